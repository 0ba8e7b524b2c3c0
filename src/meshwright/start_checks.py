"""What ranks must have in common before a strategy is applied: code, strategy, model, and the values of its weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from meshwright.data import GlobalBatchLoader
from meshwright.errors import LaunchError, ModelError
from meshwright.planner import Plan
from meshwright.runtime import Difference, agreed, check_all_equal, code_versions, gather_objects

_own_versions = functools.cache(code_versions)  # it reads every source file


def check_alike(strategy: str, model: str, parameters: Sequence[str] = ()) -> None:
    """Refuses ranks that do not start alike; collective.

    Args:
        strategy: The strategy asked for, as text.
        model: A short text that tells models apart.
        parameters: A line for each of its parameters; gathered only where models differ.

    Raises:
        LaunchError: On every rank, naming ranks, and the first parameter that differs.
    """
    check_all_equal(
        ("The installed code", _own_versions(), "install the same Meshwright and torch on every machine"),
        ("The strategy", strategy, "pass the same strategy on every rank"),
    )
    models = gather_objects(model)
    other = next((rank for rank, each in enumerate(models) if each != models[0]), None)
    if other is None:
        return
    lines = gather_objects(list(parameters))
    pairs = itertools.zip_longest(lines[0], lines[other], fillvalue="no further parameter")
    ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), (models[0], models[other]))
    raise agreed(
        LaunchError(
            "The model differs between ranks",
            expected=f"{ours} (rank 0)",
            got=f"{theirs} (rank {other})",
            fix="build the same model on every rank",
        )
    )


def told_difference(difference: Difference | None, plan: Plan) -> list[str]:
    """What is said of weights that differ between ranks where rank 0's are taken over; nothing where all are equal.

    Raises:
        ModelError: On every rank, where each would keep its own.
    """
    if difference is None:
        return []
    if not takes_over_values(plan):
        raise agreed(
            ModelError(
                "The weights differ between ranks, and nothing in the strategy makes them equal",
                expected="equal values on every rank",
                got=str(difference),
                fix="seed every rank alike before building the model, and load the same file on all",
            )
        )
    return [f"the weights differ between ranks: {difference}; those of rank 0 are taken over"]


def told_remainder(dataloader: DataLoader[Any] | None, num_micro_batches: int) -> list[str]:
    """What is said of an epoch whose last batch is an error: hours may pass until it comes."""
    last = dataloader.last_batch_size if isinstance(dataloader, GlobalBatchLoader) else None
    if last is None or last % num_micro_batches == 0:
        return []
    return [
        f"the last batch of an epoch has {last} samples per replica, which do not divide into {num_micro_batches} "
        "micro-batches: its step will be an error; dataloader_args={'drop_last': True} leaves it out"
    ]


def takes_over_values(plan: Plan) -> bool:
    """Whether applying the plan gives every rank rank 0's weights: see the methods that shard, split or replicate."""
    sizes = dict(plan.step.axes)
    if sizes.get("pipeline", 1) > 1:
        return False
    if sizes.get("tensor", 1) > 1 or sizes.get("expert", 1) > 1:
        return True
    sharding = [method for method in plan.strategy.methods if getattr(method, "shards", False)]
    if sharding:
        return bool(getattr(sharding[0], "sync_module_states", False))
    return True  # DDP, and replicas of an outer method, begin with the first one's
