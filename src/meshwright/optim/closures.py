"""Optimizers that a step can drive: those that need nothing but gradients."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

from meshwright.errors import ConfigError

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_steps_alone(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer whose ``step()`` takes gradients as they are.

    Raises:
        ConfigError: For one that asks for a closure (torch's LBFGS), with which it computes the loss several times.
    """
    step = getattr(type(optimizer), "step", None)  # what is no optimizer has none, and is refused elsewhere
    parameters = inspect.signature(step).parameters if step is not None else {}
    needed = [name for name in list(parameters)[1:] if parameters[name].default is inspect.Parameter.empty]
    needed = [name for name in needed if parameters[name].kind not in _VARIABLE]
    if needed:
        raise ConfigError(
            f"{type(optimizer).__name__} needs a closure that computes the loss anew, and a step computes it once",
            expected="an optimizer whose step() works without arguments",
            got=f"step({', '.join(needed)})",
            fix="use another optimizer, such as torch.optim.AdamW",
        )
    return optimizer
