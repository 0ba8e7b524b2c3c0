"""Reading a training file: TOML and ``--set`` into a validated config, with every mistake named at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from meshwright.cli.config import Table, TrainConfig
from meshwright.errors import ConfigError, did_you_mean

_HELP = "meshwright train --help-config lists every key"


def read_config(file: Path, changes: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Reads a training file.

    Args:
        file: TOML file.
        changes: ``table.key=value`` texts, as ``--set`` takes them; later ones win.
        overrides: Values by dotted key that win over all; None leaves a key as it is.

    Raises:
        ConfigError: When the file cannot be read, or naming every key that is wrong.
    """
    content = _read_toml(file)
    for change in changes:
        _put(content, *_parse_change(change))
    for key, value in (overrides or {}).items():
        if value is not None:
            _put(content, key, value)
    return parse_config(content, str(file))


def parse_config(content: Mapping[str, Any], where: str) -> TrainConfig:
    """Validates the content of a training file.

    Raises:
        ConfigError: Naming every key that is wrong.
    """
    try:
        return TrainConfig.model_validate(dict(content))
    except ValidationError as error:
        raise _explained(error, where) from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return _parsed(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read",
            expected="a TOML file",
            got=error.strerror or str(error),
            fix="name a training file; examples/gpt2/stdlib.toml is one",
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not TOML", expected="tables of key = value", got=str(error), fix=_HELP) from None


def _parsed(text: str) -> dict[str, Any]:
    """The tables of a TOML text, whose integers have 64 bits: Python's own have no end, and long ones no text.

    Raises:
        ValueError: When it is none.
    """
    content = tomllib.loads(text)
    left: list[Any] = [content]
    while left:
        value = left.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("an integer of more than 64 bits")
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return content


def _parse_change(change: str) -> tuple[str, Any]:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            "--set takes a key and a value",
            expected="table.key=value, such as optimizer.lr=1e-3",
            got=repr(change),
            fix="write it as --set table.key=value",
        )
    try:
        return key.strip(), _parsed(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return key.strip(), text.strip()  # shells strip quotes: run.device=cpu is meant as text


def _put(content: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    table = content
    for depth, name in enumerate(tables):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{key} cannot be set",
                expected=f"{'.'.join(tables[: depth + 1])} to be a table",
                got=repr(table),
                fix="see meshwright train --help-config",
            )
    table[last] = value


def _explained(error: ValidationError, where: str) -> ConfigError:
    expected: dict[str, list[str]] = {}
    got: dict[str, str] = {}
    for each in error.errors():
        # Deeper parts of the location name alternatives of a type, which a user has not written.
        names = [str(part) for part in each["loc"][:2]]
        key = ".".join(names)
        got.setdefault(key, _got(each, key))
        wanted = _expected(each, names)
        if wanted not in expected.setdefault(key, []):
            expected[key].append(wanted)
    count = f"{len(expected)} mistakes" if len(expected) > 1 else "a mistake"
    return ConfigError(
        f"{where} has {count}",
        expected="; ".join(f"{key}: {' or '.join(wanted)}" if key else wanted[0] for key, wanted in expected.items()),
        got="; ".join(got.values()),
        fix=_HELP,
    )


def _expected(each: Any, names: list[str]) -> str:
    if each["type"] == "extra_forbidden":
        known = _keys(names[:-1])
        hint = did_you_mean(names[-1], known) or f"; keys are {', '.join(known)}"
        return f"no such key{hint}"
    if each["type"] == "missing":
        return "a value" if each["loc"] == tuple(names) else "more values"
    if each["type"] == "model_type":
        return "a table"
    message = each["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if each["type"] == "string_pattern_mismatch":
        return _description(names) or message
    return message


def _got(each: Any, key: str) -> str:
    if each["type"] == "missing" and each["loc"] == tuple(key.split(".")):
        return f"no {key}"
    value = repr(each["input"]) if not isinstance(each["input"], Table) else "both"
    shown = value if len(value) < 80 else value[:80] + "…"
    return f"{key} = {shown}" if key and value != "both" else "a combination of them"


def _table(names: list[str]) -> type[BaseModel]:
    table: Any = TrainConfig
    for name in names:
        table = table.model_fields[name].annotation
    return table


def _keys(names: list[str]) -> list[str]:
    return list(_table(names).model_fields)


def _description(names: list[str]) -> str | None:
    return _table(names[:-1]).model_fields[names[-1]].description
