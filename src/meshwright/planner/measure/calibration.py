"""Measure a machine's kernels, links and training steps, as a cluster with a calibration for predictions."""

from __future__ import annotations

import dataclasses
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.cost import HALF, Calibration, Cluster, Constants, Device, find_device, fitted
from meshwright.cost.device_time import Machine
from meshwright.errors import ConfigError
from meshwright.planner.measure.calibration_fit import Links, fit_kernels, fit_links, kernel_residuals, link_residuals
from meshwright.planner.measure.calibration_probes import (
    beside_collective,
    host_copies,
    kernel_probes,
    link_samples,
    link_sizes,
    num_probes,
    small_step_s,
    tiers_of,
)
from meshwright.planner.measure.step_overheads import constants_in_step
from meshwright.planner.measure.timing import (
    Clock,
    LinkSample,
    Residual,
    Sample,
    Timing,
    cold_time_of,
    ranks_per_core,
    slowest,
    tells_cpu_time,
    time_of,
)
from meshwright.runtime import (
    Settings,
    host_share_bytes,
    machine_name,
    memory_limit_bytes,
    settings,
    smallest,
    world_size,
)

FAMILY = "measured"
_KERNEL_WINDOW_S, _LINK_WINDOW_S = 0.03, 0.03
_DISTURBED = 1.1  # ratio of wall to CPU time from which other programs count as disturbing
_DISK_BYTES = 2**26
_ACCUMULATION = 3.0  # a further gradient and the sum are read, the sum is written


@dataclass(frozen=True)
class Calibrated:
    """A measured machine.

    Args:
        cluster: The cluster with its calibration.
        clock: ``"cpu"`` where other programs kept the CPU busy: seconds are then CPU time.
        disturbed: Median ratio of wall to CPU time of the kernels: 1 on an idle machine.
        residuals: Errors of the cost model by part.
        samples: All timed samples: ``(part, label, measured, predicted)``, in seconds.
        notes: Provenance of the figures.
    """

    cluster: Cluster
    clock: Clock
    disturbed: float
    residuals: tuple[Residual, ...]
    samples: tuple[tuple[str, str, float, float], ...]
    notes: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """Return the provenance and the errors for the cluster file."""
        off = {
            each.part: {"samples": each.num_samples, "median": each.median, "worst": each.worst}
            for each in self.residuals
        }
        return {**self.notes, "residuals": off}

    def figures(self) -> dict[str, str]:
        """Return the figures for people, by the parts of the residuals."""
        device, known = self.cluster.device, self.cluster.calibration
        assert known is not None
        efficiency, constants = known.of(FAMILY), known.constants
        reached = device.bandwidth_bytes_per_s * efficiency.memory
        found = {
            "gap": f"{constants.gap_s * 1e6:.3g} us",
            "memory": f"{reached / 1e9:.3g} GB/s",
            "functions": f"{constants.function_s * 1e9:.3g} ns an element",
            "update": f"{reached * efficiency.update / 1e9:.3g} GB/s",
            "in a step": f"{constants.in_step:.2f} times, in half precision {constants.half_in_step:.2f} times that",
            "shards": f"{constants.sharded:.2f} times and {constants.shard_s * 1e3:.3g} ms a collective",
            "waiting": f"{constants.wait_s * 1e3:.3g} ms for the last rank at a collective",
        }
        for dtype, peak in (("fp32", device.fp32_flops_per_s), (HALF, device.half_flops_per_s)):
            found[f"{dtype} products"] = f"{peak * efficiency.matmul / 1e12:.3g} TFLOP/s"
            found[f"{dtype} attention"] = f"{peak * efficiency.of_attention(dtype)[0] / 1e12:.3g} TFLOP/s"
        for tier, link in (("intra", self.cluster.intra), ("inter", self.cluster.inter)):
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
                found[f"{kind} {tier}"] = f"{link.bytes_per_s * efficiency.of_collective(kind) / 1e9:.3g} GB/s"
        return found


