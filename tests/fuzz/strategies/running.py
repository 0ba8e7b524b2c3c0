"""Run one case on the ranks of a pool, and the same in one plain process; say what differs."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import meshwright as mw
from meshwright.cost import memory, peak
from meshwright.errors import MeshwrightError
from meshwright.planner import measured_state
from meshwright.store.entries import unwrapped
from tests.fuzz.strategies import models
from tests.fuzz.strategies.drawing import BATCH, Case
from tests.live_bytes import LiveBytes
from tests.methods.split_runs import whole_weights
from tests.parity.runs import merged

STEPS, COUNTED_STEPS = 6, 3
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
}
LOSSES, NORMS, WEIGHTS, ACTIVATIONS = 1e-4, 1e-4, 2e-5, 0.03  # most that may differ, of the whole


@dataclass
class Trained:
    """What a rank has to say of its run: a refusal, or figures."""

    refused: str = ""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, tuple[int, int]] = field(default_factory=dict)  # class of bytes: predicted, measured
    peak: tuple[int, int] = (0, 0)  # predicted, counted


@dataclass
class Reference:
    """The plain loop in one process."""

    losses: list[float]
    norms: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64, also where a model asks for float32."""
    wide, to, build = torch.float64, torch.Tensor.to, models.build

    def to_wide(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(wide if each is torch.float32 else each for each in args)
        kwargs = {key: wide if each is torch.float32 else each for key, each in kwargs.items()}
        return to(tensor, *args, **kwargs)

    before = torch.get_default_dtype()
    torch.set_default_dtype(wide)
    try:
        with (
            mock.patch.object(torch.Tensor, "to", to_wide),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
            mock.patch.object(models, "build", lambda *args: build(*args).double()),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def batches(name: str) -> list[Any]:
    rows = models.data(name)
    loader = DataLoader(rows, BATCH, sampler=DistributedSampler(rows, num_replicas=1, rank=0, seed=0))
    found: list[Any] = []
    for epoch in range(STEPS):
        loader.sampler.set_epoch(epoch)
        found += loader
    return found[:STEPS]


@functools.lru_cache(maxsize=32)
def reference(name: str, layers: int, optimizer: str, max_grad_norm: float | None, wide: bool = False) -> Reference:
    """Train plainly, in float64 if asked to."""
    with in_float64() if wide else contextlib.nullcontext():
        return _reference(name, layers, optimizer, max_grad_norm)


def _reference(name: str, layers: int, optimizer: str, max_grad_norm: float | None) -> Reference:
    model = models.build(name, layers)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim_class, args = OPTIMIZERS[optimizer]
    optim = optim_class(model.parameters(), **args)
    losses, norms = [], []
    for batch in batches(name):
        optim.zero_grad()
        inputs = models.prepare_for(name)(batch, "cpu")
        loss = models.loss_func(inputs, models.forward(name, model, inputs))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf")).item())
        optim.step()
        losses.append(loss.item())
    return Reference(losses, norms, before, {key: value.detach() for key, value in model.named_parameters()})


def train_in_float64(case: Case) -> Trained:
    """Train the case as :func:`train` does, in float64."""
    with in_float64():
        return train(case)


def is_rounding(case: Case, ranks: list[Trained]) -> bool:
    """Say whether the same case in float64 gives the same numbers, ten thousand times closer than they must be.

    AdamW divides by the size of gradients: where these are near zero, what float32 rounds comes back as large as an
    update, and a norm may differ by 1e-4 for no fault.
    """
    expected = reference(case.model, case.layers, case.optimizer, case.max_grad_norm, wide=True)
    pairs = [*zip(ranks[0].losses, expected.losses, strict=True), *zip(ranks[0].norms, expected.norms, strict=False)]
    return {each.refused for each in ranks} == {""} and all(abs(a / b - 1) <= LOSSES / 1e4 for a, b in pairs)


def train(case: Case) -> Trained:
    """Train the case on this rank; a refusal in our own words is an answer, anything else is raised."""
    optim_class, args = OPTIMIZERS[case.optimizer]
    data = models.data(case.model)
    try:
        with LiveBytes() as live:
            job = mw.accelerate(
                models.build(case.model, case.layers), optim_class, data, models.loss_func,
                strategy=case.strategy, optim_args=args, prepare_input=models.prepare_for(case.model),
                model_input_format=models.input_format(case.model), dataloader_args={"batch_size": BATCH},
                num_micro_batches=case.micro_batches, max_grad_norm=case.max_grad_norm,
                find_unused_parameters=case.model == "odd",
            )  # fmt: skip
            return _steps(case, job, live)
    except MeshwrightError as error:
        return Trained(refused=f"{type(error).__name__}: {error}")


def _steps(case: Case, job: Any, live: LiveBytes) -> Trained:
    trained = Trained()
    counted: list[int] = []
    epoch = 0
    while len(trained.losses) < STEPS:
        job.dataloader.sampler.set_epoch(epoch)
        epoch += 1
        for batch in job.dataloader:
            if len(trained.losses) == STEPS:
                break
            gc.collect()
            live.peak = 0
            step = job.step(batch)
            counted.append(live.peak)
            trained.losses.append(step.loss.item())
            if step.grad_norm is not None:
                trained.norms.append(step.grad_norm.item())
    plan, inner = job.plan, job._job
    step_plan = plan.steps[inner.index("pipeline")] if plan.steps else plan.step
    predicted, measured = memory(step_plan, inner.coordinate), measured_state(job.model, job.optim)
    trained.state = {kind: (getattr(predicted, kind), size) for kind, size in measured.items()}
    trained.peak = (peak(step_plan).allocated_bytes, min(counted[-COUNTED_STEPS:]))
    trained.weights = whole_weights(unwrapped(job.model))
    return trained


def findings(case: Case, ranks: list[Trained]) -> list[str]:
    """Return what is wrong with a case that no rank refused, one line each."""
    expected = reference(case.model, case.layers, case.optimizer, case.max_grad_norm)
    found = []
    if any((each.losses, each.norms) != (ranks[0].losses, ranks[0].norms) for each in ranks):
        found.append("losses or norms differ between ranks")
    for kind, limit, seen, wanted in (
        ("loss", LOSSES, ranks[0].losses, expected.losses),
        ("norm", NORMS, ranks[0].norms, expected.norms if ranks[0].norms else []),
    ):
        off = max((abs(a - b) / abs(b) for a, b in zip(seen, wanted, strict=True)), default=0.0)
        if not off <= limit:
            found.append(f"{kind} off by {off:.1e}: {_short(seen)}, not {_short(wanted)}")
    if case.optimizer == "sgd":
        found += _weights(ranks, expected)
    # A plan counts gradients of what nothing uses, and says so.
    idle = ("gradients", "optimizer", "host_gradients", "host_optimizer") if case.model == "odd" else ()
    unsaid = ("activations", *idle)
    for rank, each in enumerate(ranks):
        found += [
            f"{kind} on rank {rank}: {told:,} bytes predicted, {held:,} measured"
            for kind, (told, held) in each.state.items()
            if told != held and kind not in unsaid
        ]
    told, held = max((each.peak for each in ranks), key=lambda pair: pair[1])
    if (
        "expert_parallel" in case.strategy
    ):  # a rank whose experts are chosen more often holds more: predicted is the mean
        told, held = (sum(sizes) for sizes in zip(*(each.peak for each in ranks), strict=True))
    if any("offload" in method for method in case.strategy):
        return found  # on a CPU host and device are one memory, and what left the device is counted, too
    if abs(told / held - 1) > ACTIVATIONS:
        found.append(f"peak: {told:,} bytes predicted, {held:,} counted ({told / held - 1:+.1%})")
    return found


def _short(values: list[float]) -> str:
    return " ".join(f"{value:.5g}" for value in values)


def _weights(ranks: list[Trained], expected: Reference) -> list[str]:
    try:
        weights = merged([each.weights for each in ranks])
    except AssertionError as error:
        return [f"weights differ between ranks: {error}"]
    if weights.keys() != expected.after.keys():
        return [f"names of weights differ: {sorted(weights.keys() ^ expected.after.keys())[:5]}"]
    off = torch.stack([(weights[key] - value).norm() for key, value in expected.after.items()]).norm()
    moved = torch.stack([(expected.after[key] - value).norm() for key, value in expected.before.items()]).norm()
    return [] if off / moved <= WEIGHTS else [f"weights off by {(off / moved).item():.1e} of their way"]
