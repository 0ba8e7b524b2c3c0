"""Learn factors from dry runs, and save them in the machine's cluster file beside its calibration."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.cost import Calibration, Cluster, Learned, Step, learned_from, read_cluster, simulate
from meshwright.cost.calibration import LEAST, MOST, MOST_CALL_S
from meshwright.errors import CheckpointError, ConfigError
from meshwright.planner.measure.dry_runs import Measured
from meshwright.planner.measure.timing import ranks_per_core, tells_cpu_time, time_of
from meshwright.runtime import Settings, broadcast_object, largest, machine_name, rank, same_on_every_rank
from meshwright.store.tensor_files import write_text

# What is learned has three coordinates: the logarithms of the time ratios of kernels and of collectives' bytes, and
# milliseconds per call. These are the typical errors of calibrations in them, before anything has run.
_BELIEF = np.array([0.3, 0.7, 2.0])
_LEAST = np.array([np.log(LEAST), np.log(LEAST), 0.0])
_MOST = np.array([np.log(MOST), np.log(MOST), MOST_CALL_S * 1e3])
_NOISE = 0.1  # relative, of a run's seconds
_FIRM = 6  # runs after which what was learned before weighs as much as the calibration
_MOST_RUNS = 24  # earlier runs do not count: machines change
_ROUNDS, _NUDGE = 12, 1e-3
_FAR = np.array([0.7, 0.7, 20.0])  # largest change in one round
_BUSY, _PROBED = 1.2, 384


@dataclasses.dataclass(frozen=True)
class Run:
    """A candidate that has run: the simulated steps of its ranks, the cluster, and the measured seconds."""

    steps: tuple[Step, ...]
    cluster: Cluster
    seconds: float

    def predicted_s(self, calibration: Calibration) -> float:
        """Return the predicted seconds of a step."""
        return simulate(self.steps, self.cluster, calibration).step_time_s


def note_runs(file: Path, measured: Sequence[Measured], now: Settings) -> str:
    """Save in a cluster file what runs have taught, beside its calibration; collective.

    Nothing is saved if other programs keep the machine busy, or for another machine or number of ranks than was
    calibrated.

    Args:
        file: A file of ``meshwright calibrate``.
        measured: Plans that were predicted with it, and have run on this machine.
        now: This rank's settings.

    Returns:
        One line that says what rank 0 has saved, or why it has not.
    """
    busy = disturbed(now)
    with same_on_every_rank():
        notice = _noted(file, measured, machine_name(now.device), busy) if rank() == 0 else ""
    return str(broadcast_object(notice))


def disturbed(now: Settings) -> float:
    """Measure how many times longer computing takes because of other programs; 1 if unknown. Collective."""
    if not tells_cpu_time(now.device):
        return 1.0
    left = torch.ones(_PROBED, _PROBED)
    timing = time_of(lambda: left @ left, now.device)
    return largest([timing.wall_s / timing.cpu_s])[0] / ranks_per_core(now.local_world_size)


def _noted(file: Path, measured: Sequence[Measured], machine: str, busy: float) -> str:
    runs = runs_of(measured)
    if not runs:
        return "no dry run to note"
    if busy > _BUSY:
        return (
            f"the dry runs are not noted in {file}: other programs keep this machine busy (computing takes {busy:.1f} "
            "times as long)"
        )
    try:
        document = json.loads(file.read_text())
        why_not = _why_not(document, machine, runs[0].cluster.num_devices)
        if why_not:
            return f"the dry runs are not noted in {file}: {why_not}"
        before = learned_from(document["calibration"].pop("learned", {}))
        bare = read_bare(file)
        found = learned_of(runs, bare, before)
        document["calibration"]["learned"] = dataclasses.asdict(found)
        write_text(file, json.dumps(document, indent=2) + "\n")
    except (OSError, ValueError, TypeError, ConfigError, CheckpointError) as error:
        return f"the dry runs are not noted in {file}: {error}"
    was, now = (_off(runs, each.applied(bare)) for each in (before, found))
    count = f"{len(runs)} dry run{'s' if len(runs) > 1 else ''}"
    return f"noted {count} in {file}: predictions were {was:.0%} off, and are {now:.0%} off with what they taught"


def runs_of(measured: Sequence[Measured]) -> list[Run]:
    """Return the plans that ran and have a prediction."""
    return [
        Run(each.plan.steps or (each.plan.step,), each.plan.forecast.cluster, each.step_time_s)
        for each in measured
        if each.plan.forecast is not None and each.step_time_s is not None
    ]


def learned_of(runs: Sequence[Run], known: Calibration, before: Learned) -> Learned:
    """Return the factors that fit predictions to the measured seconds, close to what was learned before.

    Gauss-Newton steps on logarithms minimize the runs' relative errors and the distance from before, which weighs more
    the more runs it is based on.

    Args:
        runs: One run or more.
        known: The calibration with nothing learned.
        before: What was learned before.
    """
    firm = np.sqrt(1 + min(before.num_runs, _MOST_RUNS) / _FIRM) / _BELIEF
    start = np.array([np.log(before.computing), np.log(before.collectives), before.call_s * 1e3])

    def errors(at: np.ndarray) -> np.ndarray:
        calibration = _learned(at).applied(known)
        off = [np.log(run.predicted_s(calibration) / run.seconds) / _NOISE for run in runs]
        return np.array([*off, *((at - start) * firm)])

    at = start
    for _ in range(_ROUNDS):
        here = errors(at)
        slopes = np.stack([(errors(at + _NUDGE * axis) - here) / _NUDGE for axis in np.eye(len(at))], axis=1)
        change = np.linalg.lstsq(slopes, -here, rcond=None)[0]
        at = np.clip(at + np.clip(change, -_FAR, _FAR), _LEAST, _MOST)
    return dataclasses.replace(_learned(at), num_runs=before.num_runs + len(runs))


def _learned(at: np.ndarray) -> Learned:
    computing, collectives = (float(min(max(each, LEAST), MOST)) for each in np.exp(at[:2]))
    return Learned(computing, collectives, float(at[2]) / 1e3)


def read_bare(file: Path) -> Calibration:
    """Read the calibration of a file without learned factors."""
    known = read_cluster(file, learned=False).calibration
    assert known is not None
    return known


def _off(runs: Sequence[Run], calibration: Calibration) -> float:
    return statistics.median(abs(run.predicted_s(calibration) / run.seconds - 1) for run in runs)


def _why_not(document: Mapping[str, Any], machine: str, num_ranks: int) -> str:
    calibration = document.get("calibration")
    if not isinstance(calibration, Mapping):
        return "meshwright calibrate has not written it"
    if calibration.get("machine") != machine:
        return f"it was measured on {calibration.get('machine') or 'another machine'}, and this is {machine}"
    if document.get("num_devices") != num_ranks:
        return f"it was measured with {document.get('num_devices')} ranks, and these are {num_ranks}"
    return ""
