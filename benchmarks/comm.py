"""Loss and bytes of training whose weights and gradients travel in few bits, on real text.

Two ranks on this machine train a small GPT on the Python standard library's sources, byte by byte. Every variant sees
the same batches with the same AdamW, schedule and clipping. The held-out loss is that of the weights that ranks compute
with, which under a quantised gather are the rounded ones. Bytes are those a rank sends in a step, as ring algorithms
send them; the suite holds this prediction against what is counted.

    python benchmarks/comm.py [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.runtime.launch import inside_launcher, launch

sys.path.insert(0, str(Path(__file__).parent))

from optimizer_curves import corpus
from outer_steps import build, sequences

RANKS, BATCH, HELD_OUT, LEARNING_RATE = 2, 16, 64, 1e-3


def few(**keys: Any) -> tuple[str, dict[str, Any]]:
    return ("comm", {"min_numel": 1024, **keys})  # all matrices; norms and biases are smaller


VARIANTS: dict[str, list[Any]] = {
    "fsdp": ["fsdp"],
    "fsdp, int8 weights": ["fsdp", few(all_gather="int8", reduce=None)],
    "fsdp, int8 weights, int8 gradients": ["fsdp", few(all_gather="int8", reduce="int8")],
    "fsdp, int8 weights, int4 gradients": ["fsdp", few(all_gather="int8", reduce="int4")],
    "fsdp, fp8 weights, int8 gradients": ["fsdp", few(all_gather="fp8", reduce="int8")],
    "data, int8 gradients": [few(reduce="int8")],
    "data, int4 gradients": [few(reduce="int4")],
}


def bytes_sent(job: mw.Accelerated) -> float:
    """An all-reduce sends its buffer twice, every other collective its tensor once, but for a rank's own part."""
    traffic = job.plan.step.traffic
    return sum((2 if t.kind == "all_reduce" else 1) * t.bytes_per_step for t in traffic) * (RANKS - 1) / RANKS


def train(
    methods: list[Any], steps: int, text: Tensor, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> dict[str, float]:
    job, generator = build(methods, steps, LEARNING_RATE, optimizer), torch.Generator().manual_seed(1)
    held_out = sequences(text[-500_000:], HELD_OUT, torch.Generator().manual_seed(2))[mw.rank() :: RANKS]
    begin = time.perf_counter()
    for _ in range(steps):
        job.step(sequences(text[:-500_000], BATCH, generator)[mw.rank() :: RANKS])
    seconds = (time.perf_counter() - begin) / steps
    return {"loss": float(job.evaluate(held_out)), "bytes_sent": bytes_sent(job), "step_time_s": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not inside_launcher():
        return launch([__file__, *sys.argv[1:]], RANKS)
    mw.init_distributed(backend="gloo")
    text, found = corpus(), {}
    for name, methods in VARIANTS.items():
        found[name] = figures = train(methods, options.steps, text)
        off = 100 * (figures["loss"] / found["fsdp"]["loss"] - 1)
        saved = found["fsdp"]["bytes_sent"] / figures["bytes_sent"]
        mw.print_rank(
            f"{name:36} held-out loss {figures['loss']:.4f} ({off:+.2f} %), {figures['bytes_sent'] / 1e6:6.2f} MB per "
            f"step ({saved:.2f} x less), {figures['step_time_s'] * 1e3:6.1f} ms",
            flush=True,
        )
    if mw.rank() == 0 and options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
