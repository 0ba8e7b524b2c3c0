"""Replace the forward of transformers' stacked experts by one with fewer passes over their rows.

Transformers' grouped implementation multiplies the answers, of as many features as a token has, by the router's
weights, and puts them back in the order of tokens before it adds them up. Here the weights multiply what enters the
last product, which is narrower in mixtures of many small experts, and on a CPU answers are added where they belong.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.methods.replace.model_changes import NewForward, Replacement
from meshwright.runtime import preserved_rng
from meshwright.runtime.torch_internals.modules import PARAMETERS, parameters_of

_NEEDED = ("has_gate", "has_bias", "is_transposed", "num_experts", "config", "_apply_gate")
_TOLERANCE = 1e-5  # of fp32, relative to the largest value


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute stacked experts; shapes are tokens (T, H), the experts of each (T, k) and their weights (T, k)."""
    top_k, num_experts = top_k_index.shape[1], self.num_experts
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    # The number of rows up to each expert's last one.
    ends = torch.searchsorted(experts, torch.arange(1, num_experts + 1, device=experts.device)).to(torch.int32)
    token = order // top_k
    weights = top_k_weights.reshape(-1).index_select(0, order)[:, None]
    first = "gate_up_proj" if self.has_gate else "up_proj"
    hidden = _product(self, first, hidden_states.index_select(0, token), experts, ends)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    answers = _product(self, "down_proj", (hidden * weights).to(hidden.dtype), experts, ends, weights)
    if answers.device.type == "cpu" and answers.dtype == torch.float32:
        summed = torch.zeros_like(hidden_states, dtype=answers.dtype).index_add(0, token, answers)
    else:  # exact to the last bit in every run, and summed in fp32
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        summed = answers.index_select(0, back).view(*top_k_index.shape, -1).sum(1)
    return summed.to(hidden_states.dtype)


def _product(
    module: Any, name: str, rows: Tensor, experts: Tensor, ends: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Multiply rows, sorted by expert, with the weight of each one's expert, and add its bias times ``weights``."""
    from transformers.integrations import moe  # chooses a kernel that the device and the type have

    out: Tensor = moe._grouped_linear(rows, getattr(module, name), ends, is_transposed=module.is_transposed)
    if not module.has_bias:
        return out
    bias = getattr(module, f"{name}_bias").index_select(0, experts)
    return out + (bias if weights is None else (bias * weights).to(bias.dtype))


def replace_experts(model: nn.Module, into: Replacement, *, by_name: bool) -> None:
    """Add a faster forward for every module of ``model`` that is proven to be such experts of transformers.

    Args:
        model: The model.
        into: Takes the changes.
        by_name: Whether they were asked for by name, so that a model without experts is told.
    """
    known: dict[type[nn.Module], bool] = {}
    changes = []
    for module in model.modules():
        if not _looks_right(module):
            continue
        if type(module) not in known:
            known[type(module)] = _proven(module)
        if known[type(module)]:
            changes.append(NewForward(module, experts_forward))
    names = ", ".join(sorted({type(change.module).__name__ for change in changes}))
    into.add(f"experts: {len(changes)} modules ({names}) weigh before their last product", changes)
    if by_name and not changes:
        into.left.append("experts: there are no stacked experts of transformers")


def _looks_right(module: nn.Module) -> bool:
    if not all(hasattr(module, name) for name in _NEEDED):
        return False
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        return False
    stacks = [name for name, weight in parameters_of(module).items() if weight is not None and weight.dim() == 3]
    return sorted(stacks) == sorted(("gate_up_proj" if module.has_gate else "up_proj", "down_proj"))


def _proven(module: nn.Module) -> bool:
    """Return whether the new forward agrees with the module's own on random tokens, with narrow random weights."""
    tokens, width, inner, experts = 6, 16, 8, 4  # rows of 16 bytes, as grouped kernels want
    up = inner * (2 if module.has_gate else 1)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    shapes = {first: (up, width), "down_proj": (width, inner), f"{first}_bias": (up,), "down_proj_bias": (width,)}
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in parameters_of(module).items():
        if name not in shapes or parameter is None:
            return False
        shape = tuple(reversed(shapes[name])) if module.is_transposed else shapes[name]
        weights[name] = nn.Parameter(torch.randn(experts, *shape, generator=generator) / 2)
    probe: Any = copy.copy(module)  # without its hooks and weights: called by its forward alone
    probe.__dict__ = {**module.__dict__, PARAMETERS: weights, "num_experts": experts}
    hidden = torch.randn(tokens, width, generator=generator)
    index = torch.rand(tokens, experts, generator=generator).topk(2).indices
    factors = torch.rand(tokens, 2, generator=generator)
    try:
        with torch.no_grad(), preserved_rng():
            expected = type(module).forward(probe, hidden, index, factors)
            got = experts_forward(probe, hidden, index, factors)
    except Exception:  # its forward needs more than these weights
        return False
    return bool((got - expected).abs().max() <= _TOLERANCE * expected.abs().max())
