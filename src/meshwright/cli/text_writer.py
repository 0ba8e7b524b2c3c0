"""Let a model write: continue prompts on any layout, as ``meshwright generate`` does and a run at every validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from meshwright.cli.train_config import EvalTable, TrainConfig
from meshwright.cli.train_corpus import Corpus, tokenizer_name
from meshwright.cli.validation import evaluating
from meshwright.data.chat import is_tokenizer_folder, transformers_tokenizer
from meshwright.errors import ModelError
from meshwright.nn.batches import call_model
from meshwright.nn.fsdp_units import reshard
from meshwright.planner.config_models import config_path
from meshwright.runtime import TOKEN_AXES, same_on_every_rank
from meshwright.store.entries import unwrapped
from meshwright.training.accelerated import Accelerated


@dataclass(frozen=True)
class Draws:
    """How the tokens of a text are drawn."""

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
        made = self._by_model(accelerated, given) if self._generates(accelerated) else self._by_hand(accelerated, given)
        reshard(accelerated.model)  # otherwise weights gathered here would outlive a change of the shards
        return self._corpus.tokenizer.decode(made[0, len(ids) :].tolist())

    @staticmethod
    def _generates(accelerated: Accelerated) -> bool:
        # transformers' models that write nothing have None there.
        can = getattr(unwrapped(accelerated.model), "generation_config", None) is not None
        return can and not _needs_whole_windows(accelerated)

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
        shares = shares.masked_fill(shares.cumsum(-1) - shares >= self._draws.top_p, 0)
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


# --- Samples of a run


class Sample(NamedTuple):
    """A prompt, and what the model has made of it."""

    prompt: str
    text: str


class Samples:
    """What a model writes during its training; every method is collective.

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
