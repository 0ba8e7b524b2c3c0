"""Parameters that are sharded when they are made, so that models larger than a device can be built. Seed: BMTrain."""

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
    """Attributes of a distributed parameter beside its values."""

    init_method: InitMethod | None
    group: str | None
    gather_on_use: bool
    """Whether reading it gathers it: True outside Blocks, which gather all their parameters together."""


class _DistributedParameterType(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and record_of(instance) is not None


class DistributedParameter(nn.Parameter, metaclass=_DistributedParameterType):
    """A sharded parameter: an ``nn.Parameter`` around a DTensor, of which every rank holds a part of dim 0.

    All ranks pass the same values, or an ``init_method`` and call ``init_parameters``. Only the rank's own part of
    ``data`` is kept, on the rank's device.

    Args:
        data: The full tensor, of at least one dimension, on any device. On ``meta`` the part is left uninitialised.
        requires_grad: Whether it trains.
        init_method: Called by ``init_parameters`` with a full-shape tensor: the result does not depend on the
            number of ranks.
        group: A name by which ``grouped_parameters`` collects parameters.
        tp_mode: Whether tensor ranks hold pieces of it; see ``tp_split_dim``.
        tp_split_dim: With ``tp_mode``, the dim along which a tensor group (``init_distributed``'s ``tp_size`` ranks)
            splits the parameter. ``data`` is then this rank's piece, and the parameter has the shape of the whole,
            which ``init_method`` fills. In a ``DistributedModule`` the attribute is the rank's piece. -1 for a
            parameter that every tensor rank has whole.

    Raises:
        LaunchError: Before ``init_distributed``.
        ModelError: For scalars, for tensors that are distributed already, and when ``tp_split_dim`` is no dim.
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
        """Make the DTensor parameter. Its class is torch's; ``isinstance`` recognises it by its record."""
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
    """Return a distributed parameter's record; None for any other tensor."""
    record: ParameterRecord | None = getattr(tensor, _RECORD, None)
    return record


def recorded_parameter(tensor: DTensor, requires_grad: bool, record: ParameterRecord) -> nn.Parameter:
    """Make a parameter of ``tensor`` with a record."""
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    set_record(parameter, record)
    return parameter


def set_record(parameter: nn.Parameter, record: ParameterRecord) -> None:
    """Attach a record to a parameter."""
    setattr(parameter, _RECORD, record)


@contextlib.contextmanager
def keeping_records(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep records through a conversion (``half``, ``to``), in which torch swaps parameters with all attributes."""
    records = [(parameter, record) for parameter in parameters if (record := record_of(parameter)) is not None]
    try:
        yield
    finally:
        for parameter, record in records:
            set_record(parameter, record)


def mark_moved(parameter: nn.Parameter) -> None:
    """Mark a parameter in whose place a Block has another one now."""
    setattr(parameter, _MOVED, True)


def was_moved(parameter: nn.Parameter) -> bool:
    """Return whether a Block has another parameter in this one's place; a second owner would train it apart."""
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
