"""Explain a plan: what binds it, where the others lose, and what would change the result."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.cost import Cluster, moments
from meshwright.errors import MeshwrightError, readable_bytes
from meshwright.methods import SAMPLED, Method, Role, SearchScope, find_method, mesh_method, methods_for
from meshwright.methods.composition import conflicts_of, known_methods
from meshwright.planner.explain.plan_figures import (
    MOMENTS,
    RunLength,
    memory_classes,
    mfu,
    per_gpu,
    price_per_billion_tokens,
    published_mfu,
    short,
    slowest_link,
    step_interval,
    whole_run,
    with_faster_link,
    with_micro_batches,
)
from meshwright.planner.plans import (
    MEMORY_CLASSES,
    Plan,
    Subject,
    duration,
    number,
    part_name,
    percent,
    seconds,
    time_parts,
    usable_bytes,
)
from meshwright.planner.search import Found, Objective
from meshwright.planner.search.search_space import searched
from meshwright.planner.search.search_state import rank_of_plan
from meshwright.planner.search.within_time import OutOfTimeError, TimeLimit
from meshwright.runtime.lazy import paused_collection
from meshwright.strategy import Strategy

_LEAST_SHARE = 0.02  # of the step: smaller parts are not mentioned
_REFUSALS = 8
_LABELS = dict(MEMORY_CLASSES)


@dataclass(frozen=True)
class Why:
    """Reasons as sentences.

    Args:
        chosen: The speed of the first plan, and what limits it.
        others: Where every other plan that fits loses.
        too_large: By how much plans do not fit, and in which memory.
        refused: Strategies that cannot train this model on this cluster.
    """

    chosen: tuple[str, ...]
    others: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def why(found: Found, length: RunLength | None = None) -> Why:
    """Explain a search's result.

    Args:
        found: The result, with at least one plan, in the order of its objective.
        length: Of a whole run, to say what that takes.
    """
    best = found.plans[0]
    intro = f"{short(best)} is the strategy given."
    if found.num_considered > 1 or len(found.plans) > 1:
        searched = f" ({found.num_considered:,} strategies considered, {found.num_predicted:,} simulated)"
        intro = f"{short(best)} comes first{searched if found.num_considered else ''}{_unfinished(found)}."
    return Why(
        chosen=(intro, *time_sentences(best), *expectations(best, length), memory_sentence(best)),
        others=_merged((with_micro_batches(plan), against(plan, best)) for plan in found.plans[1:]),
        too_large=tuple(f"{with_micro_batches(plan)}: {too_large(plan)}" for plan in found.too_large),
        refused=tuple(f"{strategy}: {reason}" for strategy, reason in found.refused[:_REFUSALS]),
    )


def _unfinished(found: Found) -> str:
    if found.out_of_time:
        return "; the time was up, so this is the best so far (--limit-s gives more)"
    return "" if found.is_complete else "; not all strategies were considered"


def _merged(lines: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Merge plans with the same reason into one line."""
    plans: dict[str, list[str]] = {}
    for plan, reason in lines:
        plans.setdefault(reason, []).append(plan)
    return tuple(f"{'; '.join(dict.fromkeys(alike))}: {reason}" for reason, alike in plans.items())


def time_sentences(plan: Plan) -> tuple[str, ...]:
    """Describe a plan's speed, and where its time goes; nothing without a cluster."""
    if plan.forecast is None:
        return ()
    time, rate, used = plan.forecast.time, per_gpu(plan), mfu(plan)
    speeds = [f"A step takes {seconds(time.step_time_s)}"]
    known = plan.forecast.samples_per_s
    speeds.append(f"{number(known)} samples/s" if rate is None else f"{number(rate)} tokens/s per device")
    speeds += [f"MFU {percent(used, 1)}"] if used is not None else []
    parts = sorted(time_parts(time).items(), key=lambda part: -part[1])
    shares = [
        f"{percent(spent / time.step_time_s)} {part_name(part)}{_link(plan, part)}"
        for part, spent in parts
        if spent > _LEAST_SHARE * time.step_time_s
    ]
    return ", ".join(speeds) + ".", *_unheard_of(plan, used), f"Of the step: {', '.join(shares)}."


