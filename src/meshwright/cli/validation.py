"""Validate a run: the loss of each source, the best checkpoint, when to stop early, and what the model writes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset, default_collate

from meshwright.cli.run_files import BEST
from meshwright.cli.train_config import EvalTable, TrainConfig
from meshwright.cli.train_corpus import Corpus, tokenizer_name
from meshwright.cli.train_options import Prepared
from meshwright.data import SampleRows, trained_labels
from meshwright.data.chat import is_tokenizer_folder, transformers_tokenizer
from meshwright.errors import DataError, ModelError
from meshwright.nn.batches import call_model
from meshwright.nn.fsdp_units import reshard
from meshwright.planner.config_models import config_path
from meshwright.runtime import TOKEN_AXES, preserved_rng, same_on_every_rank
from meshwright.store import CheckpointStore, TrainingState
from meshwright.store.entries import unwrapped
from meshwright.store.manifest import step_name
from meshwright.training.accelerated import Accelerated

_STATE = "validation"  # the key in a checkpoint's extra


class Batch(NamedTuple):
    """Sequences that are evaluated together, by index; None is a blank one that fills the batch."""

    rows: tuple[int | None, ...]
    weight: float
    """The number of trained tokens, or of sequences, that its mean loss is over."""


@dataclass(frozen=True)
class Source:
    """Data to validate on, in batches that do not depend on the number of ranks."""

    name: str
    dataset: Dataset[Any]
    batches: tuple[Batch, ...]

    @property
    def loss_weight(self) -> Callable[[Any], Any] | None:
        """Return what weights the parts of a batch, of which one may be blank rows alone: their mean loss is nan.

        Also for a loss of the user's own, as the batches are weighted among each other.
        """
        return trained_labels if isinstance(_base(self.dataset), SampleRows) else None

    def part(self, batch: Batch, replica: int, num_replicas: int) -> Any:
        """Return a replica's part of a batch."""
        size = len(batch.rows) // num_replicas
        own = batch.rows[replica * size : (replica + 1) * size]
        return default_collate(
            [self.dataset[row] if row is not None else _rows_of(self.dataset).blank() for row in own]
        )


def batches_of(name: str, dataset: Any, batch_size: int, limit: int | None) -> Source:
    """Cut a dataset into batches.

    Samples of one length that are all trained are cut into whole batches; a rest is left out. Rows of samples, of which
    a loss is the mean over the trained tokens, are filled with blank ones.

    Raises:
        DataError: When there is not one whole batch.
    """
    count = len(dataset)
    in_rows = isinstance(_base(dataset), SampleRows)
    starts = range(0, count if in_rows else count - batch_size + 1, batch_size)[:limit]
    if not starts:
        raise DataError(
            f"{name} is too small to validate on",
            expected=f"at least one batch of {batch_size} sequences (eval.batch_size)",
            got=f"{count} sequences",
            fix="add data, or set eval.batch_size lower",
        )
    weights = _weights(dataset) if in_rows else [1] * count
    batches = []
    for start in starts:
        own: list[int | None] = list(range(start, min(start + batch_size, count)))
        weight = float(sum(weights[start : start + batch_size]))
        batches.append(Batch((*own, *[None] * (batch_size - len(own))), weight))
    return Source(name, dataset, tuple(batches))


def _base(dataset: Any) -> Any:
    return dataset.dataset if isinstance(dataset, Subset) else dataset


def _rows_of(dataset: Any) -> SampleRows:
    found = _base(dataset)
    assert isinstance(found, SampleRows), "only their batches are filled"
    return found


def _weights(dataset: Any) -> list[int]:
    counts = _rows_of(dataset).num_trained()
    return [counts[index] for index in dataset.indices] if isinstance(dataset, Subset) else counts


class Result(NamedTuple):
    """The result of one validation, equal on every rank."""

    step: int
    loss: float
    """Mean over all tokens of all sources."""
    by_source: Mapping[str, float]
    is_best: bool
    """Whether no earlier loss was as low."""

    def figures(self) -> dict[str, float]:
        """Return what is recorded and drawn, by name."""
        found = {"loss": self.loss, "perplexity": perplexity(self.loss)}
        if len(self.by_source) > 1:
            found |= {f"loss/{name}": loss for name, loss in self.by_source.items()}
        return found

    def line(self) -> str:
        """Describe the result."""
        several = "".join(f"  {name} {loss:.4f}" for name, loss in self.by_source.items())
        text = f"validation at step {self.step}: loss {self.loss:.4f}, perplexity {perplexity(self.loss):.2f}"
        return text + (several if len(self.by_source) > 1 else "") + ("  (the lowest)" if self.is_best else "")


