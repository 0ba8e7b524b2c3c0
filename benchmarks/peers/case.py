"""What every system trains alike: model, data, loss, precision and optimizer of one case."""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples" / "gpt2")]

Step = Callable[[Tensor], Tensor]
"""Trains on this rank's (batch, seq_len) token ids; returns the loss, of this rank or of all, 0-dim."""
_TEXT_FILES = ("argparse.py", "typing.py", "tarfile.py", "turtle.py", "ast.py", "subprocess.py")

GPT2_SIZES = {"vocab_size": 257, "seq_len": 128, "dim": 256, "num_layers": 6, "num_heads": 4}
_LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0}
LLAMA_SIZES: dict[str, dict[str, Any]] = {  # the shapes of Llama 3.2 1B and 3B and of Llama 3.1 8B
    "1B": _LLAMA_3 | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                      "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
    "3B": _LLAMA_3 | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                      "num_attention_heads": 24, "tie_word_embeddings": True},
    "8B": _LLAMA_3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "tie_word_embeddings": False},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model trained in one way; a feature is ``compile``, ``fp8`` or ``offload``, or none for ``plain``."""

    name: str
    precision: str = "fp32"  # or bf16: autocast over fp32 weights
    llama: str | None = None  # one of LLAMA_SIZES; None: the GPT-2 of the examples
    feature: str = "plain"
    batch: int = 4  # sequences per rank
    seq_len: int = 128
    device: str = "cpu"
    max_norm: float = 1.0
    optim: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3, "weight_decay": 0.01, "fused": True})

    def build(self) -> nn.Module:
        """The model, on the host, alike on every rank."""
        torch.manual_seed(0)
        if self.llama is None:
            from gpt2 import GPT2

            return GPT2(**GPT2_SIZES | {"seq_len": self.seq_len})
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES[self.llama], use_cache=False))

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The repeated blocks of a model that :meth:`build` made."""
        return model.blocks if self.llama is None else model.model.layers  # type: ignore[return-value, union-attr]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The case's precision, for systems that leave it to the user."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def with_feature(self, model: nn.Module) -> nn.Module:
        """``compile`` and ``fp8`` for systems that leave them to the user: torch's own, and torchao."""
        if self.feature == "fp8":
            from torchao.float8 import convert_to_float8_training

            convert_to_float8_training(model, module_filter_fn=lambda _, name: not name.endswith(("head", "lm_head")))
        if self.feature in ("compile", "fp8"):  # the casts to 8 bits pay when they are fused
            for block in self.blocks(model):
                block.compile()
        return model

    def batches(self, rank: int, world: int, count: int) -> list[Tensor]:
        """This rank's token ids of the first ``count`` steps: bytes of the Python standard library."""
        text, generator = _text(), torch.Generator().manual_seed(1)
        found = []
        for _ in range(count):
            starts = torch.randint(0, len(text) - self.seq_len, (world, self.batch), generator=generator)[rank]
            ids = torch.stack([text[start : start + self.seq_len] for start in starts.tolist()]).long()
            found.append(ids.to(self.device))
        return found


def loss_func(ids: Tensor, output: Any) -> Tensor:
    """Mean cross-entropy of predicting token t + 1; ``output`` is logits, or what transformers returns."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@functools.cache
def _text() -> Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(
        bytearray(b"".join((folder / name).read_bytes() for name in _TEXT_FILES)), dtype=torch.uint8
    )


def cpu_cases() -> list[Case]:
    return [Case("fp32"), Case("bf16", precision="bf16")]


def cuda_cases(world: int) -> list[Case]:
    """Llamas in bf16; the largest that one device of 80 GB holds with each feature, and 8 B where there are many."""

    def llama(size: str, feature: str, batch: int) -> Case:
        return Case(f"{size} {feature}", "bf16", size, feature, batch, seq_len=2048, device="cuda",
                    optim={"lr": 1e-4, "weight_decay": 0.01, "fused": True})  # fmt: skip

    cases = [llama("1B", feature, 4) for feature in ("plain", "compile", "fp8", "offload")]
    cases += [llama("3B", feature, 1) for feature in ("plain", "compile")]
    return cases + [llama("8B", "offload", 1)] + ([llama("8B", "plain", 1)] if world >= 4 else [])
