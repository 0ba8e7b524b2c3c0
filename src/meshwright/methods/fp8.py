"""Multiply linear layers in 8 bits (`fp8`): which layers, on which hardware, at what cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, NonNegativeInt, PositiveInt
from torch import nn

from meshwright.cost import FP8, Buffer, Device, Parameter, ProductDtype, Step, Traffic
from meshwright.errors import ModelError, StrategyError, join_names
from meshwright.methods.base import SHARDING, Conflict, Job, Method, Need, Phase
from meshwright.methods.fp8_torchao import Fp8Trace, require_torchao, scales_ahead, to_torchao
from meshwright.methods.recompute import is_of_low_rank
from meshwright.nn import find_blocks
from meshwright.nn.fp8 import BUFFERS, DelayedScaling, Fp8Options, to_fp8, update_scales
from meshwright.nn.module_structure import features, is_linear, is_transposed
from meshwright.runtime.torch_internals.c10d import IGNORED
from meshwright.runtime.torch_internals.modules import parameters_of


@dataclass
class Choice:
    """The linear layers to replace, and the names of all others, by reason."""

    layers: dict[str, nn.Module] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    subclasses: list[str] = field(default_factory=list)
    transposed: list[str] = field(default_factory=list)
    low_rank: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    @property
    def num_weights(self) -> dict[nn.Parameter, int]:
        """The weights of the layers, with the number of layers that share each."""
        counts: dict[nn.Parameter, int] = {}
        for layer in self.layers.values():
            weight = parameters_of(layer)["weight"]
            assert weight is not None
            counts[weight] = counts.get(weight, 0) + 1
        return counts


def choose_layers(
    model: nn.Module,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    multiple: int,
    *,
    conv1d: bool = True,
) -> Choice:
    """Choose linear layers by the names in ``include`` and ``exclude``, and by their dims.

    Args:
        model: A plain module.
        include: Substrings of which a name must have one; None takes all layers but heads and those of low rank.
        exclude: Substrings of which a name may have none.
        multiple: Number that must divide both dims of a weight.
        conv1d: Whether transformers' Conv1D may be among them.
    """
    choice = Choice()
    for name, module in model.named_modules():
        if not is_linear(module) or parameters_of(module).get("weight") is None:
            continue  # without a weight: another rank of a pipeline has it
        wanted = include is None or any(part in name for part in include)
        if not wanted or any(part in name for part in exclude or ()):
            choice.excluded.append(name)
        elif type(module) is not nn.Linear and not is_transposed(module):
            choice.subclasses.append(name)  # may compute something else, which a replacement would lose
        elif include is None and is_of_low_rank(*features(module)):
            choice.low_rank.append(name)  # adapters: to cast would take longer than to multiply
        elif is_transposed(module) and not conv1d:
            choice.transposed.append(name)
        elif any(size % multiple for size in features(module)):
            choice.misshapen.append(name)
        else:
            choice.layers[name] = module
    choice.heads = _heads(model, choice)
    for name in choice.heads if include is None else ():
        del choice.layers[name]
    return choice


def require_layers(choice: Choice, multiple: int) -> None:
    """Refuse a choice of no layers.

    Raises:
        ModelError: With the reasons against the model's layers.
    """
    if choice.layers:
        return
    reasons = [
        f"{len(choice.excluded)} left out by include and exclude" * bool(choice.excluded),
        f"{join_names(choice.misshapen, 4)} with other dims" * bool(choice.misshapen),
        f"{join_names(choice.subclasses, 4)} of classes derived from nn.Linear" * bool(choice.subclasses),
        f"{join_names(choice.transposed, 4)} of class Conv1D, whose weights mxfp8 would have to copy"
        * bool(choice.transposed),
        f"{join_names([*choice.heads, *choice.low_rank], 4)}, which include must name"
        * bool(choice.heads or choice.low_rank),
    ]
    raise ModelError(
        "fp8: no layer of the model can be computed in 8 bits",
        expected=f"nn.Linear (or transformers' Conv1D) layers whose weight has dims that are multiples of {multiple}",
        got="; ".join(reason for reason in reasons if reason) or "no linear layer at all",
        fix="correct include and exclude, choose dims that are such multiples, or leave fp8 out",
    )


def _heads(model: nn.Module, choice: Choice) -> list[str]:
    """Return the chosen layers that predict the vocabulary: outside the blocks, with one output per embedding."""
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    blocks = tuple(path + "." for path, _ in find_blocks(model))
    return [
        name
        for name, layer in choice.layers.items()
        if not name.startswith(blocks) and (made := features(layer))[1] in sizes and made[1] != made[0]
    ]


def _of_heads(choice: Choice) -> str:
    what = f"fp8: {join_names(choice.heads)} predicts the vocabulary"
    if choice.heads[0] in choice.layers:
        return (
            f"{what}, and multiplying it in 8 bits hurts convergence; exclude=({choice.heads[0]!r},) keeps it as it is"
        )
    return f"{what}, and stays as it is; name it in include to multiply it in 8 bits, which hurts convergence"


def describe_choice(choice: Choice, recipe: str, multiple: int, *, verbose: bool) -> list[str]:
    """Describe a choice to the user, one sentence each."""
    left = (choice.excluded, choice.misshapen, choice.subclasses, choice.transposed, choice.low_rank)
    others = sum(map(len, left)) + sum(name not in choice.layers for name in choice.heads)
    lines = [f"fp8: {len(choice.layers)} of {len(choice.layers) + others} linear layers multiply in 8 bits ({recipe})"]
    if choice.misshapen:
        lines.append(f"fp8: left as they are, with dims not multiples of {multiple}: {join_names(choice.misshapen, 4)}")
    if choice.transposed:
        lines.append(f"fp8: left as they are, of class Conv1D, by {recipe}: {join_names(choice.transposed, 4)}")
    if choice.low_rank:
        lines.append(f"fp8: left as they are, of low rank: {join_names(choice.low_rank, 4)}")
    if choice.heads:
        lines.append(_of_heads(choice))
    if verbose:
        lines.append(f"fp8: in 8 bits: {', '.join(choice.layers)}")
    return lines


def unusable_on(device: torch.device | Device, least: tuple[int, int]) -> str | None:
    """Return why a device, present or planned for, cannot multiply in 8 bits; None when it can."""
    if isinstance(device, Device):
        return None if device.fp8_flops_per_s is not None else f"a {device.name} has no 8-bit matrix products"
    if device.type != "cuda":
        return f"a {device.type.upper()} has no 8-bit matrix products"
    found = torch.cuda.get_device_capability(device)
    if found >= least:
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} has compute capability {found[0]}.{found[1]}, below {least[0]}.{least[1]}"


# --- ``cost``: histories and weights in 8 bits beside the parameters, and gathers of one byte per element

_NUMBER_BYTES = 4  # an fp32 number, stored as an int32
_AMAX = 3  # largest values of a layer: of its input, weight and output gradient


def delayed_cost(step: Step, options: Fp8Options, *, reduce_amax: bool) -> Step:
    """Add the buffers of delayed scaling, and one all-reduce of all largest values per step."""
    numbers = (
        _AMAX * options.recipe.amax_history_len + 2 * _AMAX + 1
    )  # histories, scales, this step's values, number of updates
    buffers: list[Buffer] = []
    total = 0
    for count, parameter in step.every_parameter():
        for _ in range(count * parameter.num_fp8):
            total += 1
            buffers.append(Buffer(numbers, _NUMBER_BYTES, floating=False))
            if options.keep_weight:
                buffers.append(Buffer(parameter.numel, 1, floating=False))
    step = step.replace(buffers=(*step.buffers, *buffers))
    axis = next((axis for axis in ("data", "zero", "sequence", "tensor") if step.size(axis) > 1), None)
    if not reduce_amax or axis is None:
        return step
    return step.send(Traffic("all_reduce", axis, total * _AMAX * _NUMBER_BYTES, "update"))


def gather_cost(step: Step) -> Step:
    """Gather weights in 8 bits, and add the all-reduce of all their scales after the step."""

    def changed(parameter: Parameter) -> Parameter:
        return dataclasses.replace(parameter, gather_itemsize=1) if parameter.num_fp8 else parameter

    total = sum(count for count, parameter in step.every_parameter() if parameter.num_fp8)
    blocks = [dataclasses.replace(block, parameters=tuple(map(changed, block.parameters))) for block in step.blocks]
    return step.replace(blocks=tuple(blocks)).send(
        Traffic("all_reduce", step.shard_axis or "data", total * _NUMBER_BYTES, "update")
    )


# --- The method. ATorch's is on TransformerEngine, this one on torch and torchao

_UNFUSED = (
    "fp8: without compile the casts of delayed scaling move some 29 bytes for each element that they cast, which may "
    "cost more than products in 8 bits save; add the method compile, or compile the blocks"
)
_OF_HISTORY = ("margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax")
_AXES = (
    "sequence",
    "data",
    "zero",
    "tensor",
)  # their ranks have the same layers, and other data or other parts of them
_AS_A_RECIPE = "name a recipe: 'delayed' is TransformerEngine's, 'tensorwise', 'rowwise' and 'mxfp8' are torchao's"
_FOREIGN = {
    **dict.fromkeys(("use_te", "scale_method", "scale_block_size"), _AS_A_RECIPE),
    **dict.fromkeys(("quantization_method", "compute_method"), "leave it out; the device decides on the kernel"),
    **dict.fromkeys(("fp8_dpa", "fp8_mha"), "leave it out; attention stays in 16 bits"),
    "override_linear_precision": "leave it out; all three products of a layer are in 8 bits",
    "precision_switchable": "leave it out; exclude names the layers that stay in 16 bits",
    "precision_switchable_fp8_input_current_scaling": _AS_A_RECIPE,
}  # of ATorch
_TILE = {"mxfp8": 32}  # rows and columns that share a scale; 16 for the other recipes


def _to_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Parts = Annotated[tuple[str, ...], BeforeValidator(_to_tuple)]


class Fp8(Method):
    """Linear layers whose three matrix products, one of forward and two of backward, run in 8 bits.

    They are ``nn.Linear`` and transformers' Conv1D.

    Their parameters, names and results' types stay; what is between the layers stays in the model's precision.

    Config: a recipe's name, or keys. ``delayed`` scales tensors by the largest values of earlier steps, with ATorch's
    keys. ``tensorwise``, ``rowwise`` and ``mxfp8`` are torchao's: scaled by what is in the tensor now, as a whole, row
    by row, or in blocks of 32.
    """

    method_name: ClassVar[str] = "fp8"
    short_forms: ClassVar[Mapping[type, str]] = {str: "recipe"}
    phase: ClassVar[Phase] = Phase.FP8
    product_dtype: ClassVar[ProductDtype | None] = FP8
    summary: ClassVar[str] = "linear layers multiply in 8 bits: about twice the arithmetic of bf16 on sm 8.9 and above"
    effect: ClassVar[str] = (
        "time: products of 8 bits. Memory: weights once more in 8 bits. Communication: one all-reduce of scales"
    )
    seed_name: ClassVar[str | None] = "ATorch: fp8"
    needs: ClassVar[tuple[Need, ...]] = (
        Need(
            any_of=SHARDING,
            reason="no other method gathers weights",
            fix="leave all_gather out",
            when=lambda own: own.all_gather,
            own_keys="all_gather=True",
        ),
    )
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="outer",
            reason="it changes weights between the steps whose scales are known ahead",
            fix="leave all_gather out",
            when=lambda own, other: own.all_gather,
            own_keys="all_gather=True",
        ),
        Conflict(
            other="tensor_parallel",
            reason="a rank knows the scale of its part of a weight alone",
            fix="leave all_gather out",
            when=lambda own, other: own.all_gather,
            own_keys="all_gather=True",
        ),
        Conflict(
            other="half",
            reason="8 bits are gathered from fp32 weights",
            fix="leave all_gather out, or keep master weights",
            when=lambda own, other: own.all_gather and not other.master_weights,
            own_keys="all_gather=True",
            other_keys="master_weights=False",
        ),
    )

    foreign_keys: ClassVar[Mapping[str, str]] = _FOREIGN
    foreign_off: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "use_te": (None, True),  # its default, with delayed scaling as here
        "scale_method": (None, "tensorwise"),  # read beside use_te=False alone
        "scale_block_size": (None, 128),
        "override_linear_precision": (None, (False,) * 3, [False] * 3),
        "quantization_method": (None, "default"),
        "compute_method": (None, "default"),
    }

    recipe: Literal["delayed", "tensorwise", "rowwise", "mxfp8"] = "delayed"
    include: Parts | None = None
    """Substrings of names: a layer is replaced if its name has one; None takes all but heads and those of low rank."""
    exclude: Parts | None = None
    """Substrings of names: a layer stays as it is if its name has one, whatever ``include`` says."""
    verbose: bool = False
    """Print the names of the layers that are replaced."""
    margin: NonNegativeInt = 0
    interval: PositiveInt = 1
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    amax_history_len: PositiveInt = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True
    """Make scales equal on all ranks that have a layer, by one all-reduce per step."""
    all_gather: bool = False
    """Under zero1, zero2 and fsdp: gather weights in 8 bits. Only ``tensorwise``."""
    emulate: bool = False
    """Run without 8-bit hardware: the same 8-bit values, multiplied in a wider type. Slow, for tests."""

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuse keys that the recipe does not take."""
        recipe = keys.get("recipe", "delayed")
        for key in _OF_HISTORY if recipe != "delayed" else ():
            if keys.get(key, cls.model_fields[key].default) != cls.model_fields[key].default:
                raise StrategyError(
                    f"fp8: the recipe {recipe!r} has no history, which {key!r} belongs to",
                    expected="keys of the recipe, or the recipe 'delayed'",
                    got=f"{key}={keys[key]!r}",
                    fix="leave the key out",
                )
        if keys.get("all_gather") and recipe != "tensorwise":
            raise StrategyError(
                f"fp8: weights are not gathered in 8 bits under the recipe {recipe!r}",
                expected="the recipe 'tensorwise', whose one scale for each weight all ranks know before they send",
                got=f"recipe={recipe!r} and all_gather=True",
                fix="leave all_gather out, or use tensorwise",
            )
        return keys

    def left_out_on(self, device: torch.device | Device) -> str | None:
        """Return why the method is left out on a device without 8-bit products, unless they are emulated."""
        reason = None if self.emulate else unusable_on(device, (10, 0) if self.recipe == "mxfp8" else (8, 9))
        return reason and f"fp8 is ignored: {reason}; the layers multiply as they would without"

    def choice(self, model: nn.Module, tensor_ranks: int) -> Choice:
        """Choose the layers of a plain model to replace; each of ``tensor_ranks`` parts must have fitting dims."""
        multiple = self._multiple * tensor_ranks
        return choose_layers(model, self.include, self.exclude, multiple, conv1d=self.recipe != "mxfp8")

    @property
    def _multiple(self) -> int:
        return _TILE.get(self.recipe, 16)

    def options(self, *, sharded: bool, tensor_ranks: int, emulate: bool) -> Fp8Options | None:
        """Return the options of layers with delayed scaling; None for torchao's recipes."""
        if self.recipe != "delayed":
            return None
        recipe = DelayedScaling(
            self.margin, self.interval, self.fp8_format, self.amax_history_len, self.amax_compute_algo
        )
        return Fp8Options(recipe, emulate, keep_weight=not sharded and tensor_ranks == 1)

    def traced_narrow(self, model: nn.Module, *, sharded: bool, tensor_ranks: int) -> Fp8Trace:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        choice = self.choice(model, tensor_ranks)
        options = self.options(sharded=sharded, tensor_ranks=tensor_ranks, emulate=self.emulate)
        return Fp8Trace(choice.layers, options, choice.num_weights, self._multiple, self.recipe)

    def check(self, job: Job) -> None:
        """Refuse a model without fitting layers, a recipe without its library, and tied weights to gather in 8 bits."""
        if self.recipe != "delayed":
            require_torchao(self.recipe)
        tensor_ranks = job.size("tensor")
        choice = self.choice(job.model, tensor_ranks)
        require_layers(choice, self._multiple * tensor_ranks)
        if self.all_gather:
            self._check_gathers(job, choice)

    def _check_gathers(self, job: Job, choice: Choice) -> None:
        transposed = [name for name, layer in choice.layers.items() if is_transposed(layer)]
        if transposed:
            raise StrategyError(
                "fp8: all_gather=True does not fit the model",
                expected="layers of class nn.Linear, whose scales torchao knows ahead",
                got=f"layers of class Conv1D: {join_names(transposed, 4)}",
                fix="leave all_gather out, or exclude these layers",
            )
        uses = [id(parameter) for _, parameter in job.model.named_parameters(remove_duplicate=False)]
        tied = [name for name, layer in choice.layers.items() if uses.count(id(layer.weight)) > 1]
        if tied:
            raise StrategyError(
                "fp8: all_gather=True does not fit the model",
                expected="weights that belong to one layer each",
                got=f"tied weights: {join_names(tied)}",
                fix="leave all_gather out, or exclude the tied layers",
            )

    def apply(self, job: Job) -> None:
        """Replace the layers in place, and update their scales in every step."""
        tensor_ranks = job.size("tensor")
        choice = self.choice(job.model, tensor_ranks)
        job.notices += describe_choice(choice, self.recipe, self._multiple * tensor_ranks, verbose=self.verbose)
        options = self.options(sharded=job.shard_axis is not None, tensor_ranks=tensor_ranks, emulate=self.emulate)
        if options is not None:
            self._delayed(job, choice, options)
            return
        to_torchao(
            choice.layers.values(), self.recipe, rows=self._multiple, emulate=self.emulate, all_gather=self.all_gather
        )
        if self.all_gather:
            job.optimizer.after_update.append(scales_ahead(job.model))

    def _delayed(self, job: Job, choice: Choice, options: Fp8Options) -> None:
        layers = [to_fp8(layer, options) for layer in choice.layers.values()]
        # DDP would broadcast these buffers in every forward; they are equal already, or must differ.
        own = [f"{name}.{buffer}".lstrip(".") for name in choice.layers for buffer in BUFFERS]
        ignored = [*getattr(job.model, IGNORED, ()), *own]
        setattr(job.model, IGNORED, ignored)
        several = self.reduce_amax and any(job.size(axis) > 1 for axis in _AXES)
        group = job.mesh_axes.flat_mesh(*_AXES).get_group() if several else None
        job.optimizer.before_update.append(functools.partial(update_scales, layers, group))
        if job.device.type == "cuda" and job.strategy.get("compile") is None:
            job.notices.append(_UNFUSED)
        if job.optim_func is None:
            job.notices.append(
                "fp8: no optimizer is known, whose steps would update the scales: call "
                "meshwright.nn.fp8.update_scales before each"
            )

    def cost(self, step: Step) -> Step:
        """Add histories and weights in 8 bits, or gather one byte per element."""
        sharded = step.shard_axis is not None
        options = self.options(sharded=sharded, tensor_ranks=step.size("tensor"), emulate=self.emulate)
        if options is not None:
            return delayed_cost(step, options, reduce_amax=self.reduce_amax)
        return gather_cost(step) if self.all_gather else step
