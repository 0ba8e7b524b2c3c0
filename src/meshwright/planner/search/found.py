"""What a search has found."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.plan import Plan


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