def _unheard_of(plan: Plan, used: float | None) -> tuple[str, ...]:
    """Warn of an MFU that no published run has reached; nothing where one has, or too few are known."""
    highest = published_mfu(plan)
    if used is None or highest is None or used <= highest[0]:
        return ()
    return (f"That MFU is above the {percent(highest[0], 1)} of the fastest of {highest[1]}: take it with caution.",)


def expectations(plan: Plan, length: RunLength | None) -> tuple[str, ...]:
    """Say how far off the step time may be, and what a whole run takes; nothing of what is not known."""
    known = step_interval(plan)
    return *(() if known is None else (f"Expect {known}.",)), *_of_run(plan, length)


def _of_run(plan: Plan, length: RunLength | None) -> tuple[str, ...]:
    run = None if length is None else whole_run(plan, length)
    if run is None or plan.forecast is None:
        return ()
    what = f"{run.steps:,} steps" + (f" ({number(run.tokens)} tokens)" if run.tokens is not None else "")
    taken = duration(run.seconds)
    if run.interval_s is not None:
        low, high = map(duration, run.interval_s)
        taken += f" ({low.removesuffix(high.partition(' ')[2]).strip()} to {high})"
    costs = [f"{number(run.device_hours)} device-hours"]
    costs += [f"{number(run.price_usd)} USD"] if run.price_usd is not None else []
    rate = ""
    if run.interruptions >= 1 and not plan.forecast.cluster.device.is_host:
        rate = f"; at the rate of Llama 3's training there would be {run.interruptions:,.0f}"
    return (f"The whole run, {what}, takes {taken}: {', '.join(costs)}, without interruptions{rate}.",)


def _link(plan: Plan, part: str) -> str:
    """Name the collective behind a part of the step."""
    if part not in ("inline_s", "exposed_s"):
        return ""
    link = slowest_link(plan, hidden=part == "exposed_s")
    return "" if link is None else f" (most of it {link})"


def memory_sentence(plan: Plan) -> str:
    """Describe a plan's peak memory: how much, when, of what, and how much is left."""
    text = f"The peak is {_with_gaps(plan)}"
    if plan.limit_bytes is not None:
        left = plan.limit_bytes - plan.needed_bytes
        text += f" of the {readable_bytes(plan.limit_bytes)} that a plan may take of a device"
        text += (
            f" ({readable_bytes(left)} left{_headroom(plan)})" if left >= 0 else f" ({readable_bytes(-left)} too much)"
        )
    when = f", {MOMENTS[plan.forecast.peak.moment]}" if plan.forecast is not None else ""
    return f"{text}{when}: {_largest_classes(plan)}.{_still_saved(plan)}{_on_host(plan)}"


def _still_saved(plan: Plan) -> str:
    """Explain why activations can be most of the peak of a plan that offloads all of them."""
    known = plan.step.activations
    classes = memory_classes(plan)
    saved = classes.get("activations", 0)
    if known is None or not known.offloaded_bytes or 2 * saved < sum(classes.values()):
        return ""
    behind = min(known.outside_bytes, saved)
    parts = {
        "logits and the loss, whose backward comes at once": behind,
        "what blocks keep on the device, or need for a moment": saved - behind,
    }
    left = " and ".join(f"{readable_bytes(size)} of {what}" for what, size in parts.items() if size)
    blocks = "all blocks" if known.offloaded_blocks == len(known.blocks) else f"{known.offloaded_blocks} blocks"
    return (
        f" What {blocks} save leaves the device as it is made; left are {left}. Smaller micro-batches make it smaller."
    )


def _headroom(plan: Plan) -> str:
    """Say how much usable memory lies beyond the limit."""
    if plan.forecast is None or plan.limit_bytes is None:
        return ""
    beyond = usable_bytes(plan.forecast.cluster.device) - plan.limit_bytes
    return f", and {readable_bytes(beyond)} of headroom beyond" if beyond > 0 else ""


