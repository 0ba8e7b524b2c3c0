"""fairseq's BMUF: its arguments and the methods that its trainer calls, over the rule of :mod:`meshwright.optim.outer`.

``fairseq.optim`` and ``fairseq.optim.bmuf`` are aliases of this module; see :mod:`meshwright.compat.aliases`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.dtensors import clip_grad_norm_, local_tensor, multiply_
from meshwright.optim.guarded_step import inner_optimizer
from meshwright.optim.outer.presets import BlockMomentum, Group

__all__ = ["BMUF", "FairseqBMUF"]

# The modules of fairseq's package are aliases of this one: it must look like a package.
__path__: list[str] = []

NbmMode = Literal["paper", "fairseq"]


class BMUF(BlockMomentum):
    """Block-wise model-update filtering with the arguments and methods of ``FairseqBMUF``.

    See :class:`~meshwright.optim.BlockMomentum` for the rule. ``nbm_mode="fairseq"`` computes what fairseq does under
    ``use_nbm``: W ← W + (1 + η) Δ, which is heavy-ball momentum with the rate (1 + η) ζ.

    Other differences from fairseq: blocks are counted from the end of warm-up, everything is in the checkpoint, states
    that are reset keep the learning rate, and ``block_momentum=0`` respects ``block_lr``.

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
        nbm_mode: One of the two NBM rules.
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
        super().__init__(
            optimizer,
            block_lr * (1 + block_momentum) if as_fairseq else block_lr,
            block_momentum,
            nesterov=use_nbm and not as_fairseq,
            sync_every=global_sync_iter,
            warmup_steps=warmup_iterations,
            warmup=warmup,
            group=group,
            model=model,
            **{"inner_state": "average" if average_sync else "keep", **policy},
        )
        if distributed_world_size not in (None, 1, self.replicas.size):
            raise ConfigError(
                "distributed_world_size is not the number of replicas",
                expected=str(self.replicas.size),
                got=repr(distributed_world_size),
                fix="leave it out, or pass the group of the replicas; 1 switches synchronisation off",
            )
        self._alone = distributed_world_size == 1

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, scale: float = 1.0, groups: None = None, **options: Any
    ) -> Any:
        """Take one inner step, and what is due after it; see OuterOptimizer.

        Args:
            closure: Recomputes the loss, for the inner optimizer.
            scale: Divides the gradients.
            groups: Must be None: all parameters step together, or replicas could not synchronise.
            options: Passed to the inner optimizer.

        Raises:
            ConfigError: When groups are named, or gradients that a closure computes are to be divided.
        """
        if groups is not None or (closure is not None and scale != 1.0):
            raise ConfigError(
                "A step of BMUF takes no groups, and no scale beside a closure",
                expected="step(), step(scale=…) or step(closure)",
                got=f"groups={groups!r} and scale={scale!r}",
                fix="leave groups out; divide the loss in the closure",
            )
        if scale != 1.0:
            self.multiply_grads(1.0 / scale)
        if self._alone:
            self.num_updates += 1
            return self.inner.step(**options) if closure is None else self.inner.step(closure, **options)
        return super().step(closure, **options)

    def prepare_gradients(self) -> None:
        """Average gradients over replicas in a synchronous warm-up; see OuterOptimizer."""
        if not self._alone:
            super().prepare_gradients()
        elif self.guard is not None:
            self.guard.prepare_gradients()

    @property
    def optimizer(self) -> Optimizer:
        """Return the torch optimizer inside."""
        return inner_optimizer(self)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the hyperparameters of the first group: overrides for a checkpoint's in ``load_state_dict``."""
        return {name: value for name, value in self.param_groups[0].items() if name != "params"}

    supports_step_with_scale = True
    """``step(scale=…)`` divides the gradients."""
    supports_groups = False
    supports_memory_efficient_fp16 = False
    supports_flat_params = False

    @property
    def params(self) -> list[torch.Tensor]:
        """Return the parameters of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: Mapping[str, Any] | None = None) -> None:
        """Load what ``state_dict`` returned; collective. See OuterOptimizer.

        Args:
            state_dict: State dict of this class. The inner optimizer's alone goes into ``optimizer.load_state_dict``.
            optimizer_overrides: Hyperparameters for all groups of the optimizer inside, instead of the saved ones, such
                as ``{"lr": 1e-4}``.

        Raises:
            CheckpointError: See OuterOptimizer.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(optimizer_overrides or {})

    def broadcast_global_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict: every rank has all of it."""
        return state_dict

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss."""
        loss.backward()

    def all_reduce_grads(self, module: nn.Module) -> None:
        """Call the module's own ``all_reduce_grads``, if it has one; replicas of BMUF have nothing to reduce."""
        reduce = getattr(module, "all_reduce_grads", None)
        if callable(reduce):
            reduce()

    def multiply_grads(self, c: float | torch.Tensor) -> None:
        """Multiply all gradients by a number, after the loss scale is removed from them."""
        self.prepare_gradients()
        gradients = [local_tensor(parameter.grad) for parameter in self.params if parameter.grad is not None]
        multiply_(gradients, torch.as_tensor(c))

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Clip the gradients of this replica and return their norm before clipping (0-dim).

        Args:
            max_norm: Largest norm allowed; 0 or less measures only, as in fairseq.
            aggregate_norm_fn: Turns this rank's norm into the norm of the whole model; not needed for DTensors.
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
        """Return the learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_num_updates(self) -> int:
        """Return the number of steps so far."""
        return self.num_updates

    def set_num_updates(self, num_updates: int) -> None:
        """Set the number of steps, by which blocks are counted; alike on every rank.

        Raises:
            ConfigError: When the number is negative.
        """
        if num_updates < 0:
            raise ConfigError("num_updates is no count", expected="0 or more", got=repr(num_updates), fix="count steps")
        self.num_updates = num_updates

    def average_params(self) -> None:
        """Average the inner optimizer's states over replicas; collective."""
        self.synchronizer.inner_state.average(self.synchronizer.weights.parameters)


