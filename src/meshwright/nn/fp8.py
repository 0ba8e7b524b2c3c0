"""Linear layers whose three matrix products run in 8 bits with delayed scaling (Micikevicius et al. 2022).

Shapes: M rows (tokens), N output and K input features, L layers, H steps of history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from meshwright.nn.module_structure import is_transposed, subclass_like
from meshwright.runtime.torch_internals.autograd import Function
from meshwright.runtime.torch_internals.operators import scaled_mm
from meshwright.runtime.torch_internals.optim import foreach_add_, foreach_copy_, foreach_zero_
from meshwright.runtime.torch_internals.tensors import version_of

INPUT, WEIGHT, GRADIENT = 0, 1, 2
"""Roles of the three tensors that a layer casts to 8 bits; they index its scales and histories."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class DelayedScaling:
    """Recipe that scales tensors before the cast by their largest absolute values (amax) in earlier steps.

    Names, defaults and the formula ``scale = fp8_max / amax / 2**margin`` are those of TransformerEngine's
    ``recipe.DelayedScaling``, which ATorch's ``fp8`` takes its keys from.

    Args:
        margin: Powers of two left free above the largest known value.
        interval: Optimizer steps between two updates of the scales; histories grow in every step.
        fp8_format: ``HYBRID`` casts inputs and weights to E4M3 (largest value 448) and gradients to E5M2 (57344);
            ``E4M3`` casts all three to E4M3.
        amax_history_len: Steps that a history remembers.
        amax_compute_algo: ``max`` scales by the largest value in the history, ``most_recent`` by the last step's.
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"

    def dtype(self, role: int) -> torch.dtype:
        """Return the 8-bit type of inputs, weights or gradients."""
        return E5M2 if role == GRADIENT and self.fp8_format == "HYBRID" else E4M3

    def scale(self, amax: torch.Tensor, role: int) -> torch.Tensor:
        """Return the factor that brings ``amax`` (fp32) to the largest value of the format; infinite for 0."""
        # A tensor, for a Python number over a tensor would round twice.
        limit = torch.full_like(amax, torch.finfo(self.dtype(role)).max)
        return limit / amax / 2.0**self.margin


# --- Casts and products.

ROWS = 16  # tensor cores sum over multiples of so many elements
_FP32_EXPONENT_BITS = 0x7F800000
_LARGEST_SCALE = 2.0**126  # its inverse is still a normal number


class Scaled(NamedTuple):
    """A tensor in 8 bits, which stands for ``values * inverse``."""

    values: torch.Tensor
    inverse: torch.Tensor  # 0-dim fp32


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value, 0-dim fp32; inf or nan where there is one."""
    return torch.linalg.vector_norm(tensor, ord=float("inf"), dtype=torch.float32)


def cast(tensor: torch.Tensor, amax: torch.Tensor, known: torch.Tensor, recipe: DelayedScaling, role: int) -> Scaled:
    """Cast a matrix to the 8-bit type of its role, row-major whatever it was; values beyond the largest saturate.

    A tensor that holds inf or nan becomes nan as a whole: saturating would hide an overflow from the loss scale.

    Args:
        tensor: A matrix of any floating type and strides.
        amax: Its :func:`largest`.
        known: The scale from its history, 0-dim fp32; 0 if there is none yet. Then the scale follows from its own amax,
            rounded down to a power of two: so ranks with other data round alike until a shared history makes their
            scales equal.
        recipe: Formats and margin.
        role: Which of the three tensors of a layer it is.
    """
    own = recipe.scale(amax, role).clamp(max=_LARGEST_SCALE)
    own = (own.view(torch.int32) & _FP32_EXPONENT_BITS).view(torch.float32)
    scale = torch.where(known > 0, known, own)
    limit = torch.finfo(recipe.dtype(role)).max
    values = (tensor.float() * scale).clamp(-limit, limit)
    # Products on tensor cores ask for row-major operands, by their strides: also in a matrix of one row.
    values = values.to(recipe.dtype(role), memory_format=torch.contiguous_format)
    return Scaled(values, torch.where(torch.isfinite(amax), scale.reciprocal(), float("nan")))


