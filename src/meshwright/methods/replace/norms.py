"""RMSNorm classes, found by what they hold and proven by what they compute; torch's fused one takes their place.

RMSNorm (Zhang & Sennrich 2019): y = w · x / sqrt(mean(x²) + ε); Gemma multiplies by 1 + w.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.methods.replace.changes import NewForward, Replacement
from meshwright.runtime import preserved_rng

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # a few roundings of the result
_PROBES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32))
"""Types of input and weight: plain, half, and a half-precision input that meets fp32 weights."""


@functools.cache
def rms_forward(eps_name: str, plus_one: bool) -> Callable[..., Tensor]:
    """A forward that is one fused operation of torch; the sum of squares is taken in fp32."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        (hidden,) = (*args, *kwargs.values())
        weight: Any = self.weight
        eps: Any = getattr(self, eps_name)
        if plus_one:
            return F.rms_norm(hidden.float(), weight.shape, 1.0 + weight.float(), eps).to(hidden.dtype)
        if hidden.dtype == weight.dtype:
            return F.rms_norm(hidden, weight.shape, weight, eps)
        return weight * F.rms_norm(hidden, weight.shape, None, eps)

    return forward


def replace_rms_norms(model: nn.Module, into: Replacement) -> None:
    """Adds a fused forward for every module of ``model`` that is proven to be an RMSNorm."""
    known: dict[Any, Callable[..., Tensor] | None] = {}
    changes = []
    for module in model.modules():
        eps_name = _eps_name(module)
        if eps_name is None:
            continue
        key = (type(module), module.weight.shape, getattr(module, eps_name))  # type: ignore[union-attr]
        if key not in known:
            known[key] = proven_forward(module, eps_name)
        forward = known[key]
        if forward is not None:
            changes.append(NewForward(module, forward))
    names = ", ".join(sorted({type(change.module).__name__ for change in changes}))
    into.add(f"rms_norm: {len(changes)} modules ({names}) use torch's fused one", changes)
    if not changes:
        into.left.append("rms_norm: there is no RMSNorm but torch's own")


def _eps_name(module: nn.Module) -> str | None:
    """The attribute that holds ε, if the module looks like a normalisation with one weight."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or module._buffers or module._modules or isinstance(module, nn.RMSNorm):
        return None
    if any(parameter is not None for name, parameter in module._parameters.items() if name != "weight"):
        return None
    return next((name for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), None)


def proven_forward(module: nn.Module, eps_name: str) -> Callable[..., Tensor] | None:
    """The fused forward that computes what ``module`` computes, on random input and weights; None if neither does."""
    for plus_one in (False, True):
        forward = rms_forward(eps_name, plus_one)
        try:
            with torch.no_grad(), preserved_rng():
                if all(_agree(module, forward, *dtypes) for dtypes in _PROBES):
                    return forward
        except Exception:  # another module than it looks: it wants other arguments, for one
            return None
    return None


def _agree(module: nn.Module, forward: Callable[..., Tensor], dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    width: Any = module.weight.shape[0]  # type: ignore[union-attr,index]
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(module)  # without its hooks and its weight: called by its forward alone
    weight = torch.rand(width, generator=generator).add(0.5).to(weight_dtype)
    probe.__dict__ = {**module.__dict__, "_parameters": {"weight": nn.Parameter(weight)}}
    # Some rows so small that ε counts.
    scale = torch.tensor([1e-3, 1e-2, 1.0, 30.0]).view(-1, 1, 1)
    hidden = (torch.randn(4, 3, width, generator=generator) * scale).to(dtype)
    expected, got = type(module).forward(probe, hidden), forward(probe, hidden)
    tolerance = _TOLERANCE[dtype]
    return got.dtype == expected.dtype and torch.allclose(got, expected, rtol=tolerance, atol=tolerance * 1e-3)
