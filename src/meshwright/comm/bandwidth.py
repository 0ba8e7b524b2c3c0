"""Benchmarks of collectives by message size.

Sizes and bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there), so that figures can be compared:
``size_bytes`` is the whole message (what every rank holds after an all-gather or before a reduce-scatter), the
algorithm bandwidth is size / time, and the bus bandwidth corrects it by what each rank has to send, so that it compares
with the speed of the link whatever the number of ranks.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.table import Table

from meshwright.comm.transport import Group, Members, all_gather_flat, members_of, reduce_scatter_flat, reduced
from meshwright.errors import ConfigError, LaunchError, did_you_mean, readable_bytes
from meshwright.runtime import settings, synchronize_device

BENCHMARK_OPS = ("all_gather", "reduce_scatter", "send_recv", "all_reduce", "all_to_all")
"""The collectives that can be measured; the first three are BMTrain's."""


@dataclass(frozen=True)
class Measurement:
    """Timings of one collective at one size, on the slowest rank."""

    op: str
    size_bytes: int
    dtype: str
    num_ranks: int
    iterations: int
    time_s: float
    """Median."""
    min_time_s: float
    max_time_s: float
    algorithm_bandwidth_bytes_per_s: float
    bus_bandwidth_bytes_per_s: float


def bus_factor(op: str, num_ranks: int) -> float:
    """Return the ratio of bus to algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md)."""
    share = (num_ranks - 1) / num_ranks
    factors = {"all_gather": share, "reduce_scatter": share, "all_reduce": 2 * share, "all_to_all": share}
    return {**factors, "send_recv": 1.0}[op]


