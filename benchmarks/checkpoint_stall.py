"""Time how long a checkpoint holds up training: written at once, and in the background.

    python benchmarks/checkpoint_stall.py [--parameters 100e6] [--saves 4] [--folder DIR] [--json FILE]

One process, fp32 weights and AdamW on the CPU (12 bytes a parameter). Between two saves the model trains, long enough
for a save in the background to end. Told are the median seconds that ``CheckpointStore.save`` takes, and by how much
the steps that run beside the writing are slower than others: both are time that training loses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from meshwright.store import CheckpointStore, TrainingState

WIDTH = 1024


def build(num_parameters: int) -> TrainingState:
    """Linear layers of 1024 x 1024, and one AdamW step so that there are states."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(round(num_parameters / WIDTH**2))))
    return TrainingState(model, torch.optim.AdamW(model.parameters(), fused=True))


def step(state: TrainingState) -> float:
    """One optimizer step on 64 rows; the seconds it took."""
    assert state.optim is not None
    started_s = time.perf_counter()
    state.model(torch.ones(64, WIDTH)).square().mean().backward()
    state.optim.step()
    state.optim.zero_grad()
    state.step += 1
    return time.perf_counter() - started_s


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def measure(num_parameters: int, num_saves: int, folder: Path) -> dict[str, float]:
    """Medians over the saves. The first in the background, which makes the buffers, is told apart."""
    state, store = build(num_parameters), CheckpointStore(folder, keep=1)
    step(state)
    at_once, call, whole = [], [], []
    alone, beside = [], []
    for _ in range(num_saves):
        alone.append(step(state))
        at_once.append(seconds(lambda: store.save(state)))
    for _ in range(num_saves + 1):
        alone.append(step(state))
        call.append(seconds(lambda: store.save(state, non_blocking=True)))
        started_s, unfinished = time.perf_counter(), folder / f".step-{state.step:08d}.tmp"
        while unfinished.exists():
            beside.append(step(state))
        whole.append(time.perf_counter() - started_s)
        store.wait()
    blocking = statistics.median(at_once)
    stall = statistics.median(call[1:])
    return {
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "step_s": statistics.median(alone),
        "step_beside_writing_s": statistics.median(beside),
        "save_s": blocking,
        "first_stall_s": call[0],
        "stall_s": stall,
        "stall_share": stall / blocking,
        "write_in_background_s": statistics.median(whole[1:]),
    }


def main() -> None:
    """Measures, prints, and writes JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        figures = measure(int(given.parameters), given.saves, Path(folder))
    for name, value in figures.items():
        print(f"{name:24} {value:.4g}")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
