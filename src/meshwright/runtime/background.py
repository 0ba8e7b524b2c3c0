"""Ranks that agree beside their training: process groups of their own for threads and signals."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch.distributed as dist

_own = threading.local()
_groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}  # by purpose: (world, its background group)
_before_leaving: list[Callable[[], None]] = []


def background_group(purpose: str = "saves") -> dist.ProcessGroup | None:
    """A gloo group of all ranks for one purpose beside training; None without other ranks.

    Collectives of two threads in one group would meet each other's. Collective the first time: call it where all
    ranks are in step, never from a background thread itself.

    Args:
        purpose: Who uses it: one thread at a time.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    if purpose not in _groups or _groups[purpose][0] is not world:
        _groups[purpose] = (world, dist.new_group(backend="gloo"))
    return _groups[purpose][1]


@contextlib.contextmanager
def agreeing_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within it, this thread's ``gather_objects``, and all that stands on it, go over ``group`` (None: the world)."""
    before = agreement_group()
    _own.group = group
    try:
        yield
    finally:
        _own.group = before


def agreement_group() -> dist.ProcessGroup | None:
    """The group over which this thread agrees; None is the world."""
    return getattr(_own, "group", None)


def before_leaving(function: Callable[[], None]) -> Callable[[], None]:
    """Calls a function on every rank at the start of ``shutdown_distributed``, while ranks can still communicate."""
    _before_leaving.append(function)
    return function


def prepare_to_leave() -> None:
    """Calls what :func:`before_leaving` was given; the first error is raised after all were called."""
    with contextlib.ExitStack() as stack:
        for function in _before_leaving:
            stack.callback(function)
