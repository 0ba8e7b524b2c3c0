"""Hooks on the gradients of parameters, where a method puts other parameters in their place.

Who has registered one on a parameter expects it to be called. torch would drop it without a word: methods make new
parameters, and FSDP2 computes with a third kind, which it gathers, while the hooks are on the shards.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.nn import parameter_groups
from meshwright.store.entries import stored_name, unwrapped

_Registered = OrderedDict[int, Callable[[torch.Tensor], Any]]
"""torch's own: a handle removes its hook from it, wherever it lies by then."""


class GradientHooks:
    """What ``register_hook`` and ``register_post_accumulate_grad_hook`` have put on a model's parameters until now.

    Args:
        model: Before anything is changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hooked = {
            name: parameter
            for name, parameter in _named(model).items()
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        }

    def carry_over(self, model: nn.Module) -> None:
        """Puts them on the parameters that the model has in the same places now."""
        present = _named(model) if self._hooked else {}
        for name, before in self._hooked.items():
            now = present.get(name)  # None: another rank of a pipeline holds it
            if now is None or now is before:
                continue
            if before._backward_hooks:
                now._backward_hooks = before._backward_hooks
            accumulated = getattr(before, "_post_accumulate_grad_hooks", None)
            if accumulated:
                now.register_post_accumulate_grad_hook(functools.partial(_call_all, accumulated))


def share_hooks(model: nn.Module) -> None:
    """Lets hooks on the shards of FSDP2, registered before or later, see the gradients of gathered parameters.

    They get what they get under data parallelism: a rank's own whole gradient, before it is averaged.
    """
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            for each in group.fsdp_params:
                if each.sharded_param._backward_hooks is None:
                    each.sharded_param._backward_hooks = OrderedDict()  # to which later ones are added
                each.init_unsharded_param = functools.partial(_gathered, each, each.init_unsharded_param)


def _gathered(parameter: Any, gather: Callable[[], None]) -> None:
    gather()
    hooks = parameter.sharded_param._backward_hooks
    if parameter._unsharded_param._backward_hooks is not hooks:
        parameter._unsharded_param._backward_hooks = hooks


def _call_all(hooks: _Registered, parameter: torch.Tensor) -> None:
    for hook in tuple(hooks.values()):
        hook(parameter)


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {stored_name(name): parameter for name, parameter in unwrapped(model).named_parameters()}
