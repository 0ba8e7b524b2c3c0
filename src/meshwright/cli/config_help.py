"""Explain a training file: every key with its default, and every mistake in a sentence."""

from __future__ import annotations

import difflib
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from meshwright.errors import ConfigError

HELP = "meshwright train --help-config lists every key"


class Table(BaseModel):
    """Base of all tables: immutable, with unknown keys refused."""

    # TOML is typed: text where a number belongs is a mistake, not a number.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# --- Mistakes

# Words of commands and of other trainers, and the keys that mean the same here.
_OTHER_WORDS = {
    "global_batch": "run.batch_size", "global_batch_size": "run.batch_size", "micro_batches": "run.num_micro_batches",
    "gradient_accumulation_steps": "run.num_micro_batches", "processes": "run.nproc", "seq": "data.seq_len",
    "max_seq_length": "data.seq_len", "max_steps": "run.steps", "num_train_epochs": "run.epochs",
    "num_epochs": "run.epochs", "max_epochs": "run.epochs", "eval_steps": "eval.every", "eval_every": "eval.every",
    "save_steps": "run.checkpoint_every", "learning_rate": "optimizer.lr", "lora_r": "adapter.r",
    "lora_alpha": "adapter.alpha", "report_to": "run.trackers", "target_modules": "adapter.targets",
}  # fmt: skip


def explained(error: ValidationError, where: str, root: type[BaseModel]) -> ConfigError:
    """Return the error that names every mistake: the first in its first sentence, further ones behind it.

    Args:
        error: pydantic's.
        where: The file.
        root: The model of the whole file.
    """
    mistakes: dict[str, list[str]] = {}
    for each in error.errors():
        # Deeper parts of the location name alternatives of a union type, which no user has written.
        names = _names(each["loc"], root)
        sentences = mistakes.setdefault(".".join(names), [])
        sentence = _sentence(each, names, root)
        if sentence not in sentences:
            sentences.append(sentence)
    said = [f"{key}{' or '.join(parts)}" if key else parts[0] for key, parts in _told_by_key(mistakes)]
    hints = [_close_key(key, root) for key in mistakes]
    first = f"{said[0]} in {where}" if len(said) == 1 else f"{where} has {len(said)} mistakes: {'; '.join(said)}"
    hint = f". Did you mean `{hints[0]}`?" if len(said) == 1 and "Unknown key" in said[0] and hints[0] else ""
    return ConfigError(first + hint, fix=HELP)


def _told_by_key(mistakes: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    for key, parts in mistakes.items():
        is_sentence = not key or parts[0].startswith("Unknown key")
        yield ("" if is_sentence else f"`{key}` ", parts)


def _names(location: tuple[Any, ...], root: type[BaseModel]) -> list[str]:
    """Return the part of a location that names keys: as deep as there are tables."""
    names: list[str] = []
    table: type[BaseModel] | None = root
    for part in location:
        if table is None or not isinstance(part, str):
            break
        names.append(part)
        table = _table_of(table, part)
    return names


def _table_of(table: type[BaseModel], key: str) -> type[BaseModel] | None:
    field = table.model_fields.get(key)
    kinds = [] if field is None else [field.annotation, *typing.get_args(field.annotation)]
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _sentence(each: Any, names: list[str], root: type[BaseModel]) -> str:
    """Say what is wrong with a key, as what follows its name."""
    kind, key = each["type"], ".".join(names)
    if kind == "extra_forbidden":
        return f"Unknown key `{key}`"
    if kind == "missing":
        return "is missing" if list(each["loc"]) == names else "needs more values"
    if kind == "model_type":
        return f"must be a table, and is {_shown(each['input'])}"
    message = each["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if kind == "string_pattern_mismatch":
        message = _field(names, root).description or message
    got = "" if isinstance(each["input"], dict | Table) else f", and is {_shown(each['input'])}"
    return f"takes {message}" if kind == "value_error" else f"must be {message}{got}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:80] + "…"


def _field(names: list[str], root: type[BaseModel]) -> FieldInfo:
    table: Any = root
    for name in names[:-1]:
        table = _table_of(table, name)
    return table.model_fields[names[-1]]  # type: ignore[no-any-return]


def _keys(table: type[BaseModel], before: str = "") -> Iterator[str]:
    for name in table.model_fields:
        inner = _table_of(table, name)
        yield f"{before}{name}"
        if inner is not None:
            yield from _keys(inner, f"{before}{name}.")


def _close_key(key: str, root: type[BaseModel]) -> str:
    """Return the key of any table that is closest to an unknown one; empty where none is close."""
    tables, _, last = key.rpartition(".")
    if last in _OTHER_WORDS:
        return _OTHER_WORDS[last]
    known = list(_keys(root))
    if last in (ends := {each.rpartition(".")[2]: each for each in known}) and ends[last] != key:
        return ends[last]  # the right key in the wrong table
    own = [each for each in known if each.rpartition(".")[0] == tables]
    for candidates in (own, known):
        if found := difflib.get_close_matches(key, candidates, n=1, cutoff=0.75):
            return found[0]
    by_words = {each.replace(".", "_"): each for each in known}
    found = difflib.get_close_matches(last, list(by_words), n=1, cutoff=0.8)
    return by_words[found[0]] if found else ""


# --- ``meshwright train --help-config``, made from the models that validate a training file

_WIDTH = 100


def keys_help(root: type[BaseModel]) -> str:
    """Return all tables and keys with type, default and description, as TOML to paste into a file."""
    lines = ["# A training file for: meshwright train FILE.toml", "# Relative paths start at the file's own folder."]
    for name, field in root.model_fields.items():
        table: type[BaseModel] = field.annotation  # type: ignore[assignment]
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
    # Limits are on the field itself, or on the inner type of an optional key; both print alike.
    found = re.findall(r"\b(Ge|Gt|Le)\((?:ge|gt|le)=([\d.]+)\)", f"{entry.metadata} {entry.annotation}")
    symbols = {"Ge": "≥", "Gt": ">", "Le": "≤"}
    return ((symbols[kind], limit) for kind, limit in found)
