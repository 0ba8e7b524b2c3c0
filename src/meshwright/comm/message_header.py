"""Headers: what ranks exchange about a tensor before they send it, in a message of fixed size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.comm.transport import Members, gathered
from meshwright.errors import ConfigError, LaunchError, MeshwrightError

_HEADER_BYTES = 256
_REQUIRED, _POSSIBLE, _OFF = "required", "not required", "off (no_grad)"


@dataclass(frozen=True)
class Header:
    """One rank's call and its tensor, as another rank has to know them."""

    call: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    gradient: str

    @classmethod
    def of(cls, call: str, x: torch.Tensor) -> Header:
        """Describe ``x``.

        Raises:
            ConfigError: When ``x`` is not a tensor of this rank alone.
        """
        if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
            raise ConfigError(
                f"{call} takes a tensor of this rank",
                expected="a torch.Tensor",
                got=type(x).__name__,
                fix="pass x.to_local() or x.full_tensor() of a DTensor",
            )
        gradient = _REQUIRED if x.requires_grad else _POSSIBLE
        gradient = gradient if torch.is_grad_enabled() else _OFF
        return cls(call, str(x.dtype).removeprefix("torch."), tuple(x.shape), x.device.type, gradient)

    @property
    def wants_gradient(self) -> bool:
        """Return whether the sender's tensor requires a gradient."""
        return self.gradient == _REQUIRED

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape without dim 0."""
        return self.shape[1:]

    @property
    def can_have_gradient(self) -> bool:
        """Return whether the rank records graphs at all."""
        return self.gradient != _OFF

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that ``dtype`` names."""
        return getattr(torch, self.dtype)

    def encode(self) -> torch.Tensor:
        """Return the header as uint8, shape (256,), on the CPU.

        Raises:
            ConfigError: When it does not fit (a tensor of dozens of dims).
        """
        text = json.dumps(asdict(self)).encode()
        if len(text) > _HEADER_BYTES:
            raise ConfigError(
                "A tensor has too many dims to be described to other ranks",
                expected=f"a shape that fits into {_HEADER_BYTES} bytes",
                got=f"{len(self.shape)} dims",
                fix="flatten some of them",
            )
        return torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES)), dtype=torch.uint8)

    @classmethod
    def decode(cls, message: torch.Tensor) -> Header:
        """Decode what :meth:`encode` made, from a tensor on any device.

        Raises:
            LaunchError: When the message is no header: the other rank called something else.
        """
        try:
            fields = json.loads(bytes(message.tolist()))
            header = cls(**{**fields, "shape": tuple(fields["shape"])})
            words = (header.call, header.dtype, header.device, header.gradient)
            if not all(isinstance(word, str) for word in words) or not isinstance(header.torch_dtype, torch.dtype):
                raise ValueError("no dtype")
            if not all(type(size) is int and 0 <= size < 2**63 for size in header.shape):
                raise ValueError("no shape")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LaunchError(
                "Another rank sent something that does not describe a tensor",
                expected="the same Meshwright, calling the same functions in the same order, on every rank",
                got=f"{type(error).__name__}: {error}",
                fix="install one version everywhere, and let all ranks of a group call the same functions",
            ) from error
        return header

    def send(self, peer: int, members: Members) -> None:
        """Send the header to one rank of the group."""
        dist.send(self.encode().to(members.host_device), group_dst=peer, group=members.group)

    @classmethod
    def receive(cls, peer: int, members: Members) -> Header:
        """Receive the header that ``peer`` sends."""
        message = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=members.host_device)
        dist.recv(message, group_src=peer, group=members.group)
        return cls.decode(message)


def exchange(header: Header, members: Members) -> list[Header]:
    """Gather every rank's header, in the order of the group, with one small all-gather."""
    own = header.encode()
    rows = gathered(own.to(members.host_device), members).cpu()
    return [header if torch.equal(row, own) else Header.decode(row) for row in rows]


def check_alike(headers: Sequence[Header], fields: Sequence[str], members: Members) -> None:
    """Raise on every rank unless the named fields are alike.

    Raises:
        LaunchError: Naming the first rank that differs from the group's first.
    """
    first = {name: getattr(headers[0], name) for name in fields}
    for place, header in enumerate(headers):
        other = {name: getattr(header, name) for name in fields}
        if other != first:
            raise on_all_ranks(
                LaunchError(
                    "Ranks do not call the same collective on like tensors",
                    expected=f"{_describe(first)}, as on rank 0 of the group",
                    got=f"{_describe(other)} on rank {place}",
                    fix="make every rank of the group call the same functions in the same order, on tensors of one "
                    "shape and dtype, of which all or none require a gradient",
                ),
                members,
            )


def check_call(call: str, x: torch.Tensor, members: Members, *, backward_communicates: bool) -> None:
    """Compare this call with the other ranks', on the CPU only: on CUDA the host would have to wait.

    Args:
        call: The function with its arguments.
        x: Its tensor.
        members: The group.
        backward_communicates: Whether gradients must be wanted on all ranks or on none.

    Raises:
        ConfigError: When ``x`` is no tensor of this rank.
        LaunchError: On every rank, when the calls differ.
    """
    header = Header.of(call, x)
    if members.size == 1 or x.device.type != "cpu":
        return
    headers, fields = exchange(header, members), ("call", "dtype", "shape")
    check_alike(headers, fields, members)
    if backward_communicates:
        check_alike(headers, (*fields, "wants_gradient"), members)


def on_all_ranks(error: MeshwrightError, members: Members) -> MeshwrightError:
    """Mark an error that all ranks of the group raise, so that a program prints it once if that is the world."""
    error.agreed = members.size == dist.get_world_size()  # type: ignore[attr-defined]
    return error


def _describe(fields: dict[str, Any]) -> str:
    words = f"{fields['call']} of {fields['dtype']}"
    if "shape" in fields:
        words += f" of shape {_listed(fields['shape'])}"
    if "row_shape" in fields:
        words += f" in rows of shape {_listed(fields['row_shape'])}"
    if "wants_gradient" in fields:
        words += ", gradient required" if fields["wants_gradient"] else ", no gradient required"
    return words


def _listed(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"
