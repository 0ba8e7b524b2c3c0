"""Parameters sharded when they are made, so that a model larger than one device can be built. Seed: BMTrain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshwright.errors import ModelError
from meshwright.runtime import require_distributed, settings, world_mesh

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

    Raises:
        LaunchError: Before ``init_distributed``.
        ModelError: For scalars and for tensors that are distributed already.
    """

    def __new__(  # type: ignore[misc]
        cls,
        data: torch.Tensor,
        requires_grad: bool = True,
        init_method: InitMethod | None = None,
        group: str | None = None,
    ) -> nn.Parameter:
        """Makes the DTensor parameter; its class is torch's, and ``isinstance`` knows it as a DistributedParameter."""
        require_distributed("A DistributedParameter")
        _check_data(data)
        record = ParameterRecord(init_method, group, gather_on_use=True)
        return recorded_parameter(sharded(data.detach()), requires_grad, record)


def gather_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """The full tensor, equal on every rank; its gradient is averaged over the ranks and split again. Collective."""
    assert isinstance(parameter, DTensor)
    whole = parameter.redistribute(placements=[Replicate()] * parameter.device_mesh.ndim)
    return whole.to_local(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)


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


def record_of(tensor: torch.Tensor) -> ParameterRecord | None:
    """What a parameter remembers; None for any other tensor."""
    record: ParameterRecord | None = getattr(tensor, _RECORD, None)
    return record


def recorded_parameter(tensor: DTensor, requires_grad: bool, record: ParameterRecord) -> nn.Parameter:
    """A parameter of ``tensor`` that remembers ``record``."""
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    setattr(parameter, _RECORD, record)
    return parameter


@contextlib.contextmanager
def keeping_records(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Lets parameters remember through a conversion (``half``, ``to``): torch swaps their contents and attributes."""
    kept = [(parameter, record) for parameter in parameters if (record := record_of(parameter)) is not None]
    try:
        yield
    finally:
        for parameter, record in kept:
            setattr(parameter, _RECORD, record)


def mark_moved(parameter: nn.Parameter) -> None:
    """Remembers that a Block holds another parameter in this one's place."""
    setattr(parameter, _MOVED, True)


def was_moved(parameter: nn.Parameter) -> bool:
    """Whether a Block holds another parameter in this one's place: who still has this one would train it apart."""
    return hasattr(parameter, _MOVED)


def sharded(full: torch.Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """Keeps this rank's part of a full tensor, without communication.

    Args:
        full: Equal on all ranks.
        mesh: One-dimensional; None for all ranks.

    Returns:
        A DTensor split along dim 0 as ``torch.chunk`` splits: the last ranks may hold less, or nothing.
    """
    mesh = mesh or world_mesh()
    part = dim0_part(full, mesh)
    if part.is_meta:
        local = torch.empty(part.shape, dtype=part.dtype, device=settings().device)
    else:
        # A copy even on the same device: a view would keep the full storage alive.
        local = part.to(settings().device, copy=True, memory_format=torch.contiguous_format)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=stride)


def dim0_part(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a full tensor on a one-dimensional mesh, as a view."""
    rows, size = full.shape[0], mesh.size()
    chunk = -(-rows // size)
    start = min(mesh.get_local_rank() * chunk, rows)
    return full[start : min(start + chunk, rows)]


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
        """Fills ``tensor`` in place."""
        self.func(tensor, *self.args, **self.kwargs)

    def __repr__(self) -> str:
        given = [repr(value) for value in self.args] + [f"{key}={value!r}" for key, value in self.kwargs.items()]
        return f"ParameterInitializer({', '.join([getattr(self.func, '__name__', repr(self.func)), *given])})"
