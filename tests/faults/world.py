"""A training program on processes that may die, and one that starts it again."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from tests.faults.vocabulary import BEFORE_SAVE, BEFORE_STEP, DURING_SAVE, Fault
from tests.pool import free_port

SAVE_EVERY = 3
_START_S, _FAREWELL_S = 60.0, 5.0


def train(rank: int, size: int, port: int, directory: Path, steps: int, faults: Sequence[Fault]) -> None:
    """What every rank does: resumes from the newest checkpoint and trains on. Rank 0 writes each loss down."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.dup2(os.open(directory.with_suffix(".stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    import torch

    import meshwright.runtime as runtime
    from meshwright.store import CheckpointStore, checkpoints
    from tests.store import runs

    torch.set_num_threads(1)
    runtime.init_distributed(backend="gloo", timeout_s=60.0)
    state, store = runs.build("fsdp" if size > 1 else "plain"), CheckpointStore(directory, keep=2)
    found = store.newest()
    if found is not None:
        info = store.load(state)
        assert info.path == found
        assert info.damaged == ()
    log = directory.with_suffix(".log").open("a", buffering=1) if rank == 0 else None
    print("resumed", state.step, file=log) if log else None

    def _strike(moment: str, step: int) -> None:
        for fault in faults:
            if fault.is_due(rank, step, moment):
                fault.strike()

    def _describe(path: Path) -> object:
        number = re.search(r"step-(\d+)", str(path))
        _strike(DURING_SAVE, int(number[1]))  # shards are written, the manifest is not
        return describe(path)

    describe = checkpoints.describe
    with mock.patch.object(checkpoints, "describe", _describe):
        while state.step < steps:
            _strike(BEFORE_STEP, state.step + 1)
            (loss,) = runs.train(state, 1)
            print(state.step, repr(loss), file=log) if log else None
            if state.step % SAVE_EVERY == 0 or state.step == steps:
                store.wait()
                _strike(BEFORE_SAVE, state.step)
                store.save(state, non_blocking=state.step % 2 == 0)
    runtime.shutdown_distributed()
    os._exit(0)


def _as_rank(program: Callable[..., None], *given: Any) -> None:
    from meshwright.runtime.launch import end_with_parent

    end_with_parent()  # which ends with pytest, whatever ends that
    program(*given)


class World:
    """Ranks that run ``program(rank, size, port, …)``."""

    def __init__(self, size: int, program: Callable[..., None], *given: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        everywhere = (size, free_port(), *given)
        self.ranks: list[BaseProcess] = [
            context.Process(target=_as_rank, args=(program, rank, *everywhere)) for rank in range(size)
        ]
        for process in self.ranks:
            process.start()

    def kill(self, rank: int) -> None:
        self.ranks[rank].kill()

    def wait(self) -> list[int | None]:
        """Waits until all have ended; once one has failed the others get a moment. Their exit codes."""
        deadline = time.monotonic() + _START_S
        while any(process.is_alive() for process in self.ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
            if any(process.exitcode for process in self.ranks):
                deadline = min(deadline, time.monotonic() + _FAREWELL_S)
        self.end()
        return [process.exitcode for process in self.ranks]

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()


def run(size: int, directory: Path, steps: int, faults: Sequence[Fault] = ()) -> list[int | None]:
    """One attempt at a run, to its end or its failure."""
    return World(size, train, directory, steps, faults).wait()


def run_and_kill(size: int, directory: Path, steps: int, rng: random.Random, within_s: float) -> bool:
    """One attempt in which a random rank is killed at a random moment after the first; whether that came in time."""
    log = directory.with_suffix(".log")
    before = log.stat().st_size if log.exists() else 0
    world = World(size, train, directory, steps, ())
    deadline = time.monotonic() + _START_S
    while (not log.exists() or log.stat().st_size == before) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, within_s))
    world.kill(rng.randrange(size))
    return any(world.wait())


def losses(directory: Path) -> dict[int, str]:
    """The loss of every step, by its exact text; a step that was repeated must have had the same every time."""
    found: dict[int, str] = {}
    for line in directory.with_suffix(".log").read_text().splitlines():
        step, loss = line.split()
        if step != "resumed":
            assert found.setdefault(int(step), loss) == loss, f"step {step} went otherwise the second time"
    return found


def resumed_at(directory: Path) -> list[int]:
    """Where each attempt began."""
    lines = directory.with_suffix(".log").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("resumed")]