class FairseqBMUF(BMUF):
    """:class:`BMUF` with the constructor of fairseq's class, and with fairseq's rule under ``use_nbm``.

    fairseq's learning-rate schedulers take instances of fairseq's own base class alone:
    ``class BMUFOfFairseq(FairseqBMUF, fairseq.optim.FairseqOptimizer): pass`` is one.

    Args:
        cfg: ``cfg.bmuf``: a ``FairseqBMUFConfig``, or whatever has attributes of its names; those that are absent have
            their defaults.
        optimizer: A torch optimizer, or one of fairseq's over a torch optimizer, such as ``FairseqAdam``.

    Raises:
        ConfigError: See BMUF; and for an optimizer of fairseq that keeps copies of the weights, as ``FP16Optimizer``.
    """

    def __init__(self, cfg: Any, optimizer: Any) -> None:
        given = {name: getattr(cfg, name) for name in _CONFIG if getattr(cfg, name, None) is not None}
        super().__init__(_torch_optimizer(optimizer), **given, nbm_mode="fairseq")
        self.cfg = cfg

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: Mapping[str, Any] | None = None) -> None:
        """Load what ``state_dict`` returned, or a checkpoint of fairseq; see BMUF.

        fairseq saves the state of the optimizer inside alone. BMUF then begins anew, as it does there.
        """
        if "inner" in state_dict:
            super().load_state_dict(state_dict, optimizer_overrides)
            return
        self.optimizer.load_state_dict(state_dict)
        for group in self.param_groups:
            group.update(optimizer_overrides or {})


_CONFIG = (
    "block_lr",
    "block_momentum",
    "global_sync_iter",
    "warmup_iterations",
    "use_nbm",
    "average_sync",
    "distributed_world_size",
)


def _torch_optimizer(optimizer: Any) -> Optimizer:
    if isinstance(optimizer, Optimizer):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer) or hasattr(optimizer, "fp32_optimizer") or hasattr(optimizer, "scaler"):
        raise ConfigError(
            "BMUF cannot synchronise the weights of this optimizer",
            expected="a torch optimizer, or fairseq's wrapper of one over the model's own parameters",
            got=type(optimizer).__name__,
            fix="leave out fp16, or train in half precision with meshwright.accelerate and the method outer",
        )
    return inner


def _is_fairseq(mode: str) -> bool:
    if mode not in ("paper", "fairseq"):
        raise ConfigError(
            f"Unknown nbm_mode {mode!r}",
            expected="'paper' or 'fairseq'",
            got=repr(mode),
            fix="use 'paper' unless a run of fairseq is to be repeated",
        )
    return mode == "fairseq"
