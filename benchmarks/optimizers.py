"""Time of one optimizer step: against single-device libraries, against one all-reduce per parameter, against DTensors.

Parameters with gradients and no model, in the shapes of 16 GPT blocks (192 tensors); one thread per process. The two
sides of a comparison take turns, so that a machine whose speed drifts slows both alike; the ratio is the median over
the turns of (other / ours): above 1 ours is faster.

    python benchmarks/optimizers.py [--quick] [--rounds N] [--width N …] [--json FILE]

Libraries that are not installed are left out: ``pip install 'meshwright[bench,dev]'`` brings them all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshwright as mw
from meshwright.optim import CAME, Adafactor, GaLoreAdamW, Lamb, Muon
from meshwright.runtime import settings, synchronize_device, world_mesh
from meshwright.runtime.launch import inside_launcher, launch

NUM_BLOCKS = 16
Build = Callable[[list[nn.Parameter]], Any]


@dataclass(frozen=True)
class Case:
    """One optimizer of ours and the library's that computes the same."""

    name: str
    ours: Build
    module: str
    reference: Callable[[Any, list[nn.Parameter]], Any]


def galore_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    rank = min(min(matrix.shape) for matrix in matrices) // 4
    low_rank = {"params": matrices, "rank": rank, "update_proj_gap": 10**6, "scale": 0.25, "proj_type": "std"}
    return [low_rank, {"params": [parameter for parameter in parameters if parameter.ndim != 2]}]


def muon_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim == 2], "algorithm": "muon"},
        {"params": [parameter for parameter in parameters if parameter.ndim != 2], "algorithm": "adamw"},
    ]


CASES = [
    Case(
        "Lamb",
        lambda p: Lamb(p, lr=1e-3, weight_decay=0.01),
        "pytorch_optimizer",
        lambda module, p: module.Lamb(p, lr=1e-3, weight_decay=0.01, weight_decouple=False),
    ),
    Case(
        "Adafactor",
        lambda p: Adafactor(p),
        "transformers.optimization",
        lambda module, p: module.Adafactor(p),
    ),
    Case("CAME", lambda p: CAME(p, lr=1e-3), "came_pytorch", lambda module, p: module.CAME(p, lr=1e-3)),
    Case(
        "GaLoreAdamW",
        lambda p: GaLoreAdamW(galore_groups(p), lr=1e-3),
        "galore_torch",
        lambda module, p: module.GaLoreAdamW(galore_groups(p), lr=1e-3, no_deprecation_warning=True),
    ),
    Case(
        "Muon (matrices)",
        lambda p: Muon([q for q in p if q.ndim == 2], lr=1e-3, ns_dtype=torch.bfloat16),
        "torch.optim",
        lambda module, p: module.Muon([q for q in p if q.ndim == 2], lr=1e-3),
    ),
]


def tensors(width: int, device: torch.device, blocks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(3 * width,), (width,), (4 * width,), *[(width,)] * 5]
    shapes = [*matrices, *vectors] * blocks
    return [torch.randn(shape, generator=generator).mul_(0.02).to(device) for shape in shapes]


def plain(width: int, device: torch.device, blocks: int) -> list[nn.Parameter]:
    parameters = [nn.Parameter(tensor) for tensor in tensors(width, device, blocks)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter).mul_(0.01)
    return parameters


def sharded(width: int, device: torch.device, blocks: int) -> list[nn.Parameter]:
    parameters = []
    for parameter in plain(width, device, blocks):
        shard = nn.Parameter(distribute_tensor(parameter.detach(), world_mesh(), [Shard(0)]))
        shard.grad = distribute_tensor(parameter.grad, world_mesh(), [Shard(0)])
        parameters.append(shard)
    return parameters


