"""Blocks that are equal are run a few times and continued: a model of many takes no longer to profile than one of five.

The list of blocks is cut for a while to its first three and its last. What the third saves and computes, every further
one does. Whether that is so is found out by comparing with a run of one block more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.nn import find_blocks

FEWEST = 8  # blocks for which this is worth while
RUN = 4  # the first, two whose neighbours are like them, and the last
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Repeated:
    """A list of equal blocks.

    Args:
        path: Of the list.
        holder: The list.
        blocks: All of them.
        paths: Of the blocks.
    """

    path: str
    holder: nn.ModuleList
    blocks: tuple[nn.Module, ...]
    paths: tuple[str, ...]

    def kept(self, count: int = RUN) -> tuple[nn.Module, ...]:
        """The first ``count - 1`` blocks and the last."""
        return (*self.blocks[: count - 1], self.blocks[-1])

    def divided_alike(self, dims: Mapping[nn.Parameter, int]) -> bool:
        """Whether the same parameters of every block are divided, along the same dims."""
        return len({tuple(dims.get(parameter) for parameter in block.parameters()) for block in self.blocks}) == 1

    @contextlib.contextmanager
    def cut(self, count: int = RUN) -> Iterator[None]:
        """The model with fewer blocks: whoever goes through the list meets these alone, under the names they have."""
        whole = self.holder._modules
        names = [*list(whole)[: count - 1], list(whole)[-1]]
        self.holder._modules = _Few(whole, names)
        try:
            yield
        finally:
            self.holder._modules = whole


class _Few(dict[str, Any]):
    """Some entries of a dict to go through, and all of them to look up: hooks may be put on any block."""

    def __init__(self, whole: dict[str, Any], names: Sequence[str]) -> None:
        super().__init__({name: whole[name] for name in names})
        self._whole = whole

    def __contains__(self, name: object) -> bool:
        return name in self._whole

    def __missing__(self, name: str) -> Any:
        return self._whole[name]


def find_repeated(model: nn.Module) -> Repeated | None:
    """The list of a model's many equal blocks; None where there is none, or more than one."""
    blocks = set(dict(find_blocks(model)).values())
    found = []
    for path, module in model.named_modules():
        listed = tuple(module.children()) if isinstance(module, nn.ModuleList) else ()
        if len(listed) >= FEWEST and blocks.issuperset(listed) and len(set(listed)) == len(module):
            paths = tuple(f"{path}.{name}" for name, _ in module.named_children())
            found.append(Repeated(path, module, listed, paths))  # type: ignore[arg-type]
    return found[0] if len(found) == 1 and _are_equal(found[0].blocks) else None


def _are_equal(blocks: Sequence[nn.Module]) -> bool:
    """Equal in classes, shapes and settings; a number that counts the blocks may differ."""
    if len({(*(id(p) for p in block.parameters()),) for block in blocks}) < len(blocks):
        return False  # they share their weights
    first = _described(blocks[0])
    for index, block in enumerate(blocks):
        one = _described(block)
        if one.keys() != first.keys():
            return False
        if any(one[key] != value and not (value == 0 and one[key] == index) for key, value in first.items()):
            return False
    return True


def _described(block: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        found[path, ""] = type(module), len(module._forward_hooks), len(module._forward_pre_hooks)
        for name, value in vars(module).items():
            if isinstance(value, _SCALARS) or (
                isinstance(value, tuple) and all(isinstance(v, _SCALARS) for v in value)
            ):
                found[path, name] = value
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[path, name] = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return found
