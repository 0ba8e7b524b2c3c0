"""Hold what a search works with: its objective, the state of a pass, follow-up spaces, and the result."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from meshwright.cost import Cluster
from meshwright.errors import ConfigError, did_you_mean
from meshwright.methods import Method, Role, axes_that_divide, find_method
from meshwright.planner.plans import Plan, Subject
from meshwright.planner.search.search_space import Family, Space, divisors_of, family_of, surcharge
from meshwright.strategy import MethodConfig

Objective = Literal["tokens_per_s", "price", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("tokens_per_s", "price", "memory")
Rank = tuple[float, int, str]
"""Smaller is better: the objective's number with surcharges, then the number of methods, then the strategy's text."""

_DIGITS = 4  # a prediction cannot tell smaller differences
_SMALLEST_KEPT = 5  # plans that do not fit
_SPARED = 0.95  # of its family's next better plan, the most that a runner-up may need: others would not fit either


def check_objective(objective: str) -> None:
    """Refuse an unknown objective.

    Raises:
        ConfigError: With the nearest name.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(
            f"Unknown objective {objective!r}{did_you_mean(objective, OBJECTIVES)}",
            expected=f"one of {', '.join(OBJECTIVES)}",
            got=repr(objective),
            fix="correct the name",
        )


def rank_of_plan(plan: Plan, objective: Objective) -> Rank:
    """Return the key by which plans are ranked.

    Raises:
        ConfigError: When the plan does not know what the objective needs.
    """
    parts = f"{plan.step.num_micro_batches:06d}"  # of equal strategies, the one with fewer micro-batches
    figure = figure_of_plan(plan, objective) * (1.0 if objective == "memory" else 1.0 + surcharge(plan))
    return rounded(figure), len(plan.strategy), f"{plan.strategy} {parts}"


def rounded(number: float) -> float:
    """Round a figure to the digits in which predictions may differ."""
    return float(f"{number:.{_DIGITS - 1}e}")


def figure_of_plan(plan: Plan, objective: Objective) -> float:
    """Return the number that the objective minimises, unrounded: bytes, or seconds or dollars per sample.

    Raises:
        ConfigError: When the plan does not know what the objective needs.
    """
    if objective == "memory":
        return plan.needed_bytes
    forecast = plan.forecast
    if forecast is None:
        raise ConfigError(
            f"The objective {objective} needs seconds, which are not predicted without a cluster",
            expected="a subject with a cluster",
            got="none",
            fix="name the cluster, or search for the objective 'memory'",
        )
    if objective == "tokens_per_s":
        return forecast.time.step_time_s / forecast.samples
    price = forecast.price_per_step
    if price is None:
        raise ConfigError(
            "The objective price needs the price of a device, which is not known",
            expected="a device with price_per_hour",
            got=forecast.cluster.device.name,
            fix="set price_per_hour in a cluster file, or search for tokens_per_s, which is the same on one cluster",
        )
    return price / forecast.samples


