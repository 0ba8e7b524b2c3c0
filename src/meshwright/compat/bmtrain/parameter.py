"""Parameters sharded when they are made, so that a model larger than one device can be built. Seed: BMTrain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.errors import ModelError
from meshwright.nn.model_layout import sharded, sharded_piece
from meshwright.runtime import require_distributed, tensor_size

InitMethod = Callable[[torch.Tensor], Any]
"""Fills a full tensor in place, as the functions of ``torch.nn.init`` do."""

_RECORD = "_meshwright_record"
_MOVED = "_meshwright_moved"


@dataclass(frozen=True)
class ParameterRecord:
    """What a distributed parameter remembers beside its values."""

    init_method: InitMethod | None
    group: str | None
    gather_on_use: bool
    """True outside blocks. Inside one, the block gathers all its parameters together."""


class _DistributedParameterType(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and record_of(instance) is not None


class DistributedParameter(nn.Parameter, metaclass=_DistributedParameterType):
    """A parameter of which every rank holds a part: an ``nn.Parameter`` around a DTensor, split along dim 0.

    All ranks must pass the same values, or an ``init_method`` and call :func:`init_parameters`. Only the rank's own
    part of ``data`` is kept, on the rank's device.

    Args:
        data: The full tensor, of at least one dimension, on any device. On ``meta`` the part is left uninitialised.
        requires_grad: Whether it trains.
        init_method: Called by :func:`init_parameters` with a full-shape tensor: the result does not depend on the
            number of ranks.
        group: A name by which :func:`grouped_parameters` collects parameters.
        tp_mode: Whether tensor ranks may hold pieces of it; see ``tp_split_dim``.
        tp_split_dim: With ``tp_mode``, the dim along which the pieces of a tensor group (``init_distributed``'s
            ``tp_size`` ranks) make the whole: ``data`` is this rank's piece then, and the parameter has the shape of
            the whole, which ``init_method`` fills. -1 for a parameter that every tensor rank has whole. In a
            :class:`DistributedModule` the attribute is the rank's piece.

    Raises:
        LaunchError: Before ``init_distributed``.
        ModelError: For scalars, for tensors that are distributed already, and for a ``tp_split_dim`` that is no dim.
    """

    def __new__(  # type: ignore[misc]
        cls,
        data: torch.Tensor,
        requires_grad: bool = True,
        init_method: InitMethod | None = None,
        group: str | None = None,
        tp_mode: bool = False,
        tp_split_dim: int = -1,
    ) -> nn.Parameter:
        """Make the DTensor parameter; its class is torch's, and ``isinstance`` knows it as a DistributedParameter."""
        require_distributed("A DistributedParameter")
        _check_data(data)
        _check_split(data, tp_mode, tp_split_dim)
        record = ParameterRecord(init_method, group, gather_on_use=True)
        split = tp_split_dim >= 0 and tensor_size() > 1
        tensor = sharded_piece(data.detach(), tp_split_dim) if split else sharded(data.detach())
        return recorded_parameter(tensor, requires_grad, record)


def _check_data(data: torch.Tensor) -> None:
    if isinstance(data, DTensor):
        raise ModelError(
            "A DistributedParameter is made from a distributed tensor",
            expected="a full torch.Tensor",
            got=f"a DTensor of shape {tuple(data.shape)}",
            fix="share the parameter itself to tie weights; use full_tensor() to make another one of its values",
        )
    if data.dim() == 0:
        raise ModelError(
            "A scalar cannot be split over ranks",
            expected="a tensor with at least one dimension",
            got="shape ()",
            fix="use a tensor of shape (1,)",
        )


def _check_split(data: torch.Tensor, tp_mode: bool, tp_split_dim: int) -> None:
    if not -1 <= tp_split_dim < (data.dim() if tp_mode else 0):
        raise ModelError(
            "tp_split_dim is not a dim of the tensor" if tp_mode else "tp_split_dim is given without tp_mode",
            expected=f"0..{data.dim() - 1}, or -1 for a parameter that is not split" if tp_mode else "tp_mode=True",
            got=f"{tp_split_dim} for shape {tuple(data.shape)}",
            fix="0 splits the output features of a linear layer, 1 its input features",
        )


def record_of(tensor: torch.Tensor) -> ParameterRecord | None:
    """Return what a parameter remembers; None for any other tensor."""
    record: ParameterRecord | None = getattr(tensor, _RECORD, None)
    return record


def recorded_parameter(tensor: DTensor, requires_grad: bool, record: ParameterRecord) -> nn.Parameter:
    """Return a parameter of ``tensor`` that remembers ``record``."""
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    set_record(parameter, record)
    return parameter


def set_record(parameter: nn.Parameter, record: ParameterRecord) -> None:
    """Let a parameter remember ``record``."""
    setattr(parameter, _RECORD, record)


@contextlib.contextmanager
def keeping_records(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters remember through a conversion (``half``, ``to``): torch swaps their contents and attributes."""
    kept = [(parameter, record) for parameter in parameters if (record := record_of(parameter)) is not None]
    try:
        yield
    finally:
        for parameter, record in kept:
            setattr(parameter, _RECORD, record)


def mark_moved(parameter: nn.Parameter) -> None:
    """Remember that a Block holds another parameter in this one's place."""
    setattr(parameter, _MOVED, True)


def was_moved(parameter: nn.Parameter) -> bool:
    """Return whether a Block holds another parameter in this one's place.

    Who still has this one would train it apart.
    """
    return hasattr(parameter, _MOVED)


class ParameterInitializer:
    """An init method with its arguments: ``ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=0.02)``.

    Args:
        func: Called as ``func(tensor, *args, **kwargs)``.
        args: Further positional arguments.
        kwargs: Keyword arguments.
    """

    def __init__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` in place."""
        self.func(tensor, *self.args, **self.kwargs)

    def __repr__(self) -> str:
        given = [repr(value) for value in self.args] + [f"{key}={value!r}" for key, value in self.kwargs.items()]
        return f"ParameterInitializer({', '.join([getattr(self.func, '__name__', repr(self.func)), *given])})"
