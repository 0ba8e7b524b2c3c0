"""What was decided: a strategy is an immutable value that can be compared, printed, diffed, saved and read back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import StrategyError
from meshwright.strategy.config import MethodConfig
from meshwright.strategy.reading import FORMAT, SCHEMA_VERSION, parse_method, read_methods


class Strategy:
    """A set of optimisation methods with their configs. The order in which they are listed has no meaning.

    Args:
        source: A list of names, ``(name, config)`` pairs or configs; another Strategy; JSON text or bytes; the path of
            a JSON file; or text as a strategy prints itself.

    Raises:
        StrategyError: When ``source`` cannot be read, names an unknown method or key, or names a method twice.

    Example:
        >>> Strategy(["fsdp", ("amp_native", {"dtype": "bf16"})])
        Strategy("fsdp + amp_native(dtype='bf16')")
    """

    __slots__ = ("methods",)

    methods: tuple[MethodConfig, ...]

    def __init__(self, source: Any = ()) -> None:
        methods = source.methods if isinstance(source, Strategy) else tuple(read_methods(source))
        names = [method.method_name for method in methods]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise StrategyError(
                "A method is listed twice",
                expected="every method once",
                got=", ".join(twice),
                fix="merge the two into one",
            )
        object.__setattr__(self, "methods", methods)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"A Strategy is immutable: {name!r} cannot be set. What to do: use with_method or without."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"A Strategy is immutable: {name!r} cannot be deleted.")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the methods, in the order listed."""
        return tuple(method.method_name for method in self.methods)

    def get(self, name: str) -> MethodConfig | None:
        """The config of a method, or None when the strategy does not name it."""
        return next((method for method in self.methods if method.method_name == name), None)

    def with_method(self, method: Any) -> Strategy:
        """This strategy with one method added, or replaced where it is already named."""
        added = parse_method(method)
        kept = [each for each in self.methods if each.method_name != added.method_name]
        position = self.names.index(added.method_name) if added.method_name in self.names else len(kept)
        return Strategy([*kept[:position], added, *kept[position:]])

    def without(self, name: str) -> Strategy:
        """This strategy without one method."""
        return Strategy([method for method in self.methods if method.method_name != name])

    def diff(self, other: Strategy) -> str:
        """What must change to get from this strategy to ``other``: lines of ``-``, ``+`` or ``~``; empty if equal."""
        lines = []
        for name in dict.fromkeys((*self.names, *other.names)):
            here, there = self.get(name), other.get(name)
            if here is None:
                lines.append(f"+ {there}")
            elif there is None:
                lines.append(f"- {here}")
            elif here != there:
                lines.append(f"~ {here} -> {there}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """JSON text with a schema version; classes are stored by their qualified names."""
        methods = [{"name": method.method_name, "config": method.model_dump(mode="json")} for method in self.methods]
        return json.dumps({"format": FORMAT, "schema_version": SCHEMA_VERSION, "methods": methods}, indent=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`to_json` to a file, whole or not at all."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        temporary.write_text(self.to_json() + "\n")
        temporary.replace(target)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[tuple[str, MethodConfig]]:
        return ((method.method_name, method) for method in self.methods)

    def __len__(self) -> int:
        return len(self.methods)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and frozenset(self.methods) == frozenset(other.methods)

    def __hash__(self) -> int:
        return hash(frozenset(self.methods))

    def __str__(self) -> str:
        return " + ".join(map(str, self.methods))

    def __repr__(self) -> str:
        return f'Strategy("{self}")' if self.methods else "Strategy()"

    def __reduce__(self) -> tuple[Any, ...]:
        return Strategy, (self.to_json(),)
