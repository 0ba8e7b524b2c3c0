"""Wrap optimizers: guard the step, and clip through the wrappers or in the kernel.

An accelerated model's optimizer is, from the outside in: perhaps an outer optimizer over replicas, perhaps a
:class:`GuardedOptimizer` (loss scale, fp32 master weights, non-finite gradients), and the optimizer that holds the
states. The functions here find their way through these layers.
"""

from __future__ import annotations

import functools
import types
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from meshwright.errors import ConfigError, NonFiniteError
from meshwright.optim.dtensors import (
    KERNELS,
    Stages,
    clip_divisor,
    clip_grad_norm_,
    clip_grad_value_,
    divide_,
    local_tensor,
)
from meshwright.optim.full_state_dict import gathered_state_dict, laid_out_like, load_laid_out
from meshwright.optim.mixed_precision import MasterWeights, ScaleGradient, gradient_holders
from meshwright.runtime import HostCopy, agreed
from meshwright.runtime.torch_internals.optim import (
    found_inf_of,
    global_step_post_hooks,
    global_step_pre_hooks,
    step_post_hooks_of,
    step_pre_hooks_of,
)

MAY_BE_SKIPPED = "may_be_skipped"
"""The attribute of a step's hook that is harmless around a step which leaves the weights as they were."""
AVERAGE = "_weight_average"
"""The attribute under which an optimizer carries the average of its weights."""
SPIKE_WATCH = "_spike_watch"
"""The attribute under which an optimizer carries the watch of its losses."""


class WrappedOptimizer(Optimizer):
    """Base class of optimizers that change what happens around another one's step.

    Groups and states are the inner optimizer's own, so learning-rate schedulers take the wrapper for an optimizer.

    Args:
        inner: Any torch optimizer.
    """

    def __init__(self, inner: Optimizer) -> None:
        # No super().__init__: it would want groups of its own.
        self.inner = inner
        self.defaults = inner.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the inner optimizer's groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the inner optimizer's states."""
        return self.inner.state

    def __getattr__(self, name: str) -> Any:
        # torch's lists of hooks, which are meant for the inner steps.
        if name.startswith("_optimizer_"):
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        # Without what others have put around ``step``, as schedulers do: it would step the original.
        return {name: value for name, value in vars(self).items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not torch's, which puts its own wrapper around the ``step`` of the class.
        vars(self).update(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)


class ReplicatedOptimizer(WrappedOptimizer):
    """Base class of :class:`~meshwright.optim.OuterOptimizer`.

    A step has to recognise one without importing the engine of outer steps, which most runs never use.
    """

    synchronizer: Any
    """See :class:`~meshwright.optim.outer.synchronizer.Synchronizer`."""

    @property
    @abstractmethod
    def outer(self) -> Optimizer:
        """Return the torch optimizer that moves the global weights."""

    @abstractmethod
    def prepare_gradients(self) -> None:
        """Average gradients over replicas, where a synchronous warm-up asks for it."""


def is_outer(optimizer: Optimizer | None) -> TypeGuard[ReplicatedOptimizer]:
    """Return whether an optimizer is an :class:`~meshwright.optim.OuterOptimizer`."""
    return isinstance(optimizer, ReplicatedOptimizer)


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the states, inside all wrappers."""
    while isinstance(optimizer, WrappedOptimizer):
        optimizer = optimizer.inner
    return optimizer


def call_around(
    optimizer: Optimizer,
    before: Sequence[Callable[[], None]] = (),
    after: Sequence[Callable[[], None]] = (),
    *,
    may_be_skipped: bool = False,
) -> None:
    """Call functions around every step of an optimizer.

    Args:
        optimizer: With or without wrappers.
        before: Called before the step; they must not look at gradients, which kernels may clip later.
        after: Called after the step.
        may_be_skipped: They may be called around a step that leaves the weights as they were.
    """
    # A wrapper has no hooks of its own, and its inner optimizer may take several steps in one.
    if isinstance(optimizer, WrappedOptimizer) and (before or after):
        step = optimizer.step

        def stepped(_: Optimizer, *args: Any, **kwargs: Any) -> None:
            for call in before:
                call()
            step(*args, **kwargs)
            for call in after:
                call()

        optimizer.step = types.MethodType(stepped, optimizer)  # type: ignore[method-assign]
        return
    for call in before:
        optimizer.register_step_pre_hook(_Hook(call, may_be_skipped))
    for call in after:
        optimizer.register_step_post_hook(_Hook(call, may_be_skipped))


