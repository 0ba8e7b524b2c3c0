"""A small search result made by hand: a 7B model on 16 GPUs, strategies that win, lose, do not fit and cannot be."""

import functools

from meshwright.cost import make_cluster
from meshwright.errors import MeshwrightError
from meshwright.planner import FamilyWorkload, parse_family
from meshwright.planner.search import Found
from meshwright.strategy import Strategy

BF16 = ("amp_native", "bf16")
RECOMPUTE = ("checkpoint", "TransformerBlock")
STRATEGIES = (
    ([("parallel_mode", {"zero": 16}), "fsdp", BF16], 2),
    ([("parallel_mode", {"zero": 16}), "fsdp", BF16], 1),
    ([("parallel_mode", {"zero": 16}), "fsdp", BF16, RECOMPUTE], 1),
    ([("parallel_mode", {"tensor": 8, "zero": 2}), "tensor_parallel", "fsdp", BF16], 4),
    (
        [
            ("parallel_mode", {"tensor": 2, "zero": 2, "pipeline": 4}),
            "tensor_parallel",
            "zero1",
            "pipeline_parallel",
            BF16,
        ],
        8,
    ),
    ([("parallel_mode", {"data": 16}), BF16, RECOMPUTE], 4),
    ([("parallel_mode", {"tensor": 3}), "tensor_parallel"], 1),
)


def subject_of(cluster, samples):
    return FamilyWorkload(parse_family("llama-2-7b:seq=2048"), cluster, samples)


def subject():
    return subject_of(make_cluster("A100-80", 16), 64)


@functools.cache
def found():
    plans, refused = [], []
    for methods, parts in STRATEGIES:
        strategy = Strategy(methods)
        try:
            plans.append(subject().plan(strategy, parts))
        except MeshwrightError as error:
            refused.append((str(strategy), str(error)))
    plans.sort(key=lambda plan: plan.forecast.time.step_time_s)
    return Found(
        tuple(plan for plan in plans if plan.fits),
        tuple(plan for plan in plans if not plan.fits),
        tuple(refused), 120, len(plans), 0.25,
    )  # fmt: skip


def plan_of(index):
    """The plan of one of the strategies above, wherever it ranks."""
    methods, parts = STRATEGIES[index]
    return subject().plan(Strategy(methods), parts)
