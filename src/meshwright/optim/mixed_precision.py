"""Train in half precision: fp32 master weights, stochastic rounding, and the dynamic loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.dtensors import HALF_TYPES, by_kind, local_tensor
from meshwright.optim.full_state_dict import check_fit, gathered, parameters_by_key, placed
from meshwright.runtime import world_size
from meshwright.runtime.torch_internals.optim import growth_tracker_of, non_finite_check_and_unscale_, scaler_states_of
from meshwright.runtime.torch_internals.tensors import version_of

MASTER = "master"
"""The state of our optimizers that holds the fp32 copy of a half-precision parameter."""


class MasterWeights:
    """fp32 copies of half-precision parameters, which the optimizer updates (Micikevicius et al. 2018, §3.1).

    Small updates vanish when they are added to an 8-bit mantissa, but not when added to the fp32 copy. The copy of a
    DTensor is a DTensor with the same placements.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.of: dict[torch.Tensor, torch.Tensor] = {
            parameter: parameter.detach().float().requires_grad_()
            for parameter in parameters
            if parameter.requires_grad and parameter.dtype in HALF_TYPES
        }
        """The fp32 copy of each half-precision parameter; parameters of other types have none."""
        self._marks: dict[torch.Tensor, tuple[int, ...]] = {}
        self._mark()

    def optimizer(self, optim_func: Callable[[Any], Optimizer], params: Iterable[Any]) -> Optimizer:
        """Build ``optim_func(params)`` over the copies. ``params`` are parameters or groups, as torch takes them."""
        groups = list(params)
        if groups and isinstance(groups[0], Mapping):
            return optim_func([{**group, "params": self._replaced(group["params"])} for group in groups])
        return optim_func(self._replaced(groups))

    def _replaced(self, params: Any) -> list[Any]:
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        if listed and isinstance(listed[0], tuple):  # named parameters
            return [(name, self.of.get(parameter, parameter)) for name, parameter in listed]
        return [self.of.get(parameter, parameter) for parameter in listed]

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Move the gradients to the copies in fp32, and free the half-precision ones."""
        for parameter, master in self.of.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    def check_covers(self, updated: Iterable[torch.Tensor]) -> None:
        """Refuse gradients of half-precision parameters without a copy: small updates would vanish.

        Args:
            updated: The tensors that the optimizer updates: copies, and parameters that need none.

        Raises:
            ConfigError: When such a parameter has a gradient.
        """
        lacking = [each for each in updated if each.grad is not None and self._lacks(each)]
        if lacking:
            raise ConfigError(
                f"{len(lacking)} parameters in half precision have gradients and no fp32 master weights: they were "
                "frozen when the optimizer was built",
                expected="parameters that require gradients from the beginning",
                got=f"shapes {[tuple(each.shape) for each in lacking[:5]]}",
                fix="save a checkpoint, build model and optimizer anew with these unfrozen, and load it",
            )

    def _lacks(self, updated: torch.Tensor) -> bool:
        return updated.dtype in HALF_TYPES

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the updated copies into the model's parameters."""
        for parameter, master in self.of.items():
            parameter.copy_(master)
        self._mark()

    def take_changes(self) -> None:
        """Copy parameters back that were written to since the copies were rounded into them.

        The next step would overwrite what was clamped, tied or averaged in place. Changes are found by version
        counters, not by values: writes through ``parameter.data`` are not seen.
        """
        for parameter, master in self.of.items():
            mark = _mark_of(parameter)
            if self._marks.get(parameter) != mark:
                take_over(master, parameter)
                self._marks[parameter] = mark

    def _mark(self) -> None:
        self._marks = {parameter: _mark_of(parameter) for parameter in self.of}

    def added_to(self, state_dict: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of an optimizer of the copies with the fp32 copies among its states."""
        self.take_changes()
        state = dict(state_dict["state"])
        for key, copy in self._by_key(state_dict, optimizer).items():
            state[key] = {**state.get(key, {}), MASTER: copy.detach()}
        return {**state_dict, "state": state}

    def gathered_to(self, state_dict: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return a gathered state dict with the whole fp32 copies among its states; collective."""
        copies = gathered(self.added_to({**state_dict, "state": {}}, optimizer))["state"]
        state = {key: {**state_dict["state"].get(key, {}), **copy} for key, copy in copies.items()}
        return {**state_dict, "state": {**state_dict["state"], **state}}

    @torch.no_grad()
    def load(
        self, state_dict: dict[str, Any], optimizer: Optimizer, load_rest: Callable[[dict[str, Any]], None]
    ) -> None:
        """Load a state dict of :meth:`added_to`: its fp32 copies here, and the rest by ``load_rest``.

        Copies that it lacks stay, as with states that were saved in fp32.

        Raises:
            CheckpointError: When it is of other parameters; nothing is changed then.
        """
        check_fit(optimizer, state_dict)
        self.take_changes()
        copies, state = self._by_key(state_dict, optimizer), dict(state_dict["state"])
        saved = {key: state[key][MASTER] for key in copies if MASTER in state.get(key, {})}
        for key in saved:
            state[key] = {name: value for name, value in state[key].items() if name != MASTER}
        load_rest({**state_dict, "state": {key: each for key, each in state.items() if each}})
        for key, value in saved.items():
            local_tensor(copies[key]).copy_(local_tensor(placed(value, MASTER, copies[key], copies[key])))
        self.write_back()

    def _by_key(self, state_dict: dict[str, Any], optimizer: Optimizer) -> dict[Any, torch.Tensor]:
        """Return the fp32 copies of half-precision parameters by their keys in a state dict of the optimizer."""
        halves = {id(copy) for parameter, copy in self.of.items() if parameter.dtype in HALF_TYPES}
        updated = parameters_by_key(optimizer, state_dict).items()
        return {key: each for key, each in updated if id(each) in halves and each.dtype == torch.float32}

    def zero_grad(self) -> None:
        """Free the gradients of the model and of the copies."""
        for parameter, master in self.of.items():
            parameter.grad = master.grad = None


def _mark_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return a value that changes when this rank's part is written to or replaced by another tensor."""
    local = local_tensor(parameter)
    # A DTensor's version is not its shard's.
    return version_of(parameter), version_of(local), local.data_ptr()


@torch.no_grad()
def take_over(copy: torch.Tensor, parameter: torch.Tensor) -> None:
    """Bring a copy of a parameter, of any type and on any device, up to date with the parameter.

    Elements of the copy that round to the parameter's stay as they are: they are the same number, more precisely.
    """
    copied, local = local_tensor(copy), local_tensor(parameter)
    local = local.to(copied.device)
    copied.copy_(torch.where(copied.to(local.dtype) == local, copied, local.to(copied.dtype)))


# --- Stochastic rounding into bfloat16: small updates survive on average, without an fp32 copy

_DROPPED_BITS = 16  # of an fp32 mantissa, in bfloat16


def round_stochastically_(target: torch.Tensor, value: torch.Tensor, generator: torch.Generator) -> None:
    """Round fp32 to one of the two neighbouring bfloat16 numbers, with probabilities that keep the mean (in place).

    Adding random bits below the kept mantissa and cutting them off carries with exactly that probability
    (Gupta et al. 2015; Zamirai et al. 2020 for bfloat16 training). Infinities and NaN stay what they are.

    Args:
        target: bfloat16, written to.
        value: fp32 of the same shape.
        generator: Of the same device; ranks that hold the same shard must draw the same bits.
    """
    bits = value.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << _DROPPED_BITS, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    rounded = ((bits + noise) & -(1 << _DROPPED_BITS)).view(torch.float32)
    target.copy_(torch.where(torch.isfinite(value), rounded, value))


def shard_generator(device: torch.device, step: int, position: int, shard: int) -> torch.Generator:
    """Make a generator seeded by step, parameter and shard and by nothing else, so that replicas stay equal."""
    generator = torch.Generator(device)
    generator.manual_seed(((step * 1_000_003 + position) * 1_000_003 + shard) % (1 << 63))
    return generator


# --- The dynamic loss scale of fp16


class ScaleGradient(torch.autograd.Function):
    """Identity whose backward multiplies by the loss scale: the loss that users read stays unscaled."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the loss as it is."""
        ctx.save_for_backward(scale)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Multiply the gradient by the scale."""
        (scale,) = ctx.saved_tensors
        return gradients[0] * scale, None


def unscale_(tensors: Iterable[torch.Tensor], inverse_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Multiply plain tensors of any devices and types in place, and look for inf and nan in the same pass.

    Args:
        tensors: Gradients, or local shards of them.
        inverse_scale: The factor, 0-dim fp32.
        found_inf: 0-dim or one-element fp32; set to 1 when a tensor holds inf or nan.
    """
    for kind in by_kind(tensors):
        device = kind[0].device
        found = found_inf if device == found_inf.device else torch.zeros_like(found_inf, device=device)
        non_finite_check_and_unscale_(kind, found, inverse_scale.to(device))
        if found is not found_inf:  # some gradients were offloaded
            found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))


