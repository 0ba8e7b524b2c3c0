"""Searching for a model that must be run to be known: what costs most to find out about is tried last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.errors import StrategyError
from meshwright.planner.plan import Subject
from meshwright.planner.search.find import search
from meshwright.planner.search.found import Found
from meshwright.planner.search.further import Further
from meshwright.planner.search.space import Choice, Space, choices
from meshwright.planner.search.wishes import read_wishes

_MAX_PREDICTIONS = 300
_DIVIDE_TOKENS = ("sequence", "context")
_BETWEEN_LAYERS = ("tensor_parallel", {"sequence": True})
# Of the other schedules none was better than both of these on any of the models that were searched whole.
_PIPELINES = choices("pipeline_parallel", ("pipeline_parallel", {"schedule": "zbv"}))


def search_in_stages(subject: Subject, space: Space, **options: Any) -> Found:
    """A search that begins with what is soon found out about, and goes on from the best of that.

    A model that is traced takes seconds for every way to divide its layers or tokens, where one of a known family takes
    milliseconds. So data and tensor parallelism come first, and pipelines next. Tokens are divided between the layers
    where the best so far divides these, or has to offload; and inside attention where nothing has fitted.
    What is included by name is tried from the first.

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
    further = _further(small, space, options.get("excluded", ()), options.get("included", ()))
    return search(subject, space=small, further=[*further], growing=small, **options)


def _further(small: Space, whole: Space, excluded: Sequence[str], included: Sequence[Any]) -> Iterator[Further]:
    """What comes after the small space, but for what a wish names: that has been tried there, or must not be."""
    wished = read_wishes(excluded, included)
    mesh = dict(getattr(wished.get("parallel_mode"), "axes", ()))
    sizes = tuple(size for size in whole.sizes.get("pipeline", ()) if size > 1)  # none on one device
    if sizes and not mesh and "pipeline_parallel" not in wished and _may_be("pipeline_parallel", excluded, included):
        yield Further(_on(small, "pipeline", sizes, _PIPELINES))
    tensor = wished.get("tensor_parallel")
    says = tensor is not None and "sequence" in tensor.model_fields_set
    allowed = tensor is not None or _may_be("tensor_parallel", excluded, included)
    sizes = tuple(size for size in whole.sizes.get("tensor", ()) if size > 1)
    if sizes and allowed and not says and (not mesh or mesh.get("tensor", 1) > 1):
        yield Further(_on(small, "tensor", sizes, choices(_BETWEEN_LAYERS)), "divided")
    yield Further(whole.replace(axis_methods={**whole.axis_methods, "pipeline": _PIPELINES}), "nothing")


def _may_be(name: str, excluded: Sequence[str], included: Sequence[Any]) -> bool:
    """Whether wishes allow a method that they may not name."""
    try:
        read_wishes(excluded, [*included, name])
    except StrategyError:
        return False
    return True


def _on(space: Space, axis: str, sizes: tuple[int, ...], methods: tuple[Choice, ...]) -> Space:
    return space.replace(sizes={**space.sizes, axis: sizes}, axis_methods={**space.axis_methods, axis: methods})
