"""What a strategy sends beside what its blocks compute."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.cost.step import Boundary, CollectiveKind, Moment, Step, Traffic


def inline_traffic(step: Step, axis: str, boundaries: Iterable[Boundary]) -> list[Traffic]:
    """The collectives of boundaries in every micro-batch, by kind and moment: blocks wait for them."""
    sent: dict[tuple[CollectiveKind, Moment], tuple[int, int]] = {}
    for each in boundaries:
        size, calls = sent.get((each.kind, each.moment), (0, 0))
        sent[each.kind, each.moment] = size + each.num_bytes, calls + each.count
    return [
        Traffic(
            kind,
            axis,
            size * step.num_micro_batches,
            moment,
            calls=calls * step.num_micro_batches,
            per_micro_batch=True,
            hidden=False,
        )
        for (kind, moment), (size, calls) in sent.items()
    ]


def send_boundaries(step: Step, axis: str) -> Step:
    """The step with what its boundaries over ``axis`` send in all micro-batches."""
    return step.send(*inline_traffic(step, axis, (each for each in step.boundaries if each.axis == axis)))
