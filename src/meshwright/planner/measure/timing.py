"""Time code on a device by two clocks, and record the seconds of kernels and collectives as samples."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from meshwright.cost import Op
from meshwright.cost.device_time import Machine, backward_s, forward_s
from meshwright.runtime import largest, synchronize, synchronize_device

Clock = Literal["wall", "cpu"]
_MAX_CALLS = 10_000
_EVICTED_BYTES = 2**24  # more than the caches that a core has to itself


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Args:
        wall_s: Wall time (on CUDA: between events on the stream).
        cpu_s: CPU time of this process, whatever else the machine did meanwhile. Equal to ``wall_s`` where CPU time is
            meaningless: on CUDA, and with several threads, which share the work of one call.
    """

    wall_s: float
    cpu_s: float

    def of(self, clock: Clock) -> float:
        """Return the seconds by one of the clocks."""
        return self.wall_s if clock == "wall" else self.cpu_s


def tells_cpu_time(device: torch.device) -> bool:
    """Return whether CPU time shows how long work would take on an idle machine."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def ranks_per_core(local_world_size: int) -> float:
    """Return the number of our ranks per core; 1 if each has its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else local_world_size
    return max(1.0, local_world_size / cores)


def time_of(run: Callable[[], object], device: torch.device, *, window_s: float = 0.04, windows: int = 5) -> Timing:
    """Time ``run`` by the median over windows of repeated calls.

    Ranks that time equal work start together and stay busy, so that contention for shared resources counts.

    Args:
        run: The code to time.
        device: Where it runs.
        window_s: Seconds of a window, which has one call at least.
        windows: Number of windows.
    """
    run()
    synchronize()
    return _median([_window(run, device, window_s=window_s) for _ in range(windows)])


def cold_time_of(run: Callable[[], object], device: torch.device, *, window_s: float, calls: int = 5) -> Timing:
    """Time ``run`` with a CPU core's caches evicted before every call, as in a step, which touches all data in turn.

    The eviction is not timed. On CUDA, where large kernels bypass the cache, this is :func:`time_of`.
    """
    if device.type == "cuda":
        return time_of(run, device, window_s=window_s)
    others = torch.ones(_EVICTED_BYTES // 4)
    run()
    synchronize()
    times: list[Timing] = []
    end_s = time.perf_counter() + 5 * window_s
    while len(times) < calls or time.perf_counter() < end_s:
        others.add_(1.0)
        times.append(calls_of(run, device, 1))
    return _median(times)


def time_together(run: Callable[[], object], device: torch.device, *, window_s: float, windows: int = 5) -> Timing:
    """Time what all ranks must call equally often, by the fastest window; collective.

    The fastest window is the one that nothing disturbed: how ranks disturb each other in steps is ``in_step``.
    """
    for _ in range(2):
        run()
    synchronize()
    (once_s,) = largest([calls_of(run, device, 2).wall_s])
    calls = max(1, min(_MAX_CALLS, int(window_s / once_s)))
    synchronize()
    times = [calls_of(run, device, calls) for _ in range(windows)]
    return Timing(min(each.wall_s for each in times), min(each.cpu_s for each in times))


def slowest(timings: Sequence[Timing]) -> list[Timing]:
    """Return the longest times of any rank, by either clock; collective."""
    times = largest([time_s for each in timings for time_s in (each.wall_s, each.cpu_s)])
    return [Timing(*each) for each in zip(times[::2], times[1::2], strict=True)]


def _median(timings: list[Timing]) -> Timing:
    return Timing(statistics.median(each.wall_s for each in timings), statistics.median(each.cpu_s for each in timings))


def _window(run: Callable[[], object], device: torch.device, *, window_s: float) -> Timing:
    if device.type == "cuda":  # the host runs ahead, and would miss the window's end
        once_s = calls_of(run, device, 3).wall_s
        return calls_of(run, device, max(1, min(_MAX_CALLS, int(window_s / max(once_s, 1e-9)))))
    calls, start_s, start_cpu_s = 0, time.perf_counter(), time.process_time()
    while calls == 0 or time.perf_counter() - start_s < window_s:
        run()
        calls += 1
    return _timing(time.perf_counter() - start_s, time.process_time() - start_cpu_s, calls, device)


def calls_of(run: Callable[[], object], device: torch.device, calls: int) -> Timing:
    """Return the mean seconds of several calls in a row, without warm-up."""
    if device.type == "cuda":
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        synchronize_device(device)
        before.record()
        for _ in range(calls):
            run()
        after.record()
        after.synchronize()
        seconds = before.elapsed_time(after) / 1000 / calls
        return Timing(seconds, seconds)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run()
    return _timing(time.perf_counter() - start_s, time.process_time() - start_cpu_s, calls, device)


def _timing(wall_s: float, cpu_s: float, calls: int, device: torch.device) -> Timing:
    return Timing(wall_s / calls, (cpu_s if tells_cpu_time(device) else wall_s) / calls)


# --- Samples: kernels and collectives in the terms of the cost model, with their seconds


@dataclass(frozen=True)
class Sample:
    """One kernel, forward alone or with its backward.

    Args:
        part: The part of the cost model that it measures.
        label: Its name for people.
        op: The kernel in the cost model.
        backward: Whether its backward runs, too.
        timing: Seconds of one call; None before it is measured.
        run: Runs it once.
    """

    part: str
    label: str
    op: Op
    backward: bool = False
    timing: Timing | None = None
    run: Callable[[], object] | None = dataclasses.field(default=None, compare=False)

    def predicted_s(self, machine: Machine) -> float:
        """Return the cost model's seconds."""
        return forward_s(self.op, machine) + (backward_s(self.op, machine) if self.backward else 0.0)


@dataclass(frozen=True)
class LinkSample:
    """One collective of one size over a tier of links, with ``kind`` and ``num_bytes`` as in ``Traffic``."""

    tier: str  # "intra" or "inter"
    kind: str
    num_bytes: int
    timing: Timing


@dataclass(frozen=True)
class Residual:
    """Relative errors of the fitted cost model on the samples of one part."""

    part: str
    num_samples: int
    median: float
    worst: float


def residual(part: str, pairs: Iterable[tuple[float, float]]) -> Residual:
    """Return the errors of ``(predicted, measured)`` seconds."""
    off = sorted(abs(predicted / measured - 1) for predicted, measured in pairs)
    return Residual(part, len(off), off[len(off) // 2] if off else 0.0, off[-1] if off else 0.0)


def fitted_factor(terms: Iterable[tuple[float, float, float]]) -> float:
    """Return the x at which ``fixed + varying * x`` fits the measured seconds best, by relative least squares.

    Args:
        terms: ``(fixed, varying, measured)`` seconds.

    Returns:
        Never less than 0.
    """
    above, below = 0.0, 0.0
    for fixed, varying, measured in terms:
        above += varying / measured * (1 - fixed / measured)
        below += (varying / measured) ** 2
    return max(above / below, 0.0) if below else 0.0
