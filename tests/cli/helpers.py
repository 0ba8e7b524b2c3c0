"""Runs of the real program, and of what its ranks do, on a tiny model and corpus."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 200  # a busy machine takes a minute to start three processes

MODEL = '''
"""A tiny language model, and some that misbehave."""
import os
import signal
import time

import torch
from torch import nn

RANK = int(os.environ.get("RANK", "0"))


def fail(error):
    open("failed_at", "w").write(repr(time.time()))
    raise error


class Tiny(nn.Module):
    def __init__(self, vocab_size, seq_len, dim=16, dropout=0.0, fails_at_step=None, dies_at_step=None,
                 nan_at_step=None, spike_at_step=None, pause_s=0.0):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(seq_len, dim)
        self.mix = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, vocab_size)
        self.nan_at_step, self.spike_at_step = nan_at_step, spike_at_step
        self.calls, self.fails_at_step, self.dies_at_step, self.pause_s = 0, fails_at_step, dies_at_step, pause_s

    def forward(self, ids):
        if torch.is_grad_enabled() and not torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            self.calls += 1
            time.sleep(self.pause_s)
            if self.calls == self.fails_at_step and RANK == 1:
                fail(RuntimeError("a bad day at step 3"))
            if self.calls == self.dies_at_step and RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        hidden = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        out = self.head(self.dropout(torch.tanh(self.mix(hidden))))
        if torch.is_grad_enabled() and self.calls == self.nan_at_step and RANK == 1:
            out = out * float("nan")
        return out * 200 if torch.is_grad_enabled() and self.calls == self.spike_at_step else out


def fails_on_rank_1(vocab_size, seq_len):
    if RANK == 1:
        fail(OSError("the weights are not on this machine"))
    return Tiny(vocab_size, seq_len)


def squared(model_input, output):
    return (output - model_input[..., None]).square().mean()
'''

CONFIG = """
[model]
source = "tiny:Tiny"

[data]
source = "*.txt"
seq_len = 16
cache_dir = "cache"

[optimizer]
lr = 1e-2
warmup_steps = 2

[run]
steps = 6
batch_size = 4
checkpoint_every = 3
keep_checkpoints = 3
device = "cpu"
trackers = []
"""


def project(folder: Path) -> Path:
    """Writes model, corpus and training file into a folder; returns the training file."""
    (folder / "tiny.py").write_text(MODEL)
    (folder / "corpus.txt").write_text("".join(f"{n} bottles of milk on the wall\n" for n in range(40)))
    file = folder / "tiny.toml"
    file.write_text(CONFIG)
    return file


def environment() -> dict[str, str]:
    """This process's, without what makes it a rank."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in ranks}
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def meshwright(*arguments: object, folder: Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs ``meshwright ARGUMENTS`` in a folder, under a launcher module where one is named."""
    command = [sys.executable, *(("-m", *launcher) if launcher else ()), "-m", "meshwright", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@contextlib.contextmanager
def as_program(folder: Path) -> Iterator[io.StringIO]:
    """Do what a rank of the program does, in a folder; yields what it prints. Ranks of a pool live on afterwards."""
    from meshwright.cli import eval_and_generate, train_loop

    path, before, said = list(sys.path), Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with (
            mock.patch.object(eval_and_generate, "shutdown_distributed"),
            mock.patch.object(train_loop, "shutdown_distributed"),
            contextlib.redirect_stdout(said),
        ):
            yield said
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in ("tiny", "mine"):
            sys.modules.pop(name, None)


def train_as_rank(file: Path, *changes: str, **options: Any) -> str:
    """Train as one of the program's ranks; returns what it prints, notices too. Starts no interpreter."""
    from meshwright.cli.train_loop import train
    from meshwright.cli.train_options import Options

    with as_program(file.parent) as said, contextlib.redirect_stderr(said):
        train(Options(file, changes=changes, **options))
    return said.getvalue()


def metrics(run_dir: Path) -> list[dict]:
    """The lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    """The losses of a run."""
    return [record["loss"] for record in metrics(run_dir)]
