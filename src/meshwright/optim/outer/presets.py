"""Local SGD, SlowMo, DiLoCo and BMUF as presets of one outer optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.dtensors import local_tensor
from meshwright.optim.outer.global_weights import OuterFactory
from meshwright.optim.outer.outer_optimizer import OuterOptimizer
from meshwright.optim.outer.sync_policy import OuterPolicy

Group = dist.ProcessGroup | DeviceMesh | None


def momentum_sgd(lr: float, momentum: float, nesterov: bool) -> OuterFactory:
    """Build torch's SGD over global weights.

    Raises:
        ConfigError: When the numbers are out of range.
    """
    if not (lr >= 0 and 0 <= momentum < 1):
        raise ConfigError(
            "The outer learning rate or momentum is out of range",
            expected="a rate of 0 or more, and a momentum from 0 to below 1",
            got=f"{lr!r} and {momentum!r}",
            fix="use 1 and 0 to average weights, 0.7 and 0.9 for DiLoCo",
        )
    return lambda params: SGD(params, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)


class LocalSGD(OuterOptimizer):
    """Local SGD: replicas average their weights every ``sync_every`` steps (Stich 2018, arXiv 1805.09767).

    Args:
        optimizer: The inner optimizer.
        sync_every: Steps between averages.
        group: See OuterOptimizer.
        model: See OuterOptimizer.
        policy: Further fields of OuterPolicy.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sync_every: int = 8,
        *,
        group: Group = None,
        model: nn.Module | None = None,
        **policy: Any,
    ) -> None:
        settings = OuterPolicy(sync_every=sync_every, **policy)
        super().__init__(optimizer, momentum_sgd(1.0, 0.0, False), settings, group=group, model=model)


class PostLocalSGD(LocalSGD):
    """Synchronous training for ``warmup_steps``, then :class:`LocalSGD` (Lin et al. 2018, arXiv 1808.07217).

    Args:
        optimizer: The inner optimizer.
        warmup_steps: Steps in which gradients are averaged over all replicas.
        sync_every: Steps between averages of weights after that.
        group: See OuterOptimizer.
        model: See OuterOptimizer.
        policy: Further fields of OuterPolicy.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int,
        sync_every: int = 8,
        *,
        group: Group = None,
        model: nn.Module | None = None,
        **policy: Any,
    ) -> None:
        super().__init__(optimizer, sync_every, group=group, model=model, warmup_steps=warmup_steps, **policy)


class SlowMo(OuterOptimizer):
    """SlowMo: slow momentum over averages of local steps, in units of the inner rate (Wang et al. 2019, 1910.00643).

    Args:
        optimizer: The inner optimizer; its learning rate at the outer step is the rule's γ.
        slowmo_momentum: β; fairseq uses 0.2 for up to 32 GPUs, 0.5 up to 64 and 0.6 beyond.
        sync_every: Steps between outer steps (τ; 12 in the paper, 3 in fairseq).
        slowmo_lr: α.
        group: See OuterOptimizer.
        model: See OuterOptimizer.
        policy: Further fields of OuterPolicy; ``inner_state`` is the paper's buffer strategy.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        slowmo_momentum: float = 0.5,
        sync_every: int = 12,
        slowmo_lr: float = 1.0,
        *,
        group: Group = None,
        model: nn.Module | None = None,
        **policy: Any,
    ) -> None:
        momentum_sgd(slowmo_lr, slowmo_momentum, False)  # checks the numbers
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise ConfigError(
                f"SlowMo counts in units of the inner learning rate, and {type(optimizer).__name__} has none",
                expected="an inner optimizer with an lr",
                got="lr=None",
                fix="give an lr (to Adafactor with relative_step=False), or use DiLoCo",
            )

        def make_outer(params: list[nn.Parameter]) -> Optimizer:
            return SlowMomentum(params, self._inner_rates, lr=slowmo_lr, momentum=slowmo_momentum)

        super().__init__(optimizer, make_outer, OuterPolicy(sync_every=sync_every, **policy), group=group, model=model)

    def _inner_rates(self) -> dict[torch.Tensor, float]:
        rates = {parameter: float(group["lr"]) for group in self.param_groups for parameter in group["params"]}
        return {copy: rates[parameter] for parameter, copy in self.synchronizer.copy.of.items()}


