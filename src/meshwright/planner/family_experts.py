"""Experts of a family over an expert axis: which parameters they are, and the tokens that travel to them."""

from __future__ import annotations

import dataclasses
import re

from meshwright.cost import Block, Boundary, Parameter, Step
from meshwright.planner.family_ops import FamilyRun
from meshwright.planner.family_shape import BLOCK, Shape

_EXPERT = re.compile(r"expert(\d+)\.")


def with_experts(step: Step, shape: Shape, run: FamilyRun) -> Step:
    """The step with experts that ``expert_parallel`` can divide, and its exchanges.

    An all-to-all sends each token to its experts, and another brings the answers back (Lepikhin et al. 2020, GShard);
    backward sends the gradients of both. Experts are taken to get equally many tokens.
    """
    sent = run.tokens * shape.experts_per_token * shape.hidden * run.itemsize * shape.layers
    exchanged = tuple(
        Boundary("all_to_all", moment, 2 * sent, (BLOCK,), (BLOCK,), axis="expert", count=2 * shape.layers)
        for moment in ("forward", "backward")  # type: ignore[arg-type]
    )
    blocks = tuple(_marked(block, shape) for block in step.blocks)
    return step.replace(blocks=blocks, boundaries=(*step.boundaries, *exchanged))


def _marked(block: Block, shape: Shape) -> Block:
    return dataclasses.replace(block, parameters=tuple(_of_expert(p, shape) for p in block.parameters))


def _of_expert(parameter: Parameter, shape: Shape) -> Parameter:
    found = _EXPERT.match(parameter.name)
    if found is None:
        return parameter
    return dataclasses.replace(parameter, expert=(int(found.group(1)), shape.experts))
