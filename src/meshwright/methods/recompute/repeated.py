"""What recomputation runs and sends a second time: kernels and collectives inside the modules that are recomputed."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from meshwright.cost import Activations, Boundary, Op, Recomputed, Stages, TracedModule, names_class


class Repeated:
    """Of a step, what runs again in backward.

    Args:
        known: What forward saves.
        recomputed: See :class:`meshwright.cost.Activations`.
        stages: Where a pipeline cuts the model: only this rank's blocks count.
        to_the_end: Whether modules run their whole forward again, and do not stop at the last saved tensor.
    """

    def __init__(
        self, known: Activations, recomputed: Recomputed, stages: Stages | None, *, to_the_end: bool = False
    ) -> None:
        self._to_the_end = to_the_end
        every = [(known.modules[module], kept) for module, kept in recomputed.items()]
        self._outside = [(module, kept) for module, kept in every if module.block is None]
        self._around, self._within = _by_path(module for module, _ in every)
        inside: dict[int, list[tuple[tuple[str, ...], frozenset[str]]]] = {}
        for module, kept in every:
            if module.block is not None:
                inside.setdefault(module.block, []).append((module.classes, kept))
        # Equal blocks are many: each kind of block, and what is recomputed in it, is looked at once.
        self._kinds = collections.Counter(
            (known.modules[number].classes, tuple(inside.get(block, ())))
            for block, number in enumerate(known.blocks)
            if _is_here(block, stages, len(known.blocks))
        )

    def share_of(self, part: Op | Boundary) -> float:
        """The share of the blocks with this kernel or collective that run it again."""
        if isinstance(part, Op) and part.moment == "backward":
            return 0.0
        names = part.inside if self._to_the_end else part.needed_in
        operator = part.operator if isinstance(part, Op) else ""
        if isinstance(part, Boundary) and part.path:
            return float(any(_named(module.classes[:1], names) for module in self._near(part.path)))
        if any(_named(module.classes[:1], names) and operator not in kept for module, kept in self._outside):
            return 1.0
        kinds = {kind: count for kind, count in self._kinds.items() if _named(kind[0][:1], part.inside)}
        again = sum(
            count
            for (_, modules), count in kinds.items()
            if any(_named(classes[:1], names) and operator not in kept for classes, kept in modules)
        )
        return again / sum(kinds.values()) if again else 0.0

    def _near(self, path: str) -> list[TracedModule]:
        """Boundaries of tokens know only the block that they are in, which may be around a recomputed module."""
        above = [self._around[each] for each in _upwards(path) if each in self._around]
        return above + self._within.get(path, [])


def _is_here(block: int, stages: Stages | None, count: int) -> bool:
    if stages is None or stages.num_blocks != count:  # a pipeline over one list of blocks among others
        return True
    return any(stages.has(stage, (block,)) for stage in stages.own)


def _by_path(modules: Iterable[TracedModule]) -> tuple[dict[str, TracedModule], dict[str, list[TracedModule]]]:
    """Each module by its own path, and those within by the paths above."""
    around = {module.path: module for module in modules}
    within: dict[str, list[TracedModule]] = {}
    for path, module in around.items():
        for each in _upwards(path)[1:]:
            within.setdefault(each, []).append(module)
    return around, within


def _upwards(path: str) -> list[str]:
    """A path and those above it, without the model itself: ``["a.b", "a"]``."""
    names = path.split(".")
    return [".".join(names[:depth]) for depth in range(len(names), 0, -1)]


def _named(references: tuple[str, ...], names: tuple[str, ...]) -> bool:
    return any(names_class(reference, names) for reference in references)
