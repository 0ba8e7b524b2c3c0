"""Calibration: the share of stated peaks that real kernels and collectives reach, measured and learned."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from meshwright.errors import ConfigError

LEAST, MOST = 0.1, 10.0  # of a learned ratio; beyond, something else is wrong
MOST_CALL_S = 1.0


@dataclass(frozen=True)
class Learned:
    """Ratios of measured to calibrated time, learned from training steps.

    Args:
        computing: Ratio of kernels, in blocks and in the update.
        collectives: Ratio of the bytes of collectives.
        call_s: Seconds that each collective takes beyond its calibration.
        num_runs: Dry runs that the ratios were learned from.
    """

    computing: float = 1.0
    collectives: float = 1.0
    call_s: float = 0.0
    num_runs: int = 0

    def applied(self, known: Calibration) -> Calibration:
        """Return the calibration scaled by these ratios."""
        devices = {name: self._efficiency(each) for name, each in known.devices.items()}
        return dataclasses.replace(
            known, devices=devices, constants=self._constants(known.constants), num_runs=self.num_runs
        )

    def _efficiency(self, known: Efficiency) -> Efficiency:
        return dataclasses.replace(
            known,
            update=known.update / self.computing,
            intra=known.intra / self.collectives,
            inter=known.inter / self.collectives,
        )

    def _constants(self, known: Constants) -> Constants:
        # Those of shards have seconds of their own where they were measured, and else those of all.
        of_shards = known.shard_s + self.call_s if known.shard_s else 0.0
        return dataclasses.replace(
            known, in_step=known.in_step * self.computing, call_s=known.call_s + self.call_s, shard_s=of_shards
        )


def learned_from(data: Mapping[str, Any]) -> Learned:
    """Read ratios from what ``dataclasses.asdict`` made of them.

    Raises:
        TypeError, ValueError: When it is something else.
    """
    found = Learned(**data)
    bounds = {"computing": (LEAST, MOST), "collectives": (LEAST, MOST), "call_s": (0.0, MOST_CALL_S)}
    for name, (least, most) in bounds.items():
        value = getattr(found, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"learned.{name} must be a number from {least:g} to {most:g}, and is {value!r}")
    if isinstance(found.num_runs, bool) or not isinstance(found.num_runs, int) or found.num_runs < 0:
        raise ValueError(f"learned.num_runs must be a count, and is {found.num_runs!r}")
    return found


# --- Efficiencies and constants.

FORMAT = "meshwright.efficiencies"
_LEAST = 1e-12  # efficiencies are divided by
_RETIRED = ("vendor",)  # constants of earlier files that nothing reads any more


@dataclass(frozen=True)
class Efficiency:
    """Fractions of stated peaks, fitted to published runs (``benchmarks/fit.py``) or measured on a machine.

    Args:
        matmul: Fraction of the peak of half-precision (and fp32) matrix products, in large ones.
        fp8: Fraction of the peak of fp8 products, in large ones.
        fp4: Fraction of the peak of 4-bit products, in large ones; None: as ``fp8``.
        attention: Fraction of the half-precision peak, in the fused attention that torch takes by itself, with heads of
            width 128, forward and backward together: cuDNN's on Hopper and Blackwell, else FlashAttention-2.
        flash2: The same of FlashAttention-2, where torch takes another by itself; None: as ``attention``.
        masked: The same of attention under a mask whose log-sum-exp is needed, over a ring or with sinks: by torch's
            memory-efficient kernel, which is taken to be as fast as FlashAttention-2; None: as ``flash2``.
        memory: Fraction of the memory bandwidth, in kernels that are bound by it.
        intra: Fraction of the bandwidth of links inside a node.
        inter: Fraction of the bandwidth of links between nodes.
        attention_backward: Speed of fused attention's backward beside its forward's.
        attention_fp32: As ``attention``, of the fp32 peak in fp32; None: the same fraction.
        attention_backward_fp32: As ``attention_backward``, in fp32; None: the same.
        cached: Speed of the bytes of a kernel that fit into the device's cache beside that of its memory.
        update: Speed of the optimizer's update beside other kernels that are bound by memory.
        all_reduce: Fraction of the rate of links (``intra``, ``inter``), in all-reduces; so are those that follow.
    """

    matmul: float = 0.75
    fp8: float = 0.55
    fp4: float | None = None
    attention: float = 0.45
    flash2: float | None = None
    masked: float | None = None
    memory: float = 0.8
    intra: float = 0.75
    inter: float = 0.7
    attention_backward: float = 1.0
    attention_fp32: float | None = None
    attention_backward_fp32: float | None = None
    cached: float = 1.0
    update: float = 1.0
    all_reduce: float = 1.0
    all_gather: float = 1.0
    reduce_scatter: float = 1.0
    all_to_all: float = 1.0
    send: float = 1.0

    def of_matmul(self, dtype: str) -> float:
        """Return the fraction of a precision's peak that large products reach."""
        if dtype == "fp4" and self.fp4 is not None:
            return self.fp4
        return self.fp8 if dtype in ("fp8", "fp4") else self.matmul

    def of_attention(self, dtype: str) -> tuple[float, float]:
        """Return the fraction of the peak in forward, and the speed of backward relative to it."""
        forward, backward = self.attention, self.attention_backward
        if dtype == "fp32":
            forward = forward if self.attention_fp32 is None else self.attention_fp32
            backward = backward if self.attention_backward_fp32 is None else self.attention_backward_fp32
        return forward, backward

    def of_collective(self, kind: str) -> float:
        """Return the fraction of a link's rate that a collective reaches; a broadcast travels as a send does."""
        return getattr(self, "send" if kind == "broadcast" else kind)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Constants:
    """Constants that all devices share.

    Args:
        gap_s: Seconds from the end of one kernel to the start of the next.
        interference: Slowdown of computing while a collective runs beside it (Galvatron: 0.1 to 0.3).
        power: Exponent of sustained power in sustained arithmetic.
        step_s: Once per step: the optimizer's launch, reading the loss, loading a batch.
        call_s: Seconds of a collective beside its bytes and hops.
        hop: Ratio of the seconds of a hop between nodes to the link's latency.
        p2p_s: Seconds of a send to the next pipeline stage beside its bytes: ranks wait for each other.
        narrow: Exponent by which attention slows down with heads narrower than 128.
        flash1: Speed of the first generation of fused attention (Triton's) beside the second, in forward.
        early: Speed of products beside today's in the first year of a generation of devices, before libraries knew it.
        blocks: Speed of fp8 products with a scale for each 32 elements beside those with one for each tensor (6.8 and
            7.2 ms for the same products on B300: Transformer Engine's documentation, gemm_profiling).
        tile: Times the bytes of its operands that a product's first and last tiles cost beside its arithmetic.
        host_s: Seconds of the host per kernel launch in a module that is not compiled: a block cannot be faster.
        operator_s: The same for one operator of a traced model, of which a module has several.
        misaligned: Speed of half-precision products whose rows are no multiples of 16 bytes beside others: kernels that
            load element by element. Padding GPT-2's vocabulary from 50257 to 50304 made all of nanoGPT 25 % faster
            (Karpathy, 3 February 2023, from memory); the head of vTrain's models with 50257 reaches 0.3 to 0.38.
        collective_host_s: Seconds of the host per launch of a collective that blocks wait for: beside the launches of
            a block's kernels these bind where kernels are short. Three sizes of tensor axes of vTrain's give 60 to
            90 us. 0: in the seconds of the collective, as where a machine was measured.
        rowwise_bytes: Bytes moved per element of an fp8 product's inputs that is scaled by rows, beside the cast.
        async_tensor: Share of tensor-parallel collectives that is left when they run beside the products they feed.
        function_s: Per element to which a function (an exponential, a normalisation) is applied, beside its bytes:
            nothing on GPUs, where that hides behind the bytes.
        product_s: Seconds of a matrix product beside its arithmetic and bytes: on CPUs its operands are packed anew.
        reduce_scatter_s: Seconds of a reduce-scatter beside that: gloo polls for a millisecond, NCCL does not.
        accumulation: Times that the bytes of a gradient are moved when a further micro-batch adds to it; 0 where that
            is in other constants.
        spread: Deviation of devices of one kind in sustained arithmetic, as a share of it (Sinha et al. 2022 found 8 %
            between the slower and the faster of whole clusters).
        shared: Computing time lost per second of a collective beside it, where both run on the same cores: 1 on CPUs.
        in_step: Seconds of kernels in a step over those of the same kernels alone; 1 where the rates were fitted to
            whole steps.
        half_in_step: Times as long as ``in_step`` that products and attention take in half precision, with their casts.
        sharded: Seconds of the bytes that are gathered and reduced of shards over those of bare collectives: they are
            copied in and out of one buffer.
        shard_s: Seconds of one of these beside its bytes, waiting included; 0: those of a bare collective.
        wait_s: Seconds until the second of two ranks arrives at a collective that computing waits for, and both go on.
        per_core: Ranks that take turns on a core of a CPU: what one leaves idle, another uses.
    """

    gap_s: float = 3e-6
    interference: float = 0.2
    power: float = 0.4
    step_s: float = 5e-3
    call_s: float = 2e-5
    hop: float = 1.0
    p2p_s: float = 2e-4
    narrow: float = 0.2
    flash1: float = 0.71
    host_s: float = 5e-5
    operator_s: float = 1.5e-5
    early: float = 0.9
    blocks: float = 0.945
    tile: float = 1.2
    misaligned: float = 1.0
    collective_host_s: float = 0.0
    rowwise_bytes: float = 5.0
    async_tensor: float = 0.5
    function_s: float = 0.0
    product_s: float = 0.0
    reduce_scatter_s: float = 0.0
    accumulation: float = 0.0
    spread: float = 0.0
    shared: float = 0.0
    in_step: float = 1.0
    half_in_step: float = 1.0
    sharded: float = 1.0
    shard_s: float = 0.0
    wait_s: float = 0.0
    per_core: float = 1.0

    def waits_s(self, ranks: int) -> float:
        """Return the seconds until the last of so many ranks arrives.

        The longest of independent delays grows with the logarithm of their number.
        """
        return self.wait_s * math.log2(ranks) if ranks > 1 else 0.0


