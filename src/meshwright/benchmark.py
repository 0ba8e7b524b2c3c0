"""BMTrain's ``benchmark``: measures a collective and prints the table, as ``meshwright bench-comm`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from meshwright.distributed import Measurement, benchmark_collectives
from meshwright.planner import readable_bytes
from meshwright.runtime import rank
from meshwright.utils.terminal import PlainConsole


def all_gather(**options: Any) -> list[Measurement]:
    """Measures all-gather and prints the table on rank 0; options are those of ``benchmark_collectives``."""
    return _shown("all_gather", options)


def reduce_scatter(**options: Any) -> list[Measurement]:
    """Measures reduce-scatter and prints the table on rank 0; options are those of ``benchmark_collectives``."""
    return _shown("reduce_scatter", options)


def send_recv(**options: Any) -> list[Measurement]:
    """Measures sends from even ranks to odd ones and prints the table on rank 0; options as above."""
    return _shown("send_recv", options)


def all_reduce(**options: Any) -> list[Measurement]:
    """Measures all-reduce and prints the table on rank 0; options are those of ``benchmark_collectives``."""
    return _shown("all_reduce", options)


def _shown(op: str, options: dict[str, Any]) -> list[Measurement]:
    measurements = benchmark_collectives([op], **options)
    if rank() == 0:
        PlainConsole().print(benchmark_table(measurements))
    return measurements


def benchmark_table(measurements: Sequence[Measurement]) -> Table:
    """A table for people: one row per collective and size, times in ms or µs, bandwidths in 10^9 bytes per second."""
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
