"""Profile steps of a job: a trace with named phases, memory snapshots, and where the step went beside the prediction.

Times come from a clock that is read at the ends of phases: the host's, and on CUDA events in the stream, for which
nobody waits. They are taken in the steps before those that are traced, too, since tracing slows a step down.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.cost.events import step_events
from meshwright.errors import ConfigError, readable_bytes
from meshwright.planner.plans import Plan, seconds
from meshwright.runtime import gather_numbers, print_rank, rank
from meshwright.runtime.torch_internals.tensors import memory_snapshot, record_memory_history

if TYPE_CHECKING:
    from rich.table import Table

PHASES = ("data", "forward", "backward", "forward and backward", "optimizer")
"""Parts of a step: waiting for the batch; the passes, which pipelines interleave; clipping and the update."""

_UNKNOWN = "–"
# How their events begin. On CPUs FSDP2's gathers may go through shared memory, where gloo knows nothing of them.
_COLLECTIVES = ("gloo:", "nccl", "FSDP::all_gather", "FSDP::post_backward_reduce")
_OF_PASSES = ("compute", "collective")


class StepProfile:
    """The profile of some of a job's steps, as a context manager around them; see :meth:`Accelerated.profile`.

    Leaving it before the last of these steps ends the profile there. Only where all of them were taken, or the block
    ends without an error, ranks exchange their times, and rank 0 writes ``summary.txt``.

    Attributes:
        summary: The text of ``summary.txt``; empty before it is written, and on ranks other than 0.
    """

    def __init__(
        self, plan: Plan, device: torch.device, folder: Path, steps: tuple[int, int], *, trace: bool, memory: bool
    ) -> None:
        self._plan, self._device, self._folder = plan, device, folder
        self._first, self._last = checked(steps)
        self._traces, self._on_cuda = trace, device.type == "cuda"
        self._snapshots = memory and self._on_cuda
        if memory and not self._on_cuda:
            print_rank(f"meshwright: there are no memory snapshots of {device.type}: CUDA alone has them", flush=True)
        self._number, self._is_over = 0, False
        self._tracer: profile | None = None
        self._times: dict[int, dict[str, list[tuple[Any, Any]]]] = {}
        self._ends: dict[int, Any] = {}
        self.summary = ""

    def __enter__(self) -> Self:
        self._ends[0] = self._now()
        self._begin_if_due()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(is_whole=error is None)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what runs inside, in the trace and in the summary."""
        with record_function(f"meshwright.{name}"):
            start = self._now()
            yield
            self._times.setdefault(self._number + 1, {}).setdefault(name, []).append((start, self._now()))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count the step that runs inside, and begin or end tracing behind it."""
        with record_function(f"meshwright.step {self._number + 1}"):
            yield
        self._number += 1
        self._ends[self._number] = self._now()
        for old in [number for number in self._ends if number < self._first_timed - 1]:
            self._times.pop(old, None)  # of a long run, only the steps that count are kept
            self._ends.pop(old)
        if self._number == self._last:
            self._end(is_whole=True)
        else:
            self._begin_if_due()

    @property
    def _first_timed(self) -> int:
        # The first step of a process allocates and compiles.
        return max(min(2, self._first), self._first - (self._last - self._first + 1))

    def _begin_if_due(self) -> None:
        if self._number != self._first - 1:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._snapshots:
            record_memory_history("all")
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._traces:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would tell on stderr that it begins and ends
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
            self._tracer = profile(activities=activities)
            self._tracer.start()

    def _end(self, *, is_whole: bool) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        measured = {"data": 0.0, **self._measured()}
        if self._tracer is not None:
            self._tracer.stop()
            self._tracer.export_chrome_trace(str(self._folder / f"trace-rank{rank()}.json.gz"))
            measured |= _collectives(self._tracer.events(), max(self._number - self._first + 1, 1))
        if self._snapshots and self._number >= self._first:
            (self._folder / f"memory-rank{rank()}.pickle").write_bytes(pickle.dumps(memory_snapshot()))
            record_memory_history(None)
        if is_whole and self._number >= self._first:
            self._sum_up(measured)

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._on_cuda else float(end - start)

    def _measured(self) -> dict[str, float]:
        """Return the median seconds of each phase of this rank: before the trace, and within it as ``traced NAME``."""
        before = [number for number in range(self._first_timed, self._first) if number in self._times]
        traced = [number for number in range(self._first, self._last + 1) if number in self._times]
        found = {f"traced {name}": value for name, value in self._medians(traced).items()}
        return {**found, **(self._medians(before) if before else self._medians(traced))}

    def _medians(self, steps: Sequence[int]) -> dict[str, float]:
        of_steps = []
        for number in steps:
            parts = {name: sum(self._between(*span) for span in spans) for name, spans in self._times[number].items()}
            if number in self._ends and number - 1 in self._ends:
                parts["step"] = self._between(self._ends[number - 1], self._ends[number])
            of_steps.append(parts)
        names = dict.fromkeys(name for parts in of_steps for name in parts)
        return {name: statistics.median(parts.get(name, 0.0) for parts in of_steps) for name in names}

    def _sum_up(self, measured: Mapping[str, float]) -> None:
        """Exchange the times, and write the summary on rank 0; collective."""
        names = [*PHASES, "step", "collectives", "waited", *(f"traced {name}" for name in (*PHASES, "step")), "peak"]
        own = [measured.get(name, -1.0) for name in names]
        own[-1] = float(torch.cuda.max_memory_allocated(self._device)) if self._on_cuda else -1.0
        every = gather_numbers(own)
        if rank() != 0:
            return
        of_ranks = {name: values for name, *values in zip(names, *every, strict=True) if max(values) >= 0}
        self.summary = _as_text(summary_table(self._plan, of_ranks, (self._first, self._number)))
        (self._folder / "summary.txt").write_text(self.summary, encoding="utf-8")


def checked(steps: Sequence[int]) -> tuple[int, int]:
    """Return the first and the last step to profile.

    Raises:
        ConfigError: When these are not two numbers in order.
    """
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        raise ConfigError(
            "The steps to profile are not known",
            expected="the first and the last of them, counted from 1, such as (10, 12)",
            got=str(tuple(steps)),
            fix="correct the numbers",
        )
    return steps[0], steps[1]


# --- What the trace knows of collectives


def _collectives(events: Iterable[Any], num_steps: int) -> dict[str, float]:
    """Return the seconds per step in which collectives ran, and on CUDA those in which no other kernel did."""
    own, others = [], []
    for event in events:
        is_kernel = event.device_type.name == "CUDA"
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith(_COLLECTIVES):
            own.append((span, is_kernel))
        elif is_kernel and not event.name.startswith("meshwright."):
            others.append(span)
    kernels = [span for span, is_kernel in own if is_kernel]
    busy = _covered(kernels or [span for span, _ in own])
    found = {"collectives": busy / 1e6 / num_steps}
    if kernels:
        found["waited"] = (_covered([*kernels, *others]) - _covered(others)) / 1e6 / num_steps
    return found


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length that spans cover together."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


# --- The summary: predicted and measured


def predicted_phases(plan: Plan) -> dict[str, float]:
    """Return the predicted seconds of each phase; empty for a plan without a cluster."""
    if plan.forecast is None:
        return {}
    time_s, every = plan.forecast.time, plan.steps or (plan.step,)
    events = [
        event for event in step_events(every, plan.forecast.cluster, plan.forecast.calibration) if event.rank == 0
    ]
    passes = sorted((each for each in events if each.lane in _OF_PASSES), key=lambda each: each.end_s)
    end_of_passes = time_s.step_time_s - time_s.update_s - time_s.copies_s - time_s.overhead_s
    found = {"optimizer": time_s.update_s + time_s.copies_s, "rest": time_s.overhead_s, "step": time_s.step_time_s}
    found["collectives"] = _covered(
        [(each.start_s, each.end_s) for each in events if each.lane in ("collective", "gather", "reduce", "send")]
    )
    found["waited"] = time_s.inline_s + time_s.exposed_s
    if len(every) > 1 or not all(each.name.partition(" ")[0] != "micro-batch" for each in passes):
        return found | {"forward and backward": end_of_passes}
    forward = last = 0.0
    for each in passes:
        forward += (each.end_s - last) if "forward" in each.name else 0.0
        last = each.end_s
    return found | {"forward": forward, "backward": end_of_passes - forward}


_LABELS = {
    "data": "waiting for data",
    "rest": "launch, loss, logs",
    "collectives": "collectives beside it",
    "waited": "  waited for",
}


def summary_table(plan: Plan, measured: Mapping[str, Sequence[float]], steps: tuple[int, int]) -> Table:
    """Build the table "where the step went".

    Args:
        plan: Has the predictions.
        measured: Seconds of every rank by phase; those of traced steps under ``traced NAME``; ``peak`` in bytes.
        steps: The first and the last step traced.
    """
    from rich import box
    from rich.table import Table

    predicted = predicted_phases(plan)
    table = Table(
        title=f"Where the step went: steps {steps[0]} to {steps[1]}", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("")
    for column in ("predicted", "measured", "slowest rank", "while traced"):
        table.add_column(column, justify="right")
    with_rest = {**measured, **_rest(measured, ""), **_rest(measured, "traced ")}
    for name in (*PHASES, "rest", "step", "collectives", "waited"):
        own = with_rest.get(name)
        if own is None and not predicted.get(name):
            continue
        traced = with_rest.get(f"traced {name}")
        if name in ("collectives", "waited"):  # only a trace shows them
            own, traced = None, own
        cells = [_mean(own), seconds(max(own)) if own else _UNKNOWN, _mean(traced)]
        if name == "step":
            table.add_section()
        table.add_row(_LABELS.get(name, name), seconds(predicted[name]) if name in predicted else _UNKNOWN, *cells)
    table.add_section()
    peak = measured.get("peak")
    shown = [readable_bytes(round(statistics.fmean(peak))), readable_bytes(round(max(peak)))] if peak else ["", ""]
    table.add_row("peak memory of a rank", readable_bytes(_peak(plan)), *shown, "")
    if not predicted:
        table.caption = "seconds are predicted where a cluster is known: strategy.cluster, or cluster="
    return table


def _peak(plan: Plan) -> int:
    return plan.needed_bytes if plan.forecast is None else plan.forecast.peak.allocated_bytes


def _mean(values: Sequence[float] | None) -> str:
    return seconds(statistics.fmean(values)) if values else _UNKNOWN


def _rest(measured: Mapping[str, Sequence[float]], kind: str) -> dict[str, list[float]]:
    """Return what the phases leave of every rank's step."""
    whole = measured.get(f"{kind}step")
    if not whole:
        return {}
    parts = [measured[f"{kind}{name}"] for name in PHASES if f"{kind}{name}" in measured]
    return {f"{kind}rest": [max(step - sum(own), 0.0) for step, *own in zip(whole, *parts, strict=True)]}


def _as_text(table: Table) -> str:
    import io

    from rich.console import Console

    console = Console(width=80, no_color=True, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]
