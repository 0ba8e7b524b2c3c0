"""Blocks of text on one rank, each under a rule with its title."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from meshwright.runtime import print_rank

_COLUMNS = 60


def print_block(title: str, text: str | None = None, file: TextIO | None = None) -> None:
    """Prints text between two rules of 60 columns, the upper with the title in its middle; on rank 0 only.

    Args:
        title: A few words; a title that is longer than the rule stands as it is.
        text: What to say; None prints the title alone.
        file: Where; None means standard output.
    """
    lines = [f" {title} ".center(_COLUMNS, "=")]
    lines += [text, "=" * _COLUMNS] if text is not None else []
    print_rank("\n".join(lines), file=file or sys.stdout)


def print_dict(title: str, content: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Prints one line ``name: value`` per entry as a block, the values aligned; on rank 0 only.

    Args:
        title: See :func:`print_block`.
        content: What to print.
        file: Where; None means standard output.
    """
    width = max((len(str(name)) for name in content), default=0) + 1
    print_block(title, "\n".join(f"{f'{name}:':<{width}} {value}" for name, value in content.items()), file)
