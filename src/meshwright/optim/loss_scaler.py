"""The dynamic loss scale of fp16, with bounds and patience."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import by_kind
from meshwright.runtime import world_size


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler over any mixture of layouts, with bounds and patience. Seed of these two: ColossalAI.

    torch checks all gradients in one operation, which refuses plain tensors and DTensors of several meshes together.
    This one checks local shards, and what one rank finds holds for all: one all-reduce of one number per step, over the
    world (or see :meth:`meet_in`). A step that overflows is skipped in any case; without bounds and with
    ``hysteresis=1`` the scale is torch's.

    Args:
        device: Device type the gradients are on.
        initial_scale: The first scale.
        growth_factor: The scale is multiplied by it after ``growth_interval`` steps without overflow.
        backoff_factor: The scale is multiplied by it after an overflow.
        growth_interval: See ``growth_factor``.
        hysteresis: Overflows since the scale last grew before it falls; 1 lowers it at the first.
        min_scale: The scale never falls below.
        max_scale: The scale never grows above; None for no bound.

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
        self._overflows = 0  # since the scale last grew
        self._group: dist.ProcessGroup | None = None  # None: the world
        self._num_peers: int | None = None  # None: all ranks

    def meet_in(self, group: dist.ProcessGroup | None, num_ranks: int) -> None:
        """From now on an overflow concerns the ranks of a group only, such as those of one replica."""
        self._group, self._num_peers = group, num_ranks

    # torch's ShardedGradScaler overrides the same method, for one process group.
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients.")
        for kind in by_kind(map(local_tensor, gradients)):
            device = kind[0].device
            found = found_inf if device == found_inf.device else torch.zeros_like(found_inf, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(kind, found, inv_scale.to(device))
            if found is not found_inf:  # these were offloaded
                found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
        if (world_size() if self._num_peers is None else self._num_peers) > 1:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._group)
        return {found_inf.device: found_inf}

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Moves the scale after a step; see the class."""
        if new_scale is not None or (self.hysteresis, self.min_scale, self.max_scale) == (1, 0.0, None):
            super().update(new_scale)
            return
        before, overflowed = self.get_scale(), self._overflowed()
        super().update()
        if overflowed:
            self._overflows += 1
        elif self._get_growth_tracker() == 0:  # it has just grown
            self._overflows = 0
        scale = before if overflowed and self._overflows < self.hysteresis else self.get_scale()
        highest = self.max_scale if self.max_scale is not None else scale
        assert self._scale is not None, "super().update() needs it too"
        self._scale.fill_(min(max(scale, self.min_scale), highest))

    def _overflowed(self) -> bool:
        found = (
            each for state in self._per_optimizer_states.values() for each in state["found_inf_per_device"].values()
        )
        return any(bool(each.item()) for each in found)

    def state_dict(self) -> dict[str, Any]:
        """torch's entries, and the overflows that count towards ``hysteresis``."""
        return {**super().state_dict(), "overflows": self._overflows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` returned; also torch's own."""
        super().load_state_dict(state_dict)
        self._overflows = int(state_dict.get("overflows", 0))
