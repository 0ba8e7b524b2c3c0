"""``meshwright train --help-config``: every key of a training file, from the models that validate it."""

from __future__ import annotations

import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from meshwright.cli.config import Table, TrainConfig

_WIDTH = 100


def config_help() -> str:
    """All tables and keys with type, default and description, as TOML comments one could paste into a file."""
    lines = ["# A training file for: meshwright train FILE.toml", "# Relative paths start at the file's own folder."]
    for name, field in TrainConfig.model_fields.items():
        table: type[Table] = field.annotation  # type: ignore[assignment]
        lines += ["", f"[{name}]", f"# {table.__doc__}"]
        for key, entry in table.model_fields.items():
            lines += ["", *_described(entry), f"{'' if entry.is_required() else '# '}{key} = {_default(entry)}"]
    return "\n".join(lines)


def _described(entry: FieldInfo) -> Iterator[str]:
    limits = "".join(f", {symbol} {limit}" for symbol, limit in _limits(entry))
    text = f"{_type_name(entry.annotation)}{limits}: {entry.description}"
    return (f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False))


def _default(entry: FieldInfo) -> str:
    if entry.is_required():
        return '"…"'
    return "…" if entry.default is None else _toml(entry.default)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(each) for each in arguments if each is not types.NoneType)
    if origin is typing.Literal:
        return " | ".join(f"'{each}'" for each in arguments)
    if origin in (list, tuple):
        items = sorted({_type_name(each) for each in arguments if each is not Ellipsis})
        return "list" if items == ["anything"] else f"list of {' or '.join(items)}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "anything"}
    return names.get(origin or annotation, "table")


def _limits(entry: FieldInfo) -> Iterator[tuple[str, Any]]:
    # Limits sit on the field itself, or on the inner type of an optional key; both print alike.
    found = re.findall(r"\b(Ge|Gt|Le)\((?:ge|gt|le)=([\d.]+)\)", f"{entry.metadata} {entry.annotation}")
    symbols = {"Ge": "≥", "Gt": ">", "Le": "≤"}
    return ((symbols[kind], limit) for kind, limit in found)
