"""Hold a plan: a strategy with its predicted memory and step time for one model on one cluster.

What plans are made for (:class:`Subject`, :class:`PlannedModel`), how much memory devices and hosts offer, the
cluster of a job, and plans in words and as a table are here, too.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.cost import (
    MEMORY_LABELS,
    Building,
    Calibration,
    Cluster,
    Peak,
    Step,
    StepTime,
    axis_parts,
    building,
    copies,
    find_cluster,
    find_device,
    make_cluster,
    memory,
    peak,
    simulate,
)
from meshwright.cost.rank_memory import snapshot_bytes
from meshwright.cost.step_time import DRAWN_PER_S
from meshwright.errors import ConfigError, MeshwrightError, readable_bytes
from meshwright.methods import besides_mesh, with_micro_batches
from meshwright.runtime import COMMUNICATOR_BYTES, host_share_bytes, machine_name
from meshwright.strategy import Strategy

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from meshwright.cost import Device, Memory
    from meshwright.methods import Cut
    from meshwright.strategy import MethodConfig


_TIME_PARTS = {
    "compute_s": "computing",
    "inline_s": "communication that layers wait for",
    "exposed_s": "communication not overlapped, and the slowing down of computing",
    "copies_s": "offload copies not overlapped",
    "bubble_s": "pipeline bubble",
    "update_s": "update",
    "overhead_s": "launch, batch and loss",
}


def short_strategy(strategy: Strategy, axes: Sequence[tuple[str, int]]) -> str:
    """Describe a strategy in one line, which ``Strategy`` reads: ``"tensor 8 x zero 4: fsdp, amp_native bf16"``."""
    mesh = " x ".join(f"{name} {size}" for name, size in axes if size > 1)
    named = [_method(method) for method in besides_mesh(strategy)]
    # A method with default keys that is named after its axis adds nothing.
    own = [text for text in named if text not in {f"{name}_parallel" for name, _ in axes}]
    return ": ".join(part for part in (mesh or "one rank", ", ".join(own)) if part)


def method_names(strategy: Strategy) -> str:
    """Name the methods of a strategy but for the mesh: ``"fsdp+checkpoint"``."""
    return "+".join(method.method_name for method in besides_mesh(strategy)) or "data"


def _method(method: MethodConfig) -> str:
    keys = method.model_dump(exclude_defaults=True, mode="json")
    return " ".join([method.method_name, *(_value(method, key, value) for key, value in keys.items())])


def _value(method: MethodConfig, key: str, value: object) -> str:
    """Write a config's value, without its key where that is clear."""
    words: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) for each in words):
        return f"{key}={value}"
    text = "/".join(each.rsplit(".", 1)[-1] for each in words)
    try:
        is_clear = Strategy(f"{method.method_name} {text}") == Strategy([(method.method_name, {key: value})])
    except MeshwrightError:
        is_clear = False
    return text if is_clear else f"{key}={text}"


def time_parts(time: StepTime) -> dict[str, float]:
    """Return the seconds of each part of a step; they add up to the step time."""
    names = (field.name for field in dataclasses.fields(time) if field.name != "step_time_s")
    return {name: getattr(time, name) for name in names}


def part_name(part: str) -> str:
    """Return the label of a part of the step."""
    return _TIME_PARTS.get(part, part.removesuffix("_s").replace("_", " "))


def percent(share: float, digits: int = 0) -> str:
    """Format a share as a percentage."""
    return f"{100 * share:.{digits}f} %"


def seconds(value: float) -> str:
    """Format a duration in a fitting unit."""
    if abs(value) >= 100:
        return f"{value:.0f} s"
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if abs(value) >= 1e-4 or value == 0 else f"{value * 1e6:.0f} us"


def duration(value: float) -> str:
    """Format the seconds of a whole run: ``5.2 h``, ``61.3 days``."""
    for unit_s, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if value >= 2 * unit_s:
            return f"{value / unit_s:,.1f} {unit}"
    return seconds(value)


