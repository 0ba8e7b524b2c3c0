"""Text files to train on: found by name, by pattern, or in Python's own standard library."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import DataError

STDLIB = "stdlib"
"""The source name that stands for the Python standard library's own ``.py`` files."""

# Installed packages differ from machine to machine; tests and their data are hardly text anybody would learn from.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test"})
_GLOB_CHARACTERS = frozenset("*?[")


def find_files(source: str | Sequence[str], base: Path) -> list[Path]:
    """Finds the files of a corpus.

    Args:
        source: ``"stdlib"``, a file path or a glob (``**`` crosses folders), or a sequence of these. ``~`` is expanded.
        base: Folder against which relative paths and globs are read.

    Returns:
        Absolute paths in sorted order; a file reached in several ways is listed once.

    Raises:
        DataError: When there is no source, or one of them matches no file.
    """
    sources = [source] if isinstance(source, str) else list(source)
    if not sources:
        raise DataError(
            "The corpus has no files",
            expected=f"{STDLIB!r}, file paths or globs",
            got="an empty list",
            fix=f"name at least one file; {STDLIB!r} is on every machine",
        )
    found = sorted(path for each in sources for path in _match(each, base))
    distinct: dict[Path, Path] = {}
    for path in found:
        distinct.setdefault(path.resolve(), path)
    return list(distinct.values())


def _match(source: str, base: Path) -> list[Path]:
    if source == STDLIB:
        return _standard_library()
    pattern = os.path.abspath(base / Path(source).expanduser())
    # A file whose name happens to hold glob characters is that file.
    names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    files = [Path(name) for name in names if os.path.isfile(name)]
    if not files:
        raise _nothing_found(source, pattern)
    return files


def _nothing_found(source: str, pattern: str) -> DataError:
    kind = "Glob" if _GLOB_CHARACTERS & set(source) else "File"
    if os.path.isdir(pattern):
        got, fix = f"the folder {pattern}", f"name its files, for example {source.rstrip('/')}/**/*.txt"
    else:
        got, fix = f"nothing at {pattern}", "correct the path; relative ones start at the folder shown under 'got'"
    return DataError(f"{kind} {source!r} matches no file", expected="one file or more", got=got, fix=fix)


def _standard_library() -> list[Path]:
    root = sysconfig.get_path("stdlib")
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise DataError(
            "This Python has no readable standard library",
            expected=f".py files under {root}",
            got="none: a frozen or zipped interpreter, most likely",
            fix="name text files of your own as the corpus",
        )
    return found
