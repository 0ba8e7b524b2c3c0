"""Measure a start: seconds from ``torchrun`` until two steps are done, beside FSDP2 by hand.

Each system imports what it needs and nothing else. Beside the seconds of the clock it is counted what they are made of:
seconds of processor time per rank, which a machine with fewer cores than ranks takes one after the other, and the peak
memory of rank 0's process. A start that takes longer than the limit is ended, and told so.

    python benchmarks/scale_launch.py --ranks 2 8 16 32 [--turns 3] [--limit-s 240] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SYSTEMS = ("raw", "ours")
BLOCKS, WIDTH = 48, 16
MIB = 2**20
_DONE = "FIRST STEP"


# --- One rank


def build() -> Any:
    """Build the model of ``scale.py``: 48 small blocks."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS))
    return nn.Sequential(nn.Embedding(257, WIDTH), *blocks, nn.Linear(WIDTH, 257))


def loss_of(ids: Any, output: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def raw_steps(ids: Any) -> None:
    """Take two steps of FSDP2 by hand."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model = build()
    for block in model[1:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss_of(ids, model(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()


def our_steps(ids: Any) -> None:
    """Take two steps under ``strategy=["fsdp"]``."""
    import torch

    import meshwright as mw

    mw.init_distributed(backend="gloo")
    job = mw.accelerate(
        build(), torch.optim.AdamW, None, loss_of, strategy=["fsdp"], optim_args={"lr": 1e-3}, sample_batch=ids
    )
    for _ in range(2):
        job.step(ids)


def first_step(system: str) -> None:
    """Start as one rank under torchrun, and take two steps; rank 0 prints the time of day at their end."""
    import torch

    torch.set_num_threads(1)
    ids = torch.zeros(1, WIDTH, dtype=torch.long)
    (raw_steps if system == "raw" else our_steps)(ids)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(f"{_DONE} {time.time()} {peak}", flush=True)
    if system == "raw":
        torch.distributed.destroy_process_group()
    else:
        import meshwright

        meshwright.shutdown_distributed()


# --- All of them


@dataclass(frozen=True)
class Start:
    """Hold what one start has taken."""

    seconds: float | None
    """From torchrun to the end of the second step; None: longer than the limit."""
    cpu_seconds: float
    """Processor time of all processes, divided by the ranks."""
    peak_bytes: int
    """Memory of rank 0's process; 0 if it did not end."""


def started(system: str, num_ranks: int, limit_s: float) -> Start:
    """Start one system once.

    Raises:
        SystemExit: When it fails.
    """
    options = [f"--nproc-per-node={num_ranks}", __file__, "--first-step", system]
    before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        out, errors = "", None
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / num_ranks
    done = next((line.split() for line in out.splitlines() if line.startswith(_DONE)), None)
    if done is None and errors is not None:
        raise SystemExit(f"{system} on {num_ranks} ranks failed:\n{errors[-3000:]}")
    return Start(None, cpu_s, 0) if done is None else Start(float(done[2]) - begun_s, cpu_s, int(done[3]))


def _end(process: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its ranks; what is left of its session is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=40)  # torchrun kills its ranks after 30 s
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def row(num_ranks: int, starts: dict[str, list[Start]]) -> str:
    """Return a line of the table in docs/scale.md: medians of all starts."""
    cells = [f"| {num_ranks} "]
    for system in SYSTEMS:
        seconds = [start.seconds for start in starts[system] if start.seconds is not None]
        whole = len(seconds) == len(starts[system])
        cpu_s = statistics.median(start.cpu_seconds for start in starts[system])
        peak = max(start.peak_bytes for start in starts[system]) / MIB
        cells.append(f"| {statistics.median(seconds):.1f} s " if whole else "| over the limit ")
        cells.append(f"| {cpu_s:.1f} s | {peak:.0f} MiB " if whole else f"| {cpu_s:.1f} s | ")
    return "".join(cells) + "|"


def main() -> int:
    """Start both systems in turns on each number of ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16, 32])
    parser.add_argument("--turns", type=int, default=3, help="starts of each system (default 3)")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds that a start may take (default 240)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--first-step", choices=SYSTEMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.first_step is not None:
        first_step(given.first_step)
        return 0
    print("| ranks | FSDP2 by hand | processor, per rank | memory | Meshwright | processor, per rank | memory |")
    print("|---|---|---|---|---|---|---|")
    found: dict[int, dict[str, list[Start]]] = {}
    for num_ranks in given.ranks:
        starts: dict[str, list[Start]] = {system: [] for system in SYSTEMS}
        for _ in range(given.turns):
            for system in SYSTEMS:  # in turns, so that what else the machine does meets both
                if all(start.seconds is not None for start in starts[system]):
                    starts[system].append(started(system, num_ranks, given.limit_s))
        found[num_ranks] = starts
        print(row(num_ranks, starts), flush=True)
    if given.json is not None:
        plain = {ranks: {name: [*map(asdict, each)] for name, each in both.items()} for ranks, both in found.items()}
        given.json.write_text(json.dumps(plain, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
