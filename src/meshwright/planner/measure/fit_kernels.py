"""From the seconds of kernels to a device and its efficiencies, by least squares of relative errors.

One constant is fitted after the other, each through the functions that will predict with it (``cost.kernels``), so that
what is fitted is what is used. A time is ``fixed + varying / rate`` in every rate: two predictions, with the rate at
one and out of the way, tell the two parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from meshwright.cost import Constants, Device, Efficiency
from meshwright.cost.kernels import Machine
from meshwright.planner.measure.samples import Residual, Sample, fitted_factor, residual
from meshwright.planner.measure.timing import Clock

_NEVER_BINDS = 1e30  # a rate at which nothing takes time
_CACHES = tuple(2**power for power in range(18, 25))  # bytes that a CPU's core may find in its caches


def fit_kernels(samples: Sequence[Sample], device: Device, start: Constants, clock: Clock) -> Machine:
    """The machine whose kernels take what was measured: its peaks are the best rates seen, and efficiencies below 1.

    Args:
        samples: Timed.
        device: Its name and memory; all rates are replaced.
        start: Constants that nothing here measures.
        clock: Which of the two clocks counts.
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
    """Of every part, in the order of the samples."""
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
        """The machine with the rate that fits a part; as it was where nothing was measured."""
        x = self._solve(self.of(part, **which), change(_NEVER_BINDS), change(1.0))
        return change(1 / x) if x > 0 else machine

    def factor(self, part: str, machine: Machine, change: Callable[[float], Machine]) -> Machine:
        """The same for a constant that time is proportional to."""
        return change(self._solve(self.of(part), change(0.0), change(1.0))) if self.of(part) else machine

    def _solve(self, samples: Iterable[Sample], without: Machine, with_one: Machine) -> float:
        terms = []
        for sample in samples:
            fixed = sample.predicted_s(without)
            terms.append((fixed, sample.predicted_s(with_one) - fixed, self.seconds(sample)))
        return fitted_factor(terms)


def _fit_products(fitting: _Fitting, machine: Machine) -> Machine:
    """Their rates, and on a CPU what each takes beside: in turns, each given the other."""
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
    """The memory's rate; and on a CPU, of the sizes that its cache may have, the one that fits best, with its rate."""
    none = fitting.rate("memory", machine, lambda rate: _with_device(machine, bandwidth_bytes_per_s=rate))
    if not machine.device.name.startswith("CPU"):
        return none
    tried = [none]
    for cache_bytes in _CACHES:
        whole = _with_device(none, cache_bytes=cache_bytes)
        for _ in range(8):  # each rate given the other
            cached = fitting.rate("memory", whole, lambda rate, now=whole: _with_efficiency(now, cached=rate))  # type: ignore[misc]
            whole = fitting.rate("memory", cached, lambda rate, now=cached: _with_memory(now, rate))  # type: ignore[misc]
        if whole.efficiency.cached >= 1:  # else it is noise that the sizes tell apart
            tried.append(whole)
    return min(tried, key=lambda each: sum((p / t - 1) ** 2 for p, t in fitting.pairs("memory", each)))


def _with_memory(machine: Machine, rate: float) -> Machine:
    """Another rate of the memory, and the same of the cache."""
    ratio = machine.device.bandwidth_bytes_per_s / rate
    changed = _with_device(machine, bandwidth_bytes_per_s=rate)
    return _with_efficiency(changed, cached=machine.efficiency.cached * ratio)


def _fit_attention(fitting: _Fitting, machine: Machine) -> Machine:
    """Its rate in either precision, how that falls with the width of heads, and the rates of backward."""
    machine = _with_constants(machine, narrow=_narrow(fitting, machine))
    for dtype, suffix in (("half", ""), ("fp32", "_fp32")):
        for name, backward in ((f"attention{suffix}", False), (f"attention_backward{suffix}", True)):
            machine = fitting.rate(
                f"{dtype} attention",
                machine,
                lambda rate, now=machine, name=name: _with_efficiency(now, **{name: rate}),  # type: ignore[misc]
                backward=backward,
            )
    return machine


def _narrow(fitting: _Fitting, machine: Machine) -> float:
    """The exponent by which narrower heads are slower, from the mean rates of two widths; as it was without them."""
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
    """The same machine with peaks that were reached, and efficiencies below them."""
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
    """The machine as the update meets it: ``cost.update`` divides by both."""
    return _with_efficiency(machine, memory=machine.efficiency.memory * machine.efficiency.update)


def _with_device(machine: Machine, **changes: float) -> Machine:
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, **changes))  # type: ignore[arg-type]


def _with_constants(machine: Machine, **changes: float) -> Machine:
    return dataclasses.replace(machine, constants=dataclasses.replace(machine.constants, **changes))


def _with_efficiency(machine: Machine, **changes: float) -> Machine:
    return dataclasses.replace(machine, efficiency=dataclasses.replace(machine.efficiency, **changes))
