"""Measure gradients over all ranks for an `OptimManager`: its loss scale, norms, and one decision per step.

The scale is a Python number and the decision one for all optimizers, where
:class:`~meshwright.optim.LossScaler` is torch's GradScaler, which holds an fp32 tensor and decides per optimizer. The
norm takes one all-reduce, in which pipeline stages and parameters of any meshes meet, where
:func:`~meshwright.optim.total_norm` takes one per mesh axis. What both do per tensor is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from meshwright.compat.bmtrain.block import take_gather_order
from meshwright.errors import ConfigError, ModelError
from meshwright.optim.dtensors import (
    Peers,
    by_kind,
    local_norms,
    local_tensor,
    num_replicas,
    numbers_of,
    placement_of,
    reduced,
)
from meshwright.optim.mixed_precision import unscale_
from meshwright.optim.outer import OuterOptimizer
from meshwright.runtime.torch_internals.optim import foreach_norm
from meshwright.runtime.torch_internals.tensors import version_of


class LossScale:
    """A loss scale, which keeps small fp16 gradients from vanishing (Micikevicius et al. 2018, §3.2).

    Args:
        value: The first scale; None for no scaling, a scale of 1 that never changes.
        factor: Divides the scale after an overflow and multiplies it when it grows; one below 1 is inverted.
        steps: Steps without overflow after which the scale grows; None for a fixed scale.
        lowest: Lowest scale.
        highest: Highest scale.

    Raises:
        ConfigError: When the numbers do not make a scale.
    """

    def __init__(
        self, value: float | None, factor: float = 2.0, steps: int | None = 1024, lowest: float = 1.0,
        highest: float = float("inf"),
    ) -> None:  # fmt: skip
        self.enabled = value is not None
        self.value = 1.0 if value is None else float(value)
        self.factor = 1.0 / factor if 0 < factor < 1 else float(factor)
        self.steps = steps
        self.lowest = float(lowest)
        self.highest = float(highest)
        self.clean_steps = 0
        """Steps without overflow since the scale last changed."""
        self._check()

    @property
    def dynamic(self) -> bool:
        """Return whether the scale changes."""
        return self.enabled and self.steps is not None

    def overflow(self) -> bool:
        """Lower the scale after an overflow; return whether there was room to."""
        self.clean_steps = 0
        if not self.dynamic:
            return False
        before = self.value
        self.value = max(before / self.factor, self.lowest)
        return self.value < before

    def clean(self) -> None:
        """Count a step without overflow, and grow when there were enough."""
        if not self.dynamic or self.steps is None:
            return
        self.clean_steps += 1
        if self.clean_steps >= self.steps:
            self.value = min(self.value * self.factor, self.highest)
            self.clean_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return all values, under BMTrain's names for the arguments."""
        return {
            "loss_scale": self.value,
            "loss_scale_enabled": self.enabled,
            "loss_scale_factor": self.factor,
            "loss_scale_steps": self.steps,
            "min_loss_scale": self.lowest,
            "max_loss_scale": self.highest,
            "clean_steps": self.clean_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or BMTrain's, which has only the first two entries."""
        self.enabled = bool(state["loss_scale_enabled"])
        self.value = float(state["loss_scale"])
        self.factor = float(state.get("loss_scale_factor", self.factor))
        self.steps = state.get("loss_scale_steps", self.steps)
        self.lowest = float(state.get("min_loss_scale", self.lowest))
        self.highest = float(state.get("max_loss_scale", self.highest))
        self.clean_steps = int(state.get("clean_steps", 0))

    def _check(self) -> None:
        if not 1 < self.factor < float("inf"):
            raise _bad("loss_scale_factor", self.factor, "a number other than 1, above 0", "use 2")
        if self.steps is not None and self.steps < 1:
            raise _bad("loss_scale_steps", self.steps, "1 or more steps, or None", "use None for a fixed scale")
        if not 0 < self.lowest <= self.highest:
            limits = f"{self.lowest} and {self.highest}"
            raise _bad("min_loss_scale or max_loss_scale", limits, "0 < min_loss_scale <= max_loss_scale", "swap them")
        if self.enabled and not (self.lowest <= self.value <= self.highest and self.value < float("inf")):
            expected = f"a finite number from min_loss_scale {self.lowest} to max_loss_scale {self.highest}"
            raise _bad("loss_scale", self.value, expected, "begin with 2**16, or leave it out for no scaling")


def _bad(name: str, value: Any, expected: str, fix: str) -> ConfigError:
    return ConfigError(f"{name} does not make a loss scale", expected=expected, got=repr(value), fix=fix)


# --- Measures of many gradients over all ranks: their norm, and whether all are finite


def norm_and_count(
    parameters: Iterable[torch.Tensor], norm_type: float, count: int, peers: Peers | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the norm of all gradients in the world as if they were one vector, in one all-reduce.

    Each rank adds its shards, divided by the number of ranks that hold the same: tensors of any meshes share one
    reduction, and pipeline stages add up. The host does not wait. Every rank calls it.

    Args:
        parameters: This rank's parameters, with or without gradients: DTensors, and plain ones that are equal on all
            ranks that hold them.
        norm_type: p of the p-norm; ``float("inf")`` for the largest absolute value.
        count: A number of this rank's own, to be sent along.
        peers: The ranks of one replica, whose gradients count; None for the world.

    Returns:
        The norm, 0-dim fp64, and the sum of all counts (their maximum for the infinity norm).

    Raises:
        ModelError: When a gradient is an unreduced partial sum.
    """
    infinite = norm_type == float("inf")
    by_replicas: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            replicas = num_replicas(parameter.grad, peers, placement_of(parameter))
            by_replicas.setdefault(replicas, []).append(numbers_of(local_tensor(parameter.grad), norm_type))
    parts = []
    for replicas, group in by_replicas.items():
        for kind in by_kind(group):
            # fp64: a sum of few numbers, whose powers must not overflow.
            norms = torch.stack(local_norms(kind, norm_type)).double()
            parts.append(norms.max() if infinite else norms.pow(norm_type).sum() / replicas)
    device = parts[0].device if parts else torch.device("cpu")
    every = torch.stack([part.to(device) for part in parts]) if parts else torch.zeros(1, dtype=torch.float64)
    # A maximum over ranks may lose a nan, but not an infinity.
    own = every.nan_to_num(nan=float("inf")).max() if infinite else every.sum()
    vector = torch.stack([own, torch.full((), float(count), dtype=torch.float64, device=device)])
    norm, total = reduced(vector, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, peers).unbind()
    return (norm if infinite else norm.pow(1.0 / norm_type)), total


def any_nonfinite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return 1 if a plain tensor of this rank holds inf or nan, else 0 (0-dim fp32)."""
    found = [~torch.isfinite(torch.stack(foreach_norm(kind, float("inf")))).all() for kind in by_kind(tensors)]
    if not found:
        return torch.zeros(())
    return torch.stack([flag.float().to(found[0].device) for flag in found]).max()


def unscale_and_find_nonfinite(tensors: Iterable[torch.Tensor], inverse_scale: float) -> torch.Tensor:
    """Multiply this rank's plain tensors in place, and return what :func:`any_nonfinite` does, in the same pass."""
    every = list(tensors)
    device = every[0].device if every else torch.device("cpu")
    found = torch.zeros((), dtype=torch.float32, device=device)
    unscale_(every, torch.full((), inverse_scale, dtype=torch.float32, device=device), found)
    return found


def parameters_in(param_groups: Iterable[Mapping[str, Any] | torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters of groups, or listed by themselves, each once."""
    found: dict[int, torch.Tensor] = {}
    for group in param_groups:
        members = [group] if isinstance(group, torch.Tensor) else group["params"]
        found.update({id(parameter): parameter for parameter in members})
    return list(found.values())


# --- Gradients that are known to be finite already, because clipping has measured them


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients that exist."""
    return [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]


class GradientWatch:
    """Norms that were measured in this step.

    Gradients with a finite norm are finite, for as long as nobody writes to them. Remembering that saves a pass over
    gradients that were clipped.
    """

    def __init__(self) -> None:
        # Each local gradient by identity, with its version and its norm.
        self._measured: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def remember(self, norm: torch.Tensor, gradients: Iterable[torch.Tensor]) -> None:
        """Remember the norm over all ranks of local gradients as they are now."""
        self._measured.update({id(gradient): (gradient, version_of(gradient), norm) for gradient in gradients})

    def is_measured(self, gradient: torch.Tensor) -> bool:
        """Return whether a norm of this local gradient is known and nobody has written to it since."""
        measured, version, _ = self._measured.get(id(gradient), (None, 0, None))
        return measured is gradient and version == version_of(gradient)

    def any_nonfinite(
        self, plain: list[torch.Tensor], to_unscale: list[torch.Tensor], inverse_scale: float
    ) -> torch.Tensor:
        """Return 1 if a gradient of this rank, or the norm of one, is inf or nan, else 0 (0-dim fp32).

        Args:
            plain: Local gradients to be left as they are.
            to_unscale: Local gradients of which those without a known norm are multiplied in the same pass.
            inverse_scale: The factor.
        """
        known = [self._measured[id(gradient)] for gradient in [*plain, *to_unscale] if self.is_measured(gradient)]
        norms = {id(norm): norm for _, _, norm in known}
        unknown = [gradient for gradient in plain if not self.is_measured(gradient)]
        fresh = [gradient for gradient in to_unscale if not self.is_measured(gradient)]
        # Without gradients a flag would be made on the host, and its copy to the device waited for.
        flags = [any_nonfinite(unknown)] if unknown else []
        flags += [unscale_and_find_nonfinite(fresh, inverse_scale)] if fresh else []
        flags += [(~torch.isfinite(norm)).float() for norm in norms.values()]
        if not flags:
            return torch.zeros(())
        device = next((flag.device for flag in flags if flag.device.type != "cpu"), flags[0].device)
        return torch.stack([flag.to(device) for flag in flags]).max()

    def forget(self) -> None:
        """Forget all norms, before the gradients of the next step."""
        self._measured = {}


# --- One all-reduce per step: whether any rank has found something, and whether all have run the same model


def on_any_rank(found: torch.Tensor, flags: tuple[bool, ...], peers: Peers | None) -> list[bool]:
    """Return for each flag whether any rank has set it, and run the gather-order check; the host waits.

    Args:
        found: A 0-dim fp32 flag on the device of the gradients.
        flags: Further flags, on the host.
        peers: The ranks of one replica; None for the world.

    Returns:
        All flags, ``found`` first.

    Raises:
        ModelError: On every rank, when ranks have gathered different Blocks, or in another order.
    """
    order = float(take_gather_order())
    host = torch.tensor([order, -order, *map(float, flags)]).to(found.device, non_blocking=True)
    any_found, highest, lowest, *rest = reduced(torch.cat([found.reshape(1), host]), dist.ReduceOp.MAX, peers).tolist()
    if highest != -lowest:
        raise ModelError(
            "The ranks have run different Blocks since the last step, and got each other's weights",
            expected="the same Blocks in the same order on every rank: all of them gather each one together",
            got="others, or another order, on some rank (this step has changed no weight)",
            fix="let all ranks decide alike which layers run, by a torch.Generator of one seed: other draws differ "
            "between ranks",
        )
    return [bool(each) for each in (any_found, *rest)]


# --- Outer optimizers: every replica decides for itself, and all count steps alike


def prepare_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Average gradients over replicas, where a synchronous warm-up asks for it."""
    for optimizer in optimizers:
        if isinstance(optimizer, OuterOptimizer):
            optimizer.prepare_gradients()


def peers_of(optimizers: Iterable[Optimizer]) -> Peers | None:
    """Return the ranks that decide together: those of one replica under outer optimizers; None for the world."""
    outer = next((each for each in optimizers if isinstance(each, OuterOptimizer)), None)
    return None if outer is None else Peers(outer.replicas.inside, outer.replicas.num_inside)


def count_skipped(optimizer: Optimizer, scheduler: Any) -> None:
    """Count a step that this replica skips and others take, so that schedules do not drift apart."""
    if isinstance(optimizer, OuterOptimizer):
        optimizer.count_step()
        if scheduler is not None:
            scheduler.step()