def product(left_MK: Scaled, right_KN: Scaled, dtype: torch.dtype, *, fast: bool, emulate: bool) -> torch.Tensor:
    """Multiply two 8-bit matrices, with sums in fp32.

    Args:
        left_MK: A row-major matrix.
        right_KN: A column-major matrix: the transpose of a row-major one. K and N are multiples of 16.
        dtype: Type of the result.
        fast: Let the tensor cores sum in fewer bits, as is usual in forward.
        emulate: Multiply the same 8-bit values in fp32, for hardware without such products.
    """
    if emulate:
        with torch.autocast(left_MK.values.device.type, enabled=False):
            sums = left_MK.values.float() @ right_KN.values.float()
        return (sums * (left_MK.inverse * right_KN.inverse)).to(dtype)
    return scaled_mm(
        left_MK.values,
        right_KN.values,
        scale_a=left_MK.inverse,
        scale_b=right_KN.inverse,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def transposed(scaled_MK: Scaled) -> Scaled:
    """Return the row-major transpose (K, M): products read both sides along the dim that they sum over.

    M is padded with zeros to a multiple of 16.
    """
    # As integers, for few operations take 8-bit floats.
    bits = scaled_MK.values.view(torch.uint8)
    missing = -bits.shape[0] % ROWS
    flipped = F.pad(bits, (0, 0, 0, missing)).t().contiguous() if missing else bits.t().contiguous()
    return Scaled(flipped.view(scaled_MK.values.dtype), scaled_MK.inverse)


# --- The layer. An ``nn.Linear`` becomes one in place, with its own parameters.

PERSISTENT = ("fp8_amax_history", "fp8_scale", "fp8_num_updates")
BUFFERS = (*PERSISTENT, "fp8_amax", "fp8_weight")


def is_scaling_state(name: str) -> bool:
    """Return whether an entry of a state dict is a scale or its history, without which a model can be loaded."""
    return name.rpartition(".")[2] in PERSISTENT


@dataclass(frozen=True)
class Fp8Options:
    """Options of a layer.

    Args:
        recipe: Formats and scaling.
        emulate: Multiply the same 8-bit values in fp32, for hardware without such products.
        keep_weight: Keep the 8-bit weight from one optimizer step to the next. Must be False where the weight is
            gathered only while the layer computes, as under fsdp: there it is cast in forward and again in backward.
    """

    recipe: DelayedScaling
    emulate: bool
    keep_weight: bool


class Fp8Layer(nn.Module):
    """A linear layer whose products of forward and backward run in 8 bits; made by :func:`to_fp8`.

    Output, gradients, parameters and their names are those of the plain layer, autocast included. The bias is added in
    the output's type. Buffers hold the bits of fp32 numbers in int32, so that casting a model leaves them as they are:

    - ``fp8_amax_history`` (3, amax_history_len): largest absolute values of input, weight and output gradient in the
      last steps, latest first;
    - ``fp8_scale`` (3,): scales that follow from them; 0 before a tensor has a history;
    - ``fp8_num_updates``: number of calls of :func:`~meshwright.nn.fp8.update_scales`;
    - ``fp8_amax`` (3,): largest values of this step so far, for the next update; not in state dicts;
    - ``fp8_weight``: the 8-bit weight with ``keep_weight``; not in state dicts.

    A forward without gradients changes none of them. Neither does a recomputation, which sees the same largest values.
    """

    # Recomputation needs the buffers as forward has left them, so SameBuffers must not reset them.
    repeats_alike: ClassVar[bool] = True
    is_transposed: ClassVar[bool] = False  # whether the weight is (in, out)

    weight: torch.Tensor
    bias: Any
    fp8: Fp8Options
    fp8_amax_history: torch.Tensor
    fp8_scale: torch.Tensor
    fp8_num_updates: torch.Tensor
    fp8_amax: torch.Tensor
    fp8_weight: torch.Tensor | None
    # The identity and versions that ``fp8_weight`` was cast from, and its inverse scale.
    _cast_from: tuple[tuple[int, ...], torch.Tensor] | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features)."""
        if input.numel() == 0:  # no largest value: an expert without tokens
            plain: torch.Tensor = super().forward(input)  # type: ignore[misc]
            return plain
        dtype, records = _computing_dtype(input), torch.is_grad_enabled()
        input_MK = input.reshape(-1, input.shape[-1])
        with torch.no_grad():
            cast_MK = self.cast(input_MK, INPUT, record=records)
            cast_weight = self._cast_weight(record=records)
        output: torch.Tensor = _Product.apply(input_MK, self.weight, *cast_MK, *cast_weight, self, dtype)
        output = output.view(*input.shape[:-1], output.shape[-1])
        return output if self.bias is None else output + self.bias.to(dtype)

    def cast(self, tensor: torch.Tensor, role: int, *, record: bool) -> Scaled:
        """Cast the layer's input, weight or output gradient, by role; ``record`` notes its largest value."""
        amax = largest(tensor)
        if record:
            noted = self.fp8_amax.view(torch.float32)[role]
            noted.copy_(torch.maximum(noted, torch.where(torch.isfinite(amax), amax, 0.0)))
        return cast(tensor, amax, self.fp8_scale.view(torch.float32)[role], self.fp8.recipe, role)

    def _cast_weight(self, *, record: bool) -> Scaled:
        """Return the 8-bit weight: the kept one if neither weight nor scale has changed since it was cast.

        Without gradients it is cast anew, for a write to ``weight.data`` before evaluation would leave no trace. In a
        compiled model it is as well: there tensors have no versions, and the cast is fused with its surroundings.
        """
        kept = self.fp8_weight
        if kept is None or not record or torch.compiler.is_compiling():
            return self.cast(self.weight, WEIGHT, record=record)
        source = (id(self.weight), version_of(self.weight), version_of(self.fp8_scale))
        if self._cast_from is None or self._cast_from[0] != source:
            fresh = self.cast(self.weight, WEIGHT, record=True)
            kept.copy_(fresh.values.view(torch.uint8))
            self._cast_from = source, fresh.inverse
        return Scaled(kept.view(self.fp8.recipe.dtype(WEIGHT)), self._cast_from[1])


