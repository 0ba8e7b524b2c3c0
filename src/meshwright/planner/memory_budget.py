"""Fit a plan into a memory budget by choosing which modules `checkpoint` recomputes, and how."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from meshwright.cost import MEMORY_LABELS, Activations, Memory, Step, memory
from meshwright.errors import StrategyError, readable_bytes
from meshwright.methods import Phase, cost_of, find_method
from meshwright.planner.plans import needed_bytes
from meshwright.strategy import Strategy

if TYPE_CHECKING:
    from meshwright.methods import Checkpoint


Granularity = Literal["none", "selective", "full"]
Choice = tuple[Granularity, ...]
_MOST_STATES = 500  # partial choices that are kept side by side


class Fitted(NamedTuple):
    """A strategy without a memory budget, and notices on how the budget was met."""

    strategy: Strategy
    notices: tuple[str, ...] = ()


def fit_budget(strategy: Strategy, steps: Sequence[Step]) -> Fitted:
    """Decide what ``checkpoint`` with a memory budget recomputes; return other strategies as they are.

    Args:
        strategy: Resolved.
        steps: Step before any method: one, or that of every pipeline rank.

    Returns:
        The strategy with a ``checkpoint`` that says what every module does, and notices.

    Raises:
        StrategyError: When no choice fits; it names the least memory there is, and its largest classes.
    """
    method: Checkpoint | None = find_method(strategy, lambda each: each.has_memory_budget)
    if method is None:
        return Fitted(strategy)
    known = steps[0].activations
    if known is None:
        raise StrategyError(
            "checkpoint: memory_budget needs predicted activations, and there are none",
            expected="a model that runs on fake tensors, and a sample to run it with",
            got="a model that could not be traced, or no sample",
            fix="pass sample_batch, or choose with every, layers or each instead of memory_budget",
        )
    chosen: list[Granularity] = ["none"] * len(method.covered(known))
    for rank, step in enumerate(steps):  # what a rank recomputes is no matter of the others
        found = RankBudget(strategy, method, step, rank if len(steps) > 1 else None).fewest()
        chosen = [ours if theirs == "none" else theirs for ours, theirs in zip(chosen, found, strict=True)]
    decided = _decided(method, tuple(chosen))
    return Fitted(strategy.without(method.method_name).with_method(decided), (_summary(method, chosen),))


def _decided(method: Checkpoint, choice: Choice) -> Checkpoint:
    return method.model_copy(update={"memory_budget": None, "each": choice})


def _summary(method: Checkpoint, chosen: Sequence[Granularity]) -> str:
    parts = [f"{chosen.count(what)} {how}" for what, how in (("full", "in full"), ("selective", "selectively"))]
    return (
        f"checkpoint: recomputes {' and '.join(parts)} of {len(chosen)} modules, "
        f"to hold at most {readable_bytes(method.memory_budget or 0)} per rank"
    )


@dataclasses.dataclass(frozen=True)
class _Option:
    """The effect of recomputing one module alone."""

    what: Granularity
    freed: int
    flops: int
    working: int


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """The predicted effect of a choice."""

    memory: Memory
    needed: int  # of it, where it is limited
    flops: int
    saved: int
    working: int


class RankBudget:
    """Search the choice for one rank.

    Modules are first taken to add up, which leaves a knapsack with one option per module. A choice that fits by its
    full prediction is then relaxed for as long as it still fits.

    Args:
        strategy: Resolved.
        method: The ``checkpoint`` of the strategy.
        step: Step of this rank, before any method.
        rank: Pipeline rank; None without a pipeline.
    """

    def __init__(self, strategy: Strategy, method: Checkpoint, step: Step, rank: int | None) -> None:
        self._strategy, self._method, self._rank = strategy.without(method.method_name), method, rank
        self._step = cost_of(self._strategy, step, before=Phase.RECOMPUTE)  # the same whatever is recomputed
        assert self._step.activations is not None
        assert method.memory_budget is not None
        covered, here = method.covered(self._step.activations), _saving(self._step.activations)
        self._here = [module in here for module in covered]
        self._count, self._budget = len(covered), int(method.memory_budget)
        full: tuple[Granularity, ...] = () if method.policy not in (None, "full") else ("full",)
        part: tuple[Granularity, ...] = () if method.policy == "full" else ("selective",)
        self._whats = (*part, *full)
        self._scale: tuple[Granularity, ...] = ("none", *self._whats)
        none: Granularity = "none"
        self._nothing: Choice = (none,) * self._count
        self._known: dict[Choice, _Outcome] = {}

    def fewest(self) -> Choice:
        """Return the fitting choice with the fewest FLOPs; of equals, the one that frees the least."""
        if self._fits(self._nothing):
            return self._nothing
        starts = [choice for working in self._workings for choice in self._knapsack(working)]
        starts += [tuple(what if here else "none" for here in self._here) for what in self._whats]
        fitting = [choice for choice in starts if self._fits(choice)]
        if not fitting:
            raise self._does_not_fit(starts)
        # Modules that share tensors free more together than they do alone: what was not needed is taken back.
        return self._relaxed(min(fitting, key=self._price))

    def _relaxed(self, choice: Choice) -> Choice:
        for index in (index for index in reversed(range(self._count)) if choice[index] != "none"):
            for what in self._scale[: self._scale.index(choice[index])]:
                other = (*choice[:index], what, *choice[index + 1 :])
                if self._fits(other) and self._price(other) <= self._price(choice):
                    choice = other
                    break
        return choice

    def _price(self, choice: Choice) -> tuple[int, int]:
        outcome = self._outcome(choice)
        return outcome.flops, -outcome.saved

    def _fits(self, choice: Choice) -> bool:
        return self._outcome(choice).needed <= self._budget

    def _outcome(self, choice: Choice) -> _Outcome:
        if choice not in self._known:
            strategy = self._strategy.with_method(_decided(self._method, choice))
            step = cost_of(strategy, self._step, first=Phase.RECOMPUTE)
            kept, held = step.activations, memory(step)
            assert kept is not None
            self._known[choice] = _Outcome(
                held, needed_bytes(step, held), step.recompute_flops, kept.saved_bytes, kept.working_bytes
            )
        return self._known[choice]

    @functools.cached_property
    def _options(self) -> list[list[_Option]]:
        nothing = self._outcome(self._nothing)
        every = []
        for index in range(self._count):
            options = [_Option("none", 0, 0, 0)]
            for what in self._whats if self._here[index] else ():
                alone = (*self._nothing[:index], what, *self._nothing[index + 1 :])
                found = self._outcome(alone)
                options.append(_Option(what, nothing.saved - found.saved, found.flops, found.working))
            every.append([option for option in options if option.freed > 0 or option.what == "none"])
        return every

    @property
    def _workings(self) -> list[int]:
        """Return every possible limit for what one module needs while it is recomputed."""
        return sorted({option.working for options in self._options for option in options})

    def _knapsack(self, working: int) -> list[Choice]:
        """Return the cheapest choice that frees enough without modules that need more than ``working`` bytes.

        The list is empty when none frees enough.
        """
        needed = self._outcome(self._nothing).needed + working - self._budget
        states = [_Partial(0, 0)]
        for options in self._options:
            fitting = [option for option in options if option.working <= working]
            if len(fitting) == 1:
                states = [_Partial(s.freed, s.flops, s, "none") for s in states]
                continue
            # Options that recompute come first: the first modules are recomputed last, when most memory is free again.
            grown = [
                _Partial(state.freed + option.freed, state.flops + option.flops, state, option.what)
                for state in states
                for option in reversed(fitting)
            ]
            states = _undominated(grown, needed)
        enough = [state for state in states if state.freed >= needed]
        return [min(enough, key=lambda state: (state.flops, state.freed)).choice()] if enough else []

    def _does_not_fit(self, tried: Sequence[Choice]) -> StrategyError:
        least = min(map(self._outcome, tried), key=lambda each: each.needed)
        names = [field.name for field in dataclasses.fields(least.memory)]
        elsewhere = ("disk_",) if self._step.on_cpu else ("disk_", "host_")
        sizes = {name: getattr(least.memory, name) or 0 for name in names if not name.startswith(elsewhere)}
        largest = sorted(sizes.items(), key=lambda each: -each[1])[:3]
        takes = ", ".join(f"{MEMORY_LABELS[name]} {readable_bytes(size)}" for name, size in largest if size)
        budget, needed = readable_bytes(self._budget), readable_bytes(least.needed)
        if budget == needed:
            budget, needed = f"{self._budget:,} bytes", f"{least.needed:,} bytes"
        where = "" if self._rank is None else f" on pipeline rank {self._rank}"
        return StrategyError(
            "checkpoint: memory_budget cannot be met, whatever is recomputed",
            expected=f"at most {budget} on every rank",
            got=f"{needed} at the least{where}: {takes}",
            fix="use smaller micro-batches, fsdp or more ranks; or raise memory_budget",
        )


class _Partial(NamedTuple):
    """A choice for the first modules, as a linked list."""

    freed: int
    flops: int
    before: Any = None  # the choice for all but the last of them
    what: Granularity = "none"

    def choice(self) -> Choice:
        """Return the choice in the order of the model."""
        whats: list[Granularity] = []
        state = self
        while state.before is not None:
            whats.append(state.what)
            state = state.before
        return tuple(reversed(whats))


def _saving(known: Activations) -> set[int]:
    """Return the modules that save something on this rank."""
    return {m for stage in known.stages for tensor in stage for running in tensor.savers for m in running}


def _undominated(states: list[_Partial], needed: int) -> list[_Partial]:
    """Return the states that no other beats in both figures, thinned out to ``_MOST_STATES``."""
    states.sort(key=lambda state: (-state.freed, state.flops))
    kept: list[_Partial] = []
    for state in states:
        while kept and kept[-1].freed >= needed and state.freed >= needed and state.flops <= kept[-1].flops:
            kept.pop()  # both free enough, and this one for no more
        if not kept or state.flops < kept[-1].flops:
            kept.append(state)
    step = max(1, -(-len(kept) // _MOST_STATES))
    return kept[:1] + kept[1:-1:step] + kept[-1:] if len(kept) > 1 else kept
