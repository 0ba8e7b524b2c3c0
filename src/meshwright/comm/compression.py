"""Compressed messages: quantise blocks of numbers, pack tensors, and send them over one level or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.comm.transport import all_gather_flat, group_of_partition
from meshwright.cost import Encoding

_LEVELS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
_SCALE_TYPES = {4: torch.float32, 2: torch.bfloat16}
_FP8 = torch.float8_e4m3fn


def encode(parts: Sequence[torch.Tensor], encoding: Encoding) -> torch.Tensor:
    """Quantise rows, each part of them in its own blocks.

    Args:
        parts: Floating tensors of shape ``(num_rows, elements of the part)``; at least one.
        encoding: Bits, block size, and the type of scales.

    Returns:
        Bytes ``(num_rows, sum of encoding.num_bytes(elements))``: all scales, then all codes (two of 4 bits to a byte).
    """
    num_rows, blocks = parts[0].shape[0], _in_blocks(parts, encoding.block_size)
    levels = _LEVELS[encoding.kind]
    scales = (blocks.abs().amax(-1).float() / levels).to(_SCALE_TYPES[encoding.scale_bytes])
    values = blocks / scales.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = _codes_of(values.clamp_(-levels, levels), encoding.kind).view(num_rows, -1)
    pieces = [codes[:, start : start + size] for start, size in _places([p.shape[1] for p in parts], encoding)]
    return torch.cat([scales.view(torch.uint8), *pieces], dim=1)


def decode(
    message: torch.Tensor, sizes: Sequence[int], encoding: Encoding, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Decode the parts that :func:`encode` turned into bytes, in fp32 and rounded to ``dtype``.

    Args:
        message: Bytes ``(num_rows, …)``, contiguous or not.
        sizes: Elements of every part.
        encoding: Encoding as in :func:`encode`.
        dtype: Floating.

    Returns:
        One tensor ``(num_rows, size)`` for every part; views of one buffer.
    """
    num_rows, block_size = message.shape[0], encoding.block_size
    counts = [-(-size // block_size) for size in sizes]
    scale_bytes = sum(counts) * encoding.scale_bytes
    scales = message[:, :scale_bytes].contiguous().view(_SCALE_TYPES[encoding.scale_bytes]).float()
    codes = _padded_codes(message[:, scale_bytes:], sizes, encoding)
    values = _values_of(codes, encoding.kind, dtype).view(num_rows, -1, block_size)
    decoded = torch.empty(values.shape, dtype=dtype, device=message.device)
    torch.mul(values, scales.unsqueeze(-1), out=decoded)
    rows = decoded.view(num_rows, -1).split([count * block_size for count in counts], dim=1)
    return [row[:, :size] for row, size in zip(rows, sizes, strict=True)]


def _in_blocks(parts: Sequence[torch.Tensor], block_size: int) -> torch.Tensor:
    """Return ``(num_rows, blocks, block_size)``, with the last block of every part padded with zeros."""
    num_rows, sizes = parts[0].shape[0], [part.shape[1] for part in parts]
    if len(parts) == 1 and sizes[0] % block_size == 0:
        return parts[0].reshape(num_rows, -1, block_size)
    widths = [-(-size // block_size) * block_size for size in sizes]
    rows = parts[0].new_zeros(num_rows, sum(widths))
    for part, size, row in zip(parts, sizes, rows.split(widths, dim=1), strict=True):
        row[:, :size] = part
    return rows.view(num_rows, -1, block_size)


def _places(sizes: Sequence[int], encoding: Encoding) -> Iterator[tuple[int, int]]:
    """Yield the runs ``(start, length)`` of the codes that travel, among those of padded blocks, in bytes."""
    start, first, length = 0, 0, 0
    for size in sizes:
        per_byte = 2 if encoding.kind == "int4" else 1
        width = -(-size // encoding.block_size) * encoding.block_size // per_byte
        num_bytes = -(-size // per_byte)
        length += num_bytes
        start += width
        if num_bytes != width:  # a gap follows
            yield first, length
            first, length = start, 0
    if length:
        yield first, length


def _padded_codes(codes: torch.Tensor, sizes: Sequence[int], encoding: Encoding) -> torch.Tensor:
    """Return the codes of whole blocks, contiguous; what does not travel is zero."""
    width = sum(-(-size // encoding.block_size) for size in sizes) * encoding.block_size
    width //= 2 if encoding.kind == "int4" else 1
    if codes.shape[1] == width:
        return codes.contiguous()
    padded = codes.new_zeros(codes.shape[0], width)
    taken = 0
    for start, size in _places(sizes, encoding):
        padded[:, start : start + size] = codes[:, taken : taken + size]
        taken += size
    return padded


def _codes_of(values: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "fp8":
        return values.to(_FP8).view(torch.uint8)
    codes = values.round_().to(torch.int8)
    if kind == "int8":
        return codes.view(torch.uint8)
    shifted = (codes + 8).to(torch.uint8)
    return shifted[..., ::2] | (shifted[..., 1::2] << 4)


def _values_of(codes: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind == "fp8":
        return codes.view(_FP8).to(dtype)
    if kind == "int8":
        return codes.view(torch.int8)
    return torch.stack([codes & 15, codes >> 4], dim=-1).view(torch.int8) - 8


# --- Rows of several tensors in one message: large ones are quantised, small ones are not.


@dataclass(frozen=True)
class Packing:
    """Layout of the tensors in a row, and their encoding.

    A message has the quantised parts of a row first, then the bytes of the others.
    """

    sizes: tuple[int, ...]
    """Elements of every part, in the order in which they lie in a row."""
    quantised: tuple[bool, ...]
    """Whether each of them is quantised."""
    encoding: Encoding | None
    """Encoding of those; None: nothing is quantised."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Pack rows ``(num_rows, elements)`` of floats into messages ``(num_rows, bytes)``."""
        parts = rows.split(self.sizes, dim=1)
        large, small = self._sorted(parts)
        pieces = [encode(large, self.encoding)] if large and self.encoding is not None else []
        if small:
            pieces.append(torch.cat(small, dim=1).view(torch.uint8))
        return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]

    def unpack(self, messages: torch.Tensor, sent: torch.dtype, rows: torch.Tensor) -> None:
        """Unpack messages into rows ``(num_rows, elements)``.

        Args:
            messages: Bytes ``(num_rows, bytes)``.
            sent: Type of the parts that are not quantised.
            rows: Rows to overwrite, of any floating type.
        """
        large, small = self._sorted(rows.split(self.sizes, dim=1))
        behind = 0
        if large and self.encoding is not None:
            sizes = [part.shape[1] for part in large]
            behind = sum(self.encoding.num_bytes(size) for size in sizes)
            for part, value in zip(large, decode(messages[:, :behind], sizes, self.encoding, rows.dtype), strict=True):
                part.copy_(value)
        if small:
            values = messages[:, behind:].contiguous().view(sent)
            for part, value in zip(small, values.split([part.shape[1] for part in small], dim=1), strict=True):
                part.copy_(value)

    def _sorted(self, parts: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the parts that are quantised, and the others."""
        both = list(zip(parts, self.quantised, strict=True))
        quantises = self.encoding is not None
        return [p for p, few in both if few and quantises], [p for p, few in both if not (few and quantises)]


# --- Gathering and summing packed messages, in one collective or between and within nodes.


@dataclass(frozen=True)
class Nodes:
    """A group of ranks in two levels: rank ``node * per_node + place`` is the ``place``-th on its node."""

    within: dist.ProcessGroup
    """The ranks of this node."""
    between: dist.ProcessGroup
    """The ranks of this place, one of every node."""
    num_nodes: int
    per_node: int


@dataclass(frozen=True)
class Route:
    """The ranks that communicate, and their nodes where messages go in two levels."""

    group: dist.ProcessGroup
    nodes: Nodes | None

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.group.size()


def route(group: dist.ProcessGroup, per_node: int | None, alike: Sequence[tuple[int, ...]] = ()) -> Route:
    """Build the route of a group's messages; collective over the world, in which all groups are cut alike.

    Args:
        group: Its ranks lie node by node.
        per_node: Number of consecutive ranks on one node; None sends over all of them at once.
        alike: Ranks of this group and of all others along its axes, as :func:`meshwright.runtime.groups_along` returns
            them; needed for nodes. None means that the group is the world.
    """
    if per_node is None:
        return Route(group, None)
    lines = alike or [tuple(dist.get_process_group_ranks(group))]
    size = len(lines[0])
    inner = group_of_partition([ranks[at : at + per_node] for ranks in lines for at in range(0, size, per_node)])
    outer = group_of_partition([ranks[at::per_node] for ranks in lines for at in range(per_node)])
    return Route(group, Nodes(inner, outer, size // per_node, per_node))


def gathered_messages(message: torch.Tensor, way: Route) -> torch.Tensor:
    """Gather every rank's message of equal size, ``(ranks, bytes)``; first between nodes, then within them.

    Each message enters a node once, and its ranks exchange the messages there.
    """
    if way.nodes is None:
        return _gathered(message, way.group)
    nodes = way.nodes
    of_my_place = _gathered(message, nodes.between)
    every = _gathered(of_my_place.view(-1), nodes.within).view(nodes.per_node, nodes.num_nodes, -1)
    return every.transpose(0, 1).reshape(way.size, -1)


def reduced_row(rows: torch.Tensor, packing: Packing, way: Route) -> torch.Tensor:
    """Return the sum over ranks of this rank's row, ``(elements,)``, added up in fp32 (fp64 for fp64).

    One all-to-all of packed rows. Over nodes two: ranks of a node add up what they have for each place, then nodes
    exchange these sums, packed once more, so that each sum leaves its node once (qgZ of ZeRO++, Wang et al. 2023).

    Args:
        rows: ``(ranks, elements)``: row ``r`` is for rank ``r``.
        packing: Layout of a row.
        way: Ranks that communicate.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    if way.nodes is None:
        return _exchanged(rows, packing, way.group, wide).sum(0)
    nodes, length = way.nodes, rows.shape[1]
    by_place = rows.view(nodes.num_nodes, nodes.per_node, length).transpose(0, 1).reshape(way.size, length)
    arrived = _exchanged(by_place, packing, nodes.within, wide)
    for_nodes = arrived.view(nodes.per_node, nodes.num_nodes, length).sum(0)
    return _exchanged(for_nodes.to(rows.dtype), packing, nodes.between, wide).sum(0)


def _gathered(message: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    every = message.new_empty(group.size() * message.numel())
    all_gather_flat(every, message, group=group)
    return every.view(group.size(), -1)


def _exchanged(rows: torch.Tensor, packing: Packing, group: dist.ProcessGroup, wide: torch.dtype) -> torch.Tensor:
    """Exchange rows all-to-all in equal runs, one for every rank, and unpack what arrives."""
    sent = packing.pack(rows)
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    result = torch.empty(rows.shape, dtype=wide, device=rows.device)
    packing.unpack(arrived, rows.dtype, result)
    return result
