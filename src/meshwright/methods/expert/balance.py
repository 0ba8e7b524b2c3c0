"""Count the tokens of every expert, and balance them: by a bias of the choice, and by the z-loss of routers.

Counts stay on the device. The bias needs those of all ranks, once per step; a z-loss needs none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError, join_names
from meshwright.methods.expert.dispatch import Call
from meshwright.methods.expert.expert_layers import ExpertLayer, ListedExperts, StackedExperts
from meshwright.nn import fp32_buffer, keep_fp32
from meshwright.runtime.torch_internals.autograd import Function, current_graph_task_id
from meshwright.runtime.torch_internals.pytree import tree_flatten, tree_unflatten

_NO_BACKWARD = -1

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]
"""Returns the sum of a tensor over the ranks of a step that route different tokens, or have other layers."""


# --- Where a layer's router and its bias are


def router_of(model: nn.Module, layer: ExpertLayer) -> nn.Module | None:
    """Return the module with a weight ``(experts, H)`` beside a layer's experts; None if there is not just one."""
    inside = {*model.get_submodule(layer.own_path).modules()}
    found = [
        module
        for module in _around(model, layer).modules()
        if module not in inside
        and (weight := getattr(module, "weight", None)) is not None
        and weight.dim() == 2
        and weight.shape[0] == layer.num_experts
    ]
    return found[0] if len(found) == 1 else None


def _around(model: nn.Module, layer: ExpertLayer) -> nn.Module:
    """Return the block that holds a layer's experts and its router."""
    return model.get_submodule(layer.own_path.rpartition(".")[0])


def _bias_of(model: nn.Module, layer: ExpertLayer) -> tuple[nn.Module, str] | None:
    """Return the module and the name of the buffer that is added to scores for the choice of experts."""
    for module in _around(model, layer).modules():
        for name, buffer in module.named_buffers(recurse=False):
            if "bias" in name and buffer.shape == (layer.num_experts,) and buffer.is_floating_point():
                return module, name
    return None


def check_balance(model: nn.Module, layers: Sequence[ExpertLayer], *, by_bias: bool, by_z_loss: bool) -> None:
    """Refuse layers without a bias of the choice, or without a router, where these are asked for.

    Raises:
        ModelError: Naming the layers.
    """
    without = [layer.own_path for layer in layers if by_bias and _bias_of(model, layer) is None]
    if without:
        raise ModelError(
            "expert_parallel: bias_rate finds no bias of the choice of experts",
            expected="a floating buffer of shape (experts,) with 'bias' in its name in the block that holds the "
            "experts, as e_score_correction_bias of DeepSeek-V3's routers",
            got=f"none beside {join_names(without)}",
            fix="register one, and add it to the scores by which experts are chosen, or leave bias_rate out",
        )
    without = [layer.own_path for layer in layers if by_z_loss and router_of(model, layer) is None]
    if without:
        raise ModelError(
            "expert_parallel: z_loss finds no router",
            expected="one module with a weight (experts, features) in the block that holds the experts, whose logits "
            "(tokens, experts) are what it returns, or the first of several results",
            got=f"none, or several, beside {join_names(without)}",
            fix="keep the router in a module of its own, or leave z_loss out",
        )


# --- Counts, and the bias that follows them


@dataclass
class _Layer:
    """Counts of a layer on this rank: a part of those of all layers."""

    place: slice
    bias: tuple[nn.Module, str] | None = None


class ExpertLoad:
    """Tokens that every expert got in the last step.

    Args:
        layers: All layers of the model, those of other pipeline ranks included.
        device: Where counts are kept.
        sum_over_ranks: Sums them over all ranks of the step.
    """

    def __init__(self, layers: Sequence[ExpertLayer], device: torch.device, sum_over_ranks: SumOverRanks) -> None:
        ends = torch.tensor([0, *(layer.num_experts for layer in layers)]).cumsum(0).tolist()
        self._layers = {
            layer.own_path: _Layer(slice(*bounds))
            for layer, bounds in zip(layers, itertools.pairwise(ends), strict=True)
        }
        self._sum_over_ranks = sum_over_ranks
        self._now = torch.zeros(ends[-1], dtype=torch.int64, device=device)  # since the last update
        self._last: torch.Tensor | None = None

    def watch(self, layer: ExpertLayer) -> Callable[[torch.Tensor], None]:
        """Return a function that adds the counts ``(experts,)`` of one call of a layer that is on this rank.

        Calls of modules that do not train, and recomputation in backward, are not counted.
        """
        module, place = layer.holder, self._layers[layer.own_path].place

        def add(counts: torch.Tensor) -> None:
            if module.training and current_graph_task_id() == _NO_BACKWARD:
                self._now[place] += counts

        return add

    def count_calls(self, layer: StackedExperts) -> None:
        """Count the tokens of stacked experts, by the indices that they are called with."""
        add, num_experts = self.watch(layer), layer.num_experts

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index = Call.of(layer, args, kwargs).index.flatten().long()
            counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=index.device)  # the last: no expert
            add(counts.scatter_add_(0, index, torch.ones_like(index))[:num_experts])

        layer.module.register_forward_pre_hook(count, with_kwargs=True)

    def end_step(self) -> None:
        """Keep the counts as those of the last step; call it after the update. No rank waits."""
        self._last, self._now = self._now, torch.zeros_like(self._now)

    def counts(self) -> Mapping[str, torch.Tensor]:
        """Return the tokens of every expert in the last step, by path of the layer; collective.

        They are sums over all ranks and micro-batches (under ``outer``: of a replica), on the device: only reading them
        waits. Without an optimizer they are those of all passes until now.
        """
        total = self._sum_over_ranks(self._now if self._last is None else self._last)
        return {path: total[layer.place] for path, layer in self._layers.items()}

    def imbalance(self) -> torch.Tensor:
        """Return the tokens of the layers' busiest experts by their mean, 1 if all are equal; 0-dim, collective."""
        shares = [each.max() / each.double().mean().clamp(min=1e-30) for each in self.counts().values()]
        return torch.stack(shares).max()

    def follow_bias(
        self, model: nn.Module, layers: Sequence[ExpertLayer], rate: float, sum_over_ranks: SumOverRanks
    ) -> Callable[[], None]:
        """Return a function to call after each update: it moves each expert's bias by ±rate towards an equal share.

        Wang et al. 2024 (Auxiliary-Loss-Free Load Balancing), as DeepSeek-V3 trains. Collective.

        Args:
            model: The whole model, or a pipeline rank's part.
            layers: The layers of ``model``.
            rate: The step.
            sum_over_ranks: Sums over the ranks that route tokens for the same layers.
        """
        own = [self._layers[layer.own_path] for layer in layers]
        for layer, known in zip(layers, own, strict=True):
            known.bias = _bias_of(model, layer)
            if known.bias is not None:
                keep_fp32(*known.bias)

        @torch.no_grad()
        def update() -> None:
            total = sum_over_ranks(torch.cat([self._now[layer.place] for layer in own])) if own else self._now
            start = 0
            for layer in own:
                counts = total[start : start + layer.place.stop - layer.place.start]
                start += len(counts)
                _move(layer, rate * (counts.sum() - counts * len(counts)).sign())

        return update


