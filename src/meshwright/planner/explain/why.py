"""Why this plan and not that one: what binds the chosen one, and where each other loses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.planner.explain.figures import MOMENTS, memory_classes, mfu, per_gpu, short, with_micro_batches
from meshwright.planner.explain.links import slowest_link
from meshwright.planner.plan import Plan
from meshwright.planner.search import Found
from meshwright.planner.sizes import readable_bytes
from meshwright.planner.table import MEMORY_CLASSES
from meshwright.planner.words import number, part_name, percent, seconds, time_parts

_TOLD = 0.02  # of the step: smaller parts are not worth a word
_REFUSALS = 8
_LABELS = dict(MEMORY_CLASSES)


@dataclass(frozen=True)
class Why:
    """The reasons, as sentences.

    Args:
        chosen: What the first plan reaches and what binds it.
        others: Of every other plan that fits, where it loses.
        too_large: Of plans that do not fit, by how much and which memory.
        refused: Strategies that cannot train this model here.
    """

    chosen: tuple[str, ...]
    others: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def why(found: Found) -> Why:
    """Explains a search's result.

    Args:
        found: With at least one plan, in the order of its objective.
    """
    best = found.plans[0]
    intro = f"{short(best)} is the strategy given."
    if found.num_considered > 1 or len(found.plans) > 1:
        looked = f" ({found.num_considered:,} strategies considered, {found.num_predicted:,} simulated)"
        more = "" if found.is_complete else "; there are more that could be better"
        intro = f"{short(best)} comes first{looked if found.num_considered else ''}{more}."
    return Why(
        chosen=(intro, *time_sentences(best), memory_sentence(best)),
        others=_told_once((with_micro_batches(plan), against(plan, best)) for plan in found.plans[1:]),
        too_large=tuple(f"{with_micro_batches(plan)}: {too_large(plan)}" for plan in found.too_large),
        refused=tuple(f"{strategy}: {reason}" for strategy, reason in found.refused[:_REFUSALS]),
    )


def _told_once(lines: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Plans and their reasons; one line for plans of the same reason."""
    plans: dict[str, list[str]] = {}
    for plan, reason in lines:
        plans.setdefault(reason, []).append(plan)
    return tuple(f"{'; '.join(dict.fromkeys(alike))}: {reason}" for reason, alike in plans.items())


def time_sentences(plan: Plan) -> tuple[str, ...]:
    """How fast a plan is, and where its time goes; nothing where no cluster is known."""
    if plan.forecast is None:
        return ()
    time, rate, used = plan.forecast.time, per_gpu(plan), mfu(plan)
    said = [f"A step takes {seconds(time.step_time_s)}"]
    known = plan.forecast.samples_per_s
    said.append(f"{number(known)} samples/s" if rate is None else f"{number(rate)} tokens/s per device")
    said += [f"MFU {percent(used, 1)}"] if used is not None else []
    parts = sorted(time_parts(time).items(), key=lambda part: -part[1])
    shares = [
        f"{percent(spent / time.step_time_s)} {part_name(part)}{_link(plan, part)}"
        for part, spent in parts
        if spent > _TOLD * time.step_time_s
    ]
    return ", ".join(said) + ".", f"Of the step: {', '.join(shares)}."


def _link(plan: Plan, part: str) -> str:
    """The collective behind a part of the step."""
    if part not in ("inline_s", "exposed_s"):
        return ""
    link = slowest_link(plan, hidden=part == "exposed_s")
    return "" if link is None else f" (most of it {link})"


def memory_sentence(plan: Plan) -> str:
    """What a plan holds at its peak, when, and what is left."""
    held = f"The peak is {_with_gaps(plan)}"
    if plan.limit_bytes is not None:
        left = plan.limit_bytes - plan.needed_bytes
        held += f" of the {readable_bytes(plan.limit_bytes)} that tensors can have"
        held += f" ({readable_bytes(left)} left)" if left >= 0 else f" ({readable_bytes(-left)} too much)"
    when = f", {MOMENTS[plan.forecast.peak.moment]}" if plan.forecast is not None else ""
    return f"{held}{when}: {_largest_classes(plan)}.{_on_host(plan)}"


def _on_host(plan: Plan) -> str:
    """What offloading needs beside the device."""
    if not plan.host_bytes:
        return ""
    room = "see that it is there"
    if plan.host_limit_bytes is not None:
        room = f"of the {readable_bytes(plan.host_limit_bytes)} that each can have of its node's"
    return f" Host memory holds {readable_bytes(plan.host_bytes)} for every device: {room}."


def _with_gaps(plan: Plan) -> str:
    needed = readable_bytes(plan.needed_bytes)
    reserved = None if plan.forecast is None else plan.forecast.peak.reserved_bytes
    if reserved is None or reserved >= plan.needed_bytes:
        return needed
    return f"{readable_bytes(reserved)}, with the gaps that an allocator leaves {needed}"


def _largest_classes(plan: Plan, most: int = 3) -> str:
    classes = memory_classes(plan)
    whole = max(sum(classes.values()), 1)
    largest = sorted(classes.items(), key=lambda each: -each[1])[:most]
    return ", ".join(f"{percent(size / whole)} {_LABELS.get(name, name)}" for name, size in largest)


def too_large(plan: Plan) -> str:
    """By how much a plan does not fit, and what takes the memory."""
    if plan.fits_device and not plan.fits_host:
        return f"needs more host memory than there is: {plan.host_text()}"
    over = plan.needed_bytes - (plan.limit_bytes or 0)
    when = f" {MOMENTS[plan.forecast.peak.moment]}" if plan.forecast is not None else ""
    return f"needs {readable_bytes(plan.needed_bytes)}{when}, {readable_bytes(over)} too much: {_largest_classes(plan)}"


def against(plan: Plan, best: Plan) -> str:
    """Where a plan loses against the first one, in one line."""
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
    told = [(part, delta) for part, delta in deltas.items() if abs(delta) > 1e-3 * step_time_s]
    told.sort(key=lambda each: -abs(each[1]))
    words = [
        f"{'+' if delta > 0 else '-'}{seconds(abs(delta))} {part_name(part)}{_link(plan, part) if delta > 0 else ''}"
        for part, delta in told[:3]
    ]
    return ", ".join(words) or "no part of the step differs by more than a thousandth"


def _memory_against(plan: Plan, best: Plan) -> str:
    delta = plan.needed_bytes - best.needed_bytes
    if not delta:
        return "the same memory"
    return f"{readable_bytes(abs(delta))} {'more' if delta >= 0 else 'less'} memory"


def sentences(reasons: Why) -> Sequence[tuple[str, tuple[str, ...]]]:
    """The reasons under their headings, without what is empty."""
    every = (
        ("Why this plan", reasons.chosen),
        ("Why not the others", reasons.others),
        ("What does not fit", reasons.too_large),
        ("What cannot be", reasons.refused),
    )
    return [(heading, lines) for heading, lines in every if lines]
