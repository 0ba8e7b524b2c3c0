"""The mean over the items of a whole batch, of which every rank and micro-batch has a part."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.errors import ConfigError, DataError
from meshwright.methods import Job
from meshwright.methods.means import STEP_AXES, mean_over

LossWeight = Callable[[Any], float | torch.Tensor]
"""How many items the loss of a model input is the mean over."""


class MeanLoss:
    """Averages the loss of every step, and sees by the same collective that ranks walk loader and model alike.

    Args:
        job: Its ranks.
        dataloader: Whose ``epoch`` is compared, if it has one.
    """

    def __init__(self, job: Job, dataloader: Any) -> None:
        self._job, self._dataloader = job, dataloader
        self._agreed: int | None = None  # the epoch in which all were: read by the host once in each

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks that take samples of one step; collective.

        Raises:
            DataError: When others are in another epoch; on a GPU at the first step in one.
            ModelError: When they have run other layers that are sharded; on a GPU one step late.
        """
        epoch, layers = getattr(self._dataloader, "epoch", None), self._job.same_layers
        ran = layers.numbers() if layers is not None else []
        beside = [*([epoch] if isinstance(epoch, int) else []), *ran]
        if not beside:
            return mean_over(self._job, loss, STEP_AXES)
        own = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        numbers = torch.stack([own, *(torch.full_like(own, each) for each in beside)])
        means = mean_over(self._job, numbers, STEP_AXES)
        if isinstance(epoch, int):
            self._check_epoch(epoch, means[1])
        if layers is not None:
            layers.check(means[-len(ran) :])
        return means[0].to(loss.dtype)

    def _check_epoch(self, epoch: int, mean: torch.Tensor) -> None:
        is_read = epoch != self._agreed or mean.device.type == "cpu"  # elsewhere the host would wait in every step
        if is_read and float(mean) != epoch:
            raise DataError(
                "Ranks are in different epochs: they would take some samples twice, and others never",
                expected="every rank walks the data loader alike",
                got=f"epoch {epoch} on this rank, {float(mean):g} on average",
                fix="walk it on all ranks or on none (who looks at the data alone takes dataloader.dataset); or call "
                "its set_epoch with one number on every rank",
            )
        self._agreed = epoch


@torch.no_grad()
def loss_divisors(job: Job, weight_of: LossWeight, inputs: Sequence[Any], axes: tuple[str, ...]) -> list[float]:
    """By what each micro-batch's loss is divided, so that their sum, averaged over ranks, is the mean over all items.

    Equal weights give the number of micro-batches. Collective, and read by the host once.

    Args:
        job: Its ranks.
        weight_of: Called with the model input of each micro-batch.
        inputs: These, of this rank.
        axes: Along which ranks have other samples of the batch.

    Returns:
        One number each; infinite for a micro-batch without items.

    Raises:
        ConfigError: On every rank along ``axes``, when a weight is no number of at least 0 on any of them.
    """
    given = [weight_of(each) for each in inputs]
    weights = torch.stack([_as_number(each, job.device) for each in given])
    wrong = ~(weights.isfinite() & (weights >= 0))
    means = mean_over(job, torch.stack([weights.sum(), wrong.sum()]), axes)
    *own, total, any_wrong = torch.cat([weights, means]).tolist()
    if any_wrong:
        raise _error([value for value, is_wrong in zip(given, wrong.tolist(), strict=True) if is_wrong])
    return [total / weight if weight else math.inf for weight in own]


def divided(loss: torch.Tensor, divisor: float) -> torch.Tensor:
    """A micro-batch's part of the mean; 0, without gradients, where it has no items: its own mean is nan then."""
    return (loss.nan_to_num() if math.isinf(divisor) else loss) / divisor


def _as_number(value: Any, device: torch.device) -> torch.Tensor:
    """0-dim, on the device; nan for what is no number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.reshape(()).to(device, torch.float32)
    return torch.tensor(float(value) if isinstance(value, numbers.Real) else math.nan, device=device)


def _error(wrong: list[Any]) -> ConfigError:
    got = "such numbers on this rank, and something else on another"
    if wrong:
        value = wrong[0]
        is_several = isinstance(value, torch.Tensor) and value.numel() != 1
        got = f"a tensor of shape {tuple(value.shape)}" if is_several else f"{type(value).__name__} {value!r:.80}"
    return ConfigError(
        "loss_weight returned no weight",
        expected="a finite number of at least 0, or a tensor of one",
        got=got,
        fix="return how many items the loss of this model input is the mean over, "
        'such as (inputs["labels"] != -100).sum()',
    )