def _on_host(plan: Plan) -> str:
    """Describe the host memory that offloading needs."""
    if not plan.host_bytes:
        return ""
    room = "make sure that it is available"
    if plan.host_limit_bytes is not None:
        room = f"of the {readable_bytes(plan.host_limit_bytes)} that its node has for each"
    return f" Offloading needs {readable_bytes(plan.host_bytes)} of host memory per device: {room}."


def _with_gaps(plan: Plan) -> str:
    needed = readable_bytes(plan.needed_bytes)
    reserved = None if plan.forecast is None else plan.forecast.peak.reserved_bytes
    if reserved is None or reserved >= plan.needed_bytes:
        return needed
    buffers = " and the buffers of communicators" if plan.communicator_bytes else ""
    return f"{readable_bytes(reserved)}, with the gaps that an allocator leaves{buffers} {needed}"


def _largest_classes(plan: Plan, most: int = 3) -> str:
    classes = memory_classes(plan)
    whole = max(sum(classes.values()), 1)
    largest = sorted(classes.items(), key=lambda each: -each[1])[:most]
    return ", ".join(f"{percent(size / whole)} {_LABELS.get(name, name)}" for name, size in largest)


def too_large(plan: Plan) -> str:
    """Describe by how much a plan does not fit, and what takes the memory."""
    if plan.fits_device and not plan.fits_host:
        return f"needs more host memory than there is: {plan.host_text()}"
    over = plan.needed_bytes - (plan.limit_bytes or 0)
    when = f" {MOMENTS[plan.forecast.peak.moment]}" if plan.forecast is not None else ""
    text = f"needs {readable_bytes(plan.needed_bytes)}{when}, {readable_bytes(over)} too much: {_largest_classes(plan)}"
    return text + _other_loss(plan)


def _other_loss(plan: Plan) -> str:
    """Name the method that would do without the logits of a plan that does not fit for them; empty where none would."""
    methods = [each for each in plan.strategy.methods if isinstance(each, Method)]
    if plan.forecast is None or plan.forecast.peak.moment != "loss" or any(each.fuses_loss for each in methods):
        return ""
    held, sizes = moments(plan.step), dict(plan.step.axes)
    behind = (held["loss"].activations or 0) - (held["recomputation"].activations or 0)
    if behind < plan.needed_bytes - (plan.limit_bytes or 0):
        return ""
    # What is in the strategy already, with other keys, would have to be said as a whole.
    free = (method for method in methods_for(Role.LOSS) if method.method_name not in plan.strategy)
    offered = (each for method in free for each in method.search_options(SearchScope()))
    helps = [str(each) for each in offered if next(conflicts_of([*methods, each], sizes), None) is None]
    return f"; {readable_bytes(behind)} of it is of the loss: try it without logits, {helps[0]}" if helps else ""


def against(plan: Plan, best: Plan) -> str:
    """Describe in one line where a plan loses against the first one."""
    if plan.forecast is None or best.forecast is None:
        return _memory_against(plan, best)
    ours, theirs = plan.forecast.time, best.forecast.time
    slower = ours.step_time_s / theirs.step_time_s - 1
    deltas = {part: spent - time_parts(theirs).get(part, 0.0) for part, spent in time_parts(ours).items()}
    return f"{_slower(slower)}: {_deltas(plan, deltas, theirs.step_time_s)}; {_memory_against(plan, best)}"


def _slower(share: float) -> str:
    if abs(share) < 5e-4:
        return "as fast"
    return f"{percent(abs(share), 1)} {'slower' if share > 0 else 'faster'}"


def _deltas(plan: Plan, deltas: dict[str, float], step_time_s: float) -> str:
    largest = [(part, delta) for part, delta in deltas.items() if abs(delta) > 1e-3 * step_time_s]
    largest.sort(key=lambda each: -abs(each[1]))
    words = [
        f"{'+' if delta > 0 else '-'}{seconds(abs(delta))} {part_name(part)}{_link(plan, part) if delta > 0 else ''}"
        for part, delta in largest[:3]
    ]
    return ", ".join(words) or "no part of the step differs by more than a thousandth"


