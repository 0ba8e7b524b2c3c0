"""Time of one optimizer step: torch's fused AdamW, AdamOptimizer, AdamOffloadOptimizer and DeepSpeed's CPU Adam.

Parameters with gradients and no model, so that nothing but the step is timed. All take turns, so that a machine whose
speed drifts slows all alike; a ratio is the median over all turns of (this / reference). The reference is torch's fused
AdamW over the parameters in fp32, and over fp32 master weights that are then rounded back (MasterWeights) in bf16.

    python benchmarks/adam_offload.py [--quick] [--parameters N] [--rounds N] [--json FILE] [--trace FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import meshwright as mw
from meshwright.optim import AdamOffloadOptimizer, AdamOptimizer, MasterWeights
from meshwright.runtime import settings, synchronize_device

LR, WEIGHT_DECAY, STEPS_PER_TURN = 1e-4, 0.1, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Step = Callable[[], object]


def parameters(num_elements: int, dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Matrices and vectors in the proportions of GPT blocks, until there are ``num_elements``; gradients included."""
    width = 2048 if num_elements >= 10**8 else 256
    block = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
    block += [(width, 4 * width), (width,), (width,), (width,)]
    made: list[nn.Parameter] = []
    while sum(parameter.numel() for parameter in made) < num_elements:
        for shape in block:
            made.append(nn.Parameter(torch.randn(shape, dtype=dtype, device=device) * 0.02))
            made[-1].grad = torch.randn(shape, dtype=dtype, device=device) * 1e-3
    return made


def torch_step(params: list[nn.Parameter]) -> Step:
    options = {"lr": LR, "weight_decay": WEIGHT_DECAY, "fused": True}
    if params[0].dtype == torch.float32:
        return torch.optim.AdamW(params, **options).step
    master = MasterWeights(params)
    inner = master.optimizer(lambda copies: torch.optim.AdamW(copies, **options), params)
    gradients = [parameter.grad for parameter in params]

    def step() -> None:
        for parameter, gradient in zip(params, gradients, strict=True):
            parameter.grad = gradient  # collecting frees it
        master.collect_gradients()
        inner.step()
        master.write_back()

    return step


def deepspeed_step(params: list[nn.Parameter]) -> Step | None:
    """DeepSpeed's kernel over host copies, without the copies from and to a device; None where it is not installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    host = [nn.Parameter(parameter.detach().cpu()) for parameter in params]
    for copied, parameter in zip(host, params, strict=True):
        assert parameter.grad is not None
        copied.grad = parameter.grad.cpu()
    return DeepSpeedCPUAdam(host, lr=LR, weight_decay=WEIGHT_DECAY).step


def steps_for(num_elements: int, dtype: torch.dtype, device: torch.device) -> dict[str, Step]:
    made = lambda: parameters(num_elements, dtype, device)  # noqa: E731
    steps: dict[str, Step | None] = {
        "torch AdamW": torch_step(made()),
        "AdamOptimizer": AdamOptimizer(made(), lr=LR, weight_decay=WEIGHT_DECAY).step,
        "AdamOffloadOptimizer": AdamOffloadOptimizer(made(), lr=LR, weight_decay=WEIGHT_DECAY).step,
        "DeepSpeedCPUAdam": deepspeed_step(made()),
    }
    return {name: step for name, step in steps.items() if step is not None}


def turn(step: Step, device: torch.device) -> float:
    synchronize_device(device)
    start = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        step()
    synchronize_device(device)
    return (time.perf_counter() - start) / STEPS_PER_TURN


def compare(num_elements: int, dtype: str, rounds: int, device: torch.device) -> list[dict[str, float | str]]:
    steps = steps_for(num_elements, DTYPES[dtype], device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        order = list(steps) if index % 2 else list(reversed(steps))
        for name in order:
            elapsed = turn(steps[name], device)
            if index > 0:  # the first round makes states and warms up
                times[name].append(elapsed)
    reference = times["torch AdamW"]
    return [
        {
            "dtype": dtype,
            "optimizer": name,
            "step_time_s": statistics.median(own),
            "ratio": statistics.median(mine / theirs for mine, theirs in zip(own, reference, strict=True)),
        }
        for name, own in times.items()
    ]


def trace(num_elements: int, device: torch.device, file: Path) -> None:
    """Writes a Chrome trace of three offloaded steps: on CUDA, copies both ways should run beside the CPU's update."""
    optimizer = AdamOffloadOptimizer(parameters(num_elements, torch.bfloat16, device), lr=LR)
    optimizer.step()
    with torch.profiler.profile() as profile:
        for _ in range(3):
            optimizer.step()
        synchronize_device(device)
    profile.export_chrome_trace(str(file))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, help="elements (default 1e9 on CUDA, 16e6 on the CPU)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--quick", action="store_true", help="1e6 elements and 3 turns, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of offloaded steps to this file")
    arguments = parser.parse_args()
    mw.init_distributed()
    device = settings().device
    num_elements = arguments.parameters or (10**9 if device.type == "cuda" else 16 * 10**6)
    rounds = arguments.rounds
    if arguments.quick:
        num_elements, rounds = 10**6, 3
    results = []
    print(f"{num_elements:,} elements on {device.type}, {torch.get_num_threads()} threads")
    print(f"{'dtype':6} {'optimizer':22} {'step':>10} {'/ torch':>8}")
    for dtype in DTYPES:
        for result in compare(num_elements, dtype, rounds, device):
            results.append(result)
            times = f"{1e3 * float(result['step_time_s']):8.1f}ms {result['ratio']:8.3f}"
            print(f"{dtype:6} {result['optimizer']:22} {times}", flush=True)
        if arguments.json:
            figures = {"torch": torch.__version__, "device": device.type, "elements": num_elements, "cases": results}
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.trace:
        trace(num_elements, device, arguments.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
