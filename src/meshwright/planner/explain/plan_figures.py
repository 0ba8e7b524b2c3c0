"""Figures of one plan as plain values: speed, use of hardware, price, the whole run, memory and collectives by link."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from meshwright.cost import (
    HALF,
    Calibration,
    Cluster,
    Device,
    Link,
    Step,
    Traffic,
    axis_parts,
    fitted,
    moments,
    seconds_of,
)
from meshwright.cost.device_time import group_of
from meshwright.errors import ConfigError
from meshwright.methods import Role, find_method
from meshwright.planner.plans import Plan, seconds, short_strategy, time_parts

MOMENTS = {
    "gather": "while weights or buffers are gathered for forward",
    "loss": "at the start of backward (loss)",
    "recomputation": "in the backward of the last block",
    "reduction": "at the reduction of the last gradients",
    "update": "at the update",
}
_BILLION = 1e9


def short(plan: Plan) -> str:
    """Format a plan's strategy in one line: its axes, and the methods with their non-default keys."""
    return short_strategy(plan.strategy, plan.step.axes)


def with_micro_batches(plan: Plan) -> str:
    """Format :func:`short` with the micro-batches."""
    return f"{short(plan)}; {plan.step.num_micro_batches} x {plan.micro_batch}"


def every_step(plan: Plan) -> tuple[Step, ...]:
    """Return the step of every pipeline rank, or the one step of all ranks."""
    return plan.steps or (plan.step,)


def per_gpu(plan: Plan) -> float | None:
    """Return the tokens per second and device; None where samples are no tokens, or time is unknown."""
    whole = plan.forecast.tokens_per_s if plan.forecast is not None else None
    return whole / plan.forecast.cluster.num_devices if whole is not None and plan.forecast is not None else None


def model_flops_per_s(plan: Plan) -> float | None:
    """Return the model's FLOP/s per device: forward and backward, without recomputation.

    Under a causal mask only the needed half of attention's scores counts. None where FLOPs or time are unknown.
    """
    if plan.forecast is None or plan.model_flops is None:
        return None
    return plan.model_flops / plan.forecast.time.step_time_s


def mfu(plan: Plan) -> float | None:
    """Return the model FLOPs utilisation (Chowdhery et al. 2022), of the dense peak in the products' precision."""
    rate = model_flops_per_s(plan)
    if rate is None or plan.forecast is None:
        return None
    return rate / plan.forecast.cluster.device.peak_flops_per_s(_precision(plan))


def published_mfu(plan: Plan) -> tuple[float, str] | None:
    """Return the highest MFU of published runs in the plan's precision, and of which; None where too few are known."""
    return highest_mfu(plan, _precision(plan))


def _precision(plan: Plan) -> str:
    ops = [op.dtype for step in every_step(plan) for block in step.blocks for op in block.ops if op.kind == "matmul"]
    if ops:
        return max(sorted(set(ops)), key=ops.count)
    lowered = find_method(plan.strategy, lambda each: each.role is Role.PRECISION) is not None
    return HALF if lowered or plan.step.compute_itemsize == 2 else "fp32"


def price_per_billion_tokens(plan: Plan) -> float | None:
    """Return US dollars per 1e9 tokens; None where the device has no price, or samples are no tokens."""
    known = plan.forecast
    if known is None or known.price_per_step is None or known.tokens_per_sample is None:
        return None
    return known.price_per_step / (known.samples * known.tokens_per_sample) * _BILLION


# --- The whole run

# Unexpected interruptions of Llama 3 405B on 16,384 H100: 419 in 54 days (Grattafiori et al. 2024, §3.3.4).
_DEVICE_HOURS_OF_AN_INTERRUPTION = 16_384 * 54 * 24 / 419