@dataclass(frozen=True)
class Found:
    """The strategies that a search has found for one subject, ranked.

    Args:
        plans: Those that fit, best first.
        too_large: A few of those that do not fit, smallest first.
        refused: Strategies that cannot train this model on this world, and why; each reason once.
        num_considered: Candidates considered, including those that a bound or a twin ruled out.
        num_predicted: Candidates that were simulated.
        seconds: How long the search took.
        is_complete: Whether no other candidate of the space can be among the best; False: predictions or time ran out.
        out_of_time: Whether it was the time.
    """

    plans: tuple[Plan, ...]
    too_large: tuple[Plan, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    num_considered: int = 0
    num_predicted: int = 0
    seconds: float = 0.0
    is_complete: bool = True
    out_of_time: bool = False


@dataclass(slots=True)
class Headroom:
    """Record of whether memory is enough for a branch.

    Args:
        bound: Lower bound of its objective.
        ran_out: Whether memory has ruled out any of its micro-batches; of twins, those of the first.
        fitting: Sizes of micro-batches that are known to fit.
        axes: Of the branch's mesh.
    """

    bound: float = 0.0
    ran_out: bool = False
    fitting: set[int] = field(default_factory=set)
    axes: tuple[tuple[str, int], ...] = ()


@dataclass
class SearchState:
    """The plans that a search has found so far, and how its current pass goes.

    Args:
        top: How many plans are kept.
        plans: Plans that fit, with their ranks, best first.
        too_large: Plans that do not fit, the smallest first.
        num_considered: Candidates unfolded.
        num_predicted: Candidates that were simulated.
        stopped: Whether the pass used up its predictions before it was certain that nothing better was left.
        headrooms: Whether memory was enough, of every branch without regard to what it offloads.
        headrooms_before: The same of the pass through the same space that did not offload.
        only_better: Whether to look only for plans that beat the best so far, not for all that may be among ``top``.
        stopped_before: Whether an earlier pass used up its predictions.
        reach: Keep only the best plan of each family, up to so many times the figure of the best; None: all alike.
        of_family: How many plans of each family are kept then: the best, and what is next and needs less memory.
    """

    top: int
    plans: list[tuple[Rank, Plan]] = field(default_factory=list)
    too_large: list[Plan] = field(default_factory=list)
    num_considered: int = 0
    num_predicted: int = 0
    stopped: bool = False
    headrooms: dict[object, Headroom] = field(default_factory=dict)
    headrooms_before: dict[object, Headroom] = field(default_factory=dict)
    only_better: bool = False
    stopped_before: bool = False
    reach: float | None = None
    of_family: int = 1
    _figures: dict[Family, float] = field(default_factory=dict)  # of the last plan that is kept of a full family

    def for_other_space(self, *, only_better: bool = True) -> SearchState:
        """Return the state from which a pass through another space looks for something better, or for all it has."""
        return SearchState(
            self.top,
            [*self.plans],
            [*self.too_large],
            only_better=only_better,
            stopped_before=self.stopped or self.stopped_before,
            reach=self.reach,
            of_family=self.of_family,
            _figures=dict(self._figures),
        )

    def for_offloading(self, without: SearchState) -> SearchState:
        """Return the state from which a pass that offloads looks for something better.

        Args:
            without: The state after the pass through the same space that did not offload.
        """
        state = self.for_other_space()
        # Families that offload are shown where they win; there are as many again, and each is slower than its like.
        state.only_better = without.only_better or (self.reach is not None and bool(self.plans))
        # Candidates that were left out when the predictions ran out may have been short of memory, too.
        state.headrooms_before = {} if without.stopped else without.headrooms
        return state

    def for_families(self, reach: float) -> SearchState:
        """Return the state from which a pass looks for the best of families that are up to ``reach`` times worse."""
        state = self.for_other_space(only_better=False)
        state.reach = reach
        return state

    @property
    def best(self) -> Plan | None:
        """Return the best plan so far; None when nothing fits."""
        return self.plans[0][1] if self.plans else None

    @property
    def to_beat(self) -> float:
        """Return the figure that a candidate must not exceed: of the last plan kept, or of the best."""
        last = 1 if self.only_better else self.top
        worst = self.plans[last - 1][0][0] if len(self.plans) >= last else math.inf
        return min(worst, self.plans[0][0][0] * self.reach) if self.reach is not None and self.plans else worst

    def has_better_of(self, family: Family, figure: float) -> bool:
        """Return whether as many plans of a family as are kept are at hand, all with smaller figures."""
        if self.reach is None:
            return False
        return self._figures.get(family, math.inf) < figure

    @property
    def ever_stopped(self) -> bool:
        """Return whether any pass used up its predictions."""
        return self.stopped or self.stopped_before

    @property
    def ran_out(self) -> bool:
        """Return whether memory has ruled out anything that could have been among the best."""
        return any(headroom.ran_out for headroom in self.headrooms.values())

    def cramped_sizes(self, axis: str, figure: float) -> tuple[int, ...]:
        """Return sizes of an axis with which memory alone has ruled out what a bound allows to be as good as a figure.

        What does not fit before anything is saved has no bound.
        """
        cramped = (each for each in self.headrooms.values() if each.ran_out and 0 < each.bound <= figure)
        return tuple(sorted({dict(each.axes).get(axis, 1) for each in cramped} - {1}))

    def add(self, rank: Rank, plan: Plan) -> None:
        """Note a plan that fits."""
        self.plans.append((rank, plan))
        self.plans.sort(key=lambda each: each[0])
        if self.reach is not None:
            kept: dict[Family, list[tuple[Rank, Plan]]] = {}
            for each in self.plans:
                better = kept.setdefault(family_of_plan(each[1]), [])
                if len(better) < self.of_family and (not better or _spares(each[1], better[-1][1])):
                    better.append(each)
            farthest = self.plans[0][0][0] * self.reach
            near = (each for plans in kept.values() for each in plans if each[0][0] <= farthest)
            self.plans = sorted(near, key=lambda each: each[0])
            full = {family: plans for family, plans in kept.items() if len(plans) == self.of_family}
            self._figures = {family: plans[-1][0][0] for family, plans in full.items()}
        del self.plans[self.top :]

    def add_too_large(self, plan: Plan) -> None:
        """Note a plan that does not fit."""
        self.too_large.append(plan)
        self.too_large.sort(key=lambda each: (each.needed_bytes, str(each.strategy)))
        del self.too_large[_SMALLEST_KEPT:]


def family_of_plan(plan: Plan) -> Family:
    """Return the family of a plan, see ``family_of``."""
    return family_of(plan.step.axes, plan.strategy.methods)


def _spares(plan: Plan, other: Plan) -> bool:
    return plan.needed_bytes <= _SPARED * other.needed_bytes


@dataclass(frozen=True)
class FollowUp:
    """A space that a search goes on to, for something better than the best that it has found.

    Args:
        space: What is tried there.
        where: ``always``; always, but at ``last``; where the best so far divides its layers, has to offload, or
            recomputes where a tensor axis could be better but for its memory (``divided``); where it leaves the loss as
            it is (``loss``); or where nothing has fitted yet (``nothing``). All but ``always`` comes after offloading
            in the spaces before. After all of these, only to show the best of each family: ``families``.
        only_better: Whether only what is better than the best so far is looked for, and not what is the best of its
            family.
        reach: Of ``families``, how many times worse than the best they may be.
    """

    space: Space
    where: Literal["always", "last", "divided", "loss", "nothing", "families"] = "always"
    only_better: bool = True
    reach: float = 1.0

    def is_worth(self, state: SearchState, first: SearchState) -> bool:
        """Return whether to search here, too, after the passes that offload.

        Args:
            state: At that time.
            first: After the first pass.
        """
        if self.where == "last":
            return True
        if self.where == "loss":
            return state.best is None or not any(map(self._changes_loss, state.best.strategy.methods))
        if self.where == "nothing" or state.best is None:
            return self.where == "nothing" and state.best is None
        return self.where == "divided" and (_divides_or_offloads(state.best) or bool(_cramped(state, first)))

    def _changes_loss(self, method: MethodConfig) -> bool:
        return isinstance(method, Method) and method.fuses_loss

    def space_after(self, state: SearchState, first: SearchState) -> Space:
        """Return the space to try, given the best so far.

        Where that divides layers, only the same tensor axis is tried. A real module is proved anew for every size,
        which takes seconds, and the size that divides layers best is also the best for the tokens between them. A
        pipeline around it stays, with any schedule, and twice the size is tried, too: what every rank of it does with
        all tokens, it does with a part of them here. Where the best recomputes, those sizes are tried for which memory
        was too small. Another loss takes traces of its own, which differ between sharded parameters and others.
        """
        if self.where == "loss" and state.best is not None and state.best.step.shard_axis is not None:
            return self.space.replace(sharding=tuple(filter(None, self.space.sharding)) or self.space.sharding)
        if self.where != "divided" or state.best is None:
            return self.space
        best = dict(state.best.step.axes)
        tensor, pipeline = best.get("tensor", 1), best.get("pipeline", 1)
        if tensor > 1 and pipeline > 1:
            larger = tuple(size for size in self.space.sizes["tensor"] if size == 2 * tensor)
            tried = {"tensor": (tensor, *larger), "pipeline": (1, pipeline)}
        else:
            sizes = (tensor,) if tensor > 1 else () if _divides_or_offloads(state.best) else _cramped(state, first)
            tried = {"tensor": sizes} if sizes else {}
        return self.space.replace(sizes={**self.space.sizes, **tried})


def _divides_or_offloads(plan: Plan) -> bool:
    return bool(find_method(plan.strategy, lambda each: each.axis == "tensor" or each.role is Role.OFFLOADING))


def _cramped(state: SearchState, first: SearchState) -> tuple[int, ...]:
    """Return the sizes of a tensor axis that could be better than a best plan that recomputes, but for their memory."""
    best = state.best
    if best is None or find_method(best.strategy, lambda each: each.role is Role.RECOMPUTATION) is None:
        return ()
    return first.cramped_sizes("tensor", state.plans[0][0][0])


def with_other_loss(small: Space, whole: Space, decided: Collection[str]) -> tuple[FollowUp, ...]:
    """Return the space that changes how a traced model's loss is computed, which takes traces of its own.

    Args:
        small: The space in which layers and samples are divided.
        whole: All that may be tried.
        decided: Methods that a caller has decided on, by name.
    """
    options = tuple(each for each in whole.loss[1:] if not any(m.method_name in decided for m in each))
    sizes = {axis: every for axis, every in small.sizes.items() if axis != "tensor"}
    return (FollowUp(small.replace(sizes=sizes, loss=options), "loss"),) if options else ()


def divided_next(
    space: Space, subject: Subject, excluded: Collection[str], included: Collection[Any]
) -> tuple[FollowUp, ...]:
    """Return the space of a module with its weights divided as methods say that they can be; none: it has no such.

    Every size is traced anew, so that there is one: the largest within a node, between whose ranks tokens travel fast.

    Args:
        space: The space that is searched before.
        subject: What plans are made for; nothing is added if it is no module on a cluster.
        excluded: Methods that must not be used.
        included: What every candidate has; if anything, nothing is added.
    """
    model: nn.Module | None = getattr(subject, "model", None)
    cluster: Cluster | None = getattr(subject, "cluster", None)
    if model is None or cluster is None or included:
        return ()
    for axis, parts in axes_that_divide(model, excluded).items():
        within = math.gcd(parts, min(subject.world, cluster.devices_per_node))
        if within > 1:
            usual = _usual_beside(space, axis)
            return (FollowUp(usual.replace(sizes={**usual.sizes, axis: (within,)})),)
    return ()


def experts_first(space: Space, num_experts: int, world: int) -> tuple[Space, tuple[FollowUp, ...]]:
    """Return the space in which the search of a model with experts begins, and those that follow.

    Samples alone are divided first, which is soon tried. Then come experts: most such models are trained with these
    divided, and few other strategies fit. But a rank computes as much either way, so that bounds cannot tell: among all
    strategies, those with an axis of experts would come last.

    Args:
        space: The space of a model without experts.
        num_experts: Experts of a layer.
        world: Number of devices.
    """
    sizes = tuple(size for size in divisors_of(world) if num_experts % size == 0)
    if len(sizes) == 1:
        return space, ()
    whole = space.replace(sizes={**space.sizes, "expert": sizes})
    usual = _usual_beside(space, "expert")
    usual = usual.replace(sizes={**usual.sizes, "expert": sizes[1:]})
    return space.replace(sizes={}, hybrid=False), (FollowUp(usual, only_better=False), FollowUp(whole, "last"))


def _usual_beside(space: Space, axis: str) -> Space:
    """Return the part of a space that is usual beside an axis of experts, or of what a module says can be divided."""
    beside = {"tensor", "pipeline"} - {axis}
    return space.replace(
        sizes={other: every for other, every in space.sizes.items() if other in beside},
        sharding=tuple(filter(None, space.sharding)) or space.sharding,
        hybrid=False,
        recompute=(space.recompute[0], space.recompute[-1])[: len(space.recompute)],
    )
