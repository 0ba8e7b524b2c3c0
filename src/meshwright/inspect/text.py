"""Summaries as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_COLUMNS = ("name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean")
_LEFT = 2  # name and shape; numbers stand to the right


def format_summary(summary: Sequence[dict[str, Any]]) -> str:
    """A summary as an aligned table, numbers with four decimals.

    Args:
        summary: What ``inspect_model`` or ``Inspector.get_summary`` returned, or several of them joined.

    Returns:
        A header and one line per tensor; columns as BMTrain's, none of them cut off.
    """
    lines = [_COLUMNS, *(tuple(_cell(line[column]) for column in _COLUMNS) for line in summary)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(_COLUMNS))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.ljust(width) if index < _LEFT else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
