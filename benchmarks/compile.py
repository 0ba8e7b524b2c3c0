"""Step time and saved activations with ``compile`` over the same strategy without, in interleaved runs.

One process, a plain GPT; each variant takes turns of a few steps with the model that is not compiled, so that a machine
whose speed drifts slows both alike. The ratio is the median over all turns of (compiled / not compiled).

    python benchmarks/compile.py [--rounds N] [--cuda] [--quick] [--json FILE]

``--cuda`` takes a model of 350 M parameters in bf16 on the first GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.runtime import settings, synchronize_device

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt2"))

from gpt2 import GPT2

SIZES = {
    "cpu": {"vocab_size": 257, "seq_len": 128, "dim": 256, "num_layers": 6, "num_heads": 4},
    "cuda": {"vocab_size": 50304, "seq_len": 1024, "dim": 1024, "num_layers": 24, "num_heads": 16},
    "quick": {"vocab_size": 257, "seq_len": 32, "dim": 32, "num_layers": 2, "num_heads": 2},
}
BATCH, STEPS_PER_TURN = 4, 2
VARIANTS: dict[str, list[Any]] = {
    "blocks": ["compile"],
    "blocks, budget 0.5": [("compile", {"activation_budget": 0.5})],
    "blocks, budget 0": [("compile", {"activation_budget": 0})],
    "checkpoint, blocks": ["checkpoint", "compile"],
    "checkpoint": ["checkpoint"],
    "whole": [("compile", "whole")],
}


def loss_func(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def build(size: str, strategy: list[Any]) -> mw.Accelerated:
    torch.manual_seed(0)
    sizes = SIZES[size]
    return mw.accelerate(
        GPT2(**sizes), torch.optim.AdamW, None, loss_func, optim_args={"lr": 1e-3, "fused": True},
        strategy=[*strategy, *([("amp_native", "bf16")] if size == "cuda" else [])],
        sample_batch=torch.zeros(BATCH, sizes["seq_len"], dtype=torch.long), batch_size=BATCH,
    )  # fmt: skip


def turn(job: mw.Accelerated, ids: torch.Tensor) -> float:
    """Seconds per step of one turn."""
    start = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        job.step(ids)
    synchronize_device(job.device)
    return (time.perf_counter() - start) / STEPS_PER_TURN


def compare(plain: mw.Accelerated, name: str, size: str, rounds: int, ids: torch.Tensor) -> dict[str, Any]:
    job = build(size, VARIANTS[name])
    start = time.perf_counter()
    _, measured = job.measured_step(ids)
    first = time.perf_counter() - start
    ratios = []
    for index in range(rounds + 1):
        pair = (plain, job) if index % 2 else (job, plain)
        times = {id(each): turn(each, ids) for each in pair}
        if index > 0:  # the first round warms up
            ratios.append(times[id(job)] / times[id(plain)])
    return {
        "variant": name,
        "ratio": statistics.median(ratios),
        "activations_bytes": measured["activations"],
        "first_step_s": first,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--cuda", action="store_true", help="a larger model on a GPU")
    parser.add_argument("--quick", action="store_true", help="a tiny model: see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    size = "quick" if arguments.quick else "cuda" if arguments.cuda else "cpu"
    mw.init_distributed()
    ids = torch.randint(0, SIZES[size]["vocab_size"], (BATCH, SIZES[size]["seq_len"]), device=settings().device)
    plain = build(size, [])
    _, measured = plain.measured_step(ids)
    results = []
    print(f"not compiled: {measured['activations'] / 2**20:.1f} MiB of activations")
    print(f"{'variant':20} {'/ not compiled':>14} {'activations':>12} {'first step':>11}")
    for name in VARIANTS:
        result = compare(plain, name, size, arguments.rounds, ids)
        results.append(result)
        print(
            f"{name:20} {result['ratio']:14.3f} {result['activations_bytes'] / 2**20:8.1f} MiB "
            f"{result['first_step_s']:9.1f} s",
            flush=True,
        )
        if arguments.json:
            figures = {"torch": torch.__version__, "size": size, "cases": results}
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
