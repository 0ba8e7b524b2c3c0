"""On what a pass without data runs, and what the device that the model will train on does differently."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


def device_of_pass(model: nn.Module, wanted: torch.device | None) -> torch.device:
    """The device of the tensors without data.

    The one that the model will train on, wherever it is now; where nobody says which, that of its parameters. A machine
    that lacks it runs the pass on tensors of the CPU.
    """
    return device_here(wanted or next((tensor.device for tensor in model.parameters()), torch.device("cpu")))


def device_here(device: torch.device) -> torch.device:
    """The device, or the CPU on a machine without it."""
    return device if device.type == "cuda" and torch.cuda.is_available() else torch.device("cpu")


def converted_to(tensor: torch.Tensor, fake: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A tensor without data like another one, which may have none already."""
    if tensor.device.type != "meta":
        return fake.from_tensor(tensor.detach()).to(device)
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def stands_in(model: nn.Module, wanted: torch.device | None) -> str | None:
    """What is assumed where the pass cannot run on the device that the model will train on; None where it can."""
    device = device_of_pass(model, wanted)
    if wanted is None or wanted.type == device.type:
        return None
    return (
        f"traced as on {device.type}, for there is no {wanted.type} device here: attention is taken to be fused as on "
        f"{wanted.type}, its rows' sums take as much, and other operators are taken to save the same"
    )


def kernels_of_device(wanted: torch.device | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Around a pass on the CPU for a model that will train on another device."""
    if wanted is None or wanted.type == "cpu" or device.type != "cpu":
        return contextlib.nullcontext()
    return _KernelsOfCuda()


class _KernelsOfCuda(TorchFunctionMode):
    """Dropout as CUDA has it.

    In attention it is left out, which has no fused kernel on the CPU with it: on CUDA it has, and keeps no more for it
    than the state of a random generator. Elsewhere it is one kernel that keeps a byte of each element, and not, as on
    the CPU, three with a mask in the type of the elements.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            given.pop("dropout_p", None)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        elif func is torch.nn.functional.dropout and _is_fused(*args, **given):
            of = {**given, **dict(zip(("input", "p"), args, strict=False))}
            return torch.native_dropout(of["input"], of.get("p", 0.5), True)[0]
        return func(*args, **given)


def _is_fused(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Whether torch drops out in one kernel on CUDA; the arguments are those of ``torch.nn.functional.dropout``."""
    return training and not inplace and 0 < p < 1 and input.numel() > 0