@dataclass(frozen=True)
class Calibration:
    """Efficiencies by device family, and the constants that go with them.

    Args:
        devices: Efficiencies by family.
        constants: Constants that go with them.
        machine: Where they were measured; None: nowhere alone.
        num_runs: Dry runs that they were corrected by.
    """

    devices: Mapping[str, Efficiency]
    constants: Constants = Constants()
    machine: str | None = None
    num_runs: int = 0

    def of(self, family: str) -> Efficiency:
        """Return the efficiencies of a device family; the defaults where it was never fitted."""
        return self.devices.get(family) or self.devices.get("default") or Efficiency()


def read_calibration(text: str) -> Calibration:
    """Read the JSON that ``benchmarks/fit.py`` and a calibration write.

    Raises:
        ConfigError: When it is not such a file, or names what is not known.
    """
    try:
        data = json.loads(text)
        if data.get("format") != FORMAT:
            raise ValueError(f"format {data.get('format')!r}")
        return calibration_from(data)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            "A calibration cannot be read",
            expected=f'JSON with "format": "{FORMAT}", "devices" and "constants"',
            got=str(error),
            fix="write it with benchmarks/fit.py, or leave it out for the fitted presets",
        ) from None


def calibration_from(data: Mapping[str, Any]) -> Calibration:
    """Build a calibration from the tables ``devices``, ``constants`` and ``learned``, and ``machine``.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: When they are not what they should be.
    """
    if not isinstance(data, Mapping):
        raise ValueError("calibration is no table")
    machine = data.get("machine")
    if machine is not None and not isinstance(machine, str):
        raise ValueError(f"calibration.machine is {machine!r}")
    devices = {name: Efficiency(**_numbers(entry, _LEAST)) for name, entry in data["devices"].items()}
    constants = {name: value for name, value in _numbers(data["constants"]).items() if name not in _RETIRED}
    known = Calibration(devices, Constants(**constants), machine)
    return learned_from(data["learned"]).applied(known) if "learned" in data else known


