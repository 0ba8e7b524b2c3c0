"""Searching for a model that must be run to be known: what costs most to find out about is tried last."""

from __future__ import annotations

from typing import Any

from meshwright.errors import StrategyError
from meshwright.planner.plan import Subject
from meshwright.planner.search.find import search
from meshwright.planner.search.found import Found
from meshwright.planner.search.space import Space, choices

_MAX_PREDICTIONS = 300
_DIVIDE_TOKENS = ("sequence", "context")


def search_in_stages(subject: Subject, space: Space, **options: Any) -> Found:
    """A search that leaves out pipelines, and what divides tokens, as long as something else fits.

    A model that is traced takes seconds for every way to divide it, where one of a known family takes milliseconds.
    What is included by name is tried all the same.

    Args:
        subject: A real module.
        space: All that may be tried.
        options: Of :func:`search`.

    Raises:
        StrategyError: As ``search`` does for the whole space.
    """
    options = {"max_predictions": _MAX_PREDICTIONS, **options}
    small = space.replace(
        sizes={axis: sizes for axis, sizes in space.sizes.items() if axis not in ("pipeline", *_DIVIDE_TOKENS)},
        axis_methods={**space.axis_methods, "tensor": choices("tensor_parallel")},
        inner_axes=1,
    )
    try:
        return search(subject, space=small, explained=False, **options)
    except StrategyError:
        whole = space.replace(axis_methods={**space.axis_methods, "pipeline": choices("pipeline_parallel")})
        return search(subject, space=whole, growing=small, **options)
