"""Numbers in 8 or 4 bits: every block of neighbours shares a scale, and is rounded to the nearest level.

``int8`` and ``int4`` have evenly spaced levels, 127 and 7 on either side of zero: no element is off by more than half a
step, 1/254 or 1/14 of its block's largest magnitude. ``fp8`` (e4m3: 3 bits of mantissa, up to 448) is off by at most
1/16 of the element itself, or by 2^-10 / 448 of the largest where that is more. A scale in bf16 widens steps by up to
1/128. A block that holds inf or nan comes back without a finite number in it, so that nobody overlooks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from meshwright.cost import Encoding

_LEVELS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
_SCALE_TYPES = {4: torch.float32, 2: torch.bfloat16}
_FP8 = torch.float8_e4m3fn


def encode(parts: Sequence[torch.Tensor], encoding: Encoding) -> torch.Tensor:
    """Quantises rows, each part of them in blocks of its own.

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
    """The parts that :func:`encode` turned into bytes, in fp32 and rounded to ``dtype``.

    Args:
        message: Bytes ``(num_rows, …)``, contiguous or not.
        sizes: Elements of every part.
        encoding: As in :func:`encode`.
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
    """``(num_rows, blocks, block_size)``, the last block of every part filled up with zeros."""
    num_rows, sizes = parts[0].shape[0], [part.shape[1] for part in parts]
    if len(parts) == 1 and sizes[0] % block_size == 0:
        return parts[0].reshape(num_rows, -1, block_size)
    widths = [-(-size // block_size) * block_size for size in sizes]
    rows = parts[0].new_zeros(num_rows, sum(widths))
    for part, size, row in zip(parts, sizes, rows.split(widths, dim=1), strict=True):
        row[:, :size] = part
    return rows.view(num_rows, -1, block_size)


def _places(sizes: Sequence[int], encoding: Encoding) -> Iterator[tuple[int, int]]:
    """Where the codes of every part begin among those of whole blocks, and how many bytes they are; runs in one."""
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
    """Codes of whole blocks, contiguous: what does not travel is zero."""
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
