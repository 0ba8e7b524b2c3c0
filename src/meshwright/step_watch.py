"""Between backward and update: what becomes of a step that is not to reach the weights."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ConfigError, LossSpikeError, UnsoundStepError
from meshwright.runtime import agreed, print_rank

if TYPE_CHECKING:
    from meshwright.optim import GuardedOptimizer, SpikeAction, SpikeWatch


def required(optim: Optimizer | None) -> Optimizer:
    """The optimizer that a step needs.

    Raises:
        ConfigError: When there is none.
    """
    if optim is None:
        raise ConfigError(
            "There is no optimizer to step",
            got="optim_func=None",
            fix="pass optim_func, such as torch.optim.AdamW",
            expected="an optimizer built by optim_func",
        )
    return optim


@contextlib.contextmanager
def kept_buffers(model: nn.Module, needed: bool = True) -> Iterator[Callable[[], None]]:
    """Copies buffers, and yields what puts them back: running statistics that have seen a nan never lose it again.

    An :class:`UnsoundStepError` puts them back, too.

    Args:
        model: Its buffers are copied as they are on entry.
        needed: False copies nothing.
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()} if needed else {}

    @torch.no_grad()
    def restore() -> None:
        now = dict(model.named_buffers())
        for name, before in kept.items():
            now[name].copy_(before)

    try:
        yield restore
    except UnsoundStepError:
        restore()
        raise


def judge_loss(loss: torch.Tensor, guard: GuardedOptimizer | None, spikes: SpikeWatch | None) -> SpikeAction | None:
    """Looks at the loss of a step, and tells the guard to leave the weights alone where that is the policy.

    Args:
        loss: The mean over all ranks that decide together; 0-dim, equal on all of them.
        guard: Of the optimizer; there is one where there are ``spikes``.
        spikes: The losses before.

    Returns:
        What is done about a spike; None where there is none.

    Raises:
        LossSpikeError: On every rank that decides; nothing was changed.
    """
    if guard is not None:
        guard.loss = loss
    if spikes is None:
        return None
    assert guard is not None, "the job builds one"
    value, limit, policy = float(loss), spikes.limit, spikes.policy
    if guard.scaler is not None and not math.isfinite(value):
        return None  # so are the gradients: the loss scale skips the step
    if not spikes.is_spike(value):
        return None
    if policy.action == "stop" or (policy.action == "skip" and spikes.out_of_patience):
        raise agreed(_error(value, limit, spikes))
    if policy.action != "warn":
        guard.leave_out()
    done = {"skip": "its step is skipped", "warn": "its step is taken", "rollback": "its step is skipped"}
    text = f"the loss of {value:.4g} is a spike, above {limit:.4g}: {done[policy.action]}"
    print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)
    return policy.action


def _error(value: float, limit: float, spikes: SpikeWatch) -> LossSpikeError:
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
