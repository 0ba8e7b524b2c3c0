"""Fit device and link constants to measured kernels and collectives by least squares of relative errors."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from meshwright.cost import HALF, Cluster, Constants, Device, Efficiency, Link
from meshwright.cost.device_time import Group, Machine, Network, collective_s
from meshwright.planner.measure.timing import Clock, LinkSample, Residual, Sample, fitted_factor, residual

_NEVER_BINDS = 1e30  # a rate at which nothing takes time
_CACHES = tuple(2**power for power in range(18, 25))  # candidate cache sizes of a CPU core, in bytes


def fit_kernels(samples: Sequence[Sample], device: Device, start: Constants, clock: Clock) -> Machine:
    """Fit a machine to measured kernels: its peaks are the best measured rates, its efficiencies below 1.

    Args:
        samples: Timed samples.
        device: Name and memory; all rates are replaced.
        start: Constants that no sample measures.
        clock: The clock that counts.
    """
    fitting = _Fitting(samples, clock)
    (chain,) = fitting.of("gap")
    gap_s = fitting.seconds(chain) / chain.op.count
    constants = dataclasses.replace(start, gap_s=gap_s, function_s=0.0, product_s=0.0, power=0.0)
    bare = dataclasses.replace(
        device,
        half_flops_per_s=_NEVER_BINDS, fp32_flops_per_s=_NEVER_BINDS, fp8_flops_per_s=None,
        bandwidth_bytes_per_s=_NEVER_BINDS, power_fraction=1.0,
    )  # fmt: skip
    machine = Machine(bare, Efficiency(matmul=1.0, memory=1.0, attention=1.0), constants)
    machine = _fit_memory(fitting, machine)
    machine = fitting.factor("functions", machine, lambda x: _with_constants(machine, function_s=x))
    machine = _fit_products(fitting, machine)
    machine = _fit_attention(fitting, machine)
    updating = fitting.rate("update", machine, lambda rate: _with_efficiency(machine, memory=rate))
    machine = _with_efficiency(machine, update=updating.efficiency.memory)
    return _as_fractions(fitting, machine)


def kernel_residuals(samples: Sequence[Sample], machine: Machine, clock: Clock) -> list[Residual]:
    """Return the errors of every part, in the order of the samples."""
    parts = dict.fromkeys(sample.part for sample in samples)
    fitting = _Fitting(samples, clock)
    return [residual(part, fitting.pairs(part, _updating(machine) if part == "update" else machine)) for part in parts]


@dataclasses.dataclass(frozen=True)
class _Fitting:
    samples: Sequence[Sample]
    clock: Clock

    def of(self, part: str, *, backward: bool | None = None) -> list[Sample]:
        return [s for s in self.samples if s.part == part and (backward is None or s.backward == backward)]

    def seconds(self, sample: Sample) -> float:
        assert sample.timing is not None
        return sample.timing.of(self.clock)

    def pairs(self, part: str, machine: Machine) -> list[tuple[float, float]]:
        return [(sample.predicted_s(machine), self.seconds(sample)) for sample in self.of(part)]

    def rate(self, part: str, machine: Machine, change: Callable[[float], Machine], **which: bool) -> Machine:
        """Return the machine with the rate that fits a part; unchanged where nothing was measured."""
        x = self._solve(self.of(part, **which), change(_NEVER_BINDS), change(1.0))
        return change(1 / x) if x > 0 else machine

    def factor(self, part: str, machine: Machine, change: Callable[[float], Machine]) -> Machine:
        """Return the machine with the constant that fits a part, where time is proportional to it."""
        return change(self._solve(self.of(part), change(0.0), change(1.0))) if self.of(part) else machine

    def _solve(self, samples: Iterable[Sample], without: Machine, with_one: Machine) -> float:
        terms = []
        for sample in samples:
            fixed = sample.predicted_s(without)
            terms.append((fixed, sample.predicted_s(with_one) - fixed, self.seconds(sample)))
        return fitted_factor(terms)


def _fit_products(fitting: _Fitting, machine: Machine) -> Machine:
    """Fit the rates of products, and on a CPU the seconds per product, in turns, each given the other."""
    for _ in range(12):
        known = machine
        machine = fitting.rate("fp32 products", known, lambda rate, now=known: _with_device(now, fp32_flops_per_s=rate))  # type: ignore[misc]
        known = machine
        machine = fitting.rate("half products", known, lambda rate, now=known: _with_device(now, half_flops_per_s=rate))  # type: ignore[misc]
        if machine.device.name.startswith("CPU"):
            known = machine
            machine = fitting.factor("fp32 products", known, lambda x, now=known: _with_constants(now, product_s=x))  # type: ignore[misc]
    return machine


def _fit_memory(fitting: _Fitting, machine: Machine) -> Machine:
    """Fit the memory's rate, and on a CPU the best candidate cache size with its rate."""
    none = fitting.rate("memory", machine, lambda rate: _with_device(machine, bandwidth_bytes_per_s=rate))
    if not machine.device.name.startswith("CPU"):
        return none
    tried = [none]
    for cache_bytes in _CACHES:
        whole = _with_device(none, cache_bytes=cache_bytes)
        for _ in range(8):  # each rate given the other
            cached = fitting.rate("memory", whole, lambda rate, now=whole: _with_efficiency(now, cached=rate))  # type: ignore[misc]
            whole = fitting.rate("memory", cached, lambda rate, now=cached: _with_memory(now, rate))  # type: ignore[misc]
        if whole.efficiency.cached >= 1:  # a slower cache than memory would fit noise
            tried.append(whole)
    return min(tried, key=lambda each: sum((p / t - 1) ** 2 for p, t in fitting.pairs("memory", each)))


