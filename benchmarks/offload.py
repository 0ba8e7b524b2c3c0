"""Measure what every offload choice holds on the device, the host and the disk, beside what the plan predicts.

On one process, with the example's GPT-2 on random tokens. ``--largest`` looks for the largest model that trains on the
CUDA device at hand with each choice, by bisection over the number of blocks; it needs a GPU and takes minutes.

    python benchmarks/offload.py [--dim N] [--blocks N] [--disk FOLDER] [--largest]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import meshwright as mw
from meshwright.cost import Memory, copies
from meshwright.errors import readable_bytes
from meshwright.runtime import settings, synchronize_device
from meshwright.training.accelerated import Accelerated

VOCAB, SEQ_LEN, BATCH = 512, 128, 4
CLASSES = ("parameters", "master", "gradients", "optimizer", "activations")


def choices(folder: str) -> dict[str, list[Any]]:
    """The strategies that are compared."""
    return {
        "nothing": [],
        "optimizer": [("offload", "optimizer")],
        "optimizer, half": [("offload", {"optimizer": 0.5})],
        "optimizer, gradients stay": [("offload", {"optimizer": 1.0, "gradients": 0.0})],
        "optimizer on disk": [("offload", {"disk": folder})],
        "activation": [("offload", "activation")],
        "activation + checkpoint": ["checkpoint", ("offload", "activation")],
        "all": ["fsdp", ("offload", "all")],
    }


def build(dim: int, blocks: int) -> torch.nn.Module:
    """The GPT-2 of the examples."""
    path = Path(__file__).parents[1] / "examples" / "gpt2" / "gpt2.py"
    spec = importlib.util.spec_from_file_location("example_gpt2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT2(vocab_size=VOCAB, seq_len=SEQ_LEN, dim=dim, num_layers=blocks, num_heads=dim // 32, dropout=0.0)


def next_token(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(strategy: list[Any], dim: int, blocks: int) -> tuple[Accelerated, dict[str, int], float]:
    """Three steps; what the last holds, and how long the second took."""
    ids = torch.randint(0, VOCAB, (BATCH, SEQ_LEN))
    result = mw.accelerate(
        build(dim, blocks), torch.optim.AdamW, None, next_token, strategy=strategy,
        optim_args={"lr": 1e-4, "fused": True}, sample_batch=ids, batch_size=BATCH,
    )  # fmt: skip
    result.step(ids)
    synchronize_device(result.device)
    start = time.perf_counter()
    result.step(ids)
    synchronize_device(result.device)
    seconds = time.perf_counter() - start
    return result, result.measured_step(ids)[1], seconds


def place(memory: Memory | dict[str, int], prefix: str) -> int:
    """Bytes in one place: the classes that are measured."""
    held = memory if isinstance(memory, dict) else vars(memory)
    return sum(held.get(prefix + name) or 0 for name in CLASSES)


def show(dim: int, blocks: int, folder: str) -> None:
    """Prints predicted and measured bytes of every choice."""
    table = Table(title=f"GPT-2, {blocks} blocks of width {dim}, AdamW, {settings().device}: predicted / measured")
    for column in ("offload", "device", "host", "disk", "copied per step", "step"):
        table.add_column(column, justify="left" if column == "offload" else "right")
    for name, strategy in choices(folder).items():
        result, measured, seconds = train(strategy, dim, blocks)
        cells = [
            f"{readable_bytes(place(result.plan.memory, prefix))} / {readable_bytes(place(measured, prefix))}"
            for prefix in ("", "host_", "disk_")
        ]
        moved = readable_bytes(sum(copy.bytes_per_step for copy in copies(result.plan.step)))
        table.add_row(name, *cells, moved, f"{seconds:.2f} s")
        del result
        gc.collect()
    Console(width=150).print(table)


def trains(strategy: list[Any], dim: int, blocks: int) -> bool:
    """Whether a model of that many blocks fits."""
    try:
        train(strategy, dim, blocks)
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return True


def largest(dim: int, folder: str) -> None:
    """Prints the most blocks, and their parameters, that train with each choice on this GPU."""
    for name, strategy in choices(folder).items():
        fits, tried = 0, 1
        while trains(strategy, dim, tried):
            fits, tried = tried, 2 * tried
        while tried - fits > 1:
            middle = (fits + tried) // 2
            fits, tried = (middle, tried) if trains(strategy, dim, middle) else (fits, middle)
        print(f"{name}: {fits} blocks, {sum(p.numel() for p in build(dim, max(fits, 1)).parameters()) / 1e9:.2f} B")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--disk", help="folder for states; a temporary one if left out")
    parser.add_argument("--largest", action="store_true", help="bisect the largest model on this GPU")
    given = parser.parse_args()
    mw.init_distributed()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.disk or temporary
        if given.largest:
            largest(given.dim, folder)
        else:
            show(given.dim, given.blocks, folder)


if __name__ == "__main__":
    main()
