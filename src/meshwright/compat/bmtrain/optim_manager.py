"""`OptimManager`: scale, clip, check and step several optimizers and schedulers under one loss scale."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from meshwright.compat.bmtrain.overflow import (
    GradientWatch,
    LossScale,
    count_skipped,
    local_gradients,
    norm_and_count,
    on_any_rank,
    parameters_in,
    peers_of,
    prepare_gradients,
)
from meshwright.errors import CheckpointError, ConfigError, NonFiniteError
from meshwright.optim.checks import check_dense
from meshwright.optim.dtensors import by_kind, local_tensor, multiply_
from meshwright.optim.full_state_dict import load_laid_out
from meshwright.optim.guarded_step import GuardedOptimizer
from meshwright.optim.outer import OuterOptimizer
from meshwright.optim.pipeline_state_dict import gathered_state_dict, laid_out_like
from meshwright.runtime import print_rank

OnNonFinite = Literal["skip", "raise", "ignore"]


class OptimManager:
    """One loss scale, one decision per step, for any number of optimizers (BMTrain's ``OptimManager``).

    ::

        manager = OptimManager(loss_scale=2**16)
        manager.add_optimizer(optimizer, scheduler)
        for batch in data:
            manager.zero_grad()
            manager.backward(loss_func(model(batch)))  # once per micro-batch
            manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
            manager.step()

    All optimizers, schedulers and ranks step together or not at all, which costs one all-reduce of five numbers over
    the world and one wait of the host per ``step``. Gradients are divided by the scale exactly once, in ``step``; they
    are scaled until then, and ``clip_grad_norm`` accounts for it. So gradients that come from
    ``(manager.loss_scale * loss).backward()``, or were set by hand, count as scaled; a manager says once that it has
    met gradients of which no loss was scaled by itself. ``clip_grad_norm``, ``step``,
    ``state_dict(gather_opt=True)`` and ``load_state_dict`` must be called on every rank.

    Gradients must be averaged over ranks already, as FSDP2 and DDP do; nothing is divided by the world size. With outer
    optimizers (DiLoCo, BMUF and others; then all must be such) every replica measures, scales and skips for itself.

    Args:
        loss_scale: The first scale; None for no scaling (fp32, bf16).
        loss_scale_factor: Divides the scale after an overflow and multiplies it when it grows; one below 1 is inverted.
        loss_scale_steps: Steps without overflow after which the scale grows; None keeps the scale fixed.
        min_loss_scale: Lowest scale.
        max_loss_scale: Highest scale.
        grad_scale: A further divisor of the loss, for gradients that are summed over ranks; None for 1.
        on_nonfinite: What to do about a gradient with inf or nan. ``"skip"`` (the default with a ``loss_scale``): no
            optimizer steps, gradients are cleared, and rank 0 prints a line. ``"raise"`` (the default without one,
            where such gradients are no part of normal training): NonFiniteError on every rank, with weights and states
            as they were. ``"ignore"``: check nothing and never wait.
        max_skips: Skipped steps in a row, none of which could lower the scale, after which NonFiniteError is raised.

    Raises:
        ConfigError: When the numbers do not make a loss scale.
    """

    def __init__(
        self,
        loss_scale: float | None = None,
        loss_scale_factor: float = 2.0,
        loss_scale_steps: int | None = 1024,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float("inf"),
        grad_scale: float | None = None,
        *,
        on_nonfinite: OnNonFinite | None = None,
        max_skips: int = 20,
    ) -> None:
        self._scale = LossScale(loss_scale, loss_scale_factor, loss_scale_steps, min_loss_scale, max_loss_scale)
        check_policy(on_nonfinite, self._scale, grad_scale, max_skips)
        self._on_nonfinite = on_nonfinite
        self.grad_scale = 1.0 if grad_scale is None else float(grad_scale)
        self.max_skips = max_skips
        self.optimizers: list[Optimizer] = []
        self.lr_schedulers: list[Any] = []
        """One per optimizer, None for none."""
        self.step_was_skipped = False
        """Whether the last ``step`` left all weights as they were."""
        self._skips = 0  # skipped steps in a row that did not lower the scale
        self._scaled = False  # whether a loss was scaled since the last step
        self._warned = False  # that none was
        self._watch = GradientWatch()

    @property
    def loss_scale(self) -> float:
        """Return the current scale; 1 without scaling."""
        return self._scale.value

    @property
    def on_nonfinite(self) -> OnNonFinite:
        """Return the policy for gradients with inf or nan."""
        # Not fixed at the beginning: a scale may be loaded into a manager that had none.
        if self._scale.dynamic:
            return "skip"
        return self._on_nonfinite or ("skip" if self._scale.enabled else "raise")

    def add_optimizer(self, optimizer: Optimizer, lr_scheduler: Any = None) -> None:
        """Add an optimizer, and the scheduler to step after it.

        Raises:
            ConfigError: When the optimizer needs a closure, guards its own steps, or shares a parameter with another
                one; or the scheduler belongs to another optimizer or needs arguments.
        """
        check_optimizer(optimizer, self.optimizers)
        check_scheduler(lr_scheduler, optimizer)
        self.optimizers.append(optimizer)
        self.lr_schedulers.append(lr_scheduler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        self._watch.forget()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times ``loss_scale / grad_scale``, in fp32 if it was half, to call ``backward`` on."""
        self._scaled = True
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        factor = self.loss_scale / self.grad_scale
        return wide if factor == 1.0 else wide * factor

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward on the scaled loss; gradients of several calls before one ``step`` accumulate."""
        self.scale_loss(loss).backward()

    @torch.no_grad()
    def clip_grad_norm(
        self,
        param_groups: Iterable[Mapping[str, Any] | torch.Tensor],
        max_norm: float,
        norm_type: float | str = 2.0,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        """Scale gradients down so that their norm, without the loss scale, is at most ``max_norm``; one all-reduce.

        Args:
            param_groups: Groups of any optimizers, or parameters; those without a gradient are skipped. A plain
                parameter counts as the same one on all ranks.
            max_norm: Largest norm allowed; ``float("inf")`` only measures.
            norm_type: p of the p-norm, ``"inf"`` or ``float("inf")`` for the largest absolute value.
            eps: Added to the norm where it divides.

        Returns:
            The true norm before clipping over all ranks: 0-dim fp32, equal everywhere, still on the device.

        Raises:
            ConfigError: On every rank, when no rank has a parameter here, or a number is out of range.
            ModelError: When a gradient is sparse, or an unreduced partial sum.
        """
        power = float(norm_type)
        if not (power > 0 and max_norm > 0):
            raise ConfigError(
                "The gradient norm to clip at is none",
                expected="max_norm above 0, and a norm_type above 0 or 'inf'",
                got=f"max_norm={max_norm!r}, norm_type={norm_type!r}",
                fix="use norm_type=2",
            )
        prepare_gradients(self.optimizers)
        parameters = parameters_in(param_groups)
        for parameter in parameters:
            check_dense(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        scaled_norm, num_parameters = norm_and_count(parameters, power, len(parameters), peers_of(self.optimizers))
        if not parameters and not num_parameters.item():  # only a rank without parameters waits for the answer
            raise ConfigError(
                "There is nothing to clip",
                expected="groups with parameters",
                got="no parameter on any rank",
                fix="pass optimizer.param_groups; they can be read only once when they are a generator",
            )
        norm = (scaled_norm / self.loss_scale).float()
        local = [local_tensor(gradient) for gradient in gradients]
        if max_norm < float("inf"):
            multiply_(local, torch.clamp(max_norm / (norm + eps), max=1.0))
        self._watch.remember(norm, local)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Step all optimizers, each with its scheduler, or none of them; see ``step_was_skipped``.

        Raises:
            NonFiniteError: On every rank, see ``on_nonfinite`` and ``max_skips``.
            ModelError: When a gradient is sparse, or ranks have run different Blocks; nothing is updated then.
        """
        prepare_gradients(self.optimizers)
        parameters = [[p for group in o.param_groups for p in group["params"]] for o in self.optimizers]
        for parameter in (each for group in parameters for each in group):
            check_dense(parameter)
        self.step_was_skipped = False
        if self.on_nonfinite != "ignore" and self._found_nonfinite(parameters):
            self._skip_or_raise()
        else:
            self._step_all(parameters)
            self._scale.clean()
            self._skips = 0
        self._scaled = False
        self._watch.forget()

    def _found_nonfinite(self, parameters: list[list[torch.Tensor]]) -> bool:
        """Return whether any rank has inf or nan; unscale gradients of optimizers that do not do so themselves."""
        plain: list[torch.Tensor] = []
        to_unscale: list[torch.Tensor] = []
        for optimizer, group in zip(self.optimizers, parameters, strict=True):
            in_step = _takes_scale(optimizer) or self.loss_scale == 1.0
            (plain if in_step else to_unscale).extend(local_gradients(group))
        found = self._watch.any_nonfinite(plain, to_unscale, 1.0 / self.loss_scale)
        has_gradients = any(parameter.grad is not None for group in parameters for parameter in group)
        # Of pipeline stages only the last one sees a loss, and a stage need not have trainable parameters.
        nonfinite, scaled, present = on_any_rank(found, (self._scaled, has_gradients), peers_of(self.optimizers))
        if self._scale.enabled and present and not scaled and not self._warned:
            self._warned = True
            print_rank(
                f"meshwright: gradients are divided by the loss scale {self.loss_scale}, but OptimManager scaled no "
                "loss since the last step: right for (manager.loss_scale * loss).backward(), and for scaled "
                "gradients that were set by hand; otherwise call manager.backward(loss)",
                file=sys.stderr,
                flush=True,
            )
        return nonfinite

    def _skip_or_raise(self) -> None:
        self.step_was_skipped = True
        if self.on_nonfinite == "raise":
            raise self._nonfinite_error("Gradients are not finite", "weights and states are as they were")
        before = self.loss_scale
        if self._scale.overflow():
            print_rank(f"Gradient overflow, change scale from {before} to {self.loss_scale}", flush=True)
            self._skips = 0
        else:
            self._skips += 1
            why = f"the scale stays at {before}" if self._scale.enabled else "there is no loss scale to lower"
            print_rank(f"Gradient overflow, step skipped; {why}", flush=True)
        if self._skips >= self.max_skips:
            what = f"Gradients were not finite in {self._skips} steps in a row, with a loss scale of {before}"
            raise self._nonfinite_error(what, "weights are those of the last good step")
        for optimizer, scheduler in zip(self.optimizers, self.lr_schedulers, strict=True):
            optimizer.zero_grad(set_to_none=True)  # else they would spoil the sums of the next micro-batches
            count_skipped(optimizer, scheduler)

    def _nonfinite_error(self, what: str, left: str) -> NonFiniteError:
        return NonFiniteError(
            what,
            expected="finite numbers on every rank",
            got=f"inf or nan on some rank ({left})",
            fix="look for a loss that is nan and for the data that made it, lower the learning rate or clip gradients; "
            "on_nonfinite='skip' passes over single bad steps",
        )

    def _step_all(self, parameters: list[list[torch.Tensor]]) -> None:
        for optimizer, scheduler, group in zip(self.optimizers, self.lr_schedulers, parameters, strict=True):
            if _takes_scale(optimizer):
                scaled_step: Any = optimizer.step
                scaled_step(scale=self.loss_scale)
            else:
                self._unscale_measured(group)
                optimizer.step()
            if scheduler is not None:
                scheduler.step()

    def _unscale_measured(self, parameters: list[torch.Tensor]) -> None:
        # Gradients without a known norm were unscaled when they were checked.
        ignoring = self.on_nonfinite == "ignore"
        scaled = [g for g in local_gradients(parameters) if ignoring or self._watch.is_measured(g)]
        for kind in by_kind(scaled) if self.loss_scale != 1.0 else ():
            # Filled on the device: a tensor of a number is made on the host, and its copy waited for.
            multiply_(kind, torch.full((), 1.0 / self.loss_scale, dtype=torch.float32, device=kind[0].device))

    def state_dict(self, gather_opt: bool = False) -> dict[str, Any]:
        """Return the loss scale's entries, ``optimizers`` and ``lr_schedulers``, in the order they were added.

        Args:
            gather_opt: Return optimizer states as whole tensors on the CPU of rank 0 (other ranks' dicts have none),
                which plain torch and any world size can load; collective. Otherwise this rank's shards, as DTensors
                for torch's distributed checkpoint.
        """
        states = [gathered_state_dict(o) if gather_opt else o.state_dict() for o in self.optimizers]
        schedules = [scheduler.state_dict() if scheduler is not None else None for scheduler in self.lr_schedulers]
        return {**self._scale.state_dict(), "optimizers": states, "lr_schedulers": schedules}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned in either form, on any number of ranks; collective.

        Whole states are needed on rank 0 only. Stored hyperparameters replace those of the constructors.

        Raises:
            CheckpointError: On every rank, when optimizers, schedulers or parameters do not fit; nothing is changed
                then.
        """
        _check_parts(len(self.optimizers), [scheduler is not None for scheduler in self.lr_schedulers], state_dict)
        # All states are checked and laid out before any is loaded.
        saved_states = zip(self.optimizers, state_dict["optimizers"], strict=True)
        laid_out = [laid_out_like(optimizer, saved) for optimizer, saved in saved_states]
        self._scale.load_state_dict(state_dict)
        for optimizer, saved in zip(self.optimizers, laid_out, strict=True):
            load_laid_out(optimizer, saved)
        for scheduler, saved in zip(self.lr_schedulers, state_dict["lr_schedulers"], strict=True):
            if scheduler is not None:
                scheduler.load_state_dict(saved)
        self._scaled, self._skips = False, 0
        self._watch.forget()


def _takes_scale(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "step_takes_scale", False))


# --- Checks, before anything is changed

_POLICIES = ("skip", "raise", "ignore")


def check_policy(on_nonfinite: str | None, scale: LossScale, grad_scale: float | None, max_skips: int) -> None:
    """Refuse a manager's arguments that do not fit together.

    Raises:
        ConfigError: When ``on_nonfinite`` is unknown or does not fit the scale, or a number is out of range.
    """
    if on_nonfinite not in (None, *_POLICIES) or (scale.dynamic and on_nonfinite not in (None, "skip")):
        raise ConfigError(
            "on_nonfinite does not fit",
            expected="'skip' with a loss scale that adapts, else one of 'skip', 'raise' and 'ignore'",
            got=repr(on_nonfinite),
            fix="leave it out, or fix the scale with loss_scale_steps=None",
        )
    if max_skips < 1 or (grad_scale is not None and not 0 < grad_scale < float("inf")):
        raise ConfigError(
            "max_skips or grad_scale is out of range",
            expected="max_skips of 1 or more, and a finite grad_scale above 0 or None",
            got=f"max_skips={max_skips!r}, grad_scale={grad_scale!r}",
            fix="leave them out",
        )


def check_optimizer(optimizer: Optimizer, others: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that cannot be stepped with others.

    Raises:
        ConfigError: When it guards its own steps, needs a closure, or shares a parameter with another one.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, GuardedOptimizer):
        raise ConfigError(
            "A GuardedOptimizer decides about its steps and its loss scale itself",
            expected="an optimizer that steps whenever step() is called",
            got=repr(optimizer),
            fix="add AdamOptimizer, which has fp32 master weights too, or any torch optimizer",
        )
    if any(required(optimizer.step, skip=("self",))):
        raise ConfigError(
            f"{name}.step needs arguments, such as a closure, and a manager has none to give",
            expected="an optimizer whose step() can be called without arguments",
            got=f"step{inspect.signature(optimizer.step)}",
            fix=f"step {name} by itself",
        )
    if others and isinstance(optimizer, OuterOptimizer) != isinstance(others[0], OuterOptimizer):
        raise ConfigError(
            "Some of the optimizers synchronise replicas and others do not",
            expected="outer optimizers, such as DiLoCo, for all parameters or for none",
            got=f"{name} beside {type(others[0]).__name__}",
            fix="wrap each of them: replicas must agree on every parameter that trains",
        )
    if isinstance(optimizer, OuterOptimizer) and optimizer.guard is not None:
        raise ConfigError(
            "A GuardedOptimizer decides about its steps and its loss scale itself",
            expected=f"a {name} around an optimizer that steps whenever step() is called",
            got=repr(optimizer.guard),
            fix=f"wrap AdamOptimizer, which has fp32 master weights too, or any torch optimizer into {name}",
        )
    taken = {id(p) for other in others for group in other.param_groups for p in group["params"]}
    shared = [p for group in optimizer.param_groups for p in group["params"] if id(p) in taken]
    if shared:
        raise ConfigError(
            f"{len(shared)} parameters of this {name} are updated by another optimizer already",
            expected="every parameter in one optimizer",
            got=f"parameters of shapes {[tuple(p.shape) for p in shared[:5]]} in two",
            fix="split the parameters between the optimizers; add each optimizer once",
        )


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """Refuse a scheduler of another optimizer, or one whose ``step`` needs arguments.

    Raises:
        ConfigError: When it is one of these.
    """
    if scheduler is None:
        return
    name, owner = type(scheduler).__name__, getattr(scheduler, "optimizer", optimizer)
    if owner is not optimizer:
        raise ConfigError(
            f"The {name} belongs to another optimizer",
            expected=f"the {type(optimizer).__name__} that is added with it",
            got=type(owner).__name__,
            fix="add each optimizer with its own scheduler",
        )
    if any(required(scheduler.step)):
        raise ConfigError(
            f"{name}.step needs arguments, and a manager has none to give",
            expected="a scheduler whose step() can be called without arguments",
            got=f"step{inspect.signature(scheduler.step)}",
            fix="add the optimizer without it, and step it yourself unless manager.step_was_skipped",
        )


def required(function: Callable[..., Any], skip: Iterable[str] = ()) -> Iterable[str]:
    """Yield the names of the arguments that a function cannot be called without."""
    for parameter in inspect.signature(function).parameters.values():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic and parameter.name not in skip:
            yield parameter.name


def _check_parts(num_optimizers: int, here: list[bool], state: dict[str, Any]) -> None:
    missing = sorted({"loss_scale", "loss_scale_enabled", "optimizers", "lr_schedulers"} - state.keys())
    saved = [] if missing else [scheduler is not None for scheduler in state["lr_schedulers"]]
    if missing or len(state["optimizers"]) != num_optimizers or saved != here:
        raise CheckpointError(
            "The saved state is not of this manager",
            expected=f"{len(here)} optimizers, with schedulers: {here}",
            got=f"entries missing: {missing}" if missing else f"{len(saved)} optimizers, with schedulers: {saved}",
            fix="add the same optimizers and schedulers in the same order before loading",
        )