def number(value: float) -> str:
    """Format a rate with a metric prefix: ``1.23 M``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


@dataclass(frozen=True)
class Plan:
    """The prediction for one strategy: what the rank that holds most holds and sends, and the time of a step."""

    strategy: Strategy  # resolved
    step: Step  # of the rank that holds most
    memory: Memory
    limit_bytes: int | None  # bytes that one rank may hold; None: unknown
    notices: tuple[str, ...]
    gaps: tuple[str, ...] = ()  # what could not be predicted, and why
    in_vain: str = ""  # why a method does not do what it is for: a search leaves such a plan out
    cut: Cut | None = None  # with a pipeline axis: which rank holds what
    steps: tuple[Step, ...] = ()  # with a pipeline axis: the step of each of its ranks
    micro_batch: int = 1  # samples of one micro-batch on one replica
    forecast: Forecast | None = None  # seconds, where the cluster is known
    taken_bytes: int | None = None  # of the limit, by the simulated allocator; None: the sum of all classes counts
    host_bytes: int = 0  # of host memory beside the device's, on the rank that holds most of it
    host_limit_bytes: int | None = None  # bytes of host memory that one rank may hold; None: unknown
    communicator_bytes: int = 0  # of the limit, for collectives along the axes of the mesh
    num_snapshots: int = 0  # copies of a rank's state that its host keeps (``run.snapshot``), those for others included

    @property
    def snapshot_bytes(self) -> int:
        """Return the host memory of one rank's snapshots."""
        steps = self.steps or (self.step,)
        return self.num_snapshots * max(map(snapshot_bytes, steps)) if self.num_snapshots else 0

    @property
    def fits(self) -> bool:
        """Return whether the predicted memory is within the limits, of the device and of its host."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        """Return whether the predicted memory is within the device's limit."""
        return self.limit_bytes is None or self.needed_bytes <= self.limit_bytes

    @property
    def fits_host(self) -> bool:
        """Return whether host memory is large enough for offloaded tensors."""
        return self.host_limit_bytes is None or self.host_bytes <= self.host_limit_bytes

    @property
    def needed_bytes(self) -> int:
        """Return the predicted bytes of limited memory: of the device, with the host's where they are one."""
        held = self.taken_bytes if self.taken_bytes is not None else needed_bytes(self.step, self.memory)
        return held + self.communicator_bytes

    @functools.cached_property
    def building(self) -> Building:
        """Return what building the model takes, before the first step."""
        steps = self.steps or (self.step,)
        if self.forecast is None:
            return building(steps)
        cluster = self.forecast.cluster
        local = min(cluster.num_devices, cluster.devices_per_node)
        return building(steps, ranks_per_host=local, disk_bytes_per_s=cluster.disk.bytes_per_s * local)

    @property
    def model_flops(self) -> float | None:
        """Return the FLOPs of a step on a device, on average: forward and backward, without recomputation.

        None where they are unknown.
        """
        steps = self.steps or (self.step,)
        known = [step.flops * step.num_micro_batches for step in steps if step.flops is not None]
        return sum(known) / len(steps) if len(known) == len(steps) else None

    @property
    def complete_strategy(self) -> Strategy:
        """Return the strategy with its number of micro-batches, which trains as this plan predicts."""
        return with_micro_batches(self.strategy, self.step.num_micro_batches)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :attr:`complete_strategy` to a file, which ``accelerate(strategy=path)`` reads."""
        self.complete_strategy.save(path)

    def summary(self) -> str:
        """Describe the plan in one line: the strategy, how a batch is cut, its speed and its memory."""
        known, parts = self.forecast, [short_strategy(self.strategy, self.step.axes)]
        parts.append(f"{self.step.num_micro_batches} x {self.micro_batch} samples")
        if known is not None:
            parts.append(f"{seconds(known.time.step_time_s)} a step")
            tokens = known.tokens_per_s
            parts.append(f"{number(known.samples_per_s)} samples/s" if tokens is None else f"{number(tokens)} tokens/s")
        limit = "" if self.limit_bytes is None else f" of {readable_bytes(self.limit_bytes)}"
        parts.append(f"{readable_bytes(self.needed_bytes)}{limit}{'' if self.fits_device else ', too much'}")
        if not self.fits_host:
            parts.append(f"{self.host_text()}, too much")
        return "; ".join(parts)

    def host_text(self) -> str:
        """Describe the use of host memory: ``"host 90 GiB of 230 GiB"``."""
        limit = "" if self.host_limit_bytes is None else f" of {readable_bytes(self.host_limit_bytes)}"
        return f"host {readable_bytes(self.host_bytes)}{limit}"

    def __str__(self) -> str:
        return self.summary()


class Subject(Protocol):
    """A model and how it is trained on a world of a given size, for which plans are made."""

    @property
    def world(self) -> int:
        """Return the number of ranks."""

    @property
    def batch_size(self) -> int | None:
        """Return the samples per step over all ranks."""

    @property
    def tokens_per_sample(self) -> int | None:
        """Return the tokens of a sample; None where a sample has no number of them."""

    @property
    def half_dtype(self) -> str:
        """Return the half precision of its devices: ``bf16`` wherever they have it."""

    def plan(self, strategy: Strategy, num_micro_batches: int | None = None) -> Plan:
        """Predict one strategy.

        Args:
            strategy: As a user wrote it; it is resolved for the world.
            num_micro_batches: Micro-batches per step; None takes the subject's number.

        Raises:
            MeshwrightError: When the strategy cannot train this model on this world, saying why.
        """


class PlannedModel(Protocol):
    """A model that can be planned for on any cluster and with any number of samples."""

    @property
    def name(self) -> str:
        """Return its name for reports."""

    def describe(self) -> dict[str, Any]:
        """Return plain values that describe it, as reports and ``--json`` show them."""

    def subject(self, cluster: Cluster, samples: int, limit_bytes: int | None, limit_is_free: bool = False) -> Subject:
        """Return the subject of its plans.

        Args:
            cluster: Cluster that it runs on.
            samples: Samples per step over all ranks.
            limit_bytes: Bytes that tensors may take of a device; None: all usable ones.
            limit_is_free: Whether communicators of the mesh take some of the limit, as they do of all usable bytes.
        """


# --- How much memory there is, and how much of it a step needs.

CONTEXT_BYTES = round(1.5 * 2**30)
"""What no tensor of a job can use: the driver's context, collectives' buffers, kernels' workspaces.

