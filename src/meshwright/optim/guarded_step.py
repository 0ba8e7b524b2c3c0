"""The guarded optimizer step: loss scale, non-finite gradients, clipping, and loads that it follows."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from meshwright.errors import ConfigError, NonFiniteError
from meshwright.optim.dtensors import Stages, clip_divisor, clip_grad_norm_, clip_grad_value_, divide_, local_tensor
from meshwright.optim.mixed_precision import MASTER, MasterWeights, take_over
from meshwright.runtime import agreed
from meshwright.runtime.torch_internals.modules import children_of, parameters_of
from meshwright.runtime.torch_internals.optim import found_inf_of, global_step_pre_hooks, step_pre_hooks_of

if TYPE_CHECKING:
    from meshwright.optim.outer import OuterOptimizer
    from meshwright.optim.weight_average import WeightAverage


AVERAGE = "_weight_average"


class WrappedOptimizer(Optimizer):
    """Base of optimizers that change what happens around another one's step.

    Groups and states are the inner optimizer's own, so learning-rate schedulers take the wrapper for an optimizer.

    Args:
        inner: Any torch optimizer.
    """

    is_outer: ClassVar[bool] = False
    """Whether it is an OuterOptimizer, whose module is imported by those who have one."""

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
        if name.startswith("_optimizer_"):  # torch's lists of hooks: whoever registers one means the inner steps
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


def is_outer(optimizer: Optimizer | None) -> TypeGuard[OuterOptimizer]:
    """Return whether an optimizer is an OuterOptimizer."""
    return isinstance(optimizer, WrappedOptimizer) and optimizer.is_outer


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the states, inside all wrappers."""
    while isinstance(optimizer, WrappedOptimizer):
        optimizer = optimizer.inner
    return optimizer


def call_around(
    optimizer: Optimizer, before: Sequence[Callable[[], None]] = (), after: Sequence[Callable[[], None]] = ()
) -> None:
    """Call these around every step of an optimizer. Those before it must not look at gradients: kernels clip later."""
    if isinstance(optimizer, WrappedOptimizer) and (before or after):  # has no hooks, and its inner one several steps
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
        optimizer.register_step_pre_hook(_Hook(call))
    for call in after:
        optimizer.register_step_post_hook(_Hook(call))


class _Hook:
    """A hook of :func:`call_around`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        self._call()


def shows_gradients(optimizer: Optimizer) -> bool:
    """Return whether somebody's hook may look at the gradients before the optimizer's kernel does."""
    hooks = (*step_pre_hooks_of(optimizer).values(), *global_step_pre_hooks.values())
    return not all(isinstance(hook, _Hook) for hook in hooks)


def average_of(optimizer: Optimizer | None) -> WeightAverage | None:
    """Return the average of the weights that an optimizer moves, through all its wrappers; None where none is kept."""
    found: WeightAverage | None = None if optimizer is None else getattr(inner_optimizer(optimizer), AVERAGE, None)
    return found


# --- An optimizer with guards before its step: loss scaling, fp32 master weights, skipping a bad step.


class _ScaleGradient(torch.autograd.Function):
    """Identity whose backward multiplies by the loss scale: the loss one reads stays the true one."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradients[0] * scale, None