def _move(layer: _Layer, by: torch.Tensor) -> None:
    """Add to a layer's bias, in fp32: half precision would swallow small updates."""
    assert layer.bias is not None
    module, name = layer.bias  # by name: casting puts another tensor in its place
    getattr(module, name).copy_(fp32_buffer(module, name).add_(by))


# --- The z-loss of routers


class RouterLoss:
    """Adds ``weight · mean(logsumexp(logits)²)`` of every router's tokens to the gradients (Zoph et al. 2022).

    The loss that is returned and logged stays what it is. Its gradient tells by what it is scaled and divided.

    Args:
        weight: Factor of the z-loss.
        device: Of the gradients.
    """

    def __init__(self, weight: float, device: torch.device) -> None:
        self._weight, self._scale = weight, torch.ones((), device=device)

    def attach(self, router: nn.Module, num_experts: int) -> Callable[[], None]:
        """Let a router add the loss of its logits; return a function that undoes it."""
        hook = router.register_forward_hook(functools.partial(self._add, num_experts))
        return hook.remove

    def _add(self, num_experts: int, module: nn.Module, args: Any, output: Any) -> Any:
        leaves, form = tree_flatten(output)
        floating = [place for place, leaf in enumerate(leaves) if _is_floating(leaf)]
        used = next((place for place in reversed(floating) if leaves[place].requires_grad), None)
        if used is None:
            return None
        logits = leaves[floating[0]]
        if logits.shape[-1] != num_experts:
            raise ModelError(
                f"expert_parallel: z_loss finds no logits in what {type(module).__name__} returns",
                expected=f"logits (tokens, {num_experts}), alone or as the first of several results",
                got=f"a tensor {tuple(logits.shape)}",
                fix="return the logits first, or leave z_loss out",
            )
        loss = logits.float().logsumexp(-1).square().mean() * self._weight
        # The last result is what weighs answers: by it the gradient comes back here.
        leaves[used] = _WithLoss.apply(leaves[used], loss, self._scale)
        return tree_unflatten(leaves, form)

    def follow(self, loss_func: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Wrap a loss function: the gradient of the loss is the scale of the z-losses, too."""

        @functools.wraps(loss_func)
        def followed(inputs: Any, output: Any) -> Any:
            result = loss_func(inputs, output)
            loss = result[0] if isinstance(result, list | tuple) else result
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.register_hook(self._note)
            return result

        return followed

    def _note(self, gradient: torch.Tensor) -> None:
        self._scale.copy_(gradient.detach().reshape(()))


class _WithLoss(Function):
    """Returns a tensor as it is; a loss beside it gets the scale that is known when backward comes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        return gradient, ctx.scale.clone(), None


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


@contextlib.contextmanager
def traced_z_loss(model: nn.Module, layers: Sequence[ExpertLayer], weight: float | None) -> Iterator[None]:
    """Let a plain model save for backward what :class:`RouterLoss` saves."""
    with contextlib.ExitStack() as stack:
        for layer in layers if weight is not None else ():
            router = router_of(model, layer)
            if router is not None:
                stack.callback(RouterLoss(weight or 0.0, torch.device("cpu")).attach(router, layer.num_experts))
        yield


def count_questions(load: ExpertLoad, layer: ListedExperts) -> None:
    """Count the tokens of experts in a list that is whole on every rank."""
    add = load.watch(layer)
    for number, expert in enumerate(layer.experts):

        def count(module: nn.Module, args: tuple[Any, ...], number: int = number) -> None:
            counts = torch.zeros(layer.num_experts, dtype=torch.int64)
            counts[number] = args[0].numel() // args[0].shape[-1]
            add(counts.to(args[0].device))

        expert.register_forward_pre_hook(count)
