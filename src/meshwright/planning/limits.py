"""What a configuration may ask for: a wrong digit would keep the processor busy for hours, or take all memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook

_MOST_LAYERS = 1_000  # as many as the deepest Transformers that were published (DeepNet, Wang et al. 2022)
_MOST_EXPERTS = 10_000
_MOST_MODULES = 200_000  # half a minute
_MOST_PIXELS = 2**27  # values of a sample: half a GiB
_COUNTS = {re.compile(r"(layers?|depths?|blocks)$"): _MOST_LAYERS, re.compile(r"experts$"): _MOST_EXPERTS}


def check_counts(path: Path, changes: Mapping[str, Any]) -> None:
    """Refuses numbers of layers and experts before anything is made of them, in configurations within others too.

    Args:
        path: Of a ``config.json``, or of the directory that holds one.
        changes: Values that replace those of the file.

    Raises:
        ValueError: Naming the key; also where the file is no JSON.
    """
    file = path / "config.json" if path.is_dir() else path
    for name, value in (*_pairs(json.loads(file.read_text(encoding="utf-8"))), *_pairs(dict(changes))):
        for key, most in _COUNTS.items():
            if key.search(name) and value > most:
                raise ValueError(f"{name} = {value}, and at most {most:,} are built")


def _pairs(tree: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Keys and their numbers; those of a list have its key."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _pairs(value, str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from _pairs(value, name)
    elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield name, tree


@contextmanager
def few_modules() -> Iterator[None]:
    """Ends the building of a model of more modules than anyone trains.

    Raises:
        ValueError: At the first module too many.
    """
    left = _MOST_MODULES

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"the model has more than {_MOST_MODULES:,} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def check_pixels(shape: tuple[int, ...]) -> None:
    """Refuses a sample of images that would fill the memory.

    Raises:
        ValueError: Naming its shape.
    """
    if prod(shape) > _MOST_PIXELS:
        raise ValueError(f"a sample would be of shape {list(shape)}, and at most {_MOST_PIXELS:,} values are made")
