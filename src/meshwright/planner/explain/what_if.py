"""What would change the result: more devices, a larger batch, faster links, more memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from meshwright.collector import paused_collection
from meshwright.cost import Cluster, Link
from meshwright.errors import MeshwrightError
from meshwright.methods import SAMPLED
from meshwright.planner.explain.figures import price_per_billion_tokens, short
from meshwright.planner.plan import Plan, Subject
from meshwright.planner.search import Found, Objective
from meshwright.planner.search.objective import figure_of_plan
from meshwright.planner.words import number, percent, seconds
from meshwright.strategy import Strategy

SubjectOf = Callable[[Cluster, int], Subject]
"""Makes what plans are made for, on a cluster and for so many samples per step."""

_NOTHING = 5e-4  # of the speed
_FARTHEST = 2  # times as many devices: a step beyond need not be called the next


@dataclass(frozen=True)
class WhatIf:
    """One change of the circumstances.

    Args:
        change: In words.
        outcome: What it would do, in words.
        plan: The best that was found then; None when nothing fits.
        speed_up: Samples per second then over those now; None when nothing fits.
    """

    change: str
    outcome: str
    plan: Plan | None = None
    speed_up: float | None = None


@paused_collection()
def what_if(subject_of: SubjectOf, found: Found, objective: Objective = "tokens_per_s") -> tuple[WhatIf, ...]:
    """Predicts the strategies that were found, and those that did not fit, under changed circumstances.

    Nothing is searched anew: a strategy that no search has met is not met here either.

    Args:
        subject_of: Makes the subject for a cluster and a number of samples per step.
        found: With at least one plan that has a forecast.
        objective: What its plans are ranked by: the best then is the best by the same.
    """
    best = found.plans[0]
    if best.forecast is None:
        return ()
    cluster, samples = best.forecast.cluster, best.forecast.samples

    def told(change: str, where: Cluster, number: int) -> WhatIf:
        return _told(change, best, _best(_replanned(subject_of(where, number), found, number), objective))

    every = [_more_devices(subject_of, found, cluster, samples, objective)]
    every.append(told(f"twice the batch, {2 * samples} samples", cluster, 2 * samples))
    every += [told(words, faster, samples) for words, faster in _faster_links(cluster)]
    roomier = dataclasses.replace(
        cluster, device=dataclasses.replace(cluster.device, memory_bytes=2 * cluster.device.memory_bytes)
    )
    every.append(told("twice the memory on every device", roomier, samples))
    return tuple(each for each in every if each is not None)


def _faster_links(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    def faster(link: Link) -> Link:
        return dataclasses.replace(link, bytes_per_s=2 * link.bytes_per_s)

    if cluster.num_devices > cluster.devices_per_node:
        yield "links between nodes twice as fast", dataclasses.replace(cluster, inter=faster(cluster.inter))
    if min(cluster.num_devices, cluster.devices_per_node) > 1:
        yield "links inside a node twice as fast", dataclasses.replace(cluster, intra=faster(cluster.intra))


def _more_devices(
    subject_of: SubjectOf, found: Found, cluster: Cluster, samples: int, objective: Objective
) -> WhatIf | None:
    """The next number of devices over which some strategy spreads the batch evenly."""
    now, per_node = cluster.num_devices, cluster.devices_per_node
    whole_nodes = now % per_node == 0 and now > per_node
    for more in range(now + 1, _FARTHEST * now + 1):
        if whole_nodes and more % per_node:
            continue
        subject = subject_of(cluster.resized(more), samples)
        wider = (each for plan in _every(found) for each in _spread(plan, now, more, samples))
        plan = _best((_planned(subject, strategy, parts) for strategy, parts in wider), objective)
        if plan is not None:
            return _told(f"{more} devices instead of {now}", found.plans[0], plan)
    return None


def _spread(plan: Plan, now: int, more: int, samples: int) -> Iterator[tuple[Strategy, int]]:
    """A strategy with one axis of samples lengthened, where the batch divides evenly; as many samples at once."""
    for axis, size in plan.step.axes:
        if axis not in SAMPLED or (more * size) % now:
            continue
        longer = more * size // now
        axes = [(name, longer if name == axis else length) for name, length in plan.step.axes]
        replicas = _product(length for name, length in axes if name in SAMPLED)
        parts = {plan.step.num_micro_batches, max(1, round(plan.step.num_micro_batches * now / more))}
        for number_of_parts in sorted(parts):
            if samples % (replicas * number_of_parts) == 0:
                yield plan.strategy.with_method(("parallel_mode", {"axes": axes})), number_of_parts


def _product(sizes: Iterable[int]) -> int:
    whole = 1
    for size in sizes:
        whole *= size
    return whole


def _replanned(subject: Subject, found: Found, samples: int) -> Iterator[Plan | None]:
    for plan in _every(found):
        for parts in sorted(_cuts(plan, samples)):
            yield _planned(subject, plan.strategy, parts)


def _cuts(plan: Plan, samples: int) -> set[int]:
    """As many micro-batches as before; of a larger batch, also as many more."""
    before = plan.forecast.samples if plan.forecast is not None else samples
    return {plan.step.num_micro_batches, plan.step.num_micro_batches * max(1, samples // before)}


def _every(found: Found) -> tuple[Plan, ...]:
    return (*found.plans, *found.too_large)


def _planned(subject: Subject, strategy: Strategy, num_micro_batches: int) -> Plan | None:
    pipeline = strategy.get("pipeline_parallel")
    if pipeline is not None and getattr(pipeline, "num_micro_batches", None) is not None:
        strategy = strategy.with_method(pipeline.model_copy(update={"num_micro_batches": num_micro_batches}))
    try:
        return subject.plan(strategy, num_micro_batches)
    except MeshwrightError:
        return None  # what cannot be there is no answer


def _best(plans: Iterable[Plan | None], objective: Objective) -> Plan | None:
    """Of those that fit."""
    fitting = [plan for plan in plans if plan is not None and plan.fits and plan.forecast is not None]
    return min(fitting, key=lambda plan: figure_of_plan(plan, objective), default=None)


def _samples_per_s(plan: Plan) -> float:
    return plan.forecast.samples_per_s if plan.forecast is not None else 0.0


def _told(change: str, before: Plan, after: Plan | None) -> WhatIf:
    if after is None or after.forecast is None or before.forecast is None:
        return WhatIf(change, "none of these strategies fits then")
    faster = after.forecast.samples_per_s / before.forecast.samples_per_s
    rate, now = after.forecast.tokens_per_s, before.forecast.tokens_per_s
    unit = "tokens/s" if rate is not None else "samples/s"
    pair = (now, rate) if now is not None and rate is not None else (_samples_per_s(before), _samples_per_s(after))
    if abs(faster - 1) < _NOTHING and after.strategy == before.strategy:
        return WhatIf(change, "no difference", after, faster)
    words = f"{number(pair[1])} {unit} instead of {number(pair[0])} ({_signed(faster - 1)})"
    words += f", {seconds(after.forecast.time.step_time_s)} a step"
    price, earlier = price_per_billion_tokens(after), price_per_billion_tokens(before)
    if price is not None and earlier is not None and abs(price / earlier - 1) > 1e-3:
        words += f", {price:,.0f} instead of {earlier:,.0f} USD per 1e9 tokens"
    words += "" if short(after) == short(before) else f"; best then: {short(after)}"
    return WhatIf(change, words, after, faster)


def _signed(share: float) -> str:
    return f"{'+' if share >= 0 else '-'}{percent(abs(share), 1)}"
