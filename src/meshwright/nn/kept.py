"""What modules hold, taken down and put back: attributes such as counters, caches and masks that are made late."""

from __future__ import annotations

import collections
import copy
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