class _Hook:
    # A class of its own, by which `shows_gradients` tells our hooks from the user's.
    def __init__(self, call: Callable[[], None], may_be_skipped: bool) -> None:
        self._call, self.may_be_skipped = call, may_be_skipped

    def __call__(self, *_: Any) -> None:
        self._call()


def shows_gradients(optimizer: Optimizer) -> bool:
    """Return whether a user's hook may look at the gradients before the optimizer's kernel does."""
    hooks = (*step_pre_hooks_of(optimizer).values(), *global_step_pre_hooks.values())
    return not all(isinstance(hook, _Hook) for hook in hooks)


def _has_hooks_of_real_steps(optimizer: Optimizer) -> bool:
    """Return whether a hook must not be called around a step that the device skips: one of a user, or of a method."""
    own = (*step_pre_hooks_of(optimizer).values(), *step_post_hooks_of(optimizer).values())
    return any(
        not getattr(hook, MAY_BE_SKIPPED, False)
        for hook in (*own, *global_step_pre_hooks.values(), *global_step_post_hooks.values())
    )


def average_of(optimizer: Optimizer | None) -> Any:
    """Return the :class:`~meshwright.optim.WeightAverage` of the weights that an optimizer moves, or None."""
    return None if optimizer is None else getattr(inner_optimizer(optimizer), AVERAGE, None)


def spike_watch_of(optimizer: Optimizer | None) -> Any:
    """Return the :class:`~meshwright.optim.SpikeWatch` attached to an optimizer, or None."""
    return None if optimizer is None else getattr(inner_optimizer(optimizer), SPIKE_WATCH, None)


# --- Guards before a step: loss scale, fp32 master weights, and skipping what is not finite


