"""In how many bits a published run multiplies and gathers, and how its tensors are scaled for that."""

from __future__ import annotations

import dataclasses
from typing import Literal

from meshwright.cost import Scaling, Step
from meshwright.planner.family_ops import FamilyRun
from meshwright.planner.published.convention import Convention
from meshwright.planner.published.rows import Row


def dtype_of(row: Row, assumed: list[str]) -> Literal["fp32", "half", "fp8", "fp4"]:
    """The precision of products; what a cell does not say is half."""
    text = row.text("precision").lower().replace("-", "").replace("_", "")
    if "fp4" in text:
        return "fp4"
    if "fp8" in text or "float8" in text or "f8" in text or "e4m3" in text:
        return "fp8"
    if "16" in text or "amp" in text or "half" in text or "mixed" in text:
        return "half"
    if "32" in text:
        return "fp32"
    assumed.append("half precision")
    return "half"


def scaling_of(row: Row, convention: Convention) -> Scaling:
    """How tensors are scaled for products in 8 or 4 bits: what a cell says, or what the project does."""
    text = row.text("precision").lower()
    if "fp4" in text:
        return "nvfp4"
    if "row" in text:
        return "rowwise"
    if "mx" in text:
        return "mxfp8" if convention.scaling == "tensorwise" else "blocks"
    return convention.scaling


def gathers_fp8(row: Row, convention: Convention) -> bool:
    """Whether weights are cast before they are gathered: where each has one scale, ranks know it before they send."""
    return convention.gathers_fp8 and scaling_of(row, convention) == "tensorwise"


def gathering(step: Step, row: Row, convention: Convention, run: FamilyRun) -> Step:
    """Gathers in 8 bits instead of 16: where products have one scale for each tensor, it is known before."""
    if run.dtype != "fp8" or not gathers_fp8(row, convention):
        return step
    traffic = tuple(
        dataclasses.replace(each, bytes_per_step=each.bytes_per_step // 2) if each.kind == "all_gather" else each
        for each in step.traffic
    )
    return step.replace(traffic=traffic)
