"""Turn Sphinx roles in docstrings into plain code: an extension of griffe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.append(str(Path(__file__).parent))
from words import without_roles


class Roles(griffe.Extension):
    """Rewrite every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a class, function, attribute or module."""
        if obj.docstring is not None:
            obj.docstring.value = without_roles(obj.docstring.value)