def interleaved(
    steps: dict[str, Callable[[], Any]], rounds: int, device: torch.device, *, together: bool = True
) -> dict[str, list[float]]:
    """Seconds of every step in every turn, all ranks ``together`` or this one alone; the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in list(steps.items()) if turn % 2 else reversed(steps.items()):
            if together:
                dist.barrier()
            start = time.perf_counter()
            step()
            synchronize_device(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def row(case: str, width: int, other: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [theirs / ours for theirs, ours in zip(seconds["other"], seconds["ours"], strict=True)]
    return {
        "case": case,
        "width": width,
        "against": other,
        "ours_s": statistics.median(seconds["ours"]),
        "other_s": statistics.median(seconds["other"]),
        "ratio": statistics.median(ratios),
    }


def against_libraries(width: int, rounds: int, device: torch.device, blocks: int) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        try:
            module = importlib.import_module(case.module)
        except ImportError:
            print(f"{case.module} is not installed: {case.name} has nothing to be compared with", file=sys.stderr)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = case.ours(plain(width, device, blocks))
            theirs = case.reference(module, plain(width, device, blocks))
            seconds = interleaved({"ours": ours.step, "other": theirs.step}, rounds, device, together=False)
        rows.append(row(case.name, width, f"{case.module} on one device", seconds))
    return rows


def against_single_reductions(width: int, rounds: int, device: torch.device, blocks: int) -> list[dict[str, Any]]:
    """The same optimizers over one parameter each, so that every parameter has its own all-reduces."""
    rows = []
    for case in CASES:
        ours = case.ours(sharded(width, device, blocks))
        if case.name == "Muon (matrices)":
            alone = [case.ours([p]) for p in sharded(width, device, blocks) if p.ndim == 2]
        elif case.name == "GaLoreAdamW":
            alone = [GaLoreAdamW(_own_group(p), lr=1e-3) for p in sharded(width, device, blocks)]
        else:
            alone = [case.ours([p]) for p in sharded(width, device, blocks)]
        seconds = interleaved(
            {"ours": ours.step, "other": lambda alone=alone: [each.step() for each in alone]}, rounds, device
        )
        rows.append(row(case.name, width, f"a reduction per parameter, {dist.get_world_size()} ranks", seconds))
    return rows


def _own_group(parameter: nn.Parameter) -> list[dict[str, Any]]:
    return [group for group in galore_groups([parameter]) if group["params"]] if parameter.ndim == 2 else [
        {"params": [parameter]}
    ]  # fmt: skip


def against_dtensors(width: int, rounds: int, device: torch.device, blocks: int) -> list[dict[str, Any]]:
    """LAMB once more, written with operations on DTensors."""
    ours = Lamb(sharded(width, device, blocks), lr=1e-3, weight_decay=0.01)
    parameters = sharded(width, device, blocks)
    states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    steps = [0]

    @torch.no_grad()
    def step() -> None:
        steps[0] += 1
        correction1, correction2 = 1 - 0.9 ** steps[0], 1 - 0.999 ** steps[0]
        for parameter, (exp_avg, exp_avg_sq) in zip(parameters, states, strict=True):
            assert isinstance(parameter.grad, DTensor)
            exp_avg.lerp_(parameter.grad, 0.1)
            exp_avg_sq.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            update = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + 1e-6)
            update.add_(parameter, alpha=0.01)
            ratio = parameter.norm() / update.norm()
            parameter.sub_(update * ratio * 1e-3)

    seconds = interleaved({"ours": ours.step, "other": step}, rounds, device)
    return [row("Lamb", width, f"DTensor operations, {dist.get_world_size()} ranks", seconds)]


def show(rows: list[dict[str, Any]]) -> None:
    for each in rows:
        print(
            f"{each['case']:16} {each['width']:>5}  {each['against']:44} {1e3 * each['ours_s']:8.1f} ms "
            f"{1e3 * each['other_s']:8.1f} ms {each['ratio']:6.2f}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one block and two turns: that it runs, not how fast")
    parser.add_argument("--rounds", type=int, help="turns of each (default 15, quick 2)")
    parser.add_argument("--width", type=int, nargs="*", default=[64, 256], help="widths of the blocks")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rounds, blocks = arguments.rounds or (2 if arguments.quick else 15), 1 if arguments.quick else NUM_BLOCKS
    if not inside_launcher():  # two ranks for the second half; the first half runs on the first alone
        return launch([__file__, *sys.argv[1:]], 2)
    mw.init_distributed()
    torch.set_num_threads(1)
    device, rows = settings().device, []
    for width in arguments.width:
        for compare in (against_libraries, against_single_reductions, against_dtensors):
            alone = compare is against_libraries  # ranks that ran beside would share the memory's bandwidth
            found = compare(width, rounds, device, blocks) if mw.rank() == 0 or not alone else []
            dist.barrier()
            rows += found
            if mw.rank() == 0:
                show(found)
    if arguments.json and mw.rank() == 0:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "cases": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
