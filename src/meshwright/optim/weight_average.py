"""Exponential moving average of the weights, read as precisely as the optimizer stores them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from meshwright.errors import ConfigError
from meshwright.optim.dtensors import local_tensor, wrapped_like
from meshwright.optim.guarded_step import AVERAGE, GuardedOptimizer, call_around, inner_optimizer, is_outer
from meshwright.optim.mixed_precision import MASTER, round_stochastically_, shard_generator


class InnerWeights:
    """This rank's parts of an optimizer's weights: the fp32 copies where there are some, else the parameters.

    Args:
        inner: Any torch optimizer. A GuardedOptimizer has its copies in its master weights, ours in their states.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._guard = inner if isinstance(inner, GuardedOptimizer) else None
        self._inner = inner.inner if isinstance(inner, GuardedOptimizer) else inner
        self.parameters = self.training()
        """Parameters that trained when the optimizer was built."""
        self._frozen = [p for group in inner.param_groups for p in group["params"] if not p.requires_grad]
        self.resting: set[torch.Tensor] = set()
        """Parameters that were frozen at the last two synchronisations. They get no pseudo-gradient, not even zero:
        outer momentum would move them."""
        self._were_frozen: set[torch.Tensor] = set()
        masters = self._guard.master.of if self._guard is not None and self._guard.master is not None else {}
        self._in_model = {id(master): parameter for parameter, master in masters.items()}

    def training(self) -> list[torch.Tensor]:
        """Return the optimizer's parameters that train now."""
        groups = self._inner.param_groups
        return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]

    def check_frozen(self) -> None:
        """Refuse to train parameters without a global weight.

        Raises:
            ConfigError: When a parameter was frozen when the optimizer was built, and is not any more.
        """
        thawed = [tuple(parameter.shape) for parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise ConfigError(
                f"{len(thawed)} parameters were unfrozen under an outer optimizer, which would not synchronise them",
                expected="parameters that require gradients when the optimizer is built",
                got=f"shapes {thawed[:5]}",
                fix="save a checkpoint, build model and optimizer anew with these unfrozen, and load it",
            )

    def note_frozen(self, parameters: Sequence[torch.Tensor]) -> None:
        """Update ``resting`` for parameters that are about to be sent."""
        frozen = {each for each in parameters if not self._in_model.get(id(each), each).requires_grad}
        self.resting = self.resting.difference(parameters) | (frozen & self._were_frozen)
        self._were_frozen = self._were_frozen.difference(parameters) | frozen

    def source(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part where it is stored, which may be the host."""
        master = self._master(parameter)
        return local_tensor(parameter).detach() if master is None else master

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part on the parameter's device, to be read only."""
        return self.source(parameter).to(local_tensor(parameter).device)

    @torch.no_grad()
    def write(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Replace this rank's part and its copy; call :meth:`finish` after the last write."""
        master = self._master(parameter)
        if master is not None:
            master.copy_(value)
        local_tensor(parameter).copy_(value)

    def finish(self) -> None:
        """Round the master weights of a guard into the model."""
        if self._guard is not None and self._guard.master is not None:
            self._guard.master.write_back()

    def _master(self, parameter: torch.Tensor) -> torch.Tensor | None:
        state = self._inner.state.get(parameter)
        found = state.get(MASTER) if state else None
        return local_tensor(found) if isinstance(found, torch.Tensor) else None


# --- The average, attached to the optimizer that moves the weights

AverageType = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class EmaPolicy:
    """Decay, frequency and precision of a moving average."""

    decay: float = 0.999
    """Share of the old average after one step; an update every n steps uses ``decay ** n``, with the same half-life."""
    warmup: bool = True
    """Use at most (1 + t) / (10 + t) in update t, so that the first weights are soon forgotten (TensorFlow's
    ``ExponentialMovingAverage(num_updates=)``)."""
    every: int = 1
    """Steps from one update to the next."""
    dtype: AverageType = "fp32"
    """Type of the average; fp32 means fp64 beside fp64 weights. bf16 is rounded stochastically (Gupta et al. 2015), as
    updates would vanish in rounding to nearest. Complex weights have an average of their own type."""

    def weight_of_old(self, num_updates: int, num_steps: int) -> float:
        """Return the share of the old average in the update behind ``num_updates`` others and ``num_steps`` steps."""
        decay = self.decay**num_steps
        return min(decay, (1 + num_updates) / (10 + num_updates)) if self.warmup else decay

    def type_of(self, weights: torch.dtype) -> torch.dtype:
        """Return the type of the average of weights of a type."""
        if weights.is_complex:
            return weights
        wide = torch.float64 if weights == torch.float64 else torch.float32
        return torch.bfloat16 if self.dtype == "bf16" else wide


class WeightAverage:
    """Moving average of weights (Polyak & Juditsky 1992; Tarvainen 2017): average ← d average + (1 - d) weights.

    Replicas that synchronise every few steps have one set of weights only where they do: there the average follows the
    global weights, so that it is the same in every replica and needs no communication. An update n steps after the one
    before uses ``decay ** n``.

    It averages the tensors that the optimizer updates, parameters or their fp32 copies, shard by shard and on their own
    devices: on the host under ``offload``. It does not communicate. The first update takes the weights as they are.

    Args:
        optimizer: The optimizer with its guards. From now on the average counts its steps, and
            :func:`~meshwright.optim.guarded_step.average_of` finds the average through it.
        of_replicas: Whether the optimizer is, or will be, the inner one of an outer optimizer, which then counts.
        policy: Decay, frequency and precision.
        model: The model whose gathered weights are freed when the average is swapped in or out; None where nothing is
            gathered.

    Raises:
        ConfigError: When the policy's numbers cannot be used.
    """

    def __init__(
        self, optimizer: Optimizer, policy: EmaPolicy, model: nn.Module | None = None, *, of_replicas: bool = False
    ) -> None:
        _check(policy)
        self.policy, self._model = policy, model
        optimizer = optimizer.inner if is_outer(optimizer) else optimizer  # type: ignore[attr-defined]
        self._weights = InnerWeights(optimizer)
        self._of: dict[torch.Tensor, torch.Tensor] = {p: self._like(p) for p in self._weights.parameters}
        self._known = {id(parameter) for parameter in self._of}
        self.num_steps = 0
        """Steps of the optimizer, without skipped ones."""
        self.num_updates = 0
        """Updates of the average."""
        self.num_steps_since = 0
        """Steps since the last update."""
        setattr(inner_optimizer(optimizer), AVERAGE, self)
        # Inside the guards, where a skipped step does not come.
        stepped = optimizer.inner if isinstance(optimizer, GuardedOptimizer) else optimizer
        call_around(stepped, before=[self._take_in], after=[] if of_replicas else [self.count_step])

    @property
    def of(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """Return the average of each parameter that trains, laid out like it; meaningless before the first update.

        A parameter that was unfrozen since begins with its weights, the average of what has not moved.
        """
        self._take_in()
        return self._of

    def _take_in(self) -> None:
        for parameter in self._weights.training():
            if id(parameter) not in self._known:  # a tensor's own hash is slow
                self._known.add(id(parameter))
                self._of[parameter] = average = self._like(parameter)
                local_tensor(average).copy_(self._weights.read(parameter))

    def _like(self, parameter: torch.Tensor) -> torch.Tensor:
        local = self._weights.read(parameter)
        return wrapped_like(parameter, torch.zeros_like(local, dtype=self.policy.type_of(local.dtype)))

    def count_step(self, *, is_synchronised: bool = True) -> None:
        """Count a step that has been taken, and update the average where that is due.

        Args:
            is_synchronised: Whether all replicas hold the same weights behind it.
        """
        self.num_steps += 1
        self.num_steps_since += 1
        if self.num_steps_since >= self.policy.every and is_synchronised:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now."""
        groups: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for parameter in self._of:
            local = self._weights.read(parameter)
            groups[local.device, local.dtype].append(parameter)
        for parameters in groups.values():
            self._update(parameters)
        self.num_updates += 1
        self.num_steps_since = 0

    def _update(self, parameters: list[torch.Tensor]) -> None:
        averages = [local_tensor(self._of[parameter]) for parameter in parameters]
        weights = [self._weights.read(parameter) for parameter in parameters]
        share = self.policy.weight_of_old(self.num_updates - 1, self.num_steps_since or self.policy.every)
        if self.num_updates == 0:
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(weight)
        elif self.policy.dtype == "bf16" and not averages[0].is_complex():
            for parameter, average, weight in zip(parameters, averages, weights, strict=True):
                self._round(parameter, average, torch.lerp(average.float(), weight.float(), 1 - share))
        else:
            wide = [weight.to(average.dtype) for average, weight in zip(averages, weights, strict=True)]
            get_ema_multi_avg_fn(share)(averages, wide, self.num_updates)  # type: ignore[no-untyped-call]

    def _round(self, parameter: torch.Tensor, average: torch.Tensor, value: torch.Tensor) -> None:
        # Seeded by nothing that differs between ranks with the same shard, also where pipeline ranks share weights.
        generator = shard_generator(value.device, self.num_updates, parameter.numel(), 0)
        round_stochastically_(average, value, generator)

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Swap the average into the model inside the block, for instance to evaluate or export it.

        Every rank enters and leaves it alike. A second copy of the weights exists meanwhile. Do not train inside.
        Before the first update nothing changes.
        """
        if self.num_updates == 0:
            yield
            return
        saved = {parameter: self._weights.read(parameter).clone() for parameter in self.of}
        self._put({parameter: local_tensor(average) for parameter, average in self.of.items()})
        try:
            yield
        finally:
            self._put(saved)

    @torch.no_grad()
    def _put(self, values: dict[torch.Tensor, torch.Tensor]) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # weights from the host may still be on their way to the device
        for parameter, value in values.items():
            self._weights.write(parameter, value)
        self._weights.finish()
        for module in self._model.modules() if self._model is not None else ():
            if isinstance(module, FSDPModule):
                module.reshard()  # gathered weights would outlive the change of the shards

    def restart(self) -> None:
        """Restart from the weights at the next update; call it after loading weights by hand."""
        self.num_steps = self.num_updates = self.num_steps_since = 0


def _check(policy: EmaPolicy) -> None:
    if not 0 < policy.decay < 1 or policy.every < 1:
        raise ConfigError(
            "These numbers make no moving average",
            expected="decay above 0 and below 1, and every of 1 or more",
            got=f"decay={policy.decay}, every={policy.every}",
            fix="0.999 is a usual decay; closer to 1 averages over more steps",
        )
