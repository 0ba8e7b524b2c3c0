"""Figures of a row in whatever unit its cell has: tokens a second, TFLOPS, memory, lengths, batches and devices."""

from __future__ import annotations

import re

from meshwright.planner.published.rows import Row

_GIB = 2**30
_DEVICES_PER_NODE = 8
_MOST_SAMPLES = 2**17  # of a step: a larger number counts tokens
_MOST_GIB = 2**11  # of a device: a larger number without a unit counts MiB
_BINARY = re.compile(r"^\W*(\d+(?:\.\d+)?)\s*([km])(?![a-z])", re.IGNORECASE)
_OF_ALL = re.compile(r"total|overall|aggregate|all gpus|cluster|system", re.IGNORECASE)


def tokens_per_s(row: Row, devices: int) -> float | None:
    """Per device; a cell that says that it is of all devices is divided."""
    printed = row.number("tokens_per_s_per_gpu")
    return printed / devices if printed and _OF_ALL.search(row.text("tokens_per_s_per_gpu")) else printed


def flops_per_s(row: Row) -> float | None:
    """Per device: TFLOPS, unless the cell says PFLOPS or is so large that it counts single operations."""
    printed, text = row.number("tflops_per_gpu"), row.text("tflops_per_gpu").lower()
    if not printed:
        return None
    if printed >= 1e9:
        return printed
    return printed * (1e15 if re.search(r"\d\s*p(?:f|eta)", text) else 1e12)


def peak_bytes(row: Row) -> float:
    """0 where nothing is printed, or a share of a device."""
    printed, text = row.number("peak_mem_gib") or 0.0, row.text("peak_mem_gib").lower()
    if "%" in text:
        return 0.0
    return printed * (2**20 if "mb" in text or "mib" in text or printed > _MOST_GIB else _GIB)


def sample_length(row: Row) -> int | None:
    """Tokens of a sample: "8k" is 8192."""
    found = _BINARY.match(row.text("seq"))
    if found is None:
        return row.count("seq")
    return round(float(found.group(1)) * {"k": 2**10, "m": 2**20}[found.group(2).lower()])


def global_batch(row: Row, dp: int, seq: int) -> int | None:
    """Samples of a step over all ranks, from samples or tokens."""
    whole = row.count("global_batch")
    if whole is not None and ("tok" in row.text("global_batch").lower() or whole >= _MOST_SAMPLES):
        whole = max(1, round(whole / seq))
    noted = re.search(r"batch per DP (\d{1,9})(?!\d)", row.notes)
    return int(noted.group(1)) * dp if whole is None and noted else whole


def devices(row: Row) -> int | None:
    """ "8x8", "8 nodes" and "64 GPUs" are numbers of devices."""
    text = row.text("n_gpus").lower()
    product = re.match(r"^(\d{1,6})\s*[x×*]\s*(\d{1,4})", text)
    if product:
        return int(product.group(1)) * int(product.group(2))
    number = row.count("n_gpus")
    return number * _DEVICES_PER_NODE if number is not None and "node" in text else number