class GuardedOptimizer(WrappedOptimizer):
    """Wraps any torch optimizer; ``step`` prepares the gradients and skips the update when they are not finite.

    Whether to skip is decided from norms and flags that are reduced over all shards, so all ranks skip together.

    Args:
        inner: The optimizer, built over ``master``'s copies when there is a ``master``.
        scaler: Dynamic loss scale for fp16; None scales nothing.
        master: fp32 master weights; None when the parameters are updated directly.
        skip_nonfinite: Skip a step whose gradients hold inf or nan (a ``scaler`` does so anyway).
        stop_nonfinite: Raise an error instead of skipping it.
        stages: Where the parameters are those of one rank of a pipeline: norms are those of all of them.
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
        """Steps that did, since this optimizer was built."""
        self._scaled = False  # a loss went through ``scaled`` since the last step
        self._prepared = False  # gradients collected and unscaled since the last step or zero_grad
        self._norm: torch.Tensor | None = None  # of the prepared gradients, when somebody has asked for it
        self._leaves_out = False  # the next step
        self.loss: torch.Tensor | None = None
        """Of the step to come, equal on all ranks that decide together; one that is not finite is like such gradients.
        Whoever knows it may set it before each step."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the same loss, whose ``backward`` multiplies the gradients by the loss scale."""
        if self.scaler is None or not loss.requires_grad:
            return loss
        self._scaled = True
        return _ScaleGradient.apply(loss, self.scaler.scale(torch.ones((), device=loss.device)))

    def expect_scaled(self) -> None:
        """Tell that gradients of this step are scaled, where another pipeline stage computes the loss."""
        self.scaled(torch.zeros((), device=self.stages.device if self.stages else None, requires_grad=True))

    def leave_out(self) -> None:
        """Make the next ``step`` leave the weights as they are, whatever the gradients; every rank must call it."""
        self._leaves_out = True

    def prepare_gradients(self) -> None:
        """Collect gradients into the master weights and remove the loss scale; once per step, repeats do nothing.

        Raises:
            ConfigError: Without a scaled loss, and for a gradient of what should have a master weight and has none.
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
        norm = clip_grad_norm_(self._parameters(), max_norm, norm_type, self.stages)
        self._norm = norm if max_norm == float("inf") or norm_type == 2.0 else None
        return norm

    def clip_grad_value(self, clip_value: float) -> None:
        """Prepare the gradients and clamp every element to ``[-clip_value, clip_value]``."""
        self.prepare_gradients()
        clip_grad_value_(self._parameters(), clip_value)
        self._norm = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the weights, or leave them when the gradients are not finite (see ``step_was_skipped``).

        Raises:
            NonFiniteError: With ``stop_nonfinite``, on every rank; nothing is changed then.
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
        self._leaves_out, self.loss = False, None

    def _step_unless_nonfinite(self) -> bool:
        if self._leaves_out:
            if self.scaler is not None:
                self.scaler.update()  # it has looked at the gradients
            return True
        if self.scaler is not None:
            # Asked for before the scale moves: a scale at its lower bound, or a patient one, stays where it is.
            found = found_inf_of(self.scaler)(self.inner).values()
            overflowed = any(bool(each.item()) for each in found)
            if not overflowed:  # torch would call a fused optimizer, which skips by itself, with all hooks of its step
                self.scaler.step(self.inner)
            self.scaler.update()
            return overflowed
        if self.skip_nonfinite:
            norm = self._norm
            if norm is None:
                norm = clip_grad_norm_(self._parameters(), float("inf"), stages=self.stages)
            if not bool(torch.isfinite(norm)) or not (self.loss is None or bool(torch.isfinite(self.loss))):
                self._stop(norm)
                return True
        self.inner.step()
        return False

    def _stop(self, norm: torch.Tensor) -> None:
        if self.stop_nonfinite:
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

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict under ``"inner"``, the loss scale's under ``"scaler"``."""
        return {"inner": self.inner.state_dict(), "scaler": self.scaler.state_dict() if self.scaler else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        if self.master is not None:
            self.master.take_changes()
        self.inner.load_state_dict(state_dict["inner"])
        if self.scaler is not None and state_dict["scaler"] is not None:
            self.scaler.load_state_dict(state_dict["scaler"])
        if self.master is not None:
            self.master.write_back()

    def __repr__(self) -> str:
        guards = [
            *(["loss scale"] if self.scaler else []),
            *(["fp32 master weights"] if self.master else []),
            *(["skips non-finite"] if self.skip_nonfinite else []),
        ]
        return f"GuardedOptimizer({', '.join(guards)}, {self.inner!r})"


# --- Through the wrappers of an optimizer: its guards, and clipping as they want it.


def guard_of(optimizer: Optimizer | None) -> GuardedOptimizer | None:
    """Return the guards of an optimizer, also inside an outer one; None where there are none."""
    inner = optimizer.inner if is_outer(optimizer) else optimizer
    return inner if isinstance(inner, GuardedOptimizer) else None


def clip_gradients(
    parameters: Iterable[torch.Tensor],
    optimizer: Optimizer | None,
    max_norm: float,
    norm_type: float = 2.0,
    stages: Stages | None = None,
) -> torch.Tensor:
    """Clip the gradients of a model, prepared as its optimizer wants them; return their norm before (0-dim).

    Args:
        parameters: Of the model as a strategy has changed it.
        optimizer: Its optimizer, with guards and replicas around it or without.
        max_norm: Largest norm allowed.
        norm_type: p of the p-norm.
        stages: Where the model is one pipeline rank's part: the norm is that of all of them.
    """
    if is_outer(optimizer):
        optimizer.prepare_gradients()
    guard = guard_of(optimizer)
    if guard is not None:
        return guard.clip_grad_norm(max_norm, norm_type)
    return clip_grad_norm_(parameters, max_norm, norm_type, stages)


def clip_gradient_values(parameters: Iterable[torch.Tensor], optimizer: Optimizer | None, clip_value: float) -> None:
    """Clamp every element of a model's gradients, prepared as its optimizer wants them; arguments as above."""
    if is_outer(optimizer):
        optimizer.prepare_gradients()
    guard = guard_of(optimizer)
    if guard is not None:
        guard.clip_grad_value(clip_value)
    else:
        clip_grad_value_(parameters, clip_value)


# --- Clipping inside the optimizer's own kernel: gradients are divided where the update reads them anyway.

_FUSED = (Adam, AdamW, SGD)  # their kernels divide by ``grad_scale``, and write what they have divided back
_INFINITY = float("inf")


def clipped_step(
    model: nn.Module,
    optimizer: Optimizer,
    max_norm: float | None,
    norm_type: float = 2.0,
    stages: Stages | None = None,
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Return the norm of the gradients before clipping (0-dim), and the step of the optimizer that is to follow.

    torch's fused optimizers clip in their kernel: until the step gradients are as backward left them, after it they are
    clipped. For all others they are clipped at once.

    Args:
        model: As a strategy has changed it.
        optimizer: Its optimizer, with guards and replicas around it or without.
        max_norm: Largest norm allowed; None only measures.
        norm_type: p of the p-norm.
        stages: Where the model is one pipeline rank's part: the norm is that of all of them.
    """
    fused, parameters = _fused_optimizer(optimizer), _parameters_of(model)
    if fused is None or max_norm is None or not max_norm > 0:  # the last is refused
        limit = _INFINITY if max_norm is None else max_norm
        return clip_gradients(parameters, optimizer, limit, norm_type, stages), optimizer.step
    norm = clip_gradients(parameters, optimizer, _INFINITY, norm_type, stages)
    clipped = parameters if optimizer is fused else ()  # guards clip what their optimizer updates
    return norm, functools.partial(_divide_and_step, clipped, optimizer, fused, norm, max_norm)


def _parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """As ``list(model.parameters())``, in a third of the time: torch composes every module's name, in each step."""
    found: dict[int, nn.Parameter] = {}
    met: set[int] = set()
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is None or id(module) in met:
            continue
        met.add(id(module))
        found.update(
            (id(parameter), parameter) for parameter in parameters_of(module).values() if parameter is not None
        )
        ahead += reversed(children_of(module).values())
    return list(found.values())


def _fused_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return what divides gradients in its kernel; None where there is no such kernel, or somebody looks before it."""
    guarded = isinstance(optimizer, GuardedOptimizer)
    if guarded and optimizer.scaler is not None:  # type: ignore[attr-defined]
        return None
    inner: Optimizer = optimizer.inner if guarded else optimizer  # type: ignore[attr-defined]
    if type(inner) not in _FUSED or not all(group["fused"] for group in inner.param_groups):
        return None
    if shows_gradients(inner) or hasattr(inner, "grad_scale"):
        return None
    every = (parameter for group in inner.param_groups for parameter in group["params"])
    if any(p.dtype == torch.float64 or (type(inner) is SGD and isinstance(p, DTensor)) for p in every):
        return None  # the kernels read the divisor in fp32
    return inner


def _divide_and_step(
    clipped: Sequence[torch.Tensor], optimizer: Optimizer, fused: Optimizer, norm: torch.Tensor, max_norm: float
) -> None:
    """Step with divided gradients; those of ``clipped`` that are not updated are divided, too."""
    divisor = clip_divisor(norm, max_norm)
    if divisor.device.type == "cpu" and divisor == 1.0:  # known without waiting for a device
        optimizer.step()
        return
    updated = {id(parameter) for group in fused.param_groups for parameter in group["params"]}
    beside = [p.grad for p in clipped if p.grad is not None and id(p) not in updated]
    divide_([local_tensor(gradient) for gradient in beside], divisor)
    fused.grad_scale = divisor  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del fused.grad_scale  # type: ignore[attr-defined]


# --- Weights that are loaded into a model reach what its optimizer keeps of them.

# Beside the modules and not in them: these may be copied and pickled, and must not keep an optimizer alive.
_OPTIMIZERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
_is_restoring = False


def follow_loads(model: nn.Module, optimizer: Optimizer) -> None:
    """From now on ``load_state_dict`` of the model, or of a module in it, also changes the optimizer's copies.

    Without that the next step would write the weights from before over the loaded ones: fp32 masters, copies on the
    host and global weights of replicas are what an update starts from.

    Args:
        model: As all methods have left it.
        optimizer: Over its parameters, with all wrappers; is not kept alive.
    """
    if not _may_keep_copies(optimizer):
        return
    for module in model.modules():
        if module not in _OPTIMIZERS:
            module.register_load_state_dict_post_hook(_refresh)
        _OPTIMIZERS[module] = weakref.ref(optimizer)


def weights_were_loaded(model: nn.Module) -> None:
    """Tell the optimizer that follows a model, if there is one, of weights that were put in place some other way."""
    for module in model.modules():
        _refresh(module)


def masters_of(model: nn.Module) -> MasterWeights | None:
    """Return the fp32 masters that the optimizer of an accelerated model updates.

    None where it updates the parameters.
    """
    known = next((_OPTIMIZERS[module] for module in model.modules() if module in _OPTIMIZERS), None)
    guard = guard_of(known()) if known is not None else None
    masters = guard.master if guard is not None else None
    if masters is not None:
        masters.take_changes()  # loading a part of the weights must not undo what was written to the others
    return masters


@contextlib.contextmanager
def restoring() -> Iterator[None]:
    """Inside, loading weights changes no copies: they are loaded themselves."""
    global _is_restoring
    before, _is_restoring = _is_restoring, True
    try:
        yield
    finally:
        _is_restoring = before


def _may_keep_copies(optimizer: Optimizer) -> bool:
    guard = guard_of(optimizer)
    masters = guard is not None and guard.master is not None
    # Ours make masters in their first step; torch's update the parameters themselves.
    ours = not type(inner_optimizer(optimizer)).__module__.startswith("torch.optim.")
    return is_outer(optimizer) or masters or ours


def _refresh(module: nn.Module, _: Any = None) -> None:
    """A module's own parameters; the hook is called for each of its submodules, too."""
    known = _OPTIMIZERS.get(module)
    optimizer = known() if known is not None else None
    if optimizer is not None and not _is_restoring:
        _take_over(list(module.parameters(recurse=False)), optimizer)


def _take_over(parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
    guard, states = guard_of(optimizer), inner_optimizer(optimizer).state
    for parameter in parameters:
        copies = [guard.master.of.get(parameter)] if guard is not None and guard.master is not None else []
        for copy in (*copies, states.get(parameter, {}).get(MASTER)):
            if isinstance(copy, torch.Tensor):
                take_over(copy, parameter)
    if is_outer(optimizer) and any(parameter.requires_grad for parameter in parameters):
        optimizer.synchronizer.weights_were_loaded()
