"""Micro-batches of other sizes: plain data whose numbers grow evenly with the number of samples are continued."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_LINE = 2  # values that make one


class NotLinearError(Exception):
    """Two values differ in more than whole numbers, or one between them would not be whole."""


def on_the_line(first: T, second: T, at: tuple[int, int], wanted: int) -> T:
    """What lies on the line through two values of plain data: tuples and dataclasses of numbers, names and others.

    Args:
        first: The value at ``at[0]``.
        second: The value at ``at[1]``: of the same form.
        at: Two different places.
        wanted: Where a value is wanted.

    Raises:
        NotLinearError: When the two differ in form or in what is no whole number, or the value wanted is not whole.
    """
    return _Line(at, wanted).value(first, second)  # type: ignore[no-any-return]


class _Line:
    def __init__(self, at: tuple[int, int], wanted: int) -> None:
        self._step, self._distance = at[1] - at[0], wanted - at[0]
        self._found: dict[tuple[int, int], Any] = {}  # what is one tuple several times stays one

    def value(self, first: Any, second: Any) -> Any:
        """The value on the line through two, part by part."""
        if first is second:
            return first
        if not isinstance(first, tuple):
            return self._new(first, second)
        key = id(first), id(second)
        if key not in self._found:
            self._found[key] = self._new(first, second)
        return self._found[key]

    def _new(self, first: Any, second: Any) -> Any:
        if type(first) is not type(second):
            raise NotLinearError(f"{type(first).__name__} and {type(second).__name__}")
        if type(first) is int:
            return self._number(first, second)
        if isinstance(first, tuple):
            if len(first) != len(second):
                raise NotLinearError(f"{len(first)} and {len(second)} parts")
            parts = [self.value(a, b) for a, b in zip(first, second, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            names = [field.name for field in dataclasses.fields(first)]
            return type(first)(**{name: self.value(getattr(first, name), getattr(second, name)) for name in names})
        if first != second:
            raise NotLinearError(f"{first!r} and {second!r}")
        return first

    def _number(self, first: int, second: int) -> int:
        rise, rest = divmod((second - first) * self._distance, self._step)
        if rest:
            raise NotLinearError(f"{first} and {second} over {self._step}")
        return first + rise


class Samples:
    """What is known of micro-batches by their number of samples, and what follows from it.

    Two sizes make a line; whether a third lies on it is seen when it is run. Only then are further ones continued.
    Where one kind of run lies on its line, others of the same model are taken to: two sizes are enough for these. A
    sample alone is on no line: dims of one element are broadcast.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, Any]] = {}
        self._straight: set[Hashable] = set()
        self._bent: set[Hashable] = set()

    def add(self, kind: Hashable, samples: int, value: Any) -> None:
        """Notes what a run has found."""
        known = self._known.setdefault(kind, {})
        if len(known) == _LINE and kind not in self._straight:
            (self._straight if self._on_line(kind, samples) == value else self._bent).add(kind)
        if samples > 1:
            known[samples] = value

    def continued(self, kind: Hashable, samples: int) -> Any | None:
        """What a run of so many samples would find; None where that is not known."""
        trusted = kind in self._straight or (bool(self._straight) and not self._bent)
        if not trusted or samples == 1 or len(self._known.get(kind, {})) < _LINE:
            return None
        return self._on_line(kind, samples)

    def _on_line(self, kind: Hashable, samples: int) -> Any | None:
        (at, first), (then, second), *_ = self._known[kind].items()
        try:
            return on_the_line(first, second, (at, then), samples)
        except NotLinearError:
            self._bent.add(kind)
            return None
