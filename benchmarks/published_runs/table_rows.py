"""Read rows of a table of published runs, and their figures in whatever unit a cell has."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import DataError

COLUMNS = (
    "source", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "gpu", "n_gpus",
    "nodes", "dp", "tp", "pp", "cp", "zero_stage", "micro_batch", "global_batch", "precision", "ac", "compile",
    "tokens_per_s_per_gpu", "mfu", "tflops_per_gpu", "peak_mem_gib",
)  # fmt: skip
_EMPTY = {"", "-", "--", "na", "n/a", "nan", "none", "null", "unknown", "?", "n.a.", "not stated"}
_MOST = 2**40  # of anything that is counted
_SUFFIX = {"k": 1e3, "m": 1e6, "b": 1e9}
_NUMBER = re.compile(
    r"^(?:mfu|hfu|about|around|approx\.?|ca\.?|up to)?[:=\s]*[~≈<>]?\s*"
    r"([-+]?\d[\d,_ ]*\.?\d*(?:e[-+]?\d+)?)\s*((?:[kmb](?![a-z])|%)?)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Row:
    """One published run; None where the table says nothing.

    Args:
        index: From 0, in the file.
        cells: As they stand there, by column; unknown columns are ignored, absent ones empty.
    """

    index: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return a cell without surrounding blanks; "" for one that says nothing."""
        value = (self.cells.get(column) or "").strip()
        return "" if value.lower() in _EMPTY else value

    def number(self, column: str) -> float | None:
        """Return a cell's number; None where there is none. "1,024", "8k" and "45 %" are numbers."""
        found = _NUMBER.match(self.text(column))
        if found is None:
            return None
        try:
            value = float(re.sub(r"[,_ ]", "", found.group(1)))
        except ValueError:
            return None
        value *= _SUFFIX.get(found.group(2).lower(), 1.0)
        return value if math.isfinite(value) else None

    def count(self, column: str) -> int | None:
        """Return a cell's positive whole number."""
        value = self.number(column)
        return int(value) if value is not None and 1 <= value <= _MOST and value == int(value) else None

    @property
    def source(self) -> str:
        """Return where the run was published, without notes in brackets."""
        name = re.split(r"\s*\[|\s\((?=v\d)", self.text("source"), maxsplit=1)[0].strip()
        return name or "unknown"

    @property
    def notes(self) -> str:
        """The source's notes in brackets."""
        return self.text("source")[len(self.source) :]

    @property
    def ran_out_of_memory(self) -> bool:
        """Return whether the row is published as one that does not fit."""
        cells = " ".join(self.text(column) for column in ("tokens_per_s_per_gpu", "peak_mem_gib", "mfu", "ac"))
        return bool(re.search(r"\bOOM\b|out[- ]of[- ]memory", f"{self.notes} {cells}", re.IGNORECASE))


def read_rows(path: Path) -> list[Row]:
    """Read a table of published runs.

    Raises:
        DataError: When it is not a CSV file with at least the columns model or layers, and gpu.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = {(name or "").strip().lower() for name in reader.fieldnames or ()}
            rows = [{(k or "").strip().lower(): v for k, v in row.items() if isinstance(v, str)} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"The table {path} cannot be read",
            expected="a CSV file in UTF-8",
            got=f"{type(error).__name__}: {error}",
            fix="correct the path or the file",
        ) from None
    if not names & {"gpu"} or not names & {"model", "layers"}:
        raise DataError(
            f"{path} is no table of published runs",
            expected="the columns " + ", ".join(COLUMNS),
            got=", ".join(sorted(names)) or "no columns",
            fix="name the columns so; cells may be empty",
        )
    return [Row(index, cells) for index, cells in enumerate(rows)]


# --- Figures of a row in whatever unit its cell has: tokens a second, TFLOPS, memory, lengths, batches and devices.

_GIB = 2**30
_DEVICES_PER_NODE = 8
_MOST_SAMPLES = 2**17  # of a step: a larger number counts tokens
_MOST_GIB = 2**11  # of a device: a larger number without a unit counts MiB
_BINARY = re.compile(r"^\W*(\d+(?:\.\d+)?)\s*([km])(?![a-z])", re.IGNORECASE)
_OF_ALL = re.compile(r"total|overall|aggregate|all gpus|cluster|system", re.IGNORECASE)


def tokens_per_s(row: Row, devices: int) -> float | None:
    """Return the figure per device; a cell that says that it is of all devices is divided."""
    printed = row.number("tokens_per_s_per_gpu")
    return printed / devices if printed and _OF_ALL.search(row.text("tokens_per_s_per_gpu")) else printed


def flops_per_s(row: Row) -> float | None:
    """Return the figure per device in TFLOPS, unless the cell says PFLOPS or is large enough for single operations."""
    printed, text = row.number("tflops_per_gpu"), row.text("tflops_per_gpu").lower()
    if not printed:
        return None
    if printed >= 1e9:
        return printed
    return printed * (1e15 if re.search(r"\d\s*p(?:f|eta)", text) else 1e12)


def peak_bytes(row: Row) -> float:
    """Return the peak in bytes, 0 where nothing is printed, or a share of a device."""
    printed, text = row.number("peak_mem_gib") or 0.0, row.text("peak_mem_gib").lower()
    if "%" in text:
        return 0.0
    return printed * (2**20 if "mb" in text or "mib" in text or printed > _MOST_GIB else _GIB)


def sample_length(row: Row) -> int | None:
    """Return the tokens per sample: "8k" is 8192."""
    found = _BINARY.match(row.text("seq"))
    if found is None:
        return row.count("seq")
    return round(float(found.group(1)) * {"k": 2**10, "m": 2**20}[found.group(2).lower()])


def global_batch(row: Row, dp: int, seq: int) -> int | None:
    """Return the samples per step over all ranks, from samples or tokens."""
    whole = row.count("global_batch")
    if whole is not None and ("tok" in row.text("global_batch").lower() or whole >= _MOST_SAMPLES):
        whole = max(1, round(whole / seq))
    noted = re.search(r"batch per DP (\d{1,9})(?!\d)", row.notes)
    return int(noted.group(1)) * dp if whole is None and noted else whole


def devices(row: Row) -> int | None:
    """Return the number of devices: "8x8", "8 nodes" and "64 GPUs" are numbers of devices."""
    text = row.text("n_gpus").lower()
    product = re.match(r"^(\d{1,6})\s*[x×*]\s*(\d{1,4})", text)
    if product:
        return int(product.group(1)) * int(product.group(2))
    number = row.count("n_gpus")
    return number * _DEVICES_PER_NODE if number is not None and "node" in text else number
