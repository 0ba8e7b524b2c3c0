"""An optimizer with guards before its step: loss scaling, fp32 master weights, skipping a bad step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.errors import ConfigError, NonFiniteError
from meshwright.optim.clip import Stages, clip_grad_norm_, clip_grad_value_
from meshwright.optim.master import MasterWeights
from meshwright.optim.wrapped import WrappedOptimizer
from meshwright.runtime import agreed


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
        """The same loss, whose ``backward`` multiplies the gradients by the loss scale."""
        if self.scaler is None or not loss.requires_grad:
            return loss
        self._scaled = True
        return _ScaleGradient.apply(loss, self.scaler.scale(torch.ones((), device=loss.device)))

    def expect_scaled(self) -> None:
        """Tells that gradients of this step are scaled, where another pipeline stage computes the loss."""
        self.scaled(torch.zeros((), device=self.stages.device if self.stages else None, requires_grad=True))

    def leave_out(self) -> None:
        """Makes the next ``step`` leave the weights as they are, whatever the gradients; every rank must call it."""
        self._leaves_out = True

    def prepare_gradients(self) -> None:
        """Collects gradients into the master weights and removes the loss scale; once per step, repeats do nothing.

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
        """Prepares the gradients, clips them and returns their norm before clipping (0-dim, equal on all ranks)."""
        self.prepare_gradients()
        norm = clip_grad_norm_(self._parameters(), max_norm, norm_type, self.stages)
        self._norm = norm if max_norm == float("inf") or norm_type == 2.0 else None
        return norm

    def clip_grad_value(self, clip_value: float) -> None:
        """Prepares the gradients and clamps every element to ``[-clip_value, clip_value]``."""
        self.prepare_gradients()
        clip_grad_value_(self._parameters(), clip_value)
        self._norm = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates the weights, or leaves them when the gradients are not finite (see ``step_was_skipped``).

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
            found = self.scaler._found_inf_per_device(self.inner).values()
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
        """Clears the gradients of the model (and of the master weights)."""
        super().zero_grad(set_to_none)
        if self.master is not None:
            self.master.zero_grad()
        self._prepared, self._norm = False, None

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict under ``"inner"``, the loss scale's under ``"scaler"``."""
        return {"inner": self.inner.state_dict(), "scaler": self.scaler.state_dict() if self.scaler else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what :meth:`state_dict` returned."""
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
