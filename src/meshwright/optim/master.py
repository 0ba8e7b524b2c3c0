"""fp32 master weights: the optimizer updates fp32 copies, the model computes with half-precision parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import HALF_TYPES

MASTER = "master"
"""The state of our optimizers that holds the fp32 copy of a half-precision parameter."""


class MasterWeights:
    """fp32 copies of half-precision parameters (Micikevicius et al. 2018, §3.1), kept beside them.

    Small updates vanish when added to an 8-bit mantissa; added to the fp32 copy they do not. A copy of a DTensor is a
    DTensor with the same placements.
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
        """Builds ``optim_func(params)`` over the copies: takes parameters or groups of them, as torch optimizers do."""
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
        """Moves the gradients to the copies, in fp32; the half-precision ones are freed."""
        for parameter, master in self.of.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    def check_covers(self, updated: Iterable[torch.Tensor]) -> None:
        """Refuses gradients of half-precision parameters without a copy: small updates would vanish.

        Args:
            updated: What the optimizer updates: copies, and parameters that need none.

        Raises:
            ConfigError: When there is one.
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
        """Rounds the updated copies into the model's parameters."""
        for parameter, master in self.of.items():
            parameter.copy_(master)
        self._mark()

    def take_changes(self) -> None:
        """Takes parameters over that somebody has written to since the copies were rounded into them.

        Clamped, tied or averaged in place, they would be overwritten by the next step. Values are not compared: what is
        written through ``parameter.data`` leaves no mark, and is not seen.
        """
        for parameter, master in self.of.items():
            mark = _mark_of(parameter)
            if self._marks.get(parameter) != mark:
                take_over(master, parameter)
                self._marks[parameter] = mark

    def _mark(self) -> None:
        """Notes that parameters are what their copies round to."""
        self._marks = {parameter: _mark_of(parameter) for parameter in self.of}

    def zero_grad(self) -> None:
        """Frees the gradients of the model and of the copies."""
        for parameter, master in self.of.items():
            parameter.grad = master.grad = None


def _mark_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """What changes when this rank's part is written to, or replaced by another tensor."""
    local = local_tensor(parameter)
    return parameter._version, local._version, local.data_ptr()  # a DTensor's are not its shard's


@torch.no_grad()
def take_over(copy: torch.Tensor, parameter: torch.Tensor) -> None:
    """Changes a copy of a parameter, of another type or on another device, into what was loaded into the parameter.

    An element that rounds to the parameter's stays: it was loaded before, and is finer.
    """
    copied, local = local_tensor(copy), local_tensor(parameter)
    local = local.to(copied.device)
    copied.copy_(torch.where(copied.to(local.dtype) == local, copied, local.to(copied.dtype)))
