"""Which collectives a step runs, over which links, and how long each would take alone."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost import fitted, seconds_of
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
    """

    kind: str
    axis: str
    moment: str
    between_nodes: bool
    seconds: float
    hidden: bool

    def __str__(self) -> str:
        where = "between nodes" if self.between_nodes else "inside a node"
        return f"{self.kind} over {self.axis} in {self.moment}, {where}"


def links(plan: Plan) -> tuple[LinkTime, ...]:
    """The collectives of a plan, longest first; of a pipeline's ranks the slowest counts."""
    if plan.forecast is None:
        return ()
    known = plan.forecast.calibration or fitted()
    found: dict[LinkTime, float] = {}
    for step in {id(step): step for step in every_step(plan)}.values():
        own: dict[LinkTime, float] = {}
        for traffic in step.traffic:
            duration = seconds_of(step, traffic, plan.forecast.cluster, known)
            group = group_of(step.axes, (traffic.axis,), plan.forecast.cluster.devices_per_node)
            key = LinkTime(traffic.kind, traffic.axis, traffic.moment, group.nodes > 1, 0.0, traffic.hidden)
            own[key] = own.get(key, 0.0) + duration
        for key, duration in own.items():
            found[key] = max(found.get(key, 0.0), duration)
    every = [LinkTime(k.kind, k.axis, k.moment, k.between_nodes, spent, k.hidden) for k, spent in found.items()]
    return tuple(sorted(every, key=lambda link: -link.seconds))


def slowest_link(plan: Plan, *, hidden: bool) -> LinkTime | None:
    """The collective that takes longest, of those that can hide or of those that blocks wait for."""
    return next((link for link in links(plan) if link.hidden == hidden and link.kind != "send"), None)
