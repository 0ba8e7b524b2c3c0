"""Time and peak memory of ``linear_cross_entropy`` and ``fused_cross_entropy`` over torch's plain cross entropy.

Forward and backward. Times: the variants take turns in one process, so that a machine whose speed drifts slows all
alike; the ratio is the median over the turns of (variant / plain). Memory: a process for each variant; its highest
resident size (on CUDA the allocator's) in a second run, less what was resident before it.

    python benchmarks/linear_cross_entropy.py [--quick] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.loss import fused_cross_entropy, linear_cross_entropy
from meshwright.runtime import synchronize_device

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison; width 0 has logits as its input instead of hidden states and a head."""

    dtype: str
    num_tokens: int
    num_classes: int
    width: int

    def __str__(self) -> str:
        width = f" x {self.width}" if self.width else ""
        return f"{self.dtype} {self.num_tokens}{width} x {self.num_classes}"


CASES = [
    Case("float32", 2048, 32000, 256),
    Case("bfloat16", 2048, 32000, 256),
    Case("bfloat16", 2048, 32000, 0),
]
QUICK = [Case(case.dtype, 512, 4000, min(case.width, 64)) for case in CASES]


def inputs(case: Case, device: torch.device) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    shapes = [(case.num_tokens, case.width), (case.num_classes, case.width)]
    shapes = shapes if case.width else [(case.num_tokens, case.num_classes)]
    tensors = [torch.randn(shape, device=device, dtype=dtype).mul_(0.3).requires_grad_() for shape in shapes]
    return tensors, torch.randint(case.num_classes, (case.num_tokens,), device=device)


def variants(case: Case) -> dict[str, Callable[..., Tensor]]:
    if not case.width:
        return {
            "plain": lambda logits, target: F.cross_entropy(logits.float(), target),
            "fused": lambda logits, target: fused_cross_entropy(logits, target),
        }
    every: dict[str, Callable[..., Tensor]] = {
        "plain": lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight).float(), target),
        "linear": lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target),
        "linear, recomputed": lambda hidden, weight, target: linear_cross_entropy(
            hidden, weight, target, reduction="none"
        ).mean(),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        options = torch.nn.LinearCrossEntropyOptions()
        every["torch's, chunked"] = lambda hidden, weight, target: F.linear_cross_entropy(
            hidden, weight, target, options=options
        )
    return every


def run(loss: Callable[..., Tensor], tensors: list[Tensor], target: Tensor) -> None:
    for tensor in tensors:
        tensor.grad = None
    loss(*tensors, target).backward()
    synchronize_device(target.device)


def own_peak(case: Case, name: str, device: torch.device) -> int:
    """Bytes beyond the inputs, gradients included, of a second run: the first loads code. For a process of its own."""
    tensors, target = inputs(case, device)
    run(variants(case)[name], tensors, target)
    for tensor in tensors:
        tensor.grad = None
    before = reset_peak(device)
    run(variants(case)[name], tensors, target)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() - before
    return process_bytes("VmHWM") - before


def reset_peak(device: torch.device) -> int:
    """Begins a new peak; returns the bytes held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak to what is resident
    return process_bytes("VmRSS")


def process_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: measuring memory on the CPU needs Linux")


def peak_in_a_process(case: Case, name: str, device: torch.device) -> int:
    command = [sys.executable, __file__, "--peak", json.dumps([asdict(case), name]), "--device", device.type]
    # Else glibc keeps freed blocks of up to 32 MiB, and the figure tells how they happened to be laid out.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def times(case: Case, rounds: int, device: torch.device) -> dict[str, list[float]]:
    tensors, target = inputs(case, device)
    every = list(variants(case).items())
    seconds: dict[str, list[float]] = {name: [] for name, _ in every}
    for index in range(rounds + 1):
        for name, loss in every if index % 2 else reversed(every):
            start = time.perf_counter()
            run(loss, tensors, target)
            if index > 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def compare(case: Case, rounds: int, device: torch.device) -> Iterator[dict[str, float | str]]:
    seconds = times(case, rounds, device)
    for name in variants(case):
        ratios = [own / plain for own, plain in zip(seconds[name], seconds["plain"], strict=True)]
        yield {
            "case": str(case),
            "variant": name,
            "time_s": statistics.median(seconds[name]),
            "ratio": statistics.median(ratios),
            "peak_bytes": peak_in_a_process(case, name, device),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: that it runs, not how fast")
    parser.add_argument("--rounds", type=int, help="turns of each (default 7, quick 2)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.peak:
        case, name = json.loads(arguments.peak)
        print(own_peak(Case(**case), name, device))
        return 0
    results = []
    print(f"{'case':28} {'variant':20} {'time':>9} {'/ plain':>8} {'peak':>9}")
    for case in QUICK if arguments.quick else CASES:
        for row in compare(case, arguments.rounds or (2 if arguments.quick else 7), device):
            results.append(row)
            print(
                f"{row['case']:28} {row['variant']:20} {1e3 * float(row['time_s']):7.0f}ms {row['ratio']:8.2f} "
                f"{float(row['peak_bytes']) / MIB:6.0f}MiB",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "cases": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
