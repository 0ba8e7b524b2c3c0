"""BMTrain's ``benchmark``: measure one collective and print the table of ``meshwright bench-comm``."""

from __future__ import annotations

from typing import Any

from meshwright.comm import Measurement, benchmark_collectives
from meshwright.comm.bandwidth import benchmark_table
from meshwright.runtime import rank
from meshwright.runtime.terminal import PlainConsole


def all_gather(**options: Any) -> list[Measurement]:
    """Measure all-gather and print the table on rank 0; options are those of ``benchmark_collectives``."""
    return _measure("all_gather", options)


def reduce_scatter(**options: Any) -> list[Measurement]:
    """Measure reduce-scatter and print the table on rank 0; options are those of ``benchmark_collectives``."""
    return _measure("reduce_scatter", options)


def send_recv(**options: Any) -> list[Measurement]:
    """Measure sends from even to odd ranks and print the table; options are those of ``benchmark_collectives``."""
    return _measure("send_recv", options)


def all_reduce(**options: Any) -> list[Measurement]:
    """Measure all-reduce and print the table on rank 0; options are those of ``benchmark_collectives``."""
    return _measure("all_reduce", options)


def _measure(op: str, options: dict[str, Any]) -> list[Measurement]:
    measurements = benchmark_collectives([op], **options)
    if rank() == 0:
        PlainConsole().print(benchmark_table(measurements))
    return measurements