def _memory_against(plan: Plan, best: Plan) -> str:
    delta = plan.needed_bytes - best.needed_bytes
    if not delta:
        return "the same memory"
    return f"{readable_bytes(abs(delta))} {'more' if delta >= 0 else 'less'} memory"


def sentences(reasons: Why) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Return the reasons by heading, without empty ones."""
    every = (
        ("Why this plan", reasons.chosen),
        ("Why not the others", reasons.others),
        ("What does not fit", reasons.too_large),
        ("What is ruled out", reasons.refused),
    )
    return [(heading, lines) for heading, lines in every if lines]


# --- What-if: more devices, a larger batch, faster links, more memory

SubjectOf = Callable[[Cluster, int], Subject]
"""``subject_of(cluster, samples)`` returns the subject to predict for, with so many samples per step."""

_NOTHING = 5e-4  # relative change of speed that counts as none
_WORTH = 0.01  # by how much another model has to be faster
_FARTHEST = 2  # times the devices, up to which the next number of devices is tried


@dataclass(frozen=True)
class WhatIf:
    """One change of the circumstances and its outcome.

    Args:
        change: The change in words.
        outcome: The outcome in words.
        plan: The best plan under the change; None when nothing fits.
        speed_up: Samples per second under the change over those now; None when nothing fits.
    """

    change: str
    outcome: str
    plan: Plan | None = None
    speed_up: float | None = None


_Change = tuple[str, Plan | None]  # in words, with the best plan then


@paused_collection()
def what_if(
    subject_of: SubjectOf,
    found: Found,
    objective: Objective = "tokens_per_s",
    limit_s: float | None = None,
    slower: float = 1.0,
    others: Sequence[tuple[str, SubjectOf]] = (),
) -> tuple[WhatIf, ...]:
    """Predict the strategies that were found, and those that did not fit, under changed circumstances.

    Nothing is searched again: strategies that the search has found are considered, and where there is more memory, or
    more of something that takes it, what the best of them may become: with less recomputed, with nothing offloaded, and
    with larger micro-batches. Methods that a search uses only by name are added to the best plan. What changes the most
    comes first.

    Args:
        subject_of: Returns the subject for a cluster and a number of samples per step.
        found: The result, with at least one plan that has a forecast.
        objective: The objective that ranks its plans, and those under each change.
        limit_s: Seconds of processor time after which no other change is tried; None: no limit.
        slower: Seconds of a step over those that the subjects predict.
        others: Models to compare with, by what is changed about them; those that are no faster are left out.
    """
    if found.plans[0].forecast is None:
        return ()
    limit, every = TimeLimit(limit_s), []
    with limit.watched(), contextlib.suppress(OutOfTimeError):
        for words, of_other in others:
            changed = _outcome(words, found.plans[0], _then(of_other, found, objective), slower)
            every += [changed] if changed.speed_up is not None and changed.speed_up > 1 + _WORTH else []
        for change, plan in _changes(subject_of, found, objective):
            every.append(_outcome(change, found.plans[0], plan, slower))
            if limit.is_over:
                break
    return tuple(sorted(every, key=_change, reverse=True))


def _then(subject_of: SubjectOf, found: Found, objective: Objective) -> Plan | None:
    """Return the best of what was found for another model, on the same cluster."""
    known = found.plans[0].forecast
    assert known is not None
    return _best(_replanned(subject_of(known.cluster, known.samples), found, known.samples), objective)


def _changes(subject_of: SubjectOf, found: Found, objective: Objective) -> Iterator[_Change]:
    best = found.plans[0]
    assert best.forecast is not None
    cluster, samples = best.forecast.cluster, best.forecast.samples

    def outcome(change: str, where: Cluster, number: int, *, may_relax: bool = True) -> _Change:
        subject = subject_of(where, number)
        plan = _best(_replanned(subject, found, number), objective)
        return change, _relaxed(subject, plan, objective) if may_relax else plan

    yield from _more_devices(subject_of, found, cluster, samples, objective)
    yield outcome(f"twice the batch, {2 * samples} samples", cluster, 2 * samples)
    for words, faster in _faster_links(cluster):
        yield outcome(words, faster, samples, may_relax=False)
    roomier = dataclasses.replace(
        cluster, device=dataclasses.replace(cluster.device, memory_bytes=2 * cluster.device.memory_bytes)
    )
    yield outcome("twice the memory on every device", roomier, samples)
    # At last, since a model is traced anew for each.
    subject = subject_of(cluster, samples)
    yield from _with_options(subject, best)
    yield from _without_kernels(subject, best)


def _change(each: WhatIf) -> float:
    """Return how much a change matters: by the speed of what trains faster then; nothing fits at last."""
    return -math.inf if each.speed_up is None else abs(each.speed_up - 1)


def _with_options(subject: Subject, best: Plan) -> Iterator[_Change]:
    """Add to the best plan each method that makes computing faster, and that a search uses only by name."""
    for method in _by_name_alone(subject.half_dtype):
        if method.method_name in best.strategy:
            continue
        others = (each for each in best.strategy.methods if isinstance(each, Method))
        kept = [each for each in others if method.role is None or each.role is not method.role]
        plan = _planned(subject, Strategy([*kept, method]), best.step.num_micro_batches)
        if plan is not None and plan.fits and method.method_name in plan.strategy:
            yield f"--include {method.method_name} ({method.summary})", plan


def _without_kernels(subject: Subject, best: Plan) -> Iterator[_Change]:
    """Take from the best plan the method that replaces kernels, for those whose model or machine cannot have it."""
    method = find_method(best.strategy, lambda each: each.role is Role.KERNELS)
    if method is not None:
        plan = _planned(subject, best.strategy.without(method.method_name), best.step.num_micro_batches)
        yield f"without {method.method_name}", plan if plan is not None and plan.fits else None


def _by_name_alone(half_dtype: str) -> Iterator[Method]:
    """Yield methods that fuse kernels or compute in fewer bits, where a search does not use them for every model."""
    for method in known_methods():
        if method.role is Role.PRECISION:
            if not method.search_options(SearchScope(half_dtype=half_dtype)):
                yield method.parse(None).on_half(half_dtype)
        elif method.role is Role.KERNELS or method.product_dtype is not None:
            yield method.parse(None)


def _faster_links(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    if cluster.num_devices > cluster.devices_per_node:
        yield "links between nodes twice as fast", with_faster_link(cluster, "inter")
    if min(cluster.num_devices, cluster.devices_per_node) > 1:
        yield "links inside a node twice as fast", with_faster_link(cluster, "intra")


def _more_devices(
    subject_of: SubjectOf, found: Found, cluster: Cluster, samples: int, objective: Objective
) -> Iterator[_Change]:
    """Predict the next number of devices over which some strategy divides the batch evenly."""
    now, per_node = cluster.num_devices, cluster.devices_per_node
    whole_nodes = now % per_node == 0 and now > per_node
    for more in range(now + 1, _FARTHEST * now + 1):
        if whole_nodes and more % per_node:
            continue
        subject = subject_of(cluster.resized(more), samples)
        wider = (each for plan in _every(found) for each in _spread(plan, now, more, samples))
        plan = _best((_planned(subject, strategy, parts) for strategy, parts in wider), objective)
        if plan is not None:
            yield f"{more} devices instead of {now}", _relaxed(subject, plan, objective)
            return


def _spread(plan: Plan, now: int, more: int, samples: int) -> Iterator[tuple[Strategy, int]]:
    """Yield a strategy with one data-parallel axis enlarged, where the batch still divides evenly."""
    for axis, size in plan.step.axes:
        if axis not in SAMPLED or (more * size) % now:
            continue
        longer = more * size // now
        axes = [(name, longer if name == axis else length) for name, length in plan.step.axes]
        replicas = math.prod(length for name, length in axes if name in SAMPLED)
        parts = {plan.step.num_micro_batches, max(1, round(plan.step.num_micro_batches * now / more))}
        for number_of_parts in sorted(parts):
            if samples % (replicas * number_of_parts) == 0:
                yield plan.strategy.with_method(mesh_method(tuple(axes))), number_of_parts


def _relaxed(subject: Subject, plan: Plan | None, objective: Objective) -> Plan | None:
    """Return the best of what a plan may become where memory is less short than where it was found."""
    if plan is None or objective == "memory":
        return plan
    parts = plan.step.num_micro_batches
    numbers = sorted(number for number in {parts, parts // 2 or 1, parts // 4 or 1} if parts % number == 0)
    others = ((strategy, number) for strategy in _lighter(plan.strategy) for number in numbers)
    lighter = (_planned(subject, *other) for other in others if other != (plan.strategy, parts))
    return _best((plan, *lighter), objective)


def _lighter(strategy: Strategy) -> Iterator[Strategy]:
    """Yield the strategy, and the same with less recomputed; then both with nothing offloaded."""
    offload = find_method(strategy, lambda each: each.role is Role.OFFLOADING)
    for kept in (strategy, *([strategy.without(offload.method_name)] if offload is not None else [])):
        recompute = find_method(kept, lambda each: each.role is Role.RECOMPUTATION)
        yield kept
        if recompute is not None:
            without = kept.without(recompute.method_name)
            yield without
            for (option,) in searched(Role.RECOMPUTATION):
                if option != recompute:
                    yield without.with_method(option)


def _replanned(subject: Subject, found: Found, samples: int) -> Iterator[Plan | None]:
    for plan in _every(found):
        for parts in sorted(_cuts(plan, samples)):
            yield _planned(subject, plan.strategy, parts)


def _cuts(plan: Plan, samples: int) -> set[int]:
    """Return the same number of micro-batches, and for a larger batch also proportionally more."""
    before = plan.forecast.samples if plan.forecast is not None else samples
    return {plan.step.num_micro_batches, plan.step.num_micro_batches * max(1, samples // before)}


def _every(found: Found) -> tuple[Plan, ...]:
    return (*found.plans, *found.too_large)


def _planned(subject: Subject, strategy: Strategy, num_micro_batches: int) -> Plan | None:
    pipeline = find_method(strategy, lambda each: each.axis == "pipeline")
    if pipeline is not None and pipeline.asked_micro_batches is not None:
        strategy = strategy.with_method(pipeline.model_copy(update={"num_micro_batches": num_micro_batches}))
    try:
        return subject.plan(strategy, num_micro_batches)
    except MeshwrightError:
        return None  # invalid under this change


def _best(plans: Iterable[Plan | None], objective: Objective) -> Plan | None:
    fitting = [plan for plan in plans if plan is not None and plan.fits and plan.forecast is not None]
    return min(fitting, key=lambda plan: rank_of_plan(plan, objective), default=None)


def _samples_per_s(plan: Plan) -> float:
    return plan.forecast.samples_per_s if plan.forecast is not None else 0.0


def _outcome(change: str, before: Plan, after: Plan | None, slower: float) -> WhatIf:
    if after is None or after.forecast is None or before.forecast is None:
        return WhatIf(change, "none of these strategies fits then")
    faster = after.forecast.samples_per_s / before.forecast.samples_per_s
    rate, now = after.forecast.tokens_per_s, before.forecast.tokens_per_s
    unit = "tokens/s" if rate is not None else "samples/s"
    pair = (now, rate) if now is not None and rate is not None else (_samples_per_s(before), _samples_per_s(after))
    if abs(faster - 1) < _NOTHING and after.strategy == before.strategy:
        return WhatIf(change, "no difference", after, faster)
    sign = "+" if faster >= 1 else "-"
    rates = f"{number(pair[1] / slower)} {unit} instead of {number(pair[0] / slower)}"
    words = f"{rates} ({sign}{percent(abs(faster - 1), 1)}), {seconds(slower * after.forecast.time.step_time_s)} a step"
    price, earlier = price_per_billion_tokens(after), price_per_billion_tokens(before)
    if price is not None and earlier is not None and abs(price / earlier - 1) > 1e-3:
        words += f", {number(slower * price)} instead of {number(slower * earlier)} USD per 1e9 tokens"
    words += "" if short(after) == short(before) else f"; best then: {short(after)}"
    return WhatIf(change, words, after, faster)