def _with_memory(machine: Machine, rate: float) -> Machine:
    """Change the memory's rate, but not the cache's."""
    ratio = machine.device.bandwidth_bytes_per_s / rate
    changed = _with_device(machine, bandwidth_bytes_per_s=rate)
    return _with_efficiency(changed, cached=machine.efficiency.cached * ratio)


def _fit_attention(fitting: _Fitting, machine: Machine) -> Machine:
    """Fit attention's rates in either precision, forward and backward, and how they fall with narrower heads."""
    machine = _with_constants(machine, narrow=_narrow(fitting, machine))
    for dtype, suffix in ((HALF, ""), ("fp32", "_fp32")):
        for name, backward in ((f"attention{suffix}", False), (f"attention_backward{suffix}", True)):
            machine = fitting.rate(
                f"{dtype} attention",
                machine,
                lambda rate, now=machine, name=name: _with_efficiency(now, **{name: rate}),  # type: ignore[misc]
                backward=backward,
            )
    return machine


def _narrow(fitting: _Fitting, machine: Machine) -> float:
    """Return the exponent by which narrower heads are slower, from the mean rates of two widths if there are two."""
    rates: dict[int, list[float]] = {}
    for sample in fitting.of("fp32 attention", backward=False) + fitting.of("half attention", backward=False):
        peak = machine.device.peak_flops_per_s(sample.op.dtype)
        rates.setdefault(sample.op.k, []).append(math.log(sample.op.flops / fitting.seconds(sample) / peak))
    if len(rates) < 2:
        return machine.constants.narrow
    low, high = min(rates), max(rates)
    fall = sum(rates[high]) / len(rates[high]) - sum(rates[low]) / len(rates[low])
    return min(max(fall / math.log(high / low), 0.0), 1.0)


def _as_fractions(fitting: _Fitting, machine: Machine) -> Machine:
    """Return the same machine with the best measured rates as peaks, and efficiencies below them."""
    best = max(s.op.flops * (3 if s.backward else 1) / fitting.seconds(s) for s in fitting.of("fp32 products"))
    largest = max(s.op.num_bytes for s in fitting.of("memory"))
    streamed = max(s.op.num_bytes / fitting.seconds(s) for s in fitting.of("memory") if s.op.num_bytes == largest)
    device, efficiency = machine.device, machine.efficiency
    matmul = min(device.fp32_flops_per_s / best, 1.0)
    memory = min(device.bandwidth_bytes_per_s / streamed, 1.0)
    return dataclasses.replace(
        machine,
        device=dataclasses.replace(
            device,
            fp32_flops_per_s=device.fp32_flops_per_s / matmul,
            half_flops_per_s=device.half_flops_per_s / matmul,
            bandwidth_bytes_per_s=device.bandwidth_bytes_per_s / memory,
        ),
        efficiency=dataclasses.replace(
            efficiency,
            matmul=matmul,
            fp8=matmul,
            memory=memory,
            attention=efficiency.attention * matmul,
            attention_fp32=None if efficiency.attention_fp32 is None else efficiency.attention_fp32 * matmul,
        ),
    )


