"""What modules hold, taken down and put back: attributes such as counters and masks, and what functions cache."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque)


class KeptAttributes:
    """Of modules, what their attributes were; plain containers in them are followed, however deep."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[Any, Any]] = {}  # by identity; holding the containers keeps that theirs

    def note(self, module: nn.Module) -> None:
        """Takes down a module's own attributes, parameters, buffers and hooks; not what its tensors hold."""
        self._note(vars(module))

    def put_back(self) -> None:
        """Gives every container what it held; those that still do are left alone."""
        for container, content in self._contents.values():
            if _items(container) != _items(content):
                container.clear()
                (container.extend if isinstance(container, list | collections.deque) else container.update)(content)

    def _note(self, value: Any) -> None:
        if type(value) not in _CONTAINERS or id(value) in self._contents:
            return
        self._contents[id(value)] = (value, copy.copy(value))
        for each in value.values() if isinstance(value, dict) else value:
            self._note(each)


def _items(container: Any) -> list[tuple[int, int]]:
    """By identity: tensors have no one truth."""
    pairs = container.items() if isinstance(container, dict) else ((each, None) for each in container)
    return [(id(key), id(value)) for key, value in pairs]


@contextlib.contextmanager
def forgotten_results(model: nn.Module) -> Iterator[None]:
    """Clears the caches of functions (``functools.lru_cache``, ``cache``) that take anything up in the block.

    Args:
        model: Functions are sought in its classes, in the files of these, and in the program that runs.
    """
    caches = _caches(model)
    misses = [each.cache_info().misses for each in caches]
    try:
        yield
    finally:
        for cache, before in zip(caches, misses, strict=True):
            if cache.cache_info().misses != before:
                cache.cache_clear()


def _caches(model: nn.Module) -> list[functools._lru_cache_wrapper[Any]]:
    classes = {parent for module in model.modules() for parent in type(module).__mro__}
    own = {each for each in classes if not f"{each.__module__}.".startswith(("torch.", "builtins."))}
    files = [sys.modules.get(name) for name in {"__main__", *(each.__module__ for each in own)}]
    places = [dict(vars(each)) for each in (*own, *files) if each is not None]
    found = (value for place in places for value in place.values() if isinstance(value, functools._lru_cache_wrapper))
    return list(dict.fromkeys(found))
