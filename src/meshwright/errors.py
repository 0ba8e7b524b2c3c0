"""The errors a user of Meshwright can meet: one paragraph that says what, expected, got, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)

NOTE = "meshwright: "
"""Begins what is added below an error of the user's own code."""


class MeshwrightError(Exception):
    """Base of every error Meshwright raises on purpose.

    Args:
        what: What went wrong, one sentence without a full stop.
        expected: What would have been right.
        got: What was found instead.
        fix: What the user can do about it.
    """

    def __init__(self, what: str, *, expected: str = "", got: str = "", fix: str = "") -> None:
        self.what, self.expected, self.got, self.fix = what, expected, got, fix
        super().__init__(self._paragraph())

    def add_fix(self, text: str) -> None:
        """Add what a surface knows to do about an error of a room below it."""
        self.fix = f"{self.fix}; {text}" if self.fix else text
        self.args = (self._paragraph(),)

    def _paragraph(self) -> str:
        parts = [self.what]
        parts += [f"Expected {self.expected}"] if self.expected else []
        parts += [f"Got {self.got}"] if self.got else []
        parts += [f"What to do: {self.fix}"] if self.fix else []
        return printable(" ".join(part if part.endswith((".", "?", "!")) else part + "." for part in parts))

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between ranks; the default would call __init__ with the finished paragraph only.
        return _rebuild, (type(self), self.what, self.expected, self.got, self.fix)


def _rebuild(kind: type[MeshwrightError], what: str, expected: str, got: str, fix: str) -> MeshwrightError:
    return kind(what, expected=expected, got=got, fix=fix)


class LaunchError(MeshwrightError, RuntimeError):
    """Processes, environment variables, devices or meshes that do not fit together."""


class StrategyError(MeshwrightError, ValueError):
    """A strategy that cannot be read, or methods in it that do not fit together."""


class ModelError(MeshwrightError, ValueError):
    """A model that a method cannot work on."""


class DataError(MeshwrightError, ValueError):
    """A dataset, a batch or data files that cannot be used."""


class ConfigError(MeshwrightError, ValueError):
    """A configuration file or argument that is not valid."""


class CheckpointError(MeshwrightError, RuntimeError):
    """A checkpoint that is absent, incomplete, damaged or of another model."""


class InspectError(MeshwrightError, RuntimeError):
    """Recording that is nested, of something that cannot be recorded, or different from rank to rank."""


class UnsoundStepError(MeshwrightError, ArithmeticError):
    """A step that must not reach the weights, where training shall not go on; all ranks raise it before the update."""


class NonFiniteError(UnsoundStepError):
    """Gradients that hold inf or nan where training cannot go on with them."""


class LossSpikeError(UnsoundStepError):
    """A loss far above those before."""


class ReplicaError(MeshwrightError, RuntimeError):
    """Copies of weights that are no longer equal: a device, a memory or a link has changed bits."""


def printable(text: str) -> str:
    r"""Return the text with what a terminal would obey, hide or refuse shown instead, as ``\\x1b`` and the like.

    Escape sequences, carriage returns, changes of writing direction, characters without width and halves of
    surrogate pairs; line feeds and tabs stay. For names from files of other people.
    """
    return _UNPRINTABLE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest of ``known``, or ``""`` when nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def join_names(names: Iterable[str], limit: int = 12) -> str:
    """List names for an error message, shortened to ``limit`` entries; ``"none"`` when there are none."""
    every = list(names)
    shown = ", ".join(every[:limit]) + (f", … ({len(every)} in all)" if len(every) > limit else "")
    return shown or "none"


def readable_bytes(size: int) -> str:
    """Return a size for people, in binary units: ``"1.50 GiB"``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
