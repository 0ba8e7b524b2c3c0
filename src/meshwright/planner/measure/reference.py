"""A small transformer of the calibration's own, trained under strategies by their own methods, and predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.cost import Step
from meshwright.methods import Job, SampleRun, apply_strategy, check_strategy
from meshwright.methods.dtypes import half_dtype, torch_dtype
from meshwright.nn import widen
from meshwright.optim import local_tensor
from meshwright.planner.workload import Workload
from meshwright.runtime import Settings, coordinate_of, rank, world_size
from meshwright.strategy import Strategy

_HEAD_WIDTH = 64


@dataclass(frozen=True)
class Size:
    """Of the model and of a rank's micro-batch."""

    width: int
    depth: int
    vocabulary: int
    samples: int
    tokens: int


def sizes_on(device: torch.device) -> tuple[Size, Size]:
    """A wide and a narrow one, fractions of a second's work."""
    if device.type == "cuda":
        return Size(2048, 3, 8192, 2, 2048), Size(768, 4, 8192, 4, 1024)
    return Size(512, 3, 1024, 4, 128), Size(192, 4, 1024, 4, 128)


@dataclass(frozen=True)
class Reference:
    """Forward and backward under a strategy.

    Args:
        run: Does them once, on this rank; collective where the strategy communicates.
        step: As the twins predict it.
        between: What an optimizer does to the caches between two steps: reads and writes weights and two states.
    """

    run: Callable[[], None]
    step: Step
    between: Callable[[], None] = lambda: None


def reference(strategy: Strategy | None, size: Size, now: Settings, *, in_half: bool = False) -> Reference:
    """Builds the model under a strategy of this world; None: on every rank for itself. Collective.

    Args:
        strategy: Its methods.
        size: Of the model.
        now: Of this rank.
        in_half: Of a model on every rank for itself: whether it trains in mixed precision.
    """
    model, world = _Model(size), 1 if strategy is None else world_size()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size.vocabulary, (size.samples, size.tokens), generator=generator).to(now.device)
    workload = Workload(
        model, now.device, torch.optim.SGD, lambda samples: ids[:samples], _loss_of,
        batch_size=size.samples * world, num_micro_batches=1, world=world, zero_level=0, limit_bytes=None,
    )  # fmt: skip
    dtype = half_dtype(now.device) if in_half else None
    plan = workload.plan(strategy or Strategy([("amp_native", dtype)] if dtype else ()))
    model.to(now.device)
    if strategy is None:
        return Reference(_alone(model, ids, dtype), plan.step, _optimizer_like(model))
    job = Job(
        model, plan.strategy, now.device, _loss, lambda inputs, device: inputs, axes=plan.step.axes,
        coordinate=coordinate_of(rank(), plan.step.axes), shard_axis=plan.step.shard_axis,
        sample=SampleRun(workload.inputs_of, _loss_of),
    )  # fmt: skip
    check_strategy(job)
    apply_strategy(job)

    def run() -> None:
        with job.micro_batch(True):
            _backward(job.model, job.loss_func(ids, job.model(ids)))

    return Reference(run, plan.step, _optimizer_like(job.model))


def _optimizer_like(model: nn.Module) -> Callable[[], None]:
    weights = [local_tensor(parameter.data) for parameter in model.parameters()]
    every = [*weights, *(torch.zeros_like(each) for each in (*weights, *weights))]
    return lambda: torch._foreach_mul_(every, 1.0)


def _alone(model: nn.Module, ids: torch.Tensor, dtype: str | None) -> Callable[[], None]:
    """Forward and backward of a plain model; in half precision as the method ``amp_native`` has it."""
    if dtype is None:
        return lambda: _backward(model, _loss_of(model, ids))
    if dtype == "bf16":
        widen(model, ids.device)

    def run() -> None:
        with torch.autocast(ids.device.type, dtype=torch_dtype(dtype)):
            loss = _loss_of(model, ids)
        _backward(model, loss)

    return run


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD_WIDTH
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.given = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inside = self.before(hidden)
        query, key, value = (
            part(inside).unflatten(-1, (-1, _HEAD_WIDTH)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.given(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.behind(hidden))))


class _Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(_Layer(size.width) for _ in range(size.depth))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of token ids, ``(samples, tokens)``."""
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def _loss(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return _loss(ids, model(ids))


def _backward(model: nn.Module, loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
