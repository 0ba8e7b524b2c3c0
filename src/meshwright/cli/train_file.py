"""Read a training file, with the changes of a command line, and validate it with every mistake named at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.cli.config_help import HELP, explained
from meshwright.cli.train_config import TrainConfig
from meshwright.errors import ConfigError


def read_config(
    file: Path,
    changes: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    strategy: str | None = None,
) -> TrainConfig:
    """Read a training file.

    Args:
        file: TOML file.
        changes: ``table.key=value`` texts, as ``--set`` takes them; later ones win.
        overrides: Values by dotted key that take precedence over all; None leaves a key as it is.
        strategy: As :func:`put_strategy` takes it; None leaves the file's.

    Raises:
        ConfigError: When the file cannot be read, or naming every key that is wrong.
    """
    content = _read_toml(file)
    put_changes(content, changes)
    put_strategy(content, strategy)
    for key, value in (overrides or {}).items():
        if value is not None:
            _put(content, key, value)
    return parse_config(content, str(file))


def put_changes(content: dict[str, Any], changes: Sequence[str]) -> None:
    """Put ``table.key=value`` texts, as ``--set`` takes them, into the content of a training file.

    Raises:
        ConfigError: When one is no such text, or names a key within something that is no table.
    """
    for change in changes:
        _put(content, *_parse_change(change))


def put_strategy(content: dict[str, Any], strategy: str | None) -> None:
    """Put the strategy of a command line, text or the path of a .json file, in place of the one in a training file."""
    if strategy is None:
        return
    given = {"file": str(Path(strategy).absolute())} if strategy.endswith(".json") else {"methods": strategy}
    kept = {key: each for key, each in dict(content.get("strategy", {})).items() if key == "cluster"}
    content["strategy"] = kept | given


def parse_config(content: Mapping[str, Any], where: str) -> TrainConfig:
    """Validate the content of a training file.

    Raises:
        ConfigError: Naming every key that is wrong.
    """
    try:
        return TrainConfig.model_validate(dict(content))
    except ValidationError as error:
        raise explained(error, where, TrainConfig) from None


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
        raise ConfigError(f"{file} is not TOML", expected="tables of key = value", got=str(error), fix=HELP) from None


_DEEPEST = 100  # lists within lists: what is saved with a checkpoint may be of 255


def _parsed(text: str) -> dict[str, Any]:
    """Parse a TOML text; refuse integers beyond 64 bits, which TOML does not have, and lists in lists without end.

    Raises:
        ValueError: When it is no TOML, or one of these.
    """
    content = tomllib.loads(text)
    left: list[tuple[Any, int]] = [(content, 0)]
    while left:
        value, depth = left.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("an integer of more than 64 bits")
        if depth > _DEEPEST:
            raise ValueError(f"lists or tables that are nested more than {_DEEPEST} deep")
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        left += ((each, depth + 1) for each in inside)
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


_INSTEAD = {"run.steps": "epochs", "run.epochs": "steps"}  # of two keys the later one counts


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
    table.pop(_INSTEAD.get(key, ""), None)
    table[last] = value