def calibration_tables(calibration: Calibration) -> dict[str, Any]:
    """Return the tables that :func:`calibration_from` reads."""
    devices = {name: dataclasses.asdict(entry) for name, entry in calibration.devices.items()}
    machine = {} if calibration.machine is None else {"machine": calibration.machine}
    return machine | {"devices": devices, "constants": dataclasses.asdict(calibration.constants)}


def write_calibration(calibration: Calibration, **notes: Any) -> str:
    """Return a calibration as JSON; ``notes`` say where its numbers come from."""
    return json.dumps({"format": FORMAT, **notes, **calibration_tables(calibration)}, indent=2) + "\n"


@functools.cache
def fitted() -> Calibration:
    """Return the packaged presets, fitted to published runs."""
    return read_calibration((resources.files("meshwright.cost") / "efficiencies.json").read_text())


def _numbers(entry: Mapping[str, Any], least: float = 0.0) -> dict[str, float]:
    found = {name: float(value) for name, value in entry.items() if isinstance(value, int | float)}
    wrong = {name: value for name, value in found.items() if not least <= value <= 1 / _LEAST}
    if wrong:
        raise ValueError(f"{wrong}: what is reached is a positive number")
    return found


# --- Checks of what files hold.

_LEAST_FIGURE = 1e-30  # bounds of all figures: from this to its inverse


