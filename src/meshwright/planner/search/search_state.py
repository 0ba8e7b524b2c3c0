"""Objective of a search, what it has looked at, where it goes on, and what it has found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from meshwright.errors import ConfigError, did_you_mean
from meshwright.planner.plans import Plan
from meshwright.planner.search.search_space import Space

Objective = Literal["tokens_per_s", "price", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("tokens_per_s", "price", "memory")
Rank = tuple[float, int, str]
"""Smaller is better: the objective's number, then the number of methods, then the strategy's text."""

_DIGITS = 4  # what differs by less is no difference that a prediction could tell


def check_objective(objective: str) -> None:
    """Refuse what is no objective.

    Raises:
        ConfigError: With the nearest.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(
            f"Unknown objective {objective!r}{did_you_mean(objective, OBJECTIVES)}",
            expected=f"one of {', '.join(OBJECTIVES)}",
            got=repr(objective),
            fix="correct the name",
        )


def rank_of_plan(plan: Plan, objective: Objective) -> Rank:
    """Return where a plan stands among others.

    Raises:
        ConfigError: When the plan does not know what the objective needs.
    """
    parts = f"{plan.step.num_micro_batches:06d}"  # of equal strategies, the one with fewer micro-batches
    return rounded(figure_of_plan(plan, objective)), len(plan.strategy), f"{plan.strategy} {parts}"


def rounded(number: float) -> float:
    """To the digits that count."""
    return float(f"{number:.{_DIGITS - 1}e}")


def figure_of_plan(plan: Plan, objective: Objective) -> float:
    """Return the objective's number, to the last digit.

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


# --- What a search has found.


@dataclass(frozen=True)
class Found:
    """Strategies for one subject, ranked.

    Args:
        plans: Those that fit, best first.
        too_large: Of those that do not fit, a few, smallest first.
        refused: Strategies that cannot train this model on this world, and why; each reason once.
        num_considered: Candidates looked at, those included that a bound or a twin ruled out.
        num_predicted: Those that were simulated.
        seconds: How long it took.
        is_complete: Whether no other candidate of the space can be among the best; False: the predictions ran out.
    """

    plans: tuple[Plan, ...]
    too_large: tuple[Plan, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    num_considered: int = 0
    num_predicted: int = 0
    seconds: float = 0.0
    is_complete: bool = True


# --- What one pass of a search has looked at.

_SMALLEST_KEPT = 5


@dataclass(slots=True)
class Room:
    """Whether memory is enough for a branch.

    Args:
        bound: What it cannot beat.
        squeezed: Whether memory has ruled out any of its micro-batches; of twins, those of the first.
        fitting: Sizes of micro-batches that are known to fit.
    """

    bound: float = 0.0
    squeezed: bool = False
    fitting: set[int] = field(default_factory=set)


@dataclass
class Looked:
    """What has been looked at.

    Args:
        top: How many plans are kept.
        plans: Those that fit, with their ranks, best first.
        too_large: Those that do not, the smallest first.
        num_considered: Candidates unfolded.
        num_predicted: Those that were simulated.
        stopped: Whether the search ended at its most predictions, before nothing better could be left.
        rooms: Of every branch, but for what it offloads, whether memory was enough.
        rooms_before: The same of the pass through the same space that did not offload.
        betters: Whether only what beats the best so far is looked for, not all that may be among ``top``.
        stopped_before: Whether a pass before ended at its most predictions.
    """

    top: int
    plans: list[tuple[Rank, Plan]] = field(default_factory=list)
    too_large: list[Plan] = field(default_factory=list)
    num_considered: int = 0
    num_predicted: int = 0
    stopped: bool = False
    rooms: dict[object, Room] = field(default_factory=dict)
    rooms_before: dict[object, Room] = field(default_factory=dict)
    betters: bool = False
    stopped_before: bool = False

    def beside(self) -> Looked:
        """Return where a pass through another space begins, for what is better than the best so far."""
        return Looked(
            self.top, [*self.plans], [*self.too_large], betters=True, stopped_before=self.stopped or self.stopped_before
        )

    def offloading(self, without: Looked) -> Looked:
        """Return where a pass that offloads begins: it has to do better.

        Args:
            without: The pass through the same space that did not.
        """
        begun = self.beside()
        begun.betters = without.betters
        # What was left out for want of predictions may have been short of memory, too.
        begun.rooms_before = {} if without.stopped else without.rooms
        return begun

    @property
    def to_beat(self) -> float:
        """Return the number that a candidate must not exceed: of the last that is kept, or of the best."""
        last = 1 if self.betters else self.top
        return self.plans[last - 1][0][0] if len(self.plans) >= last else math.inf

    @property
    def ever_stopped(self) -> bool:
        """Return whether any pass ended at its most predictions."""
        return self.stopped or self.stopped_before

    @property
    def squeezed(self) -> bool:
        """Return whether memory has ruled anything out that could have been among the best."""
        return any(room.squeezed for room in self.rooms.values())

    def add(self, rank: Rank, plan: Plan) -> None:
        """Note a plan that fits."""
        self.plans.append((rank, plan))
        self.plans.sort(key=lambda each: each[0])
        del self.plans[self.top :]

    def add_too_large(self, plan: Plan) -> None:
        """Note a plan that does not."""
        self.too_large.append(plan)
        self.too_large.sort(key=lambda each: (each.needed_bytes, str(each.strategy)))
        del self.too_large[_SMALLEST_KEPT:]


# --- A space that a search goes on to once it has looked through another.

_TELLING = {"tensor_parallel", "offload"}


@dataclass(frozen=True)
class Further:
    """Where a search goes on, for what is better than the best that it has found.

    Args:
        space: What is tried there.
        where: ``always``; where the best so far divides its layers or has to offload (``divided``); or where nothing
            has fitted yet (``nothing``). What is not always tried comes after offloading.
    """

    space: Space
    where: Literal["always", "divided", "nothing"] = "always"

    def is_worth(self, looked: Looked) -> bool:
        """Return whether to go on here, too, after what was found with offloading."""
        if self.where == "nothing" or not looked.plans:
            return self.where == "nothing" and not looked.plans
        return self.where == "divided" and not _TELLING.isdisjoint(looked.plans[0][1].strategy.names)

    def beside(self, looked: Looked) -> Space:
        """Return what is tried here.

        Where the best so far divides layers, the tokens between them are divided as often.

        A real module is proved anew for every size, which takes seconds; what divides layers best does so with them.
        """
        if self.where != "divided" or not looked.plans:
            return self.space
        mesh = looked.plans[0][1].strategy.get("parallel_mode")
        size = dict(getattr(mesh, "axes", ())).get("tensor", 1)
        return self.space if size == 1 else self.space.replace(sizes={**self.space.sizes, "tensor": (size,)})
