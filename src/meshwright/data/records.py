"""Read files that hold text or records, compressed or not: text, JSON lines, Parquet, folders of datasets."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from meshwright.errors import DataError, join_names, printable
from meshwright.runtime.lazy import optional_library

_MAGIC_BYTES = 10
# What compressed files begin with.
_COMPRESSED = {
    "gzip": rb"\x1f\x8b", "bzip2": rb"BZh[1-9]1AY&SY", "xz": rb"\xfd7zXZ\x00", "zstd": rb"\x28\xb5\x2f\xfd",
    "zip": rb"PK\x03\x04",
}  # fmt: skip
# Halves of characters, which are no text: as escapes, and as bytes.
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_JSON_LINES = re.compile(r"\.(jsonl|ndjson)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_DATASET_FILES = ("dataset_info.json", "dataset_dict.json")
_SPLIT = "train"  # of a folder with several


class Record(NamedTuple):
    """One record of a file, with the place to name in errors."""

    value: Mapping[str, Any]
    where: str


@dataclass
class BadLines:
    """The treatment of lines that are no JSON objects, and the count of those left out."""

    treatment: Literal["raise", "skip"] = "raise"
    skipped: dict[str, int] = field(default_factory=dict)
    """By file."""


def holds_records(path: Path) -> bool:
    """Return whether a path is read as records, by its name: JSON lines, Parquet, or a folder of ``datasets``."""
    if path.is_dir():
        return any((path / name).is_file() for name in _DATASET_FILES)
    return bool(_JSON_LINES.search(path.name)) or path.suffix.lower() == ".parquet"


def read_records(path: Path, bad_lines: BadLines | None = None) -> Iterator[Record]:
    """Iterate over the records of a file without holding all of them.

    Args:
        path: ``.jsonl`` or ``.ndjson``, also compressed (gzip, bzip2, xz, zstd); ``.parquet``; or a folder that
            ``datasets.Dataset.save_to_disk`` wrote, of whose splits ``train`` is read.
        bad_lines: What happens to lines that are no JSON objects; by default they raise.

    Raises:
        DataError: When the file cannot be read, or a line is no JSON object.
        ConfigError: When a library that reads it is not installed.
    """
    if path.is_dir():
        return _of_dataset(path)
    return _of_parquet(path) if path.suffix.lower() == ".parquet" else _of_json_lines(path, bad_lines or BadLines())


def text_of(record: Record, key: str, otherwise: str = "") -> str:
    """Return the text of a record.

    Args:
        record: The record.
        key: Its key.
        otherwise: What else it could have held, for the error.

    Raises:
        DataError: When there is none under the key.
    """
    text = record.value.get(key)
    if not isinstance(text, str):
        raise DataError(
            f"{record.where} has {f'neither a text nor {otherwise}' if otherwise else 'no text'}",
            expected=f"text under the key {key!r} (data.text_key)",
            got=f"keys {join_names(map(str, record.value), limit=8)}",
            fix="name the key with the text, or leave the record out",
        )
    return text


# --- Text, which may be compressed


def compression_of(path: Path) -> str | None:
    """Return what a file is compressed with, by what it begins with; None for others, folders and unreadable files."""
    try:
        with open(path, "rb") as file:
            start = file.read(_MAGIC_BYTES)
    except OSError:  # reading it whole reports that
        return None
    return next((name for name, magic in _COMPRESSED.items() if re.match(magic, start)), None)


class _Zstd(io.RawIOBase):
    """Reads what zstd has compressed; unlike the library's own stream, a file that is cut short raises."""

    def __init__(self, file: BinaryIO) -> None:
        self._library = optional_library(
            "zstandard", "Reading a file that is compressed with zstd", "pip install 'meshwright[data]'"
        )
        self._file, self._frame, self._unpacked = file, self._new_frame(), b""

    def _new_frame(self) -> Any:
        return self._library.ZstdDecompressor().decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._file.read(2**17)
            if not packed:
                if not self._frame.eof:
                    raise EOFError("it ends within a frame")
                return 0
            if self._frame.eof:
                self._frame = self._new_frame()
            self._unpacked = self._frame.decompress(packed)
        count = min(len(buffer), len(self._unpacked))
        buffer[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count


_READERS: dict[str, Callable[[BinaryIO], Any]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zstd": lambda file: io.BufferedReader(_Zstd(file)),
}


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """Open a file for reading bytes, unpacked where it is compressed.

    Yields:
        The file, with ``read`` and iteration over lines; and a function that returns how many of the bytes on disk
        have been read.

    Raises:
        DataError: When it is compressed, and damaged.
    """
    kind = compression_of(path)
    with open(path, "rb") as raw:
        text: Any = raw if kind is None else _READERS[kind](raw)
        try:
            yield text, raw.tell
        except _damage() as error:
            if isinstance(error, OSError) and (kind is None or error.errno is not None):
                raise  # the disk's, or of what is done with the text; bzip2's have no number
            raise DataError(
                "A compressed file of the corpus is damaged",
                expected=f"a whole {kind} file",
                got=f"{path}: {type(error).__name__}: {error}",
                fix="write or download it again",
            ) from error


def _damage() -> tuple[type[Exception], ...]:
    """Return the errors with which libraries meet files that are cut short or changed; some OSErrors are others."""
    known: tuple[type[Exception], ...] = (EOFError, OSError, lzma.LZMAError, zlib.error)
    with contextlib.suppress(ImportError):
        known += (importlib.import_module("zstandard").ZstdError,)
    return known


# --- Records


def _of_json_lines(path: Path, bad_lines: BadLines) -> Iterator[Record]:
    with open_text(path) as (text, _):
        for number, line in enumerate(text, start=1):
            if not line.strip():
                continue
            try:
                value, problem = _parsed(line), ""
            except (ValueError, RecursionError) as error:
                value, problem = None, str(error)
            if isinstance(value, dict):
                yield Record(value, f"{path}:{number}")
            elif bad_lines.treatment == "skip":
                bad_lines.skipped[str(path)] = bad_lines.skipped.get(str(path), 0) + 1
            else:
                shown = line[:60].decode(errors="replace").strip()
                raise DataError(
                    f"Line {number} of {path} is no JSON object",
                    expected="one object per line",
                    got=printable(f"{shown!r}{f': {problem}' if problem else ''}"),
                    fix="correct the line, or leave such lines out with data.bad_lines = 'skip'",
                )


def _parsed(line: bytes) -> Any:
    """Parse a line of JSON; a half of a character without the other becomes a question mark."""
    value = json.loads(line)
    if _SURROGATES.search(line):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _of_parquet(path: Path) -> Iterator[Record]:
    parquet: Any = optional_library("pyarrow.parquet", "Reading a Parquet file", "pip install 'meshwright[data]'")
    with _explained(path, "a Parquet file"):
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield Record(row, f"{path}, row {number}")


def _of_dataset(path: Path) -> Iterator[Record]:
    datasets: Any = optional_library("datasets", "Reading a folder of datasets", "pip install 'datasets'")
    with _explained(path, "a folder that Dataset.save_to_disk wrote"):
        found = datasets.load_from_disk(str(path))
        if isinstance(found, Mapping):
            if _SPLIT not in found:
                raise DataError(
                    f"{path} has no split {_SPLIT!r}",
                    expected="a folder of one dataset, or of several with 'train' among them",
                    got=f"splits {', '.join(map(repr, found))}",
                    fix=f"name the folder of one split, such as {path / next(iter(found))}",
                )
            found = found[_SPLIT]
        for number, row in enumerate(found, start=1):
            yield Record(row, f"{path}, row {number}")


@contextlib.contextmanager
def _explained(path: Path, expected: str) -> Iterator[None]:
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except Exception as error:  # each library has errors of its own
        raise DataError(
            f"{path} cannot be read",
            expected=expected,
            got=f"{type(error).__name__}: {error}",
            fix="write it again, or name another file",
        ) from error
