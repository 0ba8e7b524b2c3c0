"""Predict a published run as a user would: a strategy in our own methods, and what our own engine runs by default.

What a row says is what a user can say at the door: the model's dimensions, the device, the axes, ZeRO's stage, the
batch and how it is cut, the precision, what is recomputed, whether kernels are compiled, and the stages of a
pipeline's rank. Nothing that is simulated depends on whose run it is. How cells are read (dimensions that a name
stands for, units, whose micro-batch a cell counts, what a memory figure counts) is the table's business, and the same
as in ``cases.py``.

To tell what the sources' conventions are worth, the kernels alone may be those of the source, see ``Kernels``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

from meshwright.cost import make_cluster
from meshwright.errors import MeshwrightError
from meshwright.planner.family_ops import OWN, Implementation
from meshwright.planner.family_workload import FamilyModel
from meshwright.planner.plan_request import HEADROOM
from meshwright.planner.plans import CONTEXT_BYTES, Plan, usable_bytes
from meshwright.strategy import Strategy
from published_runs.cases import Case, NotCovered, RankMemory, case_of, padded
from published_runs.conventions import OTHER
from published_runs.strategies import (
    PER_OP,
    ZERO,
    dtype_of,
    is_compiled,
    recompute_of,
    says_uncompiled,
    virtual_stages_of,
)
from published_runs.table_rows import Row

_SHARE = "a share of the blocks"  # as many as memory asks for: what a user of ours takes where a policy keeps too much
Kernels = Literal["own", "attention", "source"]
"""Whose kernels run a strategy of ours: our engine's; ours but for the source's attention and its dropout; or all those
of the source. What overlaps, and in which order, is our engine's in every case."""
_RECIPES = {"row": "rowwise", "mx": "mxfp8", "tensor": "tensorwise"}


@dataclasses.dataclass(frozen=True)
class UserPlan:
    """A row beside the plan that a user gets for it."""

    case: Case  # how the table is read
    plan: Plan
    memory: RankMemory


def user_plan(row: Row, kernels: Kernels = "own") -> UserPlan:
    """Predict a row by the door that users have.

    Args:
        row: The row.
        kernels: Whose kernels run it; users have our own.

    Raises:
        NotCovered: When the row gives too little, or our methods cannot run it.
    """
    case = case_of(row)
    if case.run.dtype == "fp4":
        raise NotCovered("no method of ours has products in 4 bits")
    assumed: list[str] = []
    candidates = recompute_of(row, OTHER, assumed)
    if PER_OP in candidates:
        behind = candidates.index(PER_OP) + 1
        candidates = (*candidates[:behind], _SHARE, *candidates[behind:])
    try:
        plan = _first_that_fits(case, _implementation(case, kernels), candidates)
    except MeshwrightError as error:
        raise NotCovered(str(error).split("\n")[0]) from error
    case = dataclasses.replace(case, strategy=plan.strategy, assumed=(*case.assumed, *assumed))
    return UserPlan(case, plan, _memory_of(case, plan))


def _implementation(case: Case, kernels: Kernels) -> Implementation:
    """Return what runs the blocks, the loss and the products of a row."""
    theirs = case.convention.impl
    if kernels == "source":
        return theirs
    return OWN if kernels == "own" else dataclasses.replace(OWN, attention=theirs.attention, dropout=theirs.dropout)


def _first_that_fits(case: Case, impl: Implementation, candidates: Sequence[str]) -> Plan:
    """Return the plan of the first of these recomputations that fits, or of the first of all."""
    first = _planned(case, impl, candidates[0], keeps=True)
    # Layers wait for what they gather again, compiled blocks save less, and the loss can do without logits: each where
    # memory asks for it. Searches propose all three.
    ladder = itertools.product((False, True), candidates, (False, True))
    for omits, recomputed, compiled in ladder if not first.fits else ():
        try:
            plan = _planned(case, impl, recomputed, compiled=compiled, omits_logits=omits)
        except MeshwrightError:  # no share is enough
            continue
        if plan.fits:
            return plan
    return first


def _planned(case: Case, impl: Implementation, recomputed: str, **options: bool) -> Plan:
    cluster = case.cluster
    # The latency of a source's network is its own; a user has that of the preset.
    plain = make_cluster(cluster.device, cluster.num_devices, cluster.devices_per_node)
    inter = dataclasses.replace(plain.inter, bytes_per_s=cluster.inter.bytes_per_s)
    cluster = dataclasses.replace(cluster, inter=inter)
    # Engines with a tensor axis pad the vocabulary of the model that they are given: such is the model that ran.
    shape = padded(case.shape, dict(case.strategy.get("parallel_mode").axes).get("tensor", 1))  # type: ignore[union-attr]
    subject = FamilyModel(case.row.text("model"), shape, impl).subject(cluster, _samples(case), None)
    strategy = user_strategy(case, recomputed, **options)
    return subject.plan(strategy, case.run.num_micro_batches)


