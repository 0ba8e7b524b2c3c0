"""``fp8``: linear layers multiply in 8 bits. Seed: ATorch, on TransformerEngine; here on torch and torchao."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, NonNegativeInt, PositiveInt
from torch import nn

from meshwright.cost import Device, Step
from meshwright.errors import StrategyError, join_names
from meshwright.methods.base import Method, Phase
from meshwright.methods.float8.choice import Choice, choose_layers, heads, require_layers, said, unusable_on
from meshwright.methods.float8.cost import delayed_cost, gather_cost
from meshwright.methods.float8.torchao_layers import require_torchao, scales_ahead, to_torchao
from meshwright.methods.float8.trace import Fp8Trace
from meshwright.methods.job import Job
from meshwright.methods.law import SHARDING, Conflict, Need
from meshwright.nn.fp8 import BUFFERS, DelayedScaling, Fp8Options, to_fp8, update_scales

_OF_HISTORY = ("margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax")
_AXES = ("sequence", "data", "zero", "tensor")  # whose ranks hold the same layers, and see other data or parts
_TILE = {"mxfp8": 32}  # rows and columns that belong together; 16 for the others


def _to_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Parts = Annotated[tuple[str, ...], BeforeValidator(_to_tuple)]


class Fp8(Method):
    """``nn.Linear`` layers whose three matrix products, one of forward and two of backward, run in 8 bits.

    Their parameters, names and results' types stay; what is between the layers stays in the model's precision.

    Config: a recipe's name, or keys. ``delayed`` scales tensors by the largest values of earlier steps, with ATorch's
    keys. ``tensorwise``, ``rowwise`` and ``mxfp8`` are torchao's: scaled by what is in the tensor now, as a whole, row
    by row, or in blocks of 32.
    """

    method_name: ClassVar[str] = "fp8"
    phase: ClassVar[Phase] = Phase.FP8
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

    recipe: Literal["delayed", "tensorwise", "rowwise", "mxfp8"] = "delayed"
    include: Parts | None = None
    """Substrings of names: a layer is replaced if its name has one; None takes all."""
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
    """Make scales equal on all ranks that hold a layer, by one all-reduce per step."""
    all_gather: bool = False
    """Under zero1, zero2 and fsdp: gather weights in 8 bits. Only ``tensorwise``."""
    emulate: bool = False
    """Run without 8-bit hardware: the same 8-bit values, multiplied in a wider type. Slow, for tests."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads the name of a recipe."""
        return {"recipe": raw} if isinstance(raw, str) else super().from_short(raw)

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuses keys that the recipe has no use for."""
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
        """Why it is ignored on a device without 8-bit products, unless it is emulated."""
        reason = None if self.emulate else unusable_on(device, (10, 0) if self.recipe == "mxfp8" else (8, 9))
        return reason and f"fp8 is ignored: {reason}; the layers multiply as they would without"

    def choice(self, model: nn.Module, tensor_ranks: int) -> Choice:
        """Which layers of a plain model are replaced; each of ``tensor_ranks`` parts must have fitting dims."""
        return choose_layers(model, self.include, self.exclude, self._multiple * tensor_ranks)

    @property
    def _multiple(self) -> int:
        return _TILE.get(self.recipe, 16)

    def options(self, *, sharded: bool, tensor_ranks: int, emulate: bool) -> Fp8Options | None:
        """What layers are told under delayed scaling; None for torchao's recipes."""
        if self.recipe != "delayed":
            return None
        recipe = DelayedScaling(
            self.margin, self.interval, self.fp8_format, self.amax_history_len, self.amax_compute_algo
        )
        return Fp8Options(recipe, emulate, keep_weight=not sharded and tensor_ranks == 1)

    def trace(self, model: nn.Module, *, sharded: bool, tensor_ranks: int) -> Fp8Trace:
        """What predictions need to run a plain model as ``apply`` will change it."""
        choice = self.choice(model, tensor_ranks)
        # Fake tensors are never multiplied: any device can pretend.
        options = self.options(sharded=sharded, tensor_ranks=tensor_ranks, emulate=True)
        return Fp8Trace(choice.layers, options, choice.num_weights, self._multiple, self.recipe)

    def check(self, job: Job) -> None:
        """Refuses a model without fitting layers, a recipe without its library, and gathers that nothing asks for."""
        if self.recipe != "delayed":
            require_torchao(self.recipe)
        tensor_ranks = job.size("tensor")
        choice = self.choice(job.model, tensor_ranks)
        require_layers(choice, self._multiple * tensor_ranks)
        if self.all_gather:
            self._check_gathers(job, choice)

    def _check_gathers(self, job: Job, choice: Choice) -> None:
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
        """Replaces the layers in place, and ends every step with their scales."""
        tensor_ranks = job.size("tensor")
        choice = self.choice(job.model, tensor_ranks)
        job.notices += said(choice, self.recipe, self._multiple * tensor_ranks, verbose=self.verbose)
        found = heads(job.model, choice)
        if found:
            job.notices.append(
                f"fp8: {join_names(found)} predicts the vocabulary, and multiplying it in 8 bits hurts convergence; "
                f"exclude=({found[0]!r},) keeps it as it is"
            )
        options = self.options(sharded=job.shard_axis is not None, tensor_ranks=tensor_ranks, emulate=self.emulate)
        if options is not None:
            self._delayed(job, choice, options)
            return
        to_torchao(
            choice.layers.values(), self.recipe, rows=self._multiple, emulate=self.emulate, all_gather=self.all_gather
        )
        if self.all_gather:
            job.after_update.append(scales_ahead(job.model))

    def _delayed(self, job: Job, choice: Choice, options: Fp8Options) -> None:
        layers = [to_fp8(layer, options) for layer in choice.layers.values()]
        # DDP would send them in every forward; they are equal already, or are not to be.
        own = [f"{name}.{buffer}".lstrip(".") for name in choice.layers for buffer in BUFFERS]
        ignored = [*getattr(job.model, "_ddp_params_and_buffers_to_ignore", ()), *own]
        job.model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
        several = self.reduce_amax and any(job.size(axis) > 1 for axis in _AXES)
        group = job.flat_mesh(*_AXES).get_group() if several else None
        job.before_update.append(functools.partial(update_scales, layers, group))
        if job.optim_func is None:
            job.notices.append(
                "fp8: no optimizer is known, whose steps would update the scales: call "
                "meshwright.nn.fp8.update_scales before each"
            )

    def cost(self, step: Step) -> Step:
        """Histories and weights in 8 bits beside the parameters, or gathers of one byte per element."""
        sharded = step.shard_axis is not None
        options = self.options(sharded=sharded, tensor_ranks=step.size("tensor"), emulate=self.emulate)
        if options is not None:
            return delayed_cost(step, options, reduce_amax=self.reduce_amax)
        return gather_cost(step) if self.all_gather else step
