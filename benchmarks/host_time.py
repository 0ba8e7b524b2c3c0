"""Measure how long the host takes for a block: its operators and its modules' calls, where nothing computes.

    python benchmarks/host_time.py [--compiled] [--steps 30]

Layers are so narrow that a CPU computes them in no time: what is left is Python, autograd and the launch of kernels,
which a GPU waits for where blocks are short. For each model, eager in fp32 and under autocast: the medians of forward
and of backward for one block, with how many operators run, and modules are called. ``--compiled`` compiles the blocks
of two of them. The figures that ``cost/calibration.py`` has come from these, and from others' on GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.nn import compile_forward, find_blocks

BLOCKS = 12
NARROW: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
FREE = {"_unsafe_view", "detach", "t", "empty", "empty_like", "new_empty", "empty_strided"}  # launch nothing


class Counter(TorchDispatchMode):
    """Count operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func._schema.name.split("::")[1] not in FREE
        return func(*args, **(kwargs or {}))


class Encoder(nn.Module):
    """torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(BLOCKS)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def models(*, compiled: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield models by name; of those that are compiled, two."""
    yield "Llama", transformers.LlamaForCausalLM(transformers.LlamaConfig(**NARROW))
    dropped = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": BLOCKS, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    config = transformers.GPT2Config(**sizes, **dropped, use_cache=False, activation_function="gelu")
    yield "GPT-2", transformers.GPT2LMHeadModel(config)
    if compiled:
        return
    yield "Qwen3", transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**NARROW, head_dim=16))
    yield "Gemma 2", transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**NARROW, head_dim=16))
    yield "GPT-NeoX", transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**NARROW | {"num_key_value_heads": 4}))
    yield "nn.TransformerEncoderLayer", Encoder()


def timed(forward: Callable[[], torch.Tensor], model: nn.Module, steps: int) -> tuple[float, float]:
    """Return the median seconds of forward and of backward."""
    found: list[tuple[float, float]] = []
    for _ in range(steps):
        model.zero_grad()
        begin = time.perf_counter()
        loss = forward()
        middle = time.perf_counter()
        loss.backward()
        found.append((middle - begin, time.perf_counter() - middle))
    return tuple(statistics.median(times) for times in zip(*found[3:], strict=True))  # type: ignore[return-value]


def main() -> None:
    """Measure every model, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compiled", action="store_true", help="compile the blocks")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.zeros(1, 16, dtype=torch.long)
    table = Table("model", "", "forward", "operators", "modules", "backward", "operators")
    for name, model in track([*models(compiled=given.compiled)], "measuring", console=Console(stderr=True)):
        blocks = [block for _, block in find_blocks(model)]
        if given.compiled:
            compile_forward(blocks, contextlib.nullcontext)
        for autocasts in (False, True):

            def forward(model: nn.Module = model, autocasts: bool = autocasts) -> torch.Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                    output = model(ids)
                return getattr(output, "logits", output).float().sum()

            forward().backward()
            model.zero_grad()
            counts = [0, 0]
            if not given.compiled:
                with Counter() as counter:
                    loss = forward()
                    counts[0] = counter.count
                    loss.backward()
                    counts[1] = counter.count - counts[0]
            seconds = timed(forward, model, given.steps)
            modules = sum(1 for _ in blocks[0].modules())
            per_block = [f"{1e6 * each / BLOCKS:,.0f} us" for each in seconds]
            shown = ["" if given.compiled else f"{each / BLOCKS:.0f}" for each in counts]
            table.add_row(
                name, "autocast" if autocasts else "fp32", per_block[0], shown[0], str(modules), per_block[1], shown[1]
            )
    Console().print(table)


if __name__ == "__main__":
    main()
