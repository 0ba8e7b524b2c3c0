"""Turn docstrings into markdown."""

from __future__ import annotations

import re

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(~?)([\w.]+)`")


def without_roles(text: str) -> str:
    """Return text with its Sphinx roles, such as ``:class:`~a.B```, as plain code."""
    return _ROLE.sub(_code, text)


def _code(match: re.Match[str]) -> str:
    name = match[2].rpartition(".")[2] if match[1] else match[2].removeprefix("meshwright.")
    return f"`{name}`"
