"""The composition law's words: what a method needs, and with what it does not go together.

Every method declares its own on its class, and each conflict once, on one of the two methods. What can be known from
the strategy and its mesh alone is law; what needs the model, the device or the data is in a method's ``check``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHARDING = ("zero1", "zero2", "fsdp")
"""The methods that shard parameters."""

SHARD_AXES = ("zero", "data", "sequence", "context", "expert")
"""The axes that parameters can be sharded over: the first that the mesh has."""


def _always(*methods: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Why a method does not go together with another."""

    other: str
    """The other's name."""
    reason: str
    """A clause that follows "a does not go together with b:"."""
    fix: str
    when: Callable[[Any, Any], bool] = _always
    """Whether two configs, the method's own and the other's, are in conflict."""
    own_keys: str = ""
    """Which configs of the method ``when`` picks, as a user writes them; empty: all."""
    other_keys: str = ""
    """Which of the other."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Methods of which one must be beside a method."""

    any_of: tuple[str, ...]
    reason: str
    """A clause that follows "a needs one of …:"."""
    fix: str
    when: Callable[[Any], bool] = _always
    """Whether a config of the method needs it."""
    own_keys: str = ""
    """Which configs ``when`` picks, as a user writes them; empty: all."""
