"""BMUF under fairseq's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.clip import clip_grad_norm_, local_tensor, multiply_
from meshwright.optim.outer.optimizer import OuterOptimizer
from meshwright.optim.outer.policy import OuterPolicy
from meshwright.optim.outer.presets import Group, momentum_sgd
from meshwright.optim.wrapped import inner_optimizer

NbmMode = Literal["paper", "fairseq"]


class BMUF(OuterOptimizer):
    """Block-wise model-update filtering (Chen & Huo 2016, doi 10.1109/ICASSP.2016.7472805). Seed: ``FairseqBMUF``.

    With the mean W̄ of the replicas' weights after a block, G = W̄ - W and Δ ← η Δ + ζ G:

    - classical block momentum (CBM): W ← W + Δ, which is SGD with momentum η and rate ζ on the pseudo-gradient -G;
    - Nesterov block momentum (NBM) of the paper: W ← W + ζ G + η Δ, which is SGD with Nesterov momentum, and DiLoCo;
    - ``nbm_mode="fairseq"``: W ← W + (1 + η) Δ, what fairseq computes under ``use_nbm``: heavy-ball with (1 + η) ζ.

    What differs from fairseq: blocks are counted from the end of warm-up, everything is in the checkpoint, states that
    are reset keep the learning rate, and ``block_momentum=0`` heeds ``block_lr``.

    Args:
        optimizer: The inner optimizer.
        block_lr: ζ.
        block_momentum: η; 1 - 1/N is usual for N replicas.
        global_sync_iter: Steps of a block.
        warmup_iterations: Steps before the first block.
        use_nbm: Nesterov block momentum.
        average_sync: Average the inner optimizer's states when replicas synchronise; without it they are reset at the
            end of warm-up and kept afterwards.
        distributed_world_size: Number of replicas, as a check; 1 switches synchronisation off. None takes the group's.
        nbm_mode: Which of the two NBM rules.
        warmup: What replicas do during warm-up, see OuterPolicy; ``"broadcast"`` is fairseq's way, ``"synchronous"``
            wastes nothing.
        group: See OuterOptimizer.
        model: See OuterOptimizer.
        policy: Further fields of OuterPolicy.

    Raises:
        ConfigError: When arguments are out of range or the number of replicas is another.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        block_lr: float = 1.0,
        block_momentum: float = 0.875,
        global_sync_iter: int = 50,
        warmup_iterations: int = 500,
        use_nbm: bool = False,
        average_sync: bool = False,
        distributed_world_size: int | None = None,
        nbm_mode: NbmMode = "paper",
        *,
        warmup: str = "broadcast",
        group: Group = None,
        model: nn.Module | None = None,
        **policy: Any,
    ) -> None:
        as_fairseq = use_nbm and _is_fairseq(nbm_mode)
        settings = OuterPolicy(
            sync_every=global_sync_iter,
            warmup_steps=warmup_iterations,
            warmup=warmup,  # type: ignore[arg-type]
            inner_state=policy.pop("inner_state", "average" if average_sync else "keep"),
            skip_when_alone=True,
            **policy,
        )
        rate = block_lr * (1 + block_momentum) if as_fairseq else block_lr
        make_outer = momentum_sgd(rate, block_momentum, use_nbm and not as_fairseq)
        super().__init__(optimizer, make_outer, settings, group=group, model=model)
        self._check_size(distributed_world_size)
        self._alone = distributed_world_size == 1

    def _check_size(self, asked: int | None) -> None:
        if asked not in (None, 1, self.replicas.size):
            raise ConfigError(
                "distributed_world_size is not the number of replicas",
                expected=str(self.replicas.size),
                got=repr(asked),
                fix="leave it out, or pass the group of the replicas; 1 switches synchronisation off",
            )

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """One inner step, and what is due after it; see OuterOptimizer."""
        if self._alone:
            self.num_updates += 1
            return self.inner.step(**options) if closure is None else self.inner.step(closure, **options)
        return super().step(closure, **options)

    def prepare_gradients(self) -> None:
        """In a synchronous warm-up: averages gradients over replicas; see OuterOptimizer."""
        if not self._alone:
            super().prepare_gradients()

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer inside."""
        return inner_optimizer(self)

    @property
    def params(self) -> list[torch.Tensor]:
        """Its parameters."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: Mapping[str, Any] | None = None) -> None:
        """Takes over what ``state_dict`` returned; collective. See OuterOptimizer.

        Args:
            state_dict: Of this class; that of the optimizer inside alone goes into ``optimizer.load_state_dict``.
            optimizer_overrides: Hyperparameters for all groups of the optimizer inside, instead of what was saved, such
                as ``{"lr": 1e-4}``.

        Raises:
            CheckpointError: See OuterOptimizer.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(optimizer_overrides or {})

    def multiply_grads(self, c: float | torch.Tensor) -> None:
        """Multiplies all gradients by a number."""
        gradients = [local_tensor(parameter.grad) for parameter in self.params if parameter.grad is not None]
        multiply_(gradients, torch.as_tensor(c))

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Clips the gradients of this replica; returns their norm before (0-dim).

        Args:
            max_norm: Largest norm allowed; 0 or less measures only, as in fairseq.
            aggregate_norm_fn: Turns this rank's norm into the whole; not needed for DTensors.
        """
        self.prepare_gradients()
        limit = max_norm if max_norm > 0 else float("inf")
        if aggregate_norm_fn is None:
            return clip_grad_norm_(self.params, limit)
        norm = aggregate_norm_fn(clip_grad_norm_(self.params, float("inf")))
        if limit < float("inf"):
            self.multiply_grads(torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm

    def get_lr(self) -> float:
        """Learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_num_updates(self) -> int:
        """Steps so far."""
        return self.num_updates

    def set_num_updates(self, num_updates: int) -> None:
        """Sets the number of steps, by which blocks are counted: alike on every rank.

        Raises:
            ConfigError: When it is no count.
        """
        if num_updates < 0:
            raise ConfigError("num_updates is no count", expected="0 or more", got=repr(num_updates), fix="count steps")
        self.num_updates = num_updates

    def average_params(self) -> None:
        """Averages the inner optimizer's states over replicas; collective. fairseq's name for it."""
        self.synchronizer.inner_state.average(self.synchronizer.weights.parameters)


def _is_fairseq(mode: str) -> bool:
    if mode not in ("paper", "fairseq"):
        raise ConfigError(
            f"Unknown nbm_mode {mode!r}",
            expected="'paper' or 'fairseq'",
            got=repr(mode),
            fix="use 'paper' unless a run of fairseq is to be repeated",
        )
    return mode == "fairseq"
