"""What a search asks of a plan: one number, the smaller the better, and how ties are broken."""

from __future__ import annotations

from typing import Literal

from meshwright.errors import ConfigError, did_you_mean
from meshwright.planner.plan import Plan

Objective = Literal["tokens_per_s", "price", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("tokens_per_s", "price", "memory")
Rank = tuple[float, int, str]
"""Smaller is better: the objective's number, then the number of methods, then the strategy's text."""

_DIGITS = 4  # what differs by less is no difference that a prediction could tell


def check_objective(objective: str) -> None:
    """Refuses what is no objective.

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
    """Where a plan stands among others.

    Raises:
        ConfigError: When the plan does not know what the objective needs.
    """
    parts = f"{plan.step.num_micro_batches:06d}"  # of equal strategies, the one with fewer micro-batches
    return rounded(figure_of_plan(plan, objective)), len(plan.strategy), f"{plan.strategy} {parts}"


def rounded(number: float) -> float:
    """To the digits that count."""
    return float(f"{number:.{_DIGITS - 1}e}")


def figure_of_plan(plan: Plan, objective: Objective) -> float:
    """The objective's number, to the last digit.

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