class Fp8Linear(Fp8Layer, nn.Linear):
    """``nn.Linear`` in 8 bits, with a weight (out, in)."""

    def extra_repr(self) -> str:
        """Describe the layer as ``nn.Linear`` does, with the format."""
        return f"{super().extra_repr()}, fp8={self.fp8.recipe.fp8_format}"


class Fp8Conv1D(Fp8Layer):
    """The part in 8 bits of transformers' Conv1D, whose weight is (in, out); see :func:`to_fp8`."""

    is_transposed: ClassVar[bool] = True

    def __repr__(self) -> str:
        """Describe the layer as the plain one does, which has a text of its own, with the format."""
        return f"{super().__repr__().removesuffix(')')}, fp8={self.fp8.recipe.fp8_format})"


def _computing_dtype(input: torch.Tensor) -> torch.dtype:
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


class _Product(Function):
    """``input @ weight.t()`` in 8 bits; backward casts the gradient and multiplies it with both.

    Without ``.t()`` where the weight is (in, out). What a product reads by columns is then what it reads by rows
    otherwise, so one layer casts and transposes as much as the other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_MK: torch.Tensor,
        weight: torch.Tensor,
        input8_MK: torch.Tensor,
        input_inverse: torch.Tensor,
        weight8: torch.Tensor,
        weight_inverse: torch.Tensor,
        layer: Fp8Layer,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.layer, ctx.dtypes = layer, (input_MK.dtype, weight.dtype)
        of_input, of_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            *((input8_MK, input_inverse) if of_weight else (None, None)),
            # Without keep_weight, save the weight itself: FSDP2 gathers it again for backward.
            *((weight8, weight_inverse) if of_input and layer.fp8.keep_weight else (None, None)),
            weight if of_input and not layer.fp8.keep_weight else None,
        )
        cast_weight = Scaled(weight8, weight_inverse)
        right_KN = _by_columns(cast_weight) if layer.is_transposed else _flipped(cast_weight)
        return product(Scaled(input8_MK, input_inverse), right_KN, dtype, fast=True, emulate=layer.fp8.emulate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input8_MK, input_inverse, weight8, weight_inverse, weight = ctx.saved_tensors
        layer: Fp8Layer = ctx.layer
        emulate = layer.fp8.emulate
        cast_MN = layer.cast(gradient_MN, GRADIENT, record=True)
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            known = Scaled(weight8, weight_inverse)
            known = known if weight is None else layer.cast(weight, WEIGHT, record=False)
            right_NK = _flipped(known) if layer.is_transposed else _by_columns(known)
            of_input = product(cast_MN, right_NK, ctx.dtypes[0], fast=False, emulate=emulate)
        if ctx.needs_input_grad[1]:
            cast_MK = Scaled(input8_MK, input_inverse)
            left, right = (cast_MK, cast_MN) if layer.is_transposed else (cast_MN, cast_MK)
            of_weight = product(transposed(left), _by_columns(right), ctx.dtypes[1], fast=False, emulate=emulate)
        return of_input, of_weight, None, None, None, None, None, None


def _by_columns(scaled: Scaled) -> Scaled:
    """Return the same matrix column-major, its rows padded to a multiple of 16."""
    return Scaled(transposed(scaled).values.t(), scaled.inverse)


def _flipped(scaled: Scaled) -> Scaled:
    """Return the transpose of a row-major matrix: column-major, without a copy."""
    return Scaled(scaled.values.t(), scaled.inverse)


def to_fp8(linear: nn.Module, options: Fp8Options) -> Fp8Layer:
    """Make a plain linear layer multiply in 8 bits, in place.

    Args:
        linear: A layer of class ``nn.Linear`` itself, or transformers' Conv1D; both dims of its weight are multiples of
            16.
        options: Options of the layer.
    """
    is_plain = type(linear) is nn.Linear
    assert is_plain or is_transposed(linear), "a subclass may have a forward of its own"
    device, recipe = linear.get_parameter("weight").device, options.recipe
    linear.__class__ = Fp8Linear if is_plain else subclass_like(type(linear), Fp8Conv1D)
    assert isinstance(linear, Fp8Layer)
    linear.fp8, linear._cast_from = options, None
    shapes = {
        "fp8_amax_history": (3, recipe.amax_history_len),
        "fp8_scale": (3,),
        "fp8_num_updates": (),
        "fp8_amax": (3,),
    }
    for name, shape in shapes.items():
        zeros = torch.zeros(shape, dtype=torch.int32, device=device)
        linear.register_buffer(name, zeros, persistent=name in PERSISTENT)
    kept = None
    if options.keep_weight:
        kept = torch.empty_like(linear.weight, dtype=torch.uint8, memory_format=torch.contiguous_format)
        kept.requires_grad_(False)
    linear.register_buffer("fp8_weight", kept, persistent=False)
    return linear


def to_plain(linear: Fp8Layer) -> None:
    """Undo :func:`to_fp8`, in place."""
    for name in BUFFERS:
        delattr(linear, name)
    del linear.fp8, linear._cast_from
    linear.__class__ = type(linear).__bases__[1]  # the plain class, behind the one in 8 bits


@torch.no_grad()
def update_scales(layers: Sequence[Fp8Layer], group: dist.ProcessGroup | None = None) -> None:
    """End a step: move its largest values into the histories, and update the scales every ``interval`` steps.

    Call it once before every optimizer step. It does not wait for the device, and the number of its kernels does not
    depend on the number of layers. A tensor that was not cast in the step, or was zero, enters as 0; inf and nan do not
    enter. A history of zeros leaves a scale as it was.

    Args:
        layers: Layers of one recipe and device; the same on every rank of ``group``.
        group: The ranks that hold these layers: one all-reduce of all largest values makes histories and scales equal
            on them. None updates each rank from its own values.
    """
    if not layers:
        return
    recipe = layers[0].fp8.recipe
    amax_L3 = torch.stack([_numbers(layer.fp8_amax) for layer in layers])
    if group is not None:
        dist.all_reduce(amax_L3, dist.ReduceOp.MAX, group=group)
    history_L3H = torch.stack([_numbers(layer.fp8_amax_history) for layer in layers]).roll(1, dims=-1)
    history_L3H[..., 0] = amax_L3
    by_L3 = amax_L3 if recipe.amax_compute_algo == "most_recent" else history_L3H.amax(dim=-1)
    scale_L3 = torch.stack([_numbers(layer.fp8_scale) for layer in layers])
    wanted_L3 = torch.stack([recipe.scale(by_L3[:, role], role) for role in (INPUT, WEIGHT, GRADIENT)], dim=1)
    due_L1 = torch.stack([layer.fp8_num_updates for layer in layers]).remainder(recipe.interval).eq(0).unsqueeze(1)
    scale_L3 = torch.where(due_L1 & (by_L3 > 0) & torch.isfinite(wanted_L3), wanted_L3, scale_L3)
    foreach_copy_([_numbers(layer.fp8_amax_history) for layer in layers], list(history_L3H))
    foreach_copy_([_numbers(layer.fp8_scale) for layer in layers], list(scale_L3))
    foreach_add_([layer.fp8_num_updates for layer in layers], 1)
    foreach_zero_([layer.fp8_amax for layer in layers])


def _numbers(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.float32)
