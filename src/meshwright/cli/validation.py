"""Validate a run on data of its own: the loss of each source, the best checkpoint, and when to stop early."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import Dataset, Subset, default_collate

from meshwright.cli.run_files import BEST
from meshwright.cli.train_config import EvalTable
from meshwright.cli.train_options import Prepared
from meshwright.data import SampleRows
from meshwright.errors import DataError
from meshwright.runtime import preserved_rng, same_on_every_rank
from meshwright.store import CheckpointStore, TrainingState
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

    def run(self, shown: Callable[[int, int], None] | None = None) -> Result:
        """Compute the loss of every source, and keep the checkpoint if it is the best.

        Args:
            shown: Called with how many batches are done, and of how many.
        """
        by_source, weights = self._losses(shown or (lambda done, total: None))
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

    def _losses(self, shown: Callable[[int, int], None]) -> tuple[dict[str, float], dict[str, float]]:
        job, done, total = self._accelerated, 0, sum(len(source.batches) for source in self._sources)
        by_source, weights = {}, {}
        with evaluating(job, ema=self._table.ema):
            for source in self._sources:
                parts = []
                for batch in source.batches:
                    with same_on_every_rank():
                        own = source.part(batch, job.replica, job.num_replicas)
                    if batch.weight:
                        parts.append((float(job.evaluate(own)), batch.weight))
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
