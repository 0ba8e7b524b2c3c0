"""What runs for a moment takes beside what is saved: gradients of activations, of weights, results on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Instant(NamedTuple):
    """What is held at one moment of one place beside what the places up to it have saved, in one micro-batch.

    Args:
        activations: Bytes that grow with the samples; negative where some of what is saved is free already.
        weights: Bytes of gradients of parameters that are not complete yet.
        gradients: Bytes of complete ones of this place.
    """

    activations: int
    weights: int
    gradients: int


class Transient(NamedTuple):
    """Of one place of a model: before its blocks, one of them, or behind them.

    Args:
        place: See :data:`~meshwright.cost.placed.Placed`.
        instants: Those that can be the one at which most is held, for some number of samples.
        gradients: Bytes of the parameters' gradients that its backward completes.
        forward: Behind the blocks, the same of forward as far as the model goes, without its loss.
        returned: Bytes made here in forward that nobody saves and the model holds, such as keys and values it returns.
        left: Of those, what is held in backward, too.
        remains: Bytes that are not free when its backward has run.
    """

    place: int
    instants: tuple[Instant, ...]
    gradients: int
    forward: tuple[Instant, ...] = ()
    returned: int = 0
    left: int = 0
    remains: int = 0

    def most(self, *, with_gradients: bool) -> int:
        """The most beside what is saved.

        Args:
            with_gradients: Whether complete gradients of this place are held, and not added to others.
        """
        return max(m.activations + m.weights + (m.gradients if with_gradients else 0) for m in self.instants)


def outermost_instants(every: Iterable[Instant]) -> tuple[Instant, ...]:
    """Those of many instants at which most is held, for some number of samples, with complete gradients or without."""
    instants = set(every)
    kept = {*_hull(instants, lambda m: m.weights + m.gradients), *_hull(instants, lambda m: m.weights)}
    return tuple(sorted(kept))


def _hull(instants: Iterable[Instant], constant: Callable[[Instant], int]) -> list[Instant]:
    """The upper right part of the convex hull over (what grows with the samples, what does not)."""
    best: dict[int, Instant] = {}
    for each in instants:
        other = best.get(each.activations)
        if other is None or (constant(each), each) > (constant(other), other):
            best[each.activations] = each
    hull: list[Instant] = []
    for each in (best[size] for size in sorted(best, reverse=True)):  # the most activations first
        if hull and constant(each) <= constant(hull[-1]):
            continue
        while len(hull) > 1 and _is_below(hull[-2], hull[-1], each, constant):
            hull.pop()
        hull.append(each)
    return hull


def _is_below(first: Instant, middle: Instant, last: Instant, constant: Callable[[Instant], int]) -> bool:
    """Whether the middle of three is on or below the line through the others."""
    run, rise = first.activations - last.activations, constant(last) - constant(first)
    return (constant(middle) - constant(first)) * run <= rise * (first.activations - middle.activations)
