"""Between backward and update: steps that must not reach the weights."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.errors import LossSpikeError, UnsoundStepError
from meshwright.runtime import HostCopy, agreed, print_rank

if TYPE_CHECKING:
    from meshwright.optim import GuardedOptimizer, SpikeAction, SpikeWatch


@contextlib.contextmanager
def restored_buffers(model: nn.Module, needed: bool = True) -> Iterator[Callable[[], None]]:
    """Copy buffers, and yield a function that restores them: running statistics never lose a nan again.

    An :class:`UnsoundStepError` restores them, too.

    Args:
        model: Its buffers are copied on entry.
        needed: False copies nothing.
    """
    copies = {name: buffer.clone() for name, buffer in model.named_buffers()} if needed else {}

    @torch.no_grad()
    def restore() -> None:
        now = dict(model.named_buffers())
        for name, before in copies.items():
            now[name].copy_(before)

    try:
        yield restore
    except UnsoundStepError:
        restore()
        raise


def judge_loss(
    loss: torch.Tensor, guard: GuardedOptimizer | None, spikes: SpikeWatch | None, *, may_be_late: bool = False
) -> Callable[[], SpikeAction | None]:
    """Judge the loss of a step, and make the guard skip its update where that is the policy.

    Args:
        loss: The mean over all ranks that decide together; 0-dim, equal on all of them.
        guard: The optimizer's guard; given where ``spikes`` are.
        spikes: The earlier losses.
        may_be_late: Leave the verdict to the device where the guard can: the limit follows from earlier losses.

    Returns:
        A function to call after the update, which returns the action for a spike, or None where the loss is none.

    Raises:
        LossSpikeError: On every rank that decides, by this function or the one it returns; nothing was changed.
    """
    if guard is not None:
        guard.loss = loss
    if spikes is None:
        return lambda: None
    assert guard is not None, "the job builds one"
    if not (may_be_late and guard.skips_on_device()):
        action = _told_spike(float(loss), guard, spikes)
        if action is not None and action != "warn":
            guard.leave_out()
        return lambda: action
    known = HostCopy(loss.detach())
    if spikes.policy.action != "warn":
        exact = loss.detach().double()
        # Where a scaler finds inf in the gradients, too, the loss is none of the spikes.
        guard.leave_out(exact > spikes.limit if guard.scaler is not None else ~(exact <= spikes.limit))
    return lambda: _told_spike(known.tolist(), guard, spikes)


def _told_spike(value: float, guard: GuardedOptimizer, spikes: SpikeWatch) -> SpikeAction | None:
    limit, policy = spikes.limit, spikes.policy
    if guard.scaler is not None and not math.isfinite(value):
        return None  # the gradients are not finite either, and the loss scale skips the step
    if not spikes.is_spike(value):
        return None
    if policy.action == "stop" or (policy.action == "skip" and spikes.out_of_patience):
        raise agreed(_spike_error(value, limit, spikes))
    done = {"skip": "its step is skipped", "warn": "its step is taken", "rollback": "its step is skipped"}
    text = f"the loss of {value:.4g} is a spike, above {limit:.4g}: {done[policy.action]}"
    print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)
    return policy.action


def _spike_error(value: float, limit: float, spikes: SpikeWatch) -> LossSpikeError:
    if spikes.policy.action == "skip":
        return LossSpikeError(
            f"The loss has been up for {spikes.in_a_row} steps in a row, which is no spike",
            expected=f"at most {limit:.4g} within patience={spikes.policy.patience} steps",
            got=f"{value:.4g}; the weights are as they were before these steps",
            fix="look for what has changed in the data, or resume from an earlier checkpoint",
        )
    return LossSpikeError(
        "The loss of a step is a spike",
        expected=f"at most {limit:.4g}, by the {spikes.policy.window} losses before",
        got=f"{value:.4g}; the weights are as they were",
        fix='look for the cause in this batch, or skip such steps: ("loss_spike", "skip")',
    )
