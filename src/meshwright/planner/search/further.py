"""A space that a search goes on to once it has looked through another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.planner.search.looked import Looked
from meshwright.planner.search.space import Space

_TELLING = {"tensor_parallel", "offload"}


@dataclass(frozen=True)
class Further:
    """Where a search goes on, for what is better than the best that it has found.

    Args:
        space: What is tried there.
        where: ``always``; where the best so far divides its layers or has to offload (``divided``); or where nothing
            has fitted yet (``nothing``). What is not always tried comes after offloading.
    """

    space: Space
    where: Literal["always", "divided", "nothing"] = "always"

    def is_worth(self, looked: Looked) -> bool:
        """Whether to go on here, too, after what was found with offloading."""
        if self.where == "nothing" or not looked.plans:
            return self.where == "nothing" and not looked.plans
        return self.where == "divided" and not _TELLING.isdisjoint(looked.plans[0][1].strategy.names)

    def beside(self, looked: Looked) -> Space:
        """What is tried here: where the best so far divides layers, the tokens between them are divided as often.

        A real module is proved anew for every size, which takes seconds; what divides layers best does so with them.
        """
        if self.where != "divided" or not looked.plans:
            return self.space
        mesh = looked.plans[0][1].strategy.get("parallel_mode")
        size = dict(getattr(mesh, "axes", ())).get("tensor", 1)
        return self.space if size == 1 else self.space.replace(sizes={**self.space.sizes, "tensor": (size,)})
