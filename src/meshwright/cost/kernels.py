"""Seconds of one kernel: matrix products, fused attention and kernels bound by memory, forward and backward.

A kernel takes the time of its arithmetic plus that of its bytes plus a gap. The sum, rather than the larger of the two
(a roofline), is what a tile's prologue and epilogue and the spread between its first and last block cost; products of
narrow matrices reach less of the peak for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.casts import casts_of

if TYPE_CHECKING:
    from meshwright.cost.device import Device
    from meshwright.cost.efficiency import Constants, Efficiency
    from meshwright.cost.step import Op

_HEAD_WIDTH = 128  # that ``Efficiency.attention`` is stated for
# FlashAttention-2 (Dao 2023, §3.1) recomputes the scores: backward does five products where forward does two.
_ATTENTION_BACKWARD = 2.5
# The first generation's, in Triton, is 1.3 to 1.5 times slower than the second in forward and twice in backward (Dao
# 2023, §4.1, from memory). That it gains nothing from wide heads is what llm-foundry's runs show.
_FLASH1_BACKWARD = 0.7
_BLOCKS = ("blocks", "mxfp8")  # a scale for each 32 elements
_ITEMSIZE = {"fp32": (4, 4), "half": (2, 2), "fp8": (1, 2), "fp4": (0.5, 2)}  # of inputs and outputs in memory


@dataclass(frozen=True)
class Machine:
    """A device with what it reaches: all that a kernel's time depends on."""

    device: Device
    efficiency: Efficiency
    constants: Constants
    num_devices: int = 1

    @property
    def sustained(self) -> float:
        """Fraction of the peak clock that the power allows, in the slowest of all devices: the others wait for it.

        Of ``N`` speeds that are spread normally the least lies about ``sqrt(2 ln N)`` deviations below the mean.
        """
        slowest = 1 + self.constants.spread * math.sqrt(2 * math.log(self.num_devices))
        return self.device.power_fraction**self.constants.power / slowest

    def matmul_flops_per_s(self, dtype: str) -> float:
        """What large products reach."""
        fraction = self.efficiency.of_matmul(dtype)
        return self.device.peak_flops_per_s(dtype) * fraction * self.sustained

    @property
    def bytes_per_s(self) -> float:
        """What memory-bound kernels reach."""
        return self.device.bandwidth_bytes_per_s * self.efficiency.memory

    def move_s(self, num_bytes: float) -> float:
        """Seconds of a kernel's bytes: those that fit into the cache, and the others."""
        cached = min(num_bytes, self.device.cache_bytes)
        return (cached / self.efficiency.cached + num_bytes - cached) / self.bytes_per_s

    def attention_flops_per_s(self, width: int, dtype: str, variant: str = "") -> float:
        """What fused attention reaches with heads of a width."""
        slower = self.constants.flash1 if variant == "flash1" else 1.0
        fraction = self.constants.vendor if variant == "vendor" else self.efficiency.of_attention(dtype)[0] * slower
        narrow = 1.0 if variant == "flash1" else min(1.0, width / _HEAD_WIDTH) ** self.constants.narrow
        peak = self.device.peak_flops_per_s("half" if dtype in ("fp8", "fp4") else dtype)
        return peak * fraction * narrow * self.sustained


def forward_s(op: Op, machine: Machine) -> float:
    """Seconds of an op in forward, all its ``count``."""
    return 0.0 if op.moment == "backward" else _kernel_s(op, machine)


def _kernel_s(op: Op, machine: Machine) -> float:
    gap = machine.constants.gap_s
    if op.kind == "move":
        return op.count * (machine.move_s(op.num_bytes) + _functions_s(op, machine) + gap)
    if op.kind == "attention":
        return _attention_s(op, machine) + op.count * gap
    casts = casts_of(op, machine.constants.rowwise_bytes)
    of_input, of_weight = (casts.listed,) * 2 if op.moment == "backward" else (casts.input, casts.weight)
    cast = of_input * op.m * op.k + of_weight * op.k * op.n
    return op.count * (_matmul_s(op.m, op.n, op.k, op, machine, cast) + gap)


def backward_s(op: Op, machine: Machine) -> float:
    """Seconds of its backward, recomputation included."""
    gap = machine.constants.gap_s
    again = forward_s(op, machine) * op.recomputed if op.recomputed else 0.0
    if op.moment == "forward":
        return again
    if op.moment == "backward" and op.kind != "attention":
        return _kernel_s(op, machine)
    if op.kind == "move":
        moved = 2 * op.num_bytes if op.backward_bytes is None else op.backward_bytes
        return again + op.count * (machine.move_s(moved) + _functions_s(op, machine) + gap)
    if op.kind == "attention":
        speed = machine.efficiency.of_attention(op.dtype)[1] * (_FLASH1_BACKWARD if op.variant == "flash1" else 1.0)
        slower = _ATTENTION_BACKWARD / speed
        return again + _attention_s(op, machine) * slower + op.count * gap
    casts = casts_of(op, machine.constants.rowwise_bytes)
    cast = casts.gradient * op.m * op.n + casts.weight_again * op.k * op.n
    of_input = _matmul_s(op.m, op.k, op.n, op, machine, cast)
    of_weight = _matmul_s(op.k, op.n, op.m, op, machine, casts.input_again * op.m * op.k)
    return again + op.count * (of_input + of_weight + 2 * gap)


def _functions_s(op: Op, machine: Machine) -> float:
    return op.functions * machine.constants.function_s


def pass_flops(op: Op) -> tuple[int, int]:
    """Floating-point operations in forward and in backward, recomputation not counted."""
    forward = op.flops if op.moment != "backward" else 0
    if op.moment == "forward":
        return forward, 0
    if op.kind == "attention":
        return forward, round(op.flops * _ATTENTION_BACKWARD)
    return forward, op.flops * (1 if op.moment == "backward" else 2)


def _matmul_s(m: int, n: int, k: int, op: Op, machine: Machine, cast_bytes: float) -> float:
    """One product, and the casts before it."""
    size_in, size_out = _ITEMSIZE[op.dtype]
    moved = machine.constants.tile * (size_in * (m * k + k * n) + size_out * m * n) + cast_bytes
    spent = 2 * m * n * k / (machine.matmul_flops_per_s(op.dtype) * _speed(op, machine)) + machine.move_s(moved)
    return machine.constants.product_s + op.batch * spent


def _speed(op: Op, machine: Machine) -> float:
    """Of a product beside others of its precision."""
    early = machine.constants.early if op.variant == "early" else 1.0
    return early * (machine.constants.blocks if op.scaling in _BLOCKS else 1.0)


def _attention_s(op: Op, machine: Machine) -> float:
    moved = 2 * op.batch * op.count * op.k * (2 * op.m + 2 * op.n)
    return op.flops / machine.attention_flops_per_s(op.k, op.dtype, op.variant) + machine.move_s(moved)