def calibrate(
    *, scale: float = 1.0, clock: Clock | None = None, on_progress: Callable[[str, int, int], None] | None = None
) -> Calibrated:
    """Measure the devices of this world and the links between them in about a minute; collective.

    All ranks measure at once, so that contention for shared resources counts, such as the memory's bandwidth on CPUs.
    A single rank measures no links: its cluster has the default ones.

    Args:
        scale: Factor on the time of each measurement.
        clock: The clock that counts; None: wall time, unless other programs keep the CPU busy.
        on_progress: Called on every rank with the next measurement's name, and the numbers done and in total.

    Returns:
        The machine, equal on every rank; without ``init_distributed``, that of a single rank.
    """
    now = settings()
    start_s = time.perf_counter()
    report = on_progress or (lambda what, done, total: None)
    kernels, links = _measure(now, scale, report)
    chosen, disturbed = _clock(kernels, now, clock)
    kernels = [_in_turn(each, now) for each in kernels]
    machine = _with_fp8(fit_kernels(kernels, _device(now), fitted().constants, chosen))
    step_s = slowest([small_step_s(now.device)])[0].of(chosen)
    constants = dataclasses.replace(
        machine.constants, step_s=step_s, accumulation=_ACCUMULATION, per_core=ranks_per_core(now.local_world_size)
    )
    known = fit_links(links, Links(_cluster(now, machine), machine.efficiency, constants), chosen)
    known = dataclasses.replace(known, constants=_overlapping(now, known, chosen))
    report("whole steps", 0, 1)
    known = dataclasses.replace(known, constants=constants_in_step(now, _calibrated(known), chosen, scale))
    cluster = dataclasses.replace(_calibrated(known), host_link=host_copies(now.device) or known.cluster.host_link)
    machine = Machine(cluster.device, known.efficiency, known.constants)
    residuals = (*kernel_residuals(kernels, machine, chosen), *link_residuals(links, known, chosen))
    report("", 1, 1)
    notes = _notes(now, chosen, disturbed, time.perf_counter() - start_s)
    return Calibrated(cluster, chosen, disturbed, residuals, _rows(kernels, links, machine, known, chosen), notes)


def _measure(
    now: Settings, scale: float, report: Callable[[str, int, int], None]
) -> tuple[list[Sample], list[LinkSample]]:
    tiers = tiers_of(now)
    total = num_probes(now.device) + len(tiers) * 5 * len(link_sizes(now.device))
    kernels: list[Sample] = []
    for sample in kernel_probes(now.device):
        report(sample.part, len(kernels), total)
        assert sample.run is not None
        how = time_of if sample.part == "gap" else cold_time_of
        timing = how(sample.run, now.device, window_s=_KERNEL_WINDOW_S * scale)
        kernels.append(dataclasses.replace(sample, timing=timing, run=None))
    timings = slowest([each.timing for each in kernels if each.timing is not None])
    kernels = [dataclasses.replace(each, timing=timing) for each, timing in zip(kernels, timings, strict=True)]
    links: list[LinkSample] = []
    for tier in tiers:
        for link in link_samples(tier, now.device, window_s=_LINK_WINDOW_S * scale):
            links.append(link)
            report(link.kind, len(kernels) + len(links), total)
    return kernels, links


def _in_turn(sample: Sample, now: Settings) -> Sample:
    """Scale wall time to that of a step in which ranks share a core: a short call ends before the others' turn."""
    turns = ranks_per_core(now.local_world_size)
    if sample.timing is None or turns == 1.0 or not tells_cpu_time(now.device):
        return sample
    return dataclasses.replace(sample, timing=Timing(sample.timing.cpu_s * turns, sample.timing.cpu_s))


def _clock(samples: Sequence[Sample], now: Settings, wanted: Clock | None) -> tuple[Clock, float]:
    """Return the clock that counts, and the ratio of wall to CPU time beyond the effect of our own ranks."""
    ratios = [each.timing.wall_s / each.timing.cpu_s for each in samples if each.timing is not None]
    disturbed = statistics.median(ratios) / ranks_per_core(now.local_world_size)
    if wanted is not None:
        return wanted, disturbed
    return ("cpu" if tells_cpu_time(now.device) and disturbed > _DISTURBED else "wall"), disturbed