@dataclass(frozen=True)
class RunLength:
    """The length of a whole run, in tokens or in optimizer steps.

    Args:
        tokens: Tokens to train on; the last step may go beyond them.
        steps: Optimizer steps.

    Raises:
        ConfigError: When it is no length, or there are two.
    """

    tokens: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.steps is None):
            raise ConfigError(
                "A run has one length",
                expected="a number of tokens, or a number of steps",
                got="neither" if self.tokens is None else f"{self.tokens!r} tokens and {self.steps!r} steps",
                fix="give one of them",
            )
        for name, value in (("tokens", self.tokens), ("steps", self.steps)):
            if value is not None and not 1 <= value < math.inf:
                raise ConfigError(
                    f"The {name} of a run are no number of them",
                    expected="1 or more",
                    got=repr(value),
                    fix="correct the number",
                )

    def num_steps(self, samples: int, tokens_per_sample: int | None) -> int:
        """Return the optimizer steps of the run.

        Args:
            samples: Samples per step over all ranks.
            tokens_per_sample: None where a sample has no number of tokens.

        Raises:
            ConfigError: For a length in tokens, if samples have none.
        """
        if self.tokens is None:
            assert self.steps is not None
            return self.steps
        if tokens_per_sample is None:
            raise ConfigError(
                "The samples of this model have no number of tokens",
                expected="the length of a run in steps",
                got=f"{self.tokens:,.0f} tokens",
                fix="give the steps",
            )
        return math.ceil(self.tokens / (samples * tokens_per_sample))


@dataclass(frozen=True)
class WholeRun:
    """Time and price of a whole run, if nothing interrupts it.

    Args:
        steps: Optimizer steps.
        tokens: Tokens of these steps; None where samples are no tokens.
        seconds: From the first step to the last.
        interval_s: The times between which four of five runs are expected; None where that is not known.
        device_hours: Hours of all devices together.
        price_usd: At the price of a device and hour; None if it has none.
        interruptions: How many there would be at the rate of Llama 3's training.
    """

    steps: int
    tokens: int | None
    seconds: float
    interval_s: tuple[float, float] | None
    device_hours: float
    price_usd: float | None
    interruptions: float


def whole_run(plan: Plan, length: RunLength) -> WholeRun | None:
    """Return what a run of a given length takes by a plan; None where time is unknown.

    Loading, evaluation and checkpoints are not counted. The rate of interruptions is that of Grattafiori et al. 2024
    (§3.3.4): 419 in 54 days of 16,384 devices.

    Raises:
        ConfigError: For a length in tokens where samples are no tokens.
    """
    known, expected = plan.forecast, step_interval(plan)
    if known is None:
        return None
    steps = length.num_steps(known.samples, known.tokens_per_sample)
    hours = steps * known.device_hours_per_step
    return WholeRun(
        steps,
        None if known.tokens_per_sample is None else steps * known.samples * known.tokens_per_sample,
        steps * known.time.step_time_s,
        None if expected is None else (steps * expected.low_s, steps * expected.high_s),
        hours,
        None if known.price_per_step is None else steps * known.price_per_step,
        hours / _DEVICE_HOURS_OF_AN_INTERRUPTION,
    )


def memory_classes(plan: Plan) -> dict[str, int]:
    """Return the nonzero bytes by class on the device at the highest peak of any rank."""
    memory = plan.forecast.peak.memory if plan.forecast is not None else plan.memory
    return on_device(_nonzero(memory))