class GuardedOptimizer(WrappedOptimizer):
    """Wrapper of any torch optimizer that prepares gradients and skips updates that are not finite.

    Whether to skip is decided from norms and flags that are reduced over all shards, so all ranks skip together.

    Args:
        inner: The optimizer, built over the copies of ``master`` where there is one.
        scaler: Dynamic loss scale for fp16; None scales nothing.
        master: fp32 master weights; None when the parameters are updated directly.
        skip_nonfinite: Skip a step whose gradients hold inf or nan (a ``scaler`` does so anyway).
        stop_nonfinite: Raise an error instead of skipping it.
        stages: The pipeline that these parameters are one rank's part of; norms are of the whole model.
    """

    def __init__(
        self,
        inner: Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        master: MasterWeights | None = None,
        skip_nonfinite: bool = False,
        stop_nonfinite: bool = False,
        stages: Stages | None = None,
    ) -> None:
        super().__init__(inner)
        self.scaler = scaler
        self.master = master
        self.skip_nonfinite, self.stop_nonfinite = skip_nonfinite, stop_nonfinite
        self.stages = stages
        self.step_was_skipped = False
        """Whether the last ``step`` left the weights as they were."""
        self.num_skipped_steps = 0
        """Skipped steps since this optimizer was built."""
        self._scaled = False  # a loss went through ``scaled`` since the last step
        self._prepared = False  # gradients collected and unscaled since the last step or zero_grad
        self._norm: torch.Tensor | None = None  # of the prepared gradients, once it has been computed
        self._skips_next: bool | torch.Tensor = False
        self.loss: torch.Tensor | None = None
        """Loss of the next step, equal on all ranks that decide together. May be set before each step: a loss that is
        not finite then counts like gradients that are not."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss with a ``backward`` that multiplies gradients by the loss scale."""
        if self.scaler is None or not loss.requires_grad:
            return loss
        self._scaled = True
        return ScaleGradient.apply(loss, self.scaler.scale(torch.ones((), device=loss.device)))

    def expect_scaled(self) -> None:
        """Expect scaled gradients in this step, where another pipeline stage computes the loss."""
        self.scaled(torch.zeros((), device=self.stages.device if self.stages else None, requires_grad=True))

    def leave_out(self, where: bool | torch.Tensor = True) -> None:
        """Make the next ``step`` leave the weights as they are, whatever the gradients; every rank must call it.

        Args:
            where: Whether to; a 0-dim tensor of a device that skips by itself, see :meth:`skips_on_device`.
        """
        self._skips_next = where

    def skips_on_device(self) -> bool:
        """Return whether a device decides by itself if the next step is skipped: the host learns it after the step.

        The kernels of torch's fused optimizers can. On the CPU the host knows the numbers already.
        """
        parameters = self._parameters()
        on_device = bool(parameters) and all(parameter.device.type == "cuda" for parameter in parameters)
        return on_device and use_fused(self.inner) and not _has_hooks_of_real_steps(self.inner)

    def prepare_gradients(self) -> None:
        """Collect gradients into the master weights and remove the loss scale. Repeated calls in a step do nothing.

        Raises:
            ConfigError: When the loss was not scaled, or a half-precision parameter with a gradient has no master.
        """
        if self._prepared:
            return
        if self.scaler is not None and not self._scaled:
            raise ConfigError(
                "The gradients were not scaled, and fp16 needs them to be",
                expected="a loss from the returned loss_func, or optim.scaled(loss), before backward",
                got="a step without one",
                fix="use result.loss_func, or call result.optim.scaled(loss).backward()",
            )
        if self.master is not None:
            self.master.take_changes()
            self.master.collect_gradients()
            self.master.check_covers(self._parameters())
        if self.scaler is not None:
            self.scaler.unscale_(self.inner)
        self._prepared = True

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Prepare the gradients, clip them and return their norm before clipping (0-dim, equal on all ranks)."""
        self.prepare_gradients()
        norm = clip_grad_norm_(gradient_holders(self.inner), max_norm, norm_type, self.stages)
        self._norm = norm if max_norm == float("inf") or norm_type == 2.0 else None
        return norm

    def clip_grad_value(self, clip_value: float) -> None:
        """Prepare the gradients and clamp every element to ``[-clip_value, clip_value]``."""
        self.prepare_gradients()
        clip_grad_value_(gradient_holders(self.inner), clip_value)
        self._norm = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the weights, unless the gradients are not finite (see ``step_was_skipped``).

        Raises:
            NonFiniteError: On every rank, with ``stop_nonfinite``; nothing is changed then.
        """
        if closure is not None:
            raise ValueError(
                "A guarded optimizer takes no closure: it could not unscale and check what the closure computes. "
                "What to do: call backward before step."
            )
        self.prepare_gradients()
        self.step_was_skipped = self._step_unless_nonfinite()
        self.num_skipped_steps += self.step_was_skipped
        if self.master is not None and not self.step_was_skipped:
            self.master.write_back()
        self._prepared, self._scaled, self._norm = False, False, None
        self._skips_next, self.loss = False, None

    def _step_unless_nonfinite(self) -> bool:
        wrong = self._wrong()
        if self._skips_next is True or wrong is None:
            skipped = self._skips_next is True
            if not skipped:
                self.inner.step()
        elif self.skips_on_device():
            # The copy is under way before the kernels are: the host waits while the device has the update to do.
            known = HostCopy(wrong)
            step_unless(self.inner, wrong)
            skipped = known.tolist() > 0.0
        else:
            skipped = bool(wrong)
            # Not left to torch's scaler: it would call a fused optimizer, which skips by itself, with all hooks of
            # its step, and read the number once more.
            if not skipped:
                self.inner.step()
        if self.scaler is not None:
            self.scaler.update()  # it has seen the gradients
        elif skipped and not bool(self._skips_next):
            self._raise_if_stopping()
        return skipped

    def _wrong(self) -> torch.Tensor | None:
        """Return 1 on the device (0-dim fp32) if the step is to be skipped, else 0; None where nothing is checked."""
        if self._skips_next is True:
            return None
        found = [] if self._skips_next is False else [self._skips_next]
        if self.scaler is not None:
            # Before the scale moves: from the scale one cannot tell, as it may rest at its lower bound.
            found += [each.reshape(()) > 0 for each in found_inf_of(self.scaler)(self.inner).values()]
        elif self.skip_nonfinite:
            if self._norm is None:
                self._norm = clip_grad_norm_(gradient_holders(self.inner), float("inf"), stages=self.stages)
            found += [~torch.isfinite(each) for each in (self._norm, self.loss) if each is not None]
        if len(found) < 2:
            return found[0].float() if found else None
        return torch.stack([each.to(found[0].device) for each in found]).any().float()

    def _raise_if_stopping(self) -> None:
        if not self.stop_nonfinite:
            return
        norm = self._norm
        assert norm is not None, "it was found wrong"
        self._prepared, self._scaled, self._norm = False, False, None
        loss = "" if self.loss is None else f" and a loss of {float(self.loss)}"
        self.loss = None
        raise agreed(
            NonFiniteError(
                "The gradients of a step hold inf or nan",
                expected="finite numbers",
                got=f"a norm of {float(norm)}{loss}; the weights are as they were",
                fix='look for the cause in this batch, or skip such steps: ("skip_nonfinite", "skip")',
            )
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model (and of the master weights)."""
        super().zero_grad(set_to_none)
        if self.master is not None:
            self.master.zero_grad()
        self._prepared, self._norm = False, None

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict under ``"inner"`` and the loss scale's under ``"scaler"``.

        The inner one has fp32 master weights of half-precision parameters among its states, as ``"master"``.
        """
        inner = self.inner.state_dict()
        if self.master is not None:
            inner = self.master.added_to(inner, self.inner)
        return {"inner": inner, "scaler": self.scaler.state_dict() if self.scaler else None}

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the state dict with whole tensors on the CPU of rank 0; collective."""
        inner = gathered_state_dict(self.inner)
        if self.master is not None:
            inner = self.master.gathered_to(inner, self.inner)
        return {"inner": inner, "scaler": self.scaler.state_dict() if self.scaler else None}

    def laid_out(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert a state dict of any layout to this one; collective."""
        return {**state_dict, "inner": laid_out_like(self.inner, state_dict["inner"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; the model's weights are rounded from its master weights."""
        self._load(state_dict, self.inner.load_state_dict)

    def take_laid_out(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`laid_out` returned."""
        self._load(state_dict, functools.partial(load_laid_out, self.inner))

    def _load(self, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
        inner = state_dict["inner"]
        if self.master is None:
            load(inner)
        else:
            self.master.load(inner, self.inner, load)
        if self.scaler is not None and state_dict["scaler"] is not None:
            self.scaler.load_state_dict(state_dict["scaler"])

    def __repr__(self) -> str:
        guards = [
            *(["loss scale"] if self.scaler else []),
            *(["fp32 master weights"] if self.master else []),
            *(["skips non-finite"] if self.skip_nonfinite else []),
        ]
        return f"GuardedOptimizer({', '.join(guards)}, {self.inner!r})"


# --- Clipping through the wrappers: with guards it happens after unscaling, on the master weights' gradients


def guard_of(optimizer: Optimizer | None) -> GuardedOptimizer | None:
    """Return the :class:`GuardedOptimizer` of an optimizer, also inside an outer one; None without one."""
    inner = optimizer.inner if is_outer(optimizer) else optimizer
    return inner if isinstance(inner, GuardedOptimizer) else None


def may_keep_copies(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may have copies of weights, which must follow loaded ones."""
    guard = guard_of(optimizer)
    masters = guard is not None and guard.master is not None
    # Ours make masters in their first step; torch's update the parameters themselves.
    ours = not type(inner_optimizer(optimizer)).__module__.startswith("torch.optim.")
    return is_outer(optimizer) or masters or ours


def clip_gradients(
    parameters: Iterable[torch.Tensor],
    optimizer: Optimizer | None,
    max_norm: float,
    norm_type: float = 2.0,
    stages: Stages | None = None,
) -> torch.Tensor:
    """Prepare a model's gradients as its optimizer needs them and clip them.

    Args:
        parameters: The model's parameters, after a strategy was applied.
        optimizer: The model's optimizer, with all its wrappers.
        max_norm: Largest norm allowed.
        norm_type: p of the p-norm.
        stages: The pipeline, where the model is one rank's part: the norm is that of the whole model.

    Returns:
        The norm before clipping, 0-dim.
    """
    guard = _prepared_guard(optimizer)
    if guard is not None:
        return guard.clip_grad_norm(max_norm, norm_type)
    return clip_grad_norm_(parameters, max_norm, norm_type, stages)


def clip_gradient_values(parameters: Iterable[torch.Tensor], optimizer: Optimizer | None, clip_value: float) -> None:
    """Prepare a model's gradients as its optimizer needs them and clamp every element; see :func:`clip_gradients`."""
    guard = _prepared_guard(optimizer)
    if guard is not None:
        guard.clip_grad_value(clip_value)
    else:
        clip_grad_value_(parameters, clip_value)


def _prepared_guard(optimizer: Optimizer | None) -> GuardedOptimizer | None:
    """Average gradients over replicas where due, and return the guard that clips, if there is one."""
    if is_outer(optimizer):
        optimizer.prepare_gradients()
    return guard_of(optimizer)


# --- torch's fused kernels: they can skip a step, and clip, by numbers that the host does not know


def use_fused(optimizer: Optimizer) -> bool:
    """Return whether an optimizer, and no subclass of it, updates all its parameters with the fused kernels."""
    return type(optimizer) in KERNELS and all(group["fused"] for group in optimizer.param_groups)


def step_unless(optimizer: Optimizer, skipped: torch.Tensor) -> None:
    """Take a step of fused kernels, which the device leaves out where ``skipped`` (0-dim fp32) is 1."""
    kernels: Any = optimizer
    kernels.found_inf = skipped
    try:
        kernels.step()
    finally:
        del kernels.found_inf


# --- Clipping inside the optimizer's kernel: gradients are divided where the update reads them anyway

_INFINITY = float("inf")


def clipped_step(
    parameters: Iterable[torch.Tensor],
    optimizer: Optimizer,
    max_norm: float | None,
    norm_type: float = 2.0,
    stages: Stages | None = None,
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Measure the gradients, and clip them now or within the step that is returned.

    torch's fused optimizers clip in their kernel: gradients are as backward left them until the step, and clipped after
    it. For all other optimizers they are clipped at once.

    Args:
        parameters: The model's parameters, after a strategy was applied.
        optimizer: The model's optimizer, with all its wrappers.
        max_norm: Largest norm allowed; None only measures.
        norm_type: p of the p-norm.
        stages: The pipeline, where the model is one rank's part: the norm is that of the whole model.

    Returns:
        The norm before clipping (0-dim), and the step to call.
    """
    fused, every = _fused_optimizer(optimizer), [*parameters]
    # A max_norm of 0 or less goes to clip_gradients, which refuses it.
    if fused is None or max_norm is None or not max_norm > 0:
        limit = _INFINITY if max_norm is None else max_norm
        return clip_gradients(every, optimizer, limit, norm_type, stages), optimizer.step
    norm = clip_gradients(every, optimizer, _INFINITY, norm_type, stages)
    # Under guards, only what the optimizer updates is clipped.
    clipped = every if optimizer is fused else ()
    return norm, functools.partial(_divide_and_step, clipped, optimizer, fused, norm, max_norm)


def _fused_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that can divide gradients in its kernel; None if a hook reads them before it does."""
    guarded = isinstance(optimizer, GuardedOptimizer)
    if guarded and optimizer.scaler is not None:  # type: ignore[attr-defined]
        return None
    inner: Optimizer = optimizer.inner if guarded else optimizer  # type: ignore[attr-defined]
    # Their kernels divide by ``grad_scale``, and write the quotients back.
    if not use_fused(inner):
        return None
    if shows_gradients(inner) or hasattr(inner, "grad_scale"):
        return None
    # Kernels read the divisor in fp32, and torch's fused SGD has no rule for DTensors.
    updated = [p for group in inner.param_groups for p in group["params"]]
    is_split = any(issubclass(kind, DTensor) for kind in {*map(type, updated)})
    is_read = torch.float64 not in {p.dtype for p in updated} and not (is_split and type(inner) is SGD)
    return inner if is_read else None


def _divide_and_step(
    clipped: Sequence[torch.Tensor], optimizer: Optimizer, fused: Optimizer, norm: torch.Tensor, max_norm: float
) -> None:
    """Step with divided gradients; gradients in ``clipped`` that the step does not update are divided, too."""
    divisor = clip_divisor(norm, max_norm)
    # On the CPU one can look without waiting for a device.
    if divisor.device.type == "cpu" and divisor == 1.0:
        optimizer.step()
        return
    updated = {*map(id, chain.from_iterable(group["params"] for group in fused.param_groups))}
    identities = map(id, clipped)
    beside = [p.grad for p, key in zip(clipped, identities, strict=True) if key not in updated and p.grad is not None]
    divide_([local_tensor(gradient) for gradient in beside], divisor)
    fused.grad_scale = divisor  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del fused.grad_scale  # type: ignore[attr-defined]