def benchmark_sizes(min_bytes: int, max_bytes: int) -> list[int]:
    """Return ``min_bytes``, doubled up to ``max_bytes``.

    Raises:
        ConfigError: When they are no range.
    """
    if not 1 <= min_bytes <= max_bytes:
        raise ConfigError(
            "The sizes to measure are no range",
            expected="1 <= min_bytes <= max_bytes",
            got=f"{min_bytes} to {max_bytes}",
            fix="swap or change them",
        )
    return [min_bytes << doubling for doubling in range((max_bytes // min_bytes).bit_length())]


def benchmark_collectives(
    ops: Sequence[str] = BENCHMARK_OPS,
    *,
    min_bytes: int = 2**10,
    max_bytes: int | None = None,
    dtype: torch.dtype = torch.float32,
    iterations: int = 10,
    warmup: int = 3,
    group: Group = None,
    on_measurement: Callable[[Measurement], None] | None = None,
) -> list[Measurement]:
    """Measure collectives on this rank's device; collective, with the same arguments on every rank.

    Args:
        ops: Which, of ``BENCHMARK_OPS``. ``send_recv`` sends from every even rank to the next odd one, all at once.
        min_bytes: Smallest message, in bytes; rounded up to one element per rank.
        max_bytes: Largest message; None means 16 MiB on the CPU and 1 GiB on CUDA.
        dtype: Element type.
        iterations: Timings per size.
        warmup: Runs before them that are not timed.
        group: Process group or DeviceMesh of one axis; None means the world.
        on_measurement: Called on every rank after each size.

    Returns:
        One measurement per collective and size, in that order, alike on every rank.

    Raises:
        ConfigError: For arguments that cannot be.
        LaunchError: When the group has one rank; before ``init_distributed``.
    """
    check_benchmark(ops, iterations, warmup)
    members = members_of(group)
    check_num_ranks(members.size)
    device = settings().device
    sizes = benchmark_sizes(min_bytes, default_max_bytes(device) if max_bytes is None else max_bytes)
    measurements = []
    for op in ops:
        for size_bytes in sizes:
            measurements.append(_measure(op, size_bytes, dtype, device, iterations, warmup, members))
            if on_measurement is not None:
                on_measurement(measurements[-1])
    return measurements


def default_max_bytes(device: torch.device) -> int:
    """Return the default for the largest message, which takes seconds in all on either kind of device."""
    return 2**24 if device.type == "cpu" else 2**30


def check_benchmark(ops: Sequence[str], iterations: int, warmup: int) -> None:
    """Refuse unknown collectives and counts that measure nothing; not collective.

    Raises:
        ConfigError: Naming the argument.
    """
    for op in ops:
        if op not in BENCHMARK_OPS:
            raise ConfigError(
                f"There is no benchmark of {op!r}{did_you_mean(op, BENCHMARK_OPS)}",
                expected=f"one of {', '.join(BENCHMARK_OPS)}",
                got=repr(op),
                fix="correct the name",
            )
    if iterations < 1 or warmup < 0:
        raise ConfigError(
            "A measurement needs timings",
            expected="iterations >= 1 and warmup >= 0",
            got=f"iterations={iterations}, warmup={warmup}",
            fix="leave them out for 10 and 3",
        )


def check_num_ranks(num_ranks: int) -> None:
    """Refuse a world in which nothing is sent.

    Raises:
        LaunchError: When there is one rank.
    """
    if num_ranks < 2:
        raise LaunchError(
            "One rank has nobody to communicate with",
            expected="2 ranks or more",
            got=str(num_ranks),
            fix="start more processes: meshwright bench-comm --nproc 2, with --device cpu where there is one GPU",
        )


def _measure(
    op: str, size_bytes: int, dtype: torch.dtype, device: torch.device, iterations: int, warmup: int, members: Members
) -> Measurement:
    per_rank = max(-(-size_bytes // (dtype.itemsize * members.size)), 1)
    message = torch.ones(per_rank * members.size, dtype=dtype, device=device)
    run = benchmark_operation(op, message, members)
    for _ in range(warmup):
        run()
    synchronize_device(device)
    dist.barrier(members.group, device_ids=[device.index] if device.type == "cuda" else None)
    own = (_device_times_s if device.type == "cuda" else _host_times_s)(run, iterations)
    # Every iteration lasts as long as on the slowest rank: a sender may be done before its message has arrived.
    slowest = reduced(torch.tensor(own, dtype=torch.float64, device=members.host_device), "max", members).tolist()
    time_s = statistics.median(slowest)
    return Measurement(
        op,
        message.nbytes,
        str(dtype).removeprefix("torch."),
        members.size,
        iterations,
        time_s,
        min(slowest),
        max(slowest),
        message.nbytes / time_s,
        message.nbytes / time_s * bus_factor(op, members.size),
    )


def benchmark_operation(op: str, message: torch.Tensor, members: Members) -> Callable[[], None]:
    """Return a function that runs the bare collective on preallocated buffers.

    ``message`` is cut by all ranks.
    """
    if op == "all_reduce":
        return lambda: dist.all_reduce(message, group=members.group)
    if op == "send_recv":
        return _to_neighbour(message, members)
    if op == "all_to_all":
        received = torch.empty_like(message)
        return lambda: dist.all_to_all_single(received, message, group=members.group)
    part = message.chunk(members.size)[members.rank].clone()
    if op == "all_gather":
        return lambda: all_gather_flat(message, part, group=members.group)
    return lambda: reduce_scatter_flat(part, message, group=members.group)


def _to_neighbour(message: torch.Tensor, members: Members) -> Callable[[], None]:
    """Send from even ranks to the next odd one; the last of an odd number of ranks does nothing."""
    peer = members.rank ^ 1
    if peer >= members.size:
        return lambda: None
    if members.rank < peer:
        return lambda: dist.send(message, group_dst=peer, group=members.group)

    def receive() -> None:
        dist.recv(message, group_src=peer, group=members.group)

    return receive


def _host_times_s(run: Callable[[], None], iterations: int) -> list[float]:
    times = []
    for _ in range(iterations):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return times


def _device_times_s(run: Callable[[], None], iterations: int) -> list[float]:
    """Measure between events on the stream, which leaves out the host's launches as long as it keeps ahead."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(events)]


def benchmark_table(measurements: Sequence[Measurement]) -> Table:
    """Format measurements as a table: times in ms or µs, bandwidths in 10^9 bytes per second."""
    first = measurements[0]
    title = f"Collectives on {first.num_ranks} ranks, {first.dtype}, median of {first.iterations}"
    table = Table(title=title, title_justify="left")
    table.add_column("collective")
    for column in ("size", "time", "algorithm GB/s", "bus GB/s"):
        table.add_column(column, justify="right")
    for index, each in enumerate(measurements):
        last_of_op = index + 1 == len(measurements) or measurements[index + 1].op != each.op
        table.add_row(
            each.op,
            readable_bytes(each.size_bytes),
            _readable_time(each.time_s),
            f"{each.algorithm_bandwidth_bytes_per_s / 1e9:.3g}",
            f"{each.bus_bandwidth_bytes_per_s / 1e9:.3g}",
            end_section=last_of_op,
        )
    return table


def _readable_time(time_s: float) -> str:
    return f"{time_s * 1e3:.3f} ms" if time_s >= 1e-3 else f"{time_s * 1e6:.1f} µs"