Some 0.4 GB of context (pytorch#109888), and half a GiB each for workspaces and the communicator of all ranks, as
``accelerate`` counts. :func:`communicator_bytes` comes beside it, for the axes of a mesh of several.
"""

FRAGMENTED, FRAGMENTED_BY_LAYERS = 0.05, 0.12
"""What an allocator that cannot join its segments leaves unused between tensors of mixed sizes, as a share of them.

More where whole layers come and go between activations. Both are set on the runs of BMTrain's table that did and did
not fit.
"""

_HOST_USABLE = 0.9  # of host memory: the rest is for the system, the processes themselves, and data loaders


def usable_bytes(device: Device) -> int:
    """Return the bytes that a caching allocator can take of a device, or all memory of a host."""
    return device.memory_bytes - (0 if device.is_host else CONTEXT_BYTES)


def usable_host_bytes(cluster: Cluster) -> int | None:
    """Return the bytes of host memory for the offloaded tensors of one device; None: unknown."""
    share = cluster.host_memory_bytes
    return None if share is None else round(share * _HOST_USABLE)


def taken_bytes(reserved_bytes: int, device: Device) -> int:
    """Return the bytes that must be usable to reserve a number of bytes: gaps between tensors are included."""
    return reserved_bytes if device.is_host else round(reserved_bytes * (1 + FRAGMENTED))


def communicator_bytes(step: Step) -> int:
    """Return the device memory that communicators along the axes of the mesh will take, beside that of all ranks.

    An axis that has all ranks uses theirs. Every communicator has buffers of its own, whose size follows from the links
    inside of a host; beyond two hosts they grow no more (NVIDIA/nccl#986).
    """
    num_axes = sum(1 for _, size in step.axes if size > 1)
    return 0 if step.on_cpu or num_axes < 2 else num_axes * COMMUNICATOR_BYTES


def host_bytes(step: Step) -> int:
    """Return the bytes of host memory beside a device; 0 if device and host share one memory."""
    known = step.activations
    offloads = step.offloaded is not None or (known is not None and known.offloaded_bytes > 0)
    return memory(step).host_total if offloads and not step.on_cpu else 0


def most_host_bytes(steps: Iterable[Step]) -> int:
    """Return the host bytes of the rank that holds most of them."""
    return max(map(host_bytes, {id(step): step for step in steps}.values()))


def needed_bytes(step: Step, held: Memory) -> int:
    """Return the bytes of device memory that a step needs, with host memory if both are one."""
    return held.total + (held.host_total if step.on_cpu else 0)


_SECONDS_PER_HOUR = 3600


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The prediction of a step's time and peak memory on a cluster.

    Args:
        cluster: Cluster that it runs on.
        time: Seconds of a step, by part.
        peaks: Most bytes held, and when: of every pipeline rank, or of the only kind of rank.
        samples: Samples per step over all ranks.
        tokens_per_sample: None where a sample has no number of tokens.
        calibration: What kernels and links were taken to reach; None: the cluster's own.
    """

    cluster: Cluster
    time: StepTime
    peaks: tuple[Peak, ...]
    samples: int
    tokens_per_sample: int | None = None
    calibration: Calibration | None = None

    @functools.cached_property
    def peak(self) -> Peak:
        """Return the peak of the rank with the most memory in use."""
        return max(self.peaks, key=lambda each: each.allocated_bytes)

    @property
    def samples_per_s(self) -> float:
        """Return the samples per second over all ranks."""
        return self.samples / self.time.step_time_s

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens per second over all ranks; None where a sample has no number of tokens."""
        return None if self.tokens_per_sample is None else self.samples_per_s * self.tokens_per_sample

    @property
    def device_hours_per_step(self) -> float:
        """Return the hours of a step, of all devices together."""
        return self.cluster.num_devices * self.time.step_time_s / _SECONDS_PER_HOUR

    @property
    def price_per_step(self) -> float | None:
        """Return the price of a step on all devices, in US dollars; None if the device has no price."""
        per_hour = self.cluster.device.price_per_hour
        return None if per_hour is None else per_hour * self.device_hours_per_step


def forecast(
    steps: Sequence[Step],
    cluster: Cluster,
    *,
    samples: int,
    tokens_per_sample: int | None = None,
    calibration: Calibration | None = None,
) -> Forecast:
    """Simulate the steps of a pipeline's ranks, or the one step of all ranks, on a cluster.

    Args:
        steps: After all ``cost`` twins.
        cluster: Cluster that they run on.
        samples: Samples per step over all ranks.
        tokens_per_sample: None where a sample has no number of tokens.
        calibration: What kernels and links reach; None: the cluster's own.
    """
    peaks = {number: peak(step) for number, step in {id(step): step for step in steps}.items()}
    every = tuple(peaks[id(step)] for step in steps)
    return Forecast(cluster, simulate(steps, cluster, calibration), every, samples, tokens_per_sample, calibration)


def building_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return what building the model takes, as labels and figures."""
    built = plan.building
    device = [("born sharded, on the device", readable_bytes(built.device_bytes))] if built.device_bytes else []
    ordinary = readable_bytes(built.ordinary_host_bytes)
    if built.ranks_per_host > 1:
        ordinary += f", {readable_bytes(built.ordinary_host_bytes * built.ranks_per_host)} per host"
    rows = [
        *device,
        ("born sharded, on the host, initialised", readable_bytes(built.host_bytes_initialised)),
        ("born sharded, on the host, from stored weights", readable_bytes(built.host_bytes_read)),
        ("built whole on every rank, on the host", ordinary),
        (f"to draw {number(built.num_drawn)} numbers, at an assumed {number(DRAWN_PER_S)}/s", seconds(built.draw_s)),
    ]
    if built.read_s is not None and plan.forecast is not None:
        rate = built.read_bytes_per_host / built.read_s
        size = readable_bytes(built.read_bytes_per_host)
        rows.append((f"to read {size} of weights per host, at {number(rate)}B/s of its disks", seconds(built.read_s)))
    return rows


MEMORY_CLASSES = tuple(MEMORY_LABELS.items())
_ALWAYS = {"parameters", "gradients", "optimizer", "activations", "buffers"}


def plan_table(plan: Plan, measured: Mapping[str, int] | None = None) -> Table:
    """Build the table of a plan: memory per rank by class, seconds, copies, collectives; before it, building the model.

    Args:
        plan: The plan.
        measured: Bytes by class, as measured; adds a column.
    """
    from rich import box  # imported where a table is wanted: most ranks print none
    from rich.table import Table

    axes = " x ".join(f"{name} {size}" for name, size in plan.step.axes)
    methods = [str(method) for method in besides_mesh(plan.strategy)]
    title = f"Plan: {' + '.join(methods) or 'data parallel'} on {axes}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("memory per rank")
    table.add_column("predicted", justify="right")
    if measured is not None:
        table.add_column("measured", justify="right")
    for field, label in MEMORY_CLASSES:
        size = getattr(plan.memory, field)
        if size or field in _ALWAYS:
            table.add_row(label, _cell(size), *_measured_cell(measured, field))
    table.add_section()
    table.add_row("total", readable_bytes(plan.needed_bytes), *(() if measured is None else ("",)))
    if plan.limit_bytes is not None:
        table.add_row("limit", readable_bytes(plan.limit_bytes), *(() if measured is None else ("",)))
    if plan.forecast is not None:
        _add_time(table, plan.forecast, () if measured is None else ("",))
    for copy in copies(plan.step):
        what = f"copies from {copy.source} to {copy.target} in {copy.moment}, per step"
        table.add_row(what, readable_bytes(copy.bytes_per_step), *(() if measured is None else ("",)))
    table.add_section()
    if plan.num_snapshots:
        what = f"on the host: {plan.num_snapshots} snapshots of the state"
        table.add_row(what, readable_bytes(plan.snapshot_bytes), *(() if measured is None else ("",)))
    for what, figure in building_rows(plan) if measured is None else ():  # it has been built
        table.add_row(what, figure)
    if plan.step.traffic:
        table.add_section()
        for traffic in plan.step.traffic:
            when = "per step" if traffic.every == 1 else f"every {traffic.every} steps"
            axis = " x ".join(axis_parts(traffic.axis))
            what = f"{traffic.kind} over {axis} in {traffic.moment}, {when}"
            table.add_row(what, readable_bytes(traffic.bytes_per_step), *(() if measured is None else ("",)))
    return table


def _add_time(table: Table, forecast: Forecast, beside: tuple[str, ...]) -> None:
    table.add_section()
    for part, spent in time_parts(forecast.time).items():
        if spent:
            table.add_row(part_name(part), seconds(spent), *beside)
    table.add_row("step", seconds(forecast.time.step_time_s), *beside)
    if forecast.tokens_per_s is not None:
        table.add_row("tokens/s", number(forecast.tokens_per_s), *beside)
    table.add_section()


def _cell(size: int | None) -> str:
    return "unknown" if size is None else readable_bytes(size)


def _measured_cell(measured: Mapping[str, int] | None, field: str) -> tuple[str, ...]:
    if measured is None:
        return ()
    return (readable_bytes(measured[field]) if field in measured else "",)


# --- The cluster that a job runs on, found on its devices or described by the caller.


def cluster_at_hand(device: torch.device, world: int, local_world: int) -> Cluster | None:
    """Return the cluster of a job, with the usual links of its devices and the free host memory.

    The result is None for CPUs and unknown devices.

    Args:
        device: Device of this rank; all ranks are assumed to have one like it.
        world: Number of ranks.
        local_world: Number of ranks on this node.
    """
    if device.type != "cuda":
        return None
    try:
        known = make_cluster(machine_name(device), world, max(local_world, 1))
    except ConfigError:
        return None
    return dataclasses.replace(known, host_memory_bytes=host_share_bytes(local_world))


def described_cluster(
    given: str | os.PathLike[str] | Cluster, device: torch.device, world: int, local_world: int
) -> tuple[Cluster, tuple[str, ...]]:
    """Return a described cluster with the job's ranks, and a sentence on every figure that may be wrong here.

    Args:
        given: A cluster, a preset's name, or a file such as ``meshwright calibrate`` writes.
        device: Device of this rank.
        world: Number of ranks.
        local_world: Number of ranks on this node.

    Raises:
        ConfigError: For a file that cannot be used, and for one that describes other devices.
    """
    known = given if isinstance(given, Cluster) else find_cluster(os.fspath(given))
    here = machine_name(device)
    on_host = device.type == "cpu"
    others = not on_host and _preset(known.device.name) not in (None, _preset(here))
    if others or known.device.is_host != on_host:
        raise ConfigError(
            "cluster describes other devices than those that train",
            expected=f"the one at hand, {here}",
            got=known.device.name,
            fix="name a file that meshwright calibrate has written here, or leave cluster out",
        )
    doubts, measured = [], known.calibration
    if measured is not None and measured.machine not in (None, here):
        doubts.append(f"cluster was measured on {measured.machine}, and this is {here}: seconds are that one's")
    if measured is not None and on_host and known.num_devices != world:
        doubts.append(
            f"cluster was measured with {known.num_devices} ranks, and these are {world}: ranks share the cores of a "
            f"CPU, so measure it with meshwright calibrate --nproc {world}"
        )
    known = dataclasses.replace(known, num_devices=world, devices_per_node=max(local_world, 1))
    if device.type == "cuda":
        known = dataclasses.replace(known, host_memory_bytes=host_share_bytes(local_world))
    return known, tuple(doubts)


def _preset(name: str) -> str | None:
    try:
        return find_device(name).name
    except ConfigError:
        return None