def _with_fp8(machine: Machine) -> Machine:
    """Take the rate of 8-bit products, which is not measured, from the device's preset; else that of half precision."""
    try:
        preset = find_device(machine.device.name)
    except ConfigError:
        return machine
    if preset.fp8_flops_per_s is None:
        return machine
    return dataclasses.replace(
        machine,
        device=dataclasses.replace(machine.device, fp8_flops_per_s=preset.fp8_flops_per_s),
        efficiency=dataclasses.replace(machine.efficiency, fp8=fitted().of(preset.efficiency).fp8),
    )


def _device(now: Settings) -> Device:
    if now.device.type == "cuda":
        properties = torch.cuda.get_device_properties(now.device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = "CPU", memory_limit_bytes(now.device, now.local_world_size)
    (memory,) = smallest([memory])
    return Device(name, memory, 1.0, 1.0, 1.0, efficiency=FAMILY, is_host=now.device.type == "cpu")


def _cluster(now: Settings, machine: Machine) -> Cluster:
    world = world_size()
    per_node = now.local_world_size if world % now.local_world_size == 0 else world
    (share,) = smallest([host_share_bytes(per_node)])
    on_host = None if machine.device.is_host else share
    return Cluster(machine.device, world, min(per_node, world), host_memory_bytes=on_host)


def _overlapping(now: Settings, links: Links, clock: Clock) -> Constants:
    """Return the constants of how overlapping collectives and computing slow each other down."""
    constants = links.constants
    if world_size() == 1:
        return constants
    if clock == "cpu":  # every second counts wherever it was spent
        return dataclasses.replace(constants, shared=1.0, interference=0.0)
    alone_s, collective_s, both_s = beside_collective(now.device)
    slower_s = max(both_s - alone_s, 0.0)
    if now.device.type == "cpu":
        return dataclasses.replace(constants, shared=min(slower_s / collective_s, 1.5), interference=0.0)
    return dataclasses.replace(constants, interference=min(slower_s / min(alone_s, collective_s), 1.0))


def _calibrated(links: Links) -> Cluster:
    known = Calibration({FAMILY: links.efficiency}, links.constants, machine_name(settings().device))
    return dataclasses.replace(links.cluster, calibration=known)


def disk_rates(folder: str | None = None) -> tuple[float, float]:
    """Return the bytes per second of writing a file in a folder (with fsync), and of reading it back."""
    data = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder) as file:
        start_s = time.perf_counter()
        for _ in range(_DISK_BYTES // len(data)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written_s = time.perf_counter() - start_s
        if hasattr(os, "posix_fadvise"):  # otherwise the page cache would serve the reads
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start_s = time.perf_counter()
        while file.read(len(data)):
            pass
        return _DISK_BYTES / written_s, _DISK_BYTES / (time.perf_counter() - start_s)


def _notes(now: Settings, clock: Clock, disturbed: float, seconds: float) -> dict[str, Any]:
    write, read = disk_rates()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "processes": world_size(),
        "threads": torch.get_num_threads(),
        "device": now.device.type,
        "clock": clock,
        "disturbed": round(disturbed, 3),
        "seconds": round(seconds, 1),
        "disk_write_bytes_per_s": write,
        "disk_read_bytes_per_s": read,
    }


def _rows(
    kernels: Sequence[Sample], links: Sequence[LinkSample], machine: Machine, known: Links, clock: Clock
) -> tuple[tuple[str, str, float, float], ...]:
    rows = []
    for sample in kernels:
        assert sample.timing is not None
        if sample.part != "update":
            rows.append((sample.part, sample.label, sample.timing.of(clock), sample.predicted_s(machine)))
    for link in links:
        part = f"{link.kind} {link.tier}"
        rows.append((part, f"{link.num_bytes:,} bytes", link.timing.of(clock), known.predicted_s(link)))
    return tuple(rows)
