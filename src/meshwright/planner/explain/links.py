"""Which collectives a step runs, over which links, and how long each would take alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshwright.cost import Calibration, Cluster, Link, Step, Traffic, fitted, seconds_of
from meshwright.cost.collectives import group_of
from meshwright.planner.explain.figures import every_step
from meshwright.planner.plan import Plan


@dataclass(frozen=True)
class LinkTime:
    """One kind of collective in a step.

    Args:
        kind: As in ``Traffic``.
        axis: Over which ranks.
        moment: When.
        between_nodes: Whether the ranks lie in several nodes.
        seconds: Of a step, were it alone.
        hidden: Whether it can run beside computing.
        bound_inside: Whether faster links inside nodes would help more than faster ones between them, though the ranks
            lie in several nodes.
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
        return f"{self.kind} over {self.axis} in {self.moment}, {where}"


def links(plan: Plan) -> tuple[LinkTime, ...]:
    """The collectives of a plan, longest first; of a pipeline's ranks the slowest counts."""
    if plan.forecast is None:
        return ()
    known = plan.forecast.calibration or plan.forecast.cluster.calibration or fitted()
    found: dict[LinkTime, float] = {}
    for step in {id(step): step for step in every_step(plan)}.values():
        own: dict[LinkTime, float] = {}
        for traffic in step.traffic:
            duration = seconds_of(step, traffic, plan.forecast.cluster, known)
            group = group_of(step.axes, (traffic.axis,), plan.forecast.cluster.devices_per_node, step.counted_again)
            spans = group.nodes > 1
            bound_inside = spans and _is_bound_inside(step, traffic, plan.forecast.cluster, known)
            key = LinkTime(traffic.kind, traffic.axis, traffic.moment, spans, 0.0, traffic.hidden, bound_inside)
            own[key] = own.get(key, 0.0) + duration
        for key, duration in own.items():
            found[key] = max(found.get(key, 0.0), duration)
    every = [dataclasses.replace(key, seconds=spent) for key, spent in found.items()]
    return tuple(sorted(every, key=lambda link: -link.seconds))


def _is_bound_inside(step: Step, traffic: Traffic, cluster: Cluster, known: Calibration) -> bool:
    """A ring runs on both tiers of links at once, and waits for the slower: as seen by what each would do if faster."""

    def faster(link: Link) -> Link:
        return dataclasses.replace(link, bytes_per_s=2 * link.bytes_per_s)

    inside = dataclasses.replace(cluster, intra=faster(cluster.intra))
    between = dataclasses.replace(cluster, inter=faster(cluster.inter))
    return seconds_of(step, traffic, inside, known) < seconds_of(step, traffic, between, known)


def slowest_link(plan: Plan, *, hidden: bool) -> LinkTime | None:
    """The collective that takes longest, of those that can hide or of those that blocks wait for."""
    return next((link for link in links(plan) if link.hidden == hidden and link.kind != "send"), None)
