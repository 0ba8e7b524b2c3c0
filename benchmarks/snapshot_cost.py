"""Measure how much longer a training step takes when a snapshot in host memory follows each.

    python benchmarks/snapshot_cost.py [--parameters 100e6] [--rows 64 256 1024] [--steps 6] [--beside]

One process, fp32 weights and AdamW on the CPU (12 bytes a parameter), without a neighbour. A snapshot copies all of it
in the step, and sums it up in a thread beside the next one; what that costs depends on how much a step computes, so
there are several numbers of rows (as many tokens would a transformer of these parameters take). Steps with and without
take turns; told are medians, and their ratio. With ``--beside`` copies are made while the next forward and backward
run, as ``meshwright train`` does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from checkpoint_stall import WIDTH, build

from meshwright.store import HostSnapshots, TrainingState


def step(state: TrainingState, rows: int) -> None:
    """Run forward, backward and update."""
    assert state.optim is not None
    state.model(torch.ones(rows, WIDTH)).square().mean().backward()
    state.optim.step()
    state.optim.zero_grad()
    state.step += 1


def measure(state: TrainingState, rows: int, steps: int, folder: Path, beside: bool) -> dict[str, float]:
    """Return medians of steps without and with snapshots, which take turns of three."""
    snapshots = HostSnapshots(folder, beside=beside)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(-1, steps):  # the first turn makes the files
        for taken in (False, True):
            for _ in range(3):
                started_s = time.perf_counter()
                step(state, rows)
                if taken:
                    snapshots.take(state)
                if turn >= 0:
                    seconds[taken].append(time.perf_counter() - started_s)
            snapshots.wait()
    snapshots.close()
    without, beside = (statistics.median(seconds[taken]) for taken in (False, True))
    return {"rows": rows, "step_s": without, "step_with_snapshot_s": beside, "ratio": beside / without}


def main() -> None:
    """Measure, print, and write JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--beside", action="store_true", help="copies are made while the next step runs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    state, found = build(int(given.parameters)), []
    step(state, 1)
    for rows in given.rows:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(state, rows, given.steps, Path(folder), given.beside))
        print("  ".join(f"{name} {value:.4g}" for name, value in found[-1].items()), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
