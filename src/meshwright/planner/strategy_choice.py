"""Choose a strategy for a job whose user names none.

Where the cluster is known, a search finds the fastest. Where it is not, seconds cannot be predicted, and the first that
fits of a short list is chosen, least communication first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError, StrategyError, readable_bytes
from meshwright.methods import Role, SearchScope
from meshwright.methods.base import SHARDING
from meshwright.methods.composition import LEAST_COMMUNICATION_FIRST, without_mixed
from meshwright.methods.parallel_mode import ParallelMode
from meshwright.planner.plans import Plan, Subject, method_names
from meshwright.planner.search.constraints import as_devices_have, left_to_search, read_constraints
from meshwright.strategy import Strategy
from meshwright.strategy.value import METHOD_CONFIGS

if TYPE_CHECKING:
    from meshwright.planner.search import Found
    from meshwright.strategy import MethodConfig


_SHOWN, _RUN, _MAX_PREDICTIONS = 3, 6, 60


def choose(workload: Subject, *, excluded: Sequence[str] = (), included: Sequence[Any] = ()) -> tuple[Plan, str]:
    """Choose the fastest strategy that fits into a rank's memory.

    Without a cluster, the first that fits of data, zero2, fsdp and fsdp with checkpoint, with what all of them gain by.

    Args:
        workload: The model and how it is trained.
        excluded: Methods that must not be used.
        included: Methods that every candidate has: names, or ``(name, config)`` with keys that stay as they are.

    Returns:
        The plan, and one line on what was chosen and why.

    Raises:
        StrategyError: When no candidate is left, or none fits.
    """
    if getattr(workload, "cluster", None) is not None:
        return _searched(workload, excluded, included)
    candidates = _candidates(workload, excluded, included)
    tried: list[Plan] = []
    refused: list[MeshwrightError] = []
    for plan in _planned(workload, candidates, refused):
        if plan.fits:
            return plan, _reason(plan, tried)
        tried.append(plan)
    if not tried:
        raise refused[0]
    smallest = min(tried, key=lambda plan: plan.needed_bytes)
    raise StrategyError(
        "No strategy fits into the memory of a rank",
        expected=f"at most {readable_bytes(smallest.limit_bytes or 0)} per rank",
        got=f"{readable_bytes(smallest.needed_bytes)} for the smallest, {method_names(smallest.strategy)}",
        fix="use more ranks, a smaller batch or more micro-batches; or name a strategy yourself to try it all the same",
    )


def _found(workload: Subject, excluded: Sequence[str], included: Sequence[Any], top: int) -> Found:
    """Search with the caller's precision and number of micro-batches: both change what is computed."""
    from meshwright.planner.search import default_space, search_in_stages

    space = default_space(workload, lower_precision=False).replace(micro_batches=(None,))
    return search_in_stages(
        workload, space, excluded=excluded, included=included, top=top, max_predictions=_MAX_PREDICTIONS
    )


def _searched(workload: Subject, excluded: Sequence[str], included: Sequence[Any]) -> tuple[Plan, str]:
    best, *others = _found(workload, excluded, included, _SHOWN).plans
    passed = "".join(f"; {method_names(each.strategy)} would take {_step_time(each)}" for each in others)
    needs = f"{readable_bytes(best.needed_bytes)} of {readable_bytes(best.limit_bytes or 0)} per rank"
    return best, f"chose {best.strategy}: the fastest that fits, {_step_time(best)}, {needs}{passed}"


def _step_time(plan: Plan) -> str:
    assert plan.forecast is not None, "the cluster is known"
    return f"{plan.forecast.time.step_time_s:.3g} s a step"


def only_configs(workload: Subject, strategy: Strategy) -> dict[str, Sequence[Any]]:
    """Return constraints that keep a strategy's methods, and leave open what a search decides of their configs.

    The other keys (a norm to clip by, layers to leave out, the sizes of mesh axes) do not matter for speed.
    """
    from meshwright.planner.search import default_space

    strategy = without_mixed(strategy)
    kept = strategy.methods
    if getattr(workload, "cluster", None) is not None:
        space = default_space(workload, lower_precision=False)
        kept = tuple(left_to_search(method, space) for method in kept)
    dropped = [name for name in METHOD_CONFIGS if name not in (*strategy.names, ParallelMode.method_name)]
    return {"excluded": dropped, "included": kept}


def fitting(workload: Subject, *, excluded: Sequence[str] = (), included: Sequence[Any] = ()) -> list[Plan]:
    """Return all fitting plans that :func:`choose` would choose from, best first; at least one.

    Raises:
        StrategyError: As :func:`choose` does.
    """
    if getattr(workload, "cluster", None) is not None:
        return list(_found(workload, excluded, included, _RUN).plans)
    plans = _planned(workload, _candidates(workload, excluded, included), [])
    return [plan for plan in plans if plan.fits] or [choose(workload, excluded=excluded, included=included)[0]]


def _planned(workload: Subject, candidates: Iterable[Strategy], refused: list[MeshwrightError]) -> Iterator[Plan]:
    """Plan candidates one by one, and collect the errors of those that cannot train this model or batch."""
    for candidate in candidates:
        try:
            yield workload.plan(candidate)
        except MeshwrightError as error:
            refused.append(error)


def _candidates(workload: Subject, excluded: Sequence[str], included: Sequence[Any]) -> Iterator[Strategy]:
    required = _with_gains(workload, read_constraints(excluded, included), excluded)
    # An included sharding method takes the place of a candidate's own.
    replaced = SHARDING if any(getattr(method, "shards", False) for method in required.values()) else ()
    kept: list[list[str]] = []
    for candidate in LEAST_COMMUNICATION_FIRST:
        own = [ParallelMode.method_name, *(name for name in candidate if name not in replaced)]
        names = [*own, *(name for name in required if name not in own)]
        if not set(excluded).intersection(names) and names not in kept:
            kept.append(names)
    if not kept:
        raise StrategyError(
            "No strategy is left to choose from",
            got=f"excluded={list(excluded)}, included={[*map(str, required.values())]}",
            fix="exclude fewer methods, or name a strategy yourself",
            expected=f"at least one candidate: {_listed()}",
        )
    configs = {name: as_devices_have(method, workload.half_dtype) for name, method in required.items()}
    return (Strategy([configs.get(name, name) for name in names]) for names in kept)


def _with_gains(
    workload: Subject, required: Mapping[str, MethodConfig], excluded: Sequence[str]
) -> Mapping[str, MethodConfig]:
    """Add what any strategy of a model gains by, such as attention that need not compute all scores."""
    from meshwright.planner.search.search_space import searched

    first, *_ = (*searched(Role.LOSS, SearchScope(model=getattr(workload, "model", None)), optional=True), ())
    gains = {each.method_name: each for each in first if each.method_name not in (*required, *excluded)}
    return {**required, **gains}


def _reason(plan: Plan, tried: list[Plan]) -> str:
    needs = readable_bytes(plan.needed_bytes)
    limit = f" of {readable_bytes(plan.limit_bytes)}" if plan.limit_bytes is not None else ""
    passed = "".join(f"; {method_names(each.strategy)} needs {readable_bytes(each.needed_bytes)}" for each in tried)
    return f"chose {plan.strategy}: the first that fits, {needs}{limit} per rank{passed}"


def _listed() -> str:
    *first, last = [" with ".join(names) or "data" for names in LEAST_COMMUNICATION_FIRST]
    return f"{', '.join(first)}, or {last}"