class DiLoCo(OuterOptimizer):
    """DiLoCo: AdamW inside, Nesterov momentum outside, rare synchronisation (Douillard et al. 2023, arXiv 2311.08105).

    Inner states stay with their replicas. With one replica it is Lookahead with momentum.

    Args:
        optimizer: The inner optimizer.
        sync_every: Inner steps between outer steps, H.
        outer_lr: Outer learning rate.
        outer_momentum: Outer momentum.
        nesterov: Whether the outer momentum is Nesterov's.
        group: See OuterOptimizer.
        model: See OuterOptimizer.
        fragments: See OuterOptimizer.
        policy: Further fields of OuterPolicy.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sync_every: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        *,
        nesterov: bool = True,
        group: Group = None,
        model: nn.Module | None = None,
        fragments: int | Sequence[Sequence[torch.Tensor]] = 1,
        **policy: Any,
    ) -> None:
        number = fragments if isinstance(fragments, int) else len(fragments)
        super().__init__(
            optimizer,
            momentum_sgd(outer_lr, outer_momentum, nesterov),
            OuterPolicy(sync_every=sync_every, fragments=number, **policy),
            group=group,
            model=model,
            fragments=None if isinstance(fragments, int) else fragments,
        )


class StreamingDiLoCo(DiLoCo):
    """:class:`DiLoCo` in fragments, overlapped and in few bits (Douillard et al. 2025, arXiv 2501.18512).

    Fragments are synchronised in turn, one every ``sync_every / fragments`` steps, so that links carry a fraction of
    the model at a time. The result arrives ``delay`` steps later, while training goes on, and is merged into the
    weights that the replica has by then.

    Args:
        optimizer: The inner optimizer.
        sync_every: Inner steps between two outer steps of a fragment, H.
        fragments: Their number P, which divides H, or the parameters of each.
        delay: Steps between sending and applying, τ; below H / P.
        merge_alpha: Share of the replica's own weights in the merge, α.
        quantise: ``"int8"``, ``"int4"`` or None: the precision in which pseudo-gradients travel.
        options: Further arguments of DiLoCo and fields of OuterPolicy.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sync_every: int = 100,
        fragments: int | Sequence[Sequence[torch.Tensor]] = 4,
        delay: int = 1,
        merge_alpha: float = 0.5,
        quantise: str | None = "int4",
        **options: Any,
    ) -> None:
        options |= {"delay": delay, "merge_alpha": merge_alpha, "quantise": quantise}
        super().__init__(optimizer, sync_every, fragments=fragments, **options)


class BlockMomentum(OuterOptimizer):
    """Block-wise model-update filtering, BMUF (Chen & Huo 2016, doi 10.1109/ICASSP.2016.7472805).

    With the mean W̄ of the replicas' weights after a block, G = W̄ - W and Δ ← η Δ + ζ G:

    - classical block momentum: W ← W + Δ, which is SGD with momentum η and rate ζ on the pseudo-gradient -G;
    - Nesterov block momentum: W ← W + ζ G + η Δ, which is SGD with Nesterov momentum, and DiLoCo.

    A single replica takes no outer steps. ``meshwright.optim.BMUF`` is this rule with the arguments of fairseq.

    Args:
        optimizer: The inner optimizer.
        block_lr: ζ.
        block_momentum: η; 1 - 1/N is usual for N replicas.
        nesterov: Nesterov block momentum.
        sync_every: Steps of a block.
        warmup_steps: Steps before the first block.
        warmup: What replicas do during warm-up, see OuterPolicy.
        group: See OuterOptimizer.
        model: See OuterOptimizer.
        policy: Further fields of OuterPolicy.

    Raises:
        ConfigError: When arguments are out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        block_lr: float = 1.0,
        block_momentum: float = 0.875,
        *,
        nesterov: bool = False,
        sync_every: int = 50,
        warmup_steps: int = 500,
        warmup: str = "broadcast",
        group: Group = None,
        model: nn.Module | None = None,
        **policy: Any,
    ) -> None:
        policy |= {"warmup": warmup, "skip_when_alone": True}
        settings = OuterPolicy(sync_every=sync_every, warmup_steps=warmup_steps, **policy)
        make_outer = momentum_sgd(block_lr, block_momentum, nesterov)
        super().__init__(optimizer, make_outer, settings, group=group, model=model)


class SlowMomentum(Optimizer):
    """SlowMo's outer update (Wang et al. 2019, algorithm 1): u ← β u + Δ / γ; w ← w - α γ u, with the inner rate γ.

    With a constant γ this is heavy-ball momentum; when γ changes, u stays in units of the gradient. Where γ is 0 there
    is no momentum, and the weights move by Δ.

    Args:
        params: Global weights; their gradients are pseudo-gradients Δ.
        rates: Returns the inner learning rate γ of every weight; called at every step.
        lr: α.
        momentum: β.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        rates: Callable[[], Mapping[torch.Tensor, float]],
        lr: float = 1.0,
        momentum: float = 0.6,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._rates = rates

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every weight that has a pseudo-gradient."""
        rates = self._rates()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group, rates[weight])

    def _move(self, weight: torch.Tensor, group: dict[str, Any], rate: float) -> None:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        assert weight.grad is not None
        slow, change, local = (local_tensor(each) for each in (state["momentum_buffer"], weight.grad, weight))
        slow.mul_(group["momentum"])
        if rate:
            slow.add_(change, alpha=1 / rate)
            local.sub_(slow, alpha=group["lr"] * rate)
        else:
            local.sub_(change)
