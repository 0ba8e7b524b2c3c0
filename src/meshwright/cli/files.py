"""Files that commands write."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from meshwright.errors import CheckpointError, ConfigError
from meshwright.store.file_format import write_text


def check_writable(option: str, path: Path | None, fix: str = "name another file") -> None:
    """Refuses a file that cannot be written, before anything is worked out.

    Raises:
        ConfigError: Naming the option.
    """
    wrong = None if path is None else _what_is_wrong(path)
    if wrong:
        raise ConfigError(
            f"{option} names no file that can be written",
            expected="a file in an existing directory",
            got=f"{path}, {wrong}",
            fix=fix,
        )


def _what_is_wrong(path: Path) -> str:
    if path.is_dir():
        return "a directory"
    folder = path.absolute().parent
    if not folder.is_dir():
        return "whose directory does not exist"
    if _is_special(path):
        return "" if os.access(path, os.W_OK) else "which this user may not write"
    try:
        tempfile.TemporaryFile(dir=folder).close()  # only an attempt tells: of folders that refuse even root, too
    except OSError as error:
        return f"in whose directory nothing can be written: {error.strerror}"
    return ""


def _is_special(path: Path) -> bool:
    """A device or a pipe, such as /dev/stdout: there is nothing to put in its place."""
    return path.exists() and not path.is_file()


def write(option: str, path: Path, text: str) -> None:
    """Writes a file, whole or not at all, and says so on standard error.

    Raises:
        ConfigError: When that fails.
    """
    write_whole(path, text, f"{option} {path} cannot be written")
    sys.stderr.write(f"meshwright: wrote {path}\n")


def write_whole(
    path: Path, text: str, told: str, fix: str = "name another file", *, makes_folder: bool = False
) -> None:
    """Writes a file under its name only when it is complete.

    Raises:
        ConfigError: As ``told``, when that fails.
    """
    try:
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if _is_special(path):
            path.write_text(text, encoding="utf-8")
            return
        write_text(path.resolve(), text)
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            told,
            expected="a directory in which this user may write",
            got=error.got if isinstance(error, CheckpointError) else error.strerror or str(error),
            fix=fix,
        ) from error
