"""Files that commands write."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.errors import ConfigError


def check_writable(option: str, path: Path | None, fix: str = "name another file") -> None:
    """Refuses a file that cannot be written, before anything is worked out.

    Raises:
        ConfigError: Naming the option.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(
            f"{option} names no file that can be written",
            expected="a file in an existing directory",
            got=f"{path}, {'a directory' if path.is_dir() else 'whose directory does not exist'}",
            fix=fix,
        )


def write(option: str, path: Path, text: str) -> None:
    """Writes a file and says so on standard error.

    Raises:
        ConfigError: When that fails.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written", got=str(error), fix="name another file") from error
    sys.stderr.write(f"meshwright: wrote {path}\n")
