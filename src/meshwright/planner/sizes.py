"""Sizes as text."""

from __future__ import annotations


def readable_bytes(size: int) -> str:
    """A size for people, in binary units: ``"1.50 GiB"``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