def perplexity(loss: float) -> float:
    """Return e to the power of a loss in nats; infinity where that is no number."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class StoppedError(Exception):
    """The run was asked to stop within a validation."""


class Validation:
    """Computes the loss on data that are not trained; every method is collective.

    Args:
        table: The table ``[eval]``.
        sources: What to validate on.
        accelerated: The job.
        state: The run; its ``extra`` carries the lowest loss so far into checkpoints.
        run_dir: The best checkpoint is kept in ``best/`` there.
    """

    def __init__(
        self, table: EvalTable, sources: Sequence[Source], accelerated: Accelerated, state: TrainingState, run_dir: Path
    ) -> None:
        self._table, self._sources, self._accelerated, self._state = table, tuple(sources), accelerated, state
        self._best = CheckpointStore(run_dir / BEST, keep=1) if table.keep_best else None
        self.lowest, self.without_a_lower = _restored(state.extra.get(_STATE))

    @property
    def is_over(self) -> bool:
        """Return whether the loss has not become lower for as long as the run is patient."""
        return self._table.patience is not None and self.without_a_lower >= self._table.patience

    def run(
        self, shown: Callable[[int, int], None] | None = None, is_stopped: Callable[[], bool] | None = None
    ) -> Result:
        """Compute the loss of every source, and keep the checkpoint if it is the best.

        Args:
            shown: Called with how many batches are done, and of how many.
            is_stopped: Called before every batch, and to be answered alike on every rank.

        Raises:
            StoppedError: When it is; nothing is kept of the validation then.
        """
        by_source, weights = self._losses(shown or (lambda done, total: None), is_stopped or (lambda: False))
        loss = math.fsum(by_source[name] * weights[name] for name in by_source) / math.fsum(weights.values())
        is_best = loss < self.lowest
        self.lowest, self.without_a_lower = (loss, 0) if is_best else (self.lowest, self.without_a_lower + 1)
        self._state.extra[_STATE] = {"lowest": self.lowest, "without_a_lower": self.without_a_lower}
        if is_best and self._best is not None and not self._holds_a_later(self._best):
            self._best.save(self._state)
        return Result(self._state.step, loss, by_source, is_best)

    def _holds_a_later(self, best: CheckpointStore) -> bool:
        """Return whether this run had come further before it was resumed, and kept a checkpoint that was better yet."""
        newest = best.newest()
        return newest is not None and newest.name >= step_name(self._state.step)

    def _losses(
        self, shown: Callable[[int, int], None], is_stopped: Callable[[], bool]
    ) -> tuple[dict[str, float], dict[str, float]]:
        job, done, total = self._accelerated, 0, sum(len(source.batches) for source in self._sources)
        by_source, weights = {}, {}
        with evaluating(job, ema=self._table.ema):
            for source in self._sources:
                parts = []
                for batch in source.batches:
                    if is_stopped():
                        raise StoppedError
                    with same_on_every_rank():
                        own = source.part(batch, job.replica, job.num_replicas)
                    if batch.weight:
                        parts.append((float(job.evaluate(own, source.loss_weight)), batch.weight))
                    done += 1
                    shown(done, total)
                weights[source.name] = math.fsum(weight for _, weight in parts)
                by_source[source.name] = math.fsum(loss * weight for loss, weight in parts) / weights[source.name]
        return by_source, weights


@contextlib.contextmanager
def evaluating(job: Accelerated, *, ema: bool) -> Iterator[None]:
    """Put a job's model into evaluation, with the moving average of its weights if asked; training goes on behind it.

    It is collective.
    """
    averaged = job.ema.weights() if ema else contextlib.nullcontext()
    with preserved_rng(), _not_training(job.model), averaged:
        yield


@contextlib.contextmanager
def _not_training(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _restored(found: object) -> tuple[float, int]:
    """Return the lowest loss and the validations since, as a checkpoint has them."""
    if isinstance(found, Mapping):
        lowest, count = found.get("lowest"), found.get("without_a_lower")
        if isinstance(lowest, int | float) and isinstance(count, int):
            return float(lowest), count
    return math.inf, 0


def carried_over(now: dict[str, Any], then: object) -> dict[str, Any]:
    """Return a run's own notes with what an earlier checkpoint knows of validations."""
    found = then.get(_STATE) if isinstance(then, Mapping) else None
    return now if found is None else {**now, _STATE: found}