def refuse_unknown(data: Mapping[str, Any], known: set[str], where: str) -> None:
    """Refuse keys that a table cannot have.

    Raises:
        ValueError: Naming them.
    """
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"unknown keys in {where}: {', '.join(map(str, unknown))}; known: {', '.join(sorted(known))}")


def count_of(data: Mapping[str, Any], key: str, default: int | None = 1) -> Any:
    """Return a positive integer of a table, or the default.

    Raises:
        ValueError: When it is something else.
    """
    value = data.get(key, default)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{key} must be a positive number, and is {value!r}")
    return value


def positive_number(value: Any, name: str) -> float:
    """Return a positive figure as a float.

    Raises:
        ValueError: When it is something else.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _LEAST_FIGURE < value < 1 / _LEAST_FIGURE:
        raise ValueError(f"{name} must be a positive number, and is {value!r}")
    return float(value)


# --- Launches by the host, over those of an operator that Python calls by itself (``Constants.operator_s``).

# Host times of blocks of six decoders and encoders with tiny layers (``benchmarks/host_time.py``), with the times of
# others (docs/predictions.md): of a forward operator and the views around it, of a module's call, of an operator of
# backward, which runs in C++; of a compiled block's kernels, and of its call in either pass, in which guards are
# checked and tensors unpacked; of a layer over a tensor axis, by two ranks whose all-reduces did nothing.
FORWARD, MODULE, BACKWARD = 0.8, 2.0, 0.7
COMPILED_KERNEL, COMPILED_CALL = 0.6, (12.0, 8.0)
SPLIT_LAYER = (2.7, 1.5)


def host_launches(
    forward: float, backward: float, modules: float, split: float = 0, *, compiled: bool
) -> tuple[float, float]:
    """Return the launches of a block's forward and backward.

    Args:
        forward: Operators of forward, or kernels where the block is compiled.
        backward: The same of backward.
        modules: Modules that are called, the block among them.
        split: Those of them that a tensor axis splits.
        compiled: Whether the block is compiled.
    """
    if compiled:
        of_forward, of_backward = COMPILED_CALL
        return COMPILED_KERNEL * forward + of_forward, COMPILED_KERNEL * backward + of_backward
    beside = [split * each for each in SPLIT_LAYER]
    return FORWARD * forward + MODULE * modules + beside[0], BACKWARD * backward + beside[1]