def _samples(case: Case) -> int:
    """Return the samples of a step: whole micro-batches on every replica."""
    axes = dict(case.strategy.get("parallel_mode").axes)  # type: ignore[union-attr]
    replicas = axes.get("zero", 1) * axes.get("data", 1) // axes.get("context", 1)
    return case.run.micro_batch * case.run.num_micro_batches * replicas


def user_strategy(
    case: Case, recomputed: str, *, keeps: bool = False, compiled: bool = False, omits_logits: bool = False
) -> Strategy:
    """Return the strategy of a row in our methods, as a user writes it.

    Args:
        case: The row.
        recomputed: What is recomputed.
        keeps: Whether layers keep the tokens that they gather.
        compiled: Whether to compile where the row does not say.
        omits_logits: Whether to compute the loss without logits.
    """
    sizes = dict(case.strategy.get("parallel_mode").axes)  # type: ignore[union-attr]
    tensor, pipeline, context = (sizes.get(axis, 1) for axis in ("tensor", "pipeline", "context"))
    nearby, others = sizes.get("zero", 1), sizes.get("data", 1)
    if nearby % context == 0:
        nearby //= context
    else:
        others //= context
    axes = (("tensor", tensor), ("context", context), ("zero", nearby), ("data", others), ("pipeline", pipeline))
    stage = case.zero_stage
    methods: list[Any] = [("parallel_mode", {"axes": [each for each in axes if each[1] > 1]})]
    tokens = {"sequence": True} | ({"keep_gathered": True} if keeps else {})
    methods += [("tensor_parallel", tokens)] if tensor > 1 else []
    methods += ["context_parallel"] if context > 1 else []
    # What our search proposes where ranks share samples: each has the loss of its share, where nothing excludes that.
    methods += [("module_replace", ["fused_loss"])] if context > 1 or omits_logits else []
    methods += [("pipeline_parallel", _pipeline(case, pipeline))] if pipeline > 1 else []
    if recomputed == _SHARE:
        budget = round(usable_bytes(case.cluster.device) * (1 - HEADROOM))
        methods.append(("checkpoint", {"memory_budget": budget}))
    elif recomputed:
        methods.append(("checkpoint", {"policy": "every_second" if recomputed == PER_OP else "full"}))
    methods += _precision(case)
    # What a row does not say is not compiled, as for anybody who does not ask for it; but whoever asks for fp8 is told
    # that its casts are fused in compiled blocks alone.
    compiled = compiled or any(method[0] == "fp8" for method in methods)
    if is_compiled(case.row) or (compiled and not says_uncompiled(case.row)):
        methods.append("compile")
    if stage and nearby * others * context > 1:
        methods.append(ZERO[stage])
    return Strategy(methods)


def _precision(case: Case) -> list[Any]:
    dtype = dtype_of(case.row, [])
    if dtype == "fp32":
        return []
    text = case.row.text("precision").lower()
    half = "fp16" if "fp16" in text and case.cluster.device.half_dtype == "fp16" else case.cluster.device.half_dtype
    # Weights in half precision with fp32 copies where only states are sharded; else fp32 shards, cast to be gathered.
    methods: list[Any] = [("amp_native" if case.zero_stage >= 2 else "half", half)]
    if dtype == "fp8":
        recipe = next((recipe for word, recipe in _RECIPES.items() if word in text), "delayed")
        methods.append(("fp8", recipe))
    return methods


def _pipeline(case: Case, ranks: int) -> dict[str, Any]:
    stages, micro_batches = virtual_stages_of(case.row), case.run.num_micro_batches
    stages = min(stages, case.shape.layers // ranks)
    rounds = max(1, micro_batches // ranks)
    if stages < 2 or micro_batches % rounds:
        return {"schedule": "1f1b" if micro_batches >= ranks else "gpipe"}
    return {"schedule": "interleaved", "num_stages_per_rank": stages}


def _memory_of(case: Case, plan: Plan) -> RankMemory:
    assert plan.forecast is not None
    peaks = plan.forecast.peaks
    counted = max(peaks, key=lambda each: each.reserved_bytes)
    reported = peaks[0] if case.convention.first_rank else counted
    reserved = case.convention.memory == "reserved"
    return RankMemory(
        peak=counted,
        counted_bytes=plan.needed_bytes if reserved and not case.convention.first_rank else reported.allocated_bytes,
        needed_bytes=plan.needed_bytes + CONTEXT_BYTES,
        fits=plan.fits,
    )