def _usual_batch_size(of_a_micro_batch: int, accelerated: Accelerated) -> int:
    return max(of_a_micro_batch // accelerated.num_replicas, 1) * accelerated.num_replicas


def open_validation(
    prepared: Prepared,
    kept_aside: Sequence[tuple[str, Dataset[Any]]],
    accelerated: Accelerated,
    state: TrainingState,
    run_dir: Path,
) -> Validation | None:
    """Return the validation that a training file asks for; None where it asks for none. Collective.

    Raises:
        DataError: When its data cannot be read, or are too small.
        ConfigError: When ``eval.ema`` is asked for without the method ``ema``.
    """
    table, run = prepared.config.eval, prepared.config.run
    if not table.is_on:
        return None
    sources = prepared.validation.sources() if prepared.validation is not None else list(kept_aside)
    size = table.batch_size or _usual_batch_size(run.batch_size // accelerated.num_micro_batches, accelerated)
    with same_on_every_rank():
        if size % accelerated.num_replicas:
            raise DataError(
                "eval.batch_size does not divide: it counts sequences over all ranks",
                expected=f"a multiple of {accelerated.num_replicas}, the number of replicas",
                got=str(size),
                fix="leave it out, or correct it",
            )
        if table.ema:
            accelerated.ema  # noqa: B018 - says what is missing
        cut = [batches_of(name, dataset, size, table.batches) for name, dataset in sources]
    return Validation(table, cut, accelerated, state, run_dir)


# --- What a model writes: ``meshwright generate``, and ``eval.samples`` of a run


@dataclass(frozen=True)
class Draws:
    """Keep how the tokens of a text are drawn."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    seed: int = 0


class Writer:
    """Turns prompts into tokens, and what a model makes of them into text.

    Args:
        corpus: Has the tokenizer, and the length that a model without ``generate`` can read.
        config: The training file.
        folder: The folder its paths start at.
        draws: How tokens are drawn.
        uses_template: Whether a prompt is a user's message where the tokenizer has a chat template.
    """

    def __init__(
        self, corpus: Corpus, config: TrainConfig, folder: Path, draws: Draws, *, uses_template: bool = True
    ) -> None:
        self._corpus, self._draws, self._uses_template = corpus, draws, uses_template
        self._window = corpus.seq_len
        model = config_path(config.model.source, folder)
        found = folder / tokenizer_name(config.data, model if model is None or model.is_dir() else model.parent)
        self._hf = transformers_tokenizer(found) if is_tokenizer_folder(found) else None

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's tokens: a user's message where the tokenizer has a chat template."""
        if self._hf is not None and self._hf.chat_template and self._uses_template:
            messages = [{"role": "user", "content": prompt}]
            found = self._hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return [int(each) for each in self._hf(found, add_special_tokens=False)["input_ids"]]
        ids = self._corpus.tokenizer.encode(prompt.encode()).tolist()
        return ids or [self._corpus.tokenizer.end_of_text]

    @torch.no_grad()
    def continued(self, accelerated: Accelerated, ids: list[int]) -> str:
        """Return the text that follows; collective, and equal on every rank."""
        torch.manual_seed(self._draws.seed)  # replicas draw alike
        given = torch.tensor([ids], device=accelerated.device)
        writes = self._generates(accelerated, given.shape[1] + self._draws.max_new_tokens)
        made = self._by_model(accelerated, given) if writes else self._by_hand(accelerated, given)
        reshard(accelerated.model)  # otherwise weights gathered here would outlive a change of the shards
        return self._corpus.tokenizer.decode(made[0, len(ids) :].tolist())

    @staticmethod
    def _generates(accelerated: Accelerated, length: int) -> bool:
        """Return whether the model itself can write up to so many tokens; beyond its positions, a window moves on."""
        model = unwrapped(accelerated.model)
        # transformers' models that write nothing have None there.
        can = getattr(model, "generation_config", None) is not None
        most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        return can and not _needs_whole_windows(accelerated) and (most is None or length <= most)

    def _by_model(self, accelerated: Accelerated, ids: torch.Tensor) -> torch.Tensor:
        draws, end = self._draws, self._corpus.tokenizer.end_of_text
        how: dict[str, Any] = {"do_sample": False}
        if draws.temperature:
            how = {"do_sample": True, "temperature": draws.temperature, "top_p": draws.top_p}
        model: Any = accelerated.model
        return model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=draws.max_new_tokens,
            pad_token_id=end, eos_token_id=end, **how,
        )  # fmt: skip

    def _by_hand(self, accelerated: Accelerated, ids: torch.Tensor) -> torch.Tensor:
        is_whole = _needs_whole_windows(accelerated)
        for _ in range(self._draws.max_new_tokens):
            given = ids[:, -self._window :]
            last = given.shape[1] - 1
            if is_whole:  # a causal model sees nothing of what stands behind
                given = functional.pad(given, (0, self._window - given.shape[1]), value=0)
            inputs = accelerated.prepare_input(given, accelerated.device)
            output = call_model(accelerated.model, inputs, "unpack_dict" if isinstance(inputs, dict) else None)
            token = self._drawn(_logits(output)[:, last].float())
            ids = torch.cat([ids, token], 1)
            if int(token) == self._corpus.tokenizer.end_of_text:
                break
        return ids

    def _drawn(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits[:, : self._corpus.vocab_size]
        if not self._draws.temperature:
            return logits.argmax(-1, keepdim=True)
        shares, order = (logits / self._draws.temperature).softmax(-1).sort(descending=True)
        is_left_out = shares.cumsum(-1) - shares >= self._draws.top_p
        is_left_out[:, 0] = False  # of the likeliest, always one
        shares = shares.masked_fill(is_left_out, 0)
        return order.gather(-1, torch.multinomial(shares, 1))


def _needs_whole_windows(accelerated: Accelerated) -> bool:
    """Return whether the model reads sequences of the trained length alone, and keeps no keys and values.

    Where ranks divide the tokens of a sequence, none has the keys and values of all that came before; compiled code is
    compiled again for other lengths, and kernels of 8 bits take multiples of theirs.
    """
    mesh, strategy = accelerated.mesh, accelerated.strategy
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) if mesh is not None else {}
    divided = any(sizes.get(axis, 1) > 1 for axis in TOKEN_AXES)
    divided |= bool(getattr(strategy.get("tensor_parallel"), "sequence", False))
    return divided or not {"compile", "fp8"}.isdisjoint(strategy.names)


def _logits(output: Any) -> torch.Tensor:
    found = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if isinstance(found, torch.Tensor) and found.dim() == 3:
        return found
    raise ModelError(
        "The model returns no logits to draw tokens from",
        expected="a tensor of shape (samples, tokens, vocabulary), or an output with logits",
        got=f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(output).__name__,
        fix="name a language model; meshwright eval has the loss of others",
    )


class Sample(NamedTuple):
    """A prompt, and what the model has made of it."""

    prompt: str
    text: str


class TextSamples:
    """Writes texts with a model during its training; every method is collective.

    Args:
        table: The table ``[eval]``.
        prompts: What is continued.
        writer: Continues it.
        accelerated: The job.
    """

    def __init__(self, table: EvalTable, prompts: Sequence[str], writer: Writer, accelerated: Accelerated) -> None:
        self._table, self._writer, self._accelerated = table, writer, accelerated
        with same_on_every_rank():
            if table.ema:
                accelerated.ema  # noqa: B018 - says what is missing
            self._prompts = [(prompt, writer.encode(prompt)) for prompt in prompts]

    def write(self) -> list[Sample]:
        """Return the continuations by the weights as they are, or their moving average where that is validated."""
        with evaluating(self._accelerated, ema=self._table.ema):
            return [Sample(prompt, self._writer.continued(self._accelerated, ids)) for prompt, ids in self._prompts]