def on_device(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the classes of memory that are on the device."""
    return {name: size for name, size in sizes.items() if not name.startswith(("host_", "disk_"))}


# --- Collectives by link


@dataclass(frozen=True)
class LinkTime:
    """One kind of collective in a step.

    Args:
        kind: Kind of ``Traffic``.
        axis: Mesh axis of its ranks.
        moment: Forward, backward or update.
        between_nodes: Whether the ranks span several nodes.
        seconds: Seconds per step if nothing else ran.
        hidden: Whether it can overlap with computing.
        bound_inside: Whether faster links inside nodes would help more than faster ones between them, though the ranks
            span several nodes.
    """

    kind: str
    axis: str
    moment: str
    between_nodes: bool
    seconds: float
    hidden: bool
    bound_inside: bool = False

    def __str__(self) -> str:
        where = "between nodes" if self.between_nodes else "inside a node"
        where += ", bound by the links inside them" if self.bound_inside else ""
        return f"{self.kind} over {' x '.join(axis_parts(self.axis))} in {self.moment}, {where}"


def links(plan: Plan) -> tuple[LinkTime, ...]:
    """Return the collectives of a plan, longest first; the slowest pipeline rank counts."""
    if plan.forecast is None:
        return ()
    known = plan.forecast.calibration or plan.forecast.cluster.calibration or fitted()
    found: dict[LinkTime, float] = {}
    for step in {id(step): step for step in every_step(plan)}.values():
        own: dict[LinkTime, float] = {}
        for traffic in step.traffic:
            duration = seconds_of(step, traffic, plan.forecast.cluster, known)
            group = group_of(
                step.axes, axis_parts(traffic.axis), plan.forecast.cluster.devices_per_node, step.counted_again
            )
            spans = group.nodes > 1
            bound_inside = spans and _is_bound_inside(step, traffic, plan.forecast.cluster, known)
            key = LinkTime(traffic.kind, traffic.axis, traffic.moment, spans, 0.0, traffic.hidden, bound_inside)
            own[key] = own.get(key, 0.0) + duration
        for key, duration in own.items():
            found[key] = max(found.get(key, 0.0), duration)
    every = [dataclasses.replace(key, seconds=spent) for key, spent in found.items()]
    return tuple(sorted(every, key=lambda link: -link.seconds))


def _is_bound_inside(step: Step, traffic: Traffic, cluster: Cluster, known: Calibration) -> bool:
    # A ring uses both tiers of links at once and waits for the slower one: find it by doubling the speed of each.
    inside, between = with_faster_link(cluster, "intra"), with_faster_link(cluster, "inter")
    return seconds_of(step, traffic, inside, known) < seconds_of(step, traffic, between, known)


def with_faster_link(cluster: Cluster, tier: str) -> Cluster:
    """Return the cluster with links twice as fast, inside nodes (``intra``) or between them (``inter``)."""
    link: Link = getattr(cluster, tier)
    faster: Any = {tier: dataclasses.replace(link, bytes_per_s=2 * link.bytes_per_s)}
    return dataclasses.replace(cluster, **faster)


def slowest_link(plan: Plan, *, hidden: bool) -> LinkTime | None:
    """Return the longest collective, of those that can overlap with computing or of those that cannot."""
    return next((link for link in links(plan) if link.hidden == hidden and link.kind != "send"), None)


# --- Plans as plain values

_OF_LINK = ("kind", "axis", "moment", "between_nodes", "bound_inside", "hidden")


def plan_entry(plan: Plan, length: RunLength | None = None) -> dict[str, Any]:
    """Return a plan with all its figures as plain values.

    Args:
        plan: The plan.
        length: Of a whole run, to say what that takes.
    """
    run = None if length is None else whole_run(plan, length)
    return {
        "summary": short(plan),
        "strategy": json.loads(plan.strategy.to_json()),
        "axes": dict(plan.step.axes),
        "num_micro_batches": plan.step.num_micro_batches,
        "micro_batch": plan.micro_batch,
        "fits": plan.fits,
        "time": time_entry(plan),
        "run": None if run is None else dataclasses.asdict(run),
        "memory": _memory(plan),
        "building": dataclasses.asdict(plan.building),
        "traffic": [
            {name: getattr(link, name) for name in _OF_LINK} | {"seconds_alone": link.seconds} for link in links(plan)
        ],
        "notices": list(plan.notices),
        "gaps": list(plan.gaps),
    }


def time_entry(plan: Plan) -> dict[str, Any] | None:
    """Return the seconds and the rates; None without a cluster."""
    known, expected, highest = plan.forecast, step_interval(plan), published_mfu(plan)
    if known is None:
        return None
    return {
        "step_time_s": known.time.step_time_s,
        "interval_s": None if expected is None else [expected.low_s, expected.high_s],
        "interval_basis": None if expected is None else f"{expected.num_runs} {expected.basis}",
        "parts_s": time_parts(known.time),
        "binds": known.time.binds,
        "samples": known.samples,
        "tokens_per_sample": known.tokens_per_sample,
        "samples_per_s": known.samples_per_s,
        "tokens_per_s": known.tokens_per_s,
        "tokens_per_s_per_device": per_gpu(plan),
        "model_flops_per_s_per_device": model_flops_per_s(plan),
        "mfu": mfu(plan),
        "highest_published_mfu": None if highest is None else highest[0],
        "price_per_step_usd": known.price_per_step,
        "price_per_billion_tokens_usd": price_per_billion_tokens(plan),
    }


def _memory(plan: Plan) -> dict[str, Any]:
    steps = every_step(plan)
    peaks = plan.forecast.peaks if plan.forecast is not None else ()
    return {
        "limit_bytes": plan.limit_bytes,
        "needed_bytes": plan.needed_bytes,
        "host_limit_bytes": plan.host_limit_bytes,
        "host_bytes": plan.host_bytes,
        "ranks": [
            {
                "rank": rank,
                "moment": peaks[rank].moment if peaks else None,
                "allocated_bytes": peaks[rank].allocated_bytes if peaks else None,
                "reserved_bytes": peaks[rank].reserved_bytes if peaks else None,
                "moments": {name: _nonzero(memory) for name, memory in moments(step).items()},
            }
            for rank, step in enumerate(steps)
        ],
    }


def _nonzero(memory: Any) -> dict[str, int]:
    return {name: size for name, size in dataclasses.asdict(memory).items() if size}


# --- How far off a predicted step time may be, and what nobody has reached, by published runs of the same kind.

# [Note: intervals] ``benchmarks/plan_intervals.py`` predicts every published run by what is known of its engine, and
# writes which ratios of measured to predicted step times four of five runs lie between, by kind of device and of
# layout, into ``intervals.json``: widened, so that this holds for runs of a project that the others say nothing of. A
# plan takes the interval of its kind. Where too few runs are known of its very device, or of such layouts on it, the
# interval of others is taken and is twice as wide. The same file has the highest MFU that any run of a kind has
# reached, by precision.

FEWEST = 8  # runs from which on a kind has an interval of its own
ANY = "any"


@dataclass(frozen=True)
class Interval:
    """Step times between which four of five runs are expected.

    Args:
        low_s: The shorter one.
        high_s: The longer one.
        num_runs: Published runs that it is taken from.
        basis: Which runs these are.
    """

    low_s: float
    high_s: float
    num_runs: int
    basis: str

    def __str__(self) -> str:
        return f"{seconds(self.low_s)} to {seconds(self.high_s)} in four of five cases, by {self.num_runs} {self.basis}"


def layout_kind(axes: Sequence[tuple[str, int]]) -> str:
    """Return the kind of layout by which errors are told apart: what is hardest to predict names it."""
    sizes = dict(axes)
    divided = [axis for axis in ("expert", "pipeline", "tensor") if sizes.get(axis, 1) > 1]
    return divided[0] if divided else "data"


def kinds_of(device: Device, axes: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Return the kinds of runs whose errors may be a plan's: of its device and layout, then of fewer of both."""
    return tuple(f"{each}/{kind}" for each in (device.efficiency, ANY) for kind in (layout_kind(axes), ANY))


def step_interval(plan: Plan) -> Interval | None:
    """Return the interval of a plan's step time; None without a cluster, and on a machine that was measured itself."""
    if plan.forecast is None or plan.forecast.cluster.calibration is not None:
        return None
    device, ratios = plan.forecast.cluster.device, _known()["step_time"]
    axes = (("expert", 2),) if _is_sparse(plan) else plan.step.axes
    kind = next(kind for kind in kinds_of(device, axes) if kind in ratios)
    (where, layout), known = kind.split("/"), ratios[kind]
    basis = ("published runs" if layout == ANY else "published runs of such layouts") + f" on {where} devices"
    basis = basis.removesuffix(f" on {ANY} devices")
    lacks = [f"on {device.name}"] if where == ANY or device.name not in _known()["devices"] else []
    lacks += ["of such layouts"] if layout == ANY else []
    basis += f"; too few are known {' and '.join(lacks)}, so it is twice as wide" if lacks else ""
    wider, time = 2 if lacks else 1, plan.forecast.time.step_time_s
    return Interval(time * known["low"] ** wider, time * known["high"] ** wider, known["runs"], basis)


def _is_sparse(plan: Plan) -> bool:
    """Return whether tokens use few of a model's parameters, as with experts: what these take is hardest to predict."""
    known = plan.forecast
    if known is None or known.tokens_per_sample is None or plan.model_flops is None:
        return False
    dense = 6 * plan.building.num_drawn * known.samples * known.tokens_per_sample
    return plan.model_flops * known.cluster.num_devices < dense / 2


def highest_mfu(plan: Plan, precision: str) -> tuple[float, str] | None:
    """Return the highest MFU of published runs on a plan's kind of device, and of which runs it is.

    Args:
        plan: The plan.
        precision: Of its products: ``"half"``, ``"fp8"``, ``"fp4"`` or ``"fp32"``.

    Returns:
        Of such layouts where enough runs of them are known, and of any otherwise; None where too few are known.
    """
    if plan.forecast is None:
        return None
    device = plan.forecast.cluster.device.efficiency
    for kind, basis in ((layout_kind(plan.step.axes), "of such layouts on"), (ANY, "on")):
        known = _known()["highest_mfu"].get(f"{device}/{kind}/{precision}")
        if known is not None:
            return known["mfu"], f"{known['runs']:,} published runs {basis} {device} devices"
    return None


@functools.cache
def _known() -> dict[str, Any]:
    return json.loads((resources.files("meshwright.planner.explain") / "intervals.json").read_text())  # type: ignore[no-any-return]
