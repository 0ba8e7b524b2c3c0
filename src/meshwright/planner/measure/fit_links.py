"""From the seconds of collectives to links: what a call and a hop take, and the rate of every kind."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from meshwright.cost import Cluster, Constants, Efficiency, Link
from meshwright.cost.collectives import Group, Network, collective_s
from meshwright.planner.measure.samples import LinkSample, Residual, fitted_factor, residual
from meshwright.planner.measure.timing import Clock

_NEVER_BINDS = 1e30
_MIN_S = 1e-7  # files know no link without latency
_SMALL_BYTES = 2**15  # of messages that tell what a collective costs beside its bytes
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclasses.dataclass(frozen=True)
class Links:
    """What collectives take on a cluster."""

    cluster: Cluster
    efficiency: Efficiency
    constants: Constants

    @property
    def network(self) -> Network:
        """As the cost model knows it."""
        return Network(self.cluster, self.efficiency, self.constants)

    def predicted_s(self, sample: LinkSample) -> float:
        """What the cost model says of a sample."""
        return collective_s(sample.kind, sample.num_bytes, self._group(sample), self.network)

    def _group(self, sample: LinkSample) -> Group:
        per_node = self.cluster.devices_per_node
        if sample.tier == "inter":
            return Group(self.cluster.num_devices // per_node, 1)
        size = min(per_node, self.cluster.num_devices)
        return Group(size, size)


def fit_links(samples: Sequence[LinkSample], start: Links, clock: Clock) -> Links:
    """The links whose collectives take what was measured; as they were, where nothing was.

    Kinds share what a call and a hop take. They differ in the rate they reach, of which the best is the link's own;
    those of the nodes' own links count between nodes, too, where both were measured.
    """
    links = start
    for tier in ("intra", "inter"):
        mine = [sample for sample in samples if sample.tier == tier]
        if mine:
            links = _fit_tier(tier, mine, links, clock, first=tier == mine[0].tier == samples[0].tier)
    return links


def link_residuals(samples: Sequence[LinkSample], links: Links, clock: Clock) -> list[Residual]:
    """By tier and kind."""
    keys = dict.fromkeys((sample.tier, sample.kind) for sample in samples)
    return [
        residual(
            f"{kind} {tier}",
            [(links.predicted_s(s), s.timing.of(clock)) for s in samples if (s.tier, s.kind) == (tier, kind)],
        )
        for tier, kind in keys
    ]


def _fit_tier(tier: str, samples: Sequence[LinkSample], links: Links, clock: Clock, *, first: bool) -> Links:
    links = _with_link(links, tier, Link(_NEVER_BINDS, _MIN_S))
    if first:
        links = dataclasses.replace(links, efficiency=_equal_kinds(links.efficiency))
    links = dataclasses.replace(
        links,
        efficiency=dataclasses.replace(links.efficiency, **{tier: 1.0}),
        constants=dataclasses.replace(links.constants, hop=1.0),
    )
    links = _fit_latency(tier, samples, links, clock, calls=first)
    if first:
        links = _with_slow_start(samples, links, clock)
    large = [sample for sample in samples if sample.num_bytes > _SMALL_BYTES]
    rates = {kind: _rate(tier, [s for s in large if s.kind == kind], links, clock) for kind in _KINDS}
    known = {kind: rate for kind, rate in rates.items() if rate is not None}
    if not first:  # the kinds' fractions are known: the link has the rate at which most of them fit
        return _with_link(links, tier, Link(statistics.median(known.values()), _link(links, tier).latency_s))
    best = max(known.values())
    fractions = {kind: rate / best for kind, rate in known.items()}
    links = dataclasses.replace(links, efficiency=dataclasses.replace(links.efficiency, **fractions))
    return _with_link(links, tier, Link(best, _link(links, tier).latency_s))


def _fit_latency(tier: str, samples: Iterable[LinkSample], links: Links, clock: Clock, *, calls: bool) -> Links:
    """What a call takes (where it is not known yet) and a hop: least squares of relative errors of small messages."""
    small = [s for s in samples if s.num_bytes <= _SMALL_BYTES and s.kind != "reduce_scatter"]
    without = _with_call(links, 0.0)
    for _ in range(20):  # in turns, each given the other, neither below nothing: they converge at once
        if calls:
            terms = [
                (without.predicted_s(s), _with_call(without, 1.0).predicted_s(s) - without.predicted_s(s), s)
                for s in small
            ]
            links = _with_call(links, fitted_factor((fixed, one, s.timing.of(clock)) for fixed, one, s in terms))
        still = _with_link(links, tier, Link(_NEVER_BINDS, 0.0))
        hop = _with_link(links, tier, Link(_NEVER_BINDS, 1.0))
        latency = fitted_factor(
            (still.predicted_s(s), hop.predicted_s(s) - still.predicted_s(s), s.timing.of(clock)) for s in small
        )
        links = _with_link(links, tier, Link(_NEVER_BINDS, max(latency, _MIN_S)))
        without = _with_call(links, 0.0)
    return links


def _with_slow_start(samples: Iterable[LinkSample], links: Links, clock: Clock) -> Links:
    """What small reduce-scatters, and small sends, take beyond other collectives of their hops."""

    def beyond(kind: str) -> float:
        small = [s for s in samples if s.num_bytes <= _SMALL_BYTES and s.kind == kind]
        return max(statistics.median(s.timing.of(clock) - links.predicted_s(s) for s in small), 0.0) if small else 0.0

    constants = links.constants
    constants = dataclasses.replace(constants, reduce_scatter_s=beyond("reduce_scatter"), p2p_s=beyond("send"))
    return dataclasses.replace(links, constants=constants)


def _rate(tier: str, samples: Sequence[LinkSample], links: Links, clock: Clock) -> float | None:
    if not samples:
        return None
    latency = _link(links, tier).latency_s
    one = _with_link(links, tier, Link(1.0, latency))
    terms = [(links.predicted_s(s), one.predicted_s(s) - links.predicted_s(s), s.timing.of(clock)) for s in samples]
    # Small messages are all call and hops: an error there must not pass for bytes.
    x = fitted_factor(each for each in terms if each[0] < each[2] / 2)
    return 1 / x if x > 0 else None


def _equal_kinds(efficiency: Efficiency) -> Efficiency:
    return dataclasses.replace(efficiency, **dict.fromkeys(_KINDS, 1.0))


def _with_call(links: Links, seconds: float) -> Links:
    return dataclasses.replace(links, constants=dataclasses.replace(links.constants, call_s=seconds))


def _link(links: Links, tier: str) -> Link:
    return links.cluster.intra if tier == "intra" else links.cluster.inter


def _with_link(links: Links, tier: str, link: Link) -> Links:
    cluster = links.cluster
    changed = dataclasses.replace(cluster, intra=link) if tier == "intra" else dataclasses.replace(cluster, inter=link)
    return dataclasses.replace(links, cluster=changed)