def gradient_holders(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensor that holds the gradient of each of an optimizer's parameters; as a rule the parameter itself.

    An optimizer of copies in host memory, whose gradients stay on the device, has a method of this name.
    """
    own = getattr(optimizer, "gradient_holders", None)
    if own is not None:
        return list(own())
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler over any mixture of layouts, with bounds and hysteresis as ColossalAI has them.

    torch checks all gradients in one operation, which refuses plain tensors and DTensors of several meshes together.
    This one checks local shards, and all ranks act on what any of them finds: one all-reduce of one number per step,
    over the world (or see :meth:`agree_within`). A step that overflows is skipped in any case; without bounds and with
    ``hysteresis=1`` the scale is torch's.

    Args:
        device: Device type the gradients are on.
        initial_scale: The first scale.
        growth_factor: Multiplies the scale after ``growth_interval`` steps without overflow.
        backoff_factor: Multiplies the scale after an overflow.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth at which the scale falls; 1 lowers it at the first.
        min_scale: Lowest scale.
        max_scale: Highest scale; None for no bound.

    Raises:
        ConfigError: When the numbers do not make a scale.
    """

    def __init__(
        self,
        device: str,
        *,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 0.0,
        max_scale: float | None = None,
    ) -> None:
        if not (min_scale <= initial_scale and (max_scale is None or initial_scale <= max_scale)):
            raise ConfigError(
                "initial_scale is outside its bounds",
                expected=f"a number from min_scale {min_scale} to max_scale {max_scale}",
                got=repr(initial_scale),
                fix="correct the three",
            )
        if not (growth_factor > 1 and 0 < backoff_factor < 1):
            raise ConfigError(
                "growth_factor and backoff_factor do not move a loss scale",
                expected="growth_factor above 1 and backoff_factor between 0 and 1",
                got=f"{growth_factor} and {backoff_factor}",
                fix="use 2 and 0.5",
            )
        super().__init__(device, initial_scale, growth_factor, backoff_factor, growth_interval)
        self.hysteresis, self.min_scale, self.max_scale = hysteresis, min_scale, max_scale
        self._overflows: int | torch.Tensor = 0  # since the scale last grew
        self._group: dist.ProcessGroup | None = None  # None: the world
        self._num_peers: int | None = None  # None: all ranks

    def agree_within(self, group: dist.ProcessGroup | None, num_ranks: int) -> None:
        """Share overflows only with the ranks of a group, such as those of one replica, from now on."""
        self._group, self._num_peers = group, num_ranks

    # torch's ShardedGradScaler overrides the same method, for one process group.
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = [holder.grad for holder in gradient_holders(optimizer) if holder.grad is not None]
        if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients.")
        unscale_(map(local_tensor, gradients), inv_scale, found_inf)
        if (world_size() if self._num_peers is None else self._num_peers) > 1:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._group)
        return {found_inf.device: found_inf}

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale after a step; see the class."""
        if new_scale is not None or (self.hysteresis, self.min_scale, self.max_scale) == (1, 0.0, None):
            super().update(new_scale)
            return
        assert self._scale is not None, "unscaling needs it too"
        before, overflowed = self._scale.clone(), self._overflowed()
        super().update()
        # All on the device: the host does not know whether this step overflowed.
        has_grown = (growth_tracker_of(self) == 0) & ~overflowed
        self._overflows = (self._overflows + overflowed.to(torch.int64)) * ~has_grown
        keeps = overflowed & (self._overflows < self.hysteresis)
        self._scale.copy_(torch.where(keeps, before, self._scale).clamp(self.min_scale, self.max_scale))

    def _overflowed(self) -> torch.Tensor:
        found = (each for state in scaler_states_of(self).values() for each in state["found_inf_per_device"].values())
        return torch.stack([each.reshape(()) > 0 for each in found]).any()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's entries, and the overflows that count towards ``hysteresis``."""
        return {**super().state_dict(), "overflows": int(self._overflows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of this class or of torch's scaler returned."""
        super().load_state_dict(state_dict)
        self._overflows = int(state_dict.get("overflows", 0))
