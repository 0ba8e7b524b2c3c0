"""The base of our autograd functions: torch's own, but where torch 2.11 or 2.12 is at work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.torch_version import TorchVersion


class EarlierFunction(torch.autograd.Function):
    """Keeps gradients that torch 2.11 loses in compiled code, without a word.

    There a result has none when it was written in place (``all_reduce(result)``, ``out.copy_(x)``) or came from a cast
    to the type that it had: its node in the graph is not the one that made it. A view of it is a node of its own.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = staticmethod(_with_views(cls.forward))  # type: ignore[method-assign]


def _with_views(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any) -> Any:
        result = forward(*args)
        # Not elsewhere: a view that was made without autograd cannot be written to afterwards.
        if not torch.compiler.is_compiling():
            return result
        return tuple(_view(each) for each in result) if isinstance(result, tuple) else _view(result)

    return run


def _view(value: Any) -> Any:
    return value.view_as(value) if type(value) is torch.Tensor else value


if TYPE_CHECKING or TorchVersion(torch.__version__) >= (2, 13):
    Function = torch.autograd.Function
else:
    Function = EarlierFunction
