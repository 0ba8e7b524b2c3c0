"""A griffe extension: Sphinx roles in docstrings become plain code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.append(str(Path(__file__).parent))
from words import without_roles


class Roles(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each class, function, attribute and module."""
        if obj.docstring is not None:
            obj.docstring.value = without_roles(obj.docstring.value)
