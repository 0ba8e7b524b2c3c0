"""Starts every system of a case, gives them turns, and gathers what they measured."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.case import Case
from peers.running import Running, SystemFailed
from peers.systems import DDP, FSDP2, SYSTEMS

_ABREAST = 2  # systems whose bytes are counted at once: nothing is timed then


@dataclass(frozen=True)
class Schedule:
    """How long the systems of a case are measured."""

    turns: int = 9
    steps: int = 4  # of one turn
    alive: bool = True  # all at once; else one after the other, a process for every turn: a device holds one model


@dataclass
class Measured:
    """One system in one case; what ranks measure apart is that of the slowest, or of the one that holds most."""

    case: str
    system: str
    startup_s: list[float] = field(default_factory=list)
    startup_cpu_s: list[float] = field(default_factory=list)
    turns_s: list[float] = field(default_factory=list)  # seconds of a step, turn by turn
    turns_cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of every step, mean over ranks
    peak_memory_bytes: int = 0
    resident_bytes: int = 0
    strategy: str | None = None
    failure: str | None = None

    @property
    def step_time_s(self) -> float:
        return statistics.median(self.turns_s)

    def took_first_step(self, answers: Sequence[dict[str, Any]]) -> None:
        self.startup_s.append(max(each["startup_s"] for each in answers))
        self.startup_cpu_s.append(max(each["startup_cpu_s"] for each in answers))
        self.strategy = answers[0]["strategy"]
        self.losses.append(statistics.mean(each["loss"] for each in answers))

    def took_turn(self, answers: Sequence[dict[str, Any]], *, warm: bool) -> None:
        self.losses += [statistics.mean(losses) for losses in zip(*(each["losses"] for each in answers), strict=True)]
        if warm:
            self.turns_s.append(max(each["step_time_s"] for each in answers))
            self.turns_cpu_s.append(max(each["step_cpu_s"] for each in answers))

    def held(self, answers: Sequence[dict[str, Any]]) -> None:
        self.peak_memory_bytes = max(each["peak_memory_bytes"] for each in answers)
        self.resident_bytes = max(each["resident_bytes"] for each in answers)


class Conductor:
    """Measures one case; a system that fails is named, and the others go on."""

    def __init__(self, case: Case, names: Sequence[str], world: int, schedule: Schedule, folder: Path) -> None:
        self.case, self.world, self.schedule, self.folder = case, world, schedule, folder
        self.names = list(names)
        self.found = {name: Measured(case.name, name) for name in names}

    def measure(self) -> list[Measured]:
        if self.case.device == "cpu":
            self._count()
        if self.schedule.alive:
            self._in_turns()
        else:
            self._one_by_one()
        return list(self.found.values())

    def _start(self, name: str, *, counting: bool = False) -> Running:
        return Running(self.case, name, self.world, self.folder, counting=counting)

    def _fail(self, name: str, running: Running, why: SystemFailed) -> None:
        self.found[name].failure = str(why)
        running.end()
        print(f"{self.case.name}: {name} failed: {why}", file=sys.stderr, flush=True)

    def _fit(self) -> list[str]:
        return [name for name in self.names if self.found[name].failure is None]

    def _count(self) -> None:
        """Bytes, in processes that are not timed; the files of every system are in memory afterwards, and compiled."""
        for index in range(0, len(self.names), _ABREAST):
            abreast = {name: self._start(name, counting=True) for name in self.names[index : index + _ABREAST]}
            for name, running in abreast.items():
                try:
                    running.answers()
                    self.found[name].held(running.ask(peak=True))
                except SystemFailed as why:
                    self._fail(name, running, why)
                running.end()

    def _in_turns(self) -> None:
        alive: dict[str, Running] = {}
        try:
            for name in self._fit():
                running = self._start(name)
                try:
                    self.found[name].took_first_step(running.answers())
                    alive[name] = running
                except SystemFailed as why:
                    self._fail(name, running, why)
            for index in range(self.schedule.turns + 1):
                for name in _rotated(list(alive), index):
                    self._turn(name, alive, warm=index > 0)
        finally:
            for running in alive.values():
                running.end()

    def _turn(self, name: str, alive: dict[str, Running], *, warm: bool) -> None:
        try:
            self.found[name].took_turn(alive[name].ask(turn=self.schedule.steps), warm=warm)
        except SystemFailed as why:
            self._fail(name, alive.pop(name), why)

    def _one_by_one(self) -> None:
        for index in range(self.schedule.turns):
            for name in _rotated(self._fit(), index):
                running, found = self._start(name), self.found[name]
                try:
                    found.losses = []  # every process begins anew
                    found.took_first_step(running.answers())
                    found.took_turn(running.ask(turn=2), warm=False)
                    found.took_turn(running.ask(turn=self.schedule.steps), warm=True)
                    found.held(running.ask(peak=True))
                except SystemFailed as why:
                    self._fail(name, running, why)
                running.end()


def _rotated(names: list[str], by: int) -> list[str]:
    """Another system begins in every round, and neighbours change sides."""
    turned = names[by % len(names) :] + names[: by % len(names)] if names else []
    return turned[::-1] if by % 2 else turned


def measure(case: Case, names: Sequence[str], world: int, schedule: Schedule) -> list[Measured]:
    """Measures the systems that are installed and can train the case.

    Args:
        names: Of :data:`SYSTEMS`; those that lack a package are to be left out before.
        world: Ranks of every system.
    """
    able = [name for name in names if case.feature in SYSTEMS[name].features]
    if case.llama == "8B" or (case.feature == "offload" and world == 1):
        able = [name for name in able if name != DDP and not (name == FSDP2 and case.feature == "plain")]
    with tempfile.TemporaryDirectory() as folder:
        return Conductor(case, able, world, schedule, Path(folder)).measure()