def _updating(machine: Machine) -> Machine:
    """Return the machine at the update, where ``cost.device_time.update_s`` divides by both efficiencies."""
    return _with_efficiency(machine, memory=machine.efficiency.memory * machine.efficiency.update)


def _with_device(machine: Machine, **changes: float) -> Machine:
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, **changes))  # type: ignore[arg-type]


def _with_constants(machine: Machine, **changes: float) -> Machine:
    return dataclasses.replace(machine, constants=dataclasses.replace(machine.constants, **changes))


def _with_efficiency(machine: Machine, **changes: float) -> Machine:
    return dataclasses.replace(machine, efficiency=dataclasses.replace(machine.efficiency, **changes))


# --- Links: seconds per call and per hop, and the rate of every kind of collective

_MIN_S = 1e-7  # cluster files allow no link without latency
_SMALL_BYTES = 2**15  # up to this size messages measure latency, not bandwidth
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclasses.dataclass(frozen=True)
class Links:
    """A cluster with the efficiency and constants of its collectives."""

    cluster: Cluster
    efficiency: Efficiency
    constants: Constants

    @property
    def network(self) -> Network:
        """Return the network of the cost model."""
        return Network(self.cluster, self.efficiency, self.constants)

    def predicted_s(self, sample: LinkSample) -> float:
        """Return the cost model's seconds for a sample."""
        return collective_s(sample.kind, sample.num_bytes, self._group(sample), self.network)

    def _group(self, sample: LinkSample) -> Group:
        per_node = self.cluster.devices_per_node
        if sample.tier == "inter":
            return Group(self.cluster.num_devices // per_node, 1)
        size = min(per_node, self.cluster.num_devices)
        return Group(size, size)


def fit_links(samples: Sequence[LinkSample], start: Links, clock: Clock) -> Links:
    """Fit links to measured collectives; tiers without samples stay unchanged.

    Kinds of collectives share the seconds per call and per hop. They differ in their rates, of which the best is the
    link's own; the ratios inside nodes hold between nodes, too, where both were measured.
    """
    links = start
    for tier in ("intra", "inter"):
        mine = [sample for sample in samples if sample.tier == tier]
        if mine:
            links = _fit_tier(tier, mine, links, clock, first=tier == mine[0].tier == samples[0].tier)
    return links


def link_residuals(samples: Sequence[LinkSample], links: Links, clock: Clock) -> list[Residual]:
    """Return the errors by tier and kind."""
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
        equal = dataclasses.replace(links.efficiency, **dict.fromkeys(_KINDS, 1.0))
        links = dataclasses.replace(links, efficiency=equal)
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
    if not first:  # the fractions of the kinds are known: take the median of the rates
        return _with_link(links, tier, Link(statistics.median(known.values()), _link(links, tier).latency_s))
    best = max(known.values())
    fractions = {kind: rate / best for kind, rate in known.items()}
    links = dataclasses.replace(links, efficiency=dataclasses.replace(links.efficiency, **fractions))
    return _with_link(links, tier, Link(best, _link(links, tier).latency_s))


def _fit_latency(tier: str, samples: Iterable[LinkSample], links: Links, clock: Clock, *, calls: bool) -> Links:
    """Fit the seconds per hop, and per call with ``calls``, by least squares of relative errors of small messages."""
    small = [s for s in samples if s.num_bytes <= _SMALL_BYTES and s.kind != "reduce_scatter"]
    without = _with_call(links, 0.0)
    for _ in range(20):  # in turns, each given the other, and neither negative: they converge at once
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
    """Fit the seconds by which small reduce-scatters, and small sends, exceed other collectives of their hops."""

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
    # Small messages are dominated by call and hops, whose errors must not count as bytes.
    x = fitted_factor(each for each in terms if each[0] < each[2] / 2)
    return 1 / x if x > 0 else None


def _with_call(links: Links, seconds: float) -> Links:
    return dataclasses.replace(links, constants=dataclasses.replace(links.constants, call_s=seconds))


def _link(links: Links, tier: str) -> Link:
    return links.cluster.intra if tier == "intra" else links.cluster.inter


def _with_link(links: Links, tier: str, link: Link) -> Links:
    cluster = links.cluster
    changed = dataclasses.replace(cluster, intra=link) if tier == "intra" else dataclasses.replace(cluster, inter=link)
    return dataclasses.replace(links, cluster=changed)
