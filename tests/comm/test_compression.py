"""Numbers in few bits: how far they are off, how many bytes they take, and what becomes of inf and nan."""

import pytest
import torch

from meshwright.comm.compression import Packing, decode, encode
from meshwright.cost import Encoding

BLOCK = 64
SIZES = [5 * BLOCK, 1, BLOCK - 1, 0, 3, 2 * BLOCK + 7, BLOCK]
WORST = {"int8": 0.5 / 127, "int4": 0.5 / 7}


def rows(dtype=torch.float32):
    """Parts of very different sizes; some blocks are zero."""
    generator = torch.Generator().manual_seed(2)
    parts = [torch.randn(3, size, generator=generator) * torch.tensor([[1e-8], [1.0], [1e6]]) for size in SIZES]
    parts[0][1, :BLOCK] = 0
    return [part.to(dtype) for part in parts]


def largest(part):
    """The largest magnitude of the block of every element."""
    if not part.numel():
        return part
    return torch.cat([b.abs().amax(-1, keepdim=True).expand_as(b) for b in part.split(BLOCK, dim=1)], dim=1)


@pytest.mark.parametrize("scale_bytes", [4, 2])
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_codes_are_the_nearest_levels(kind, scale_bytes, dtype):
    encoding, parts = Encoding(kind, BLOCK, scale_bytes), rows(dtype)
    message = encode(parts, encoding)
    assert message.dtype == torch.uint8
    assert message.shape == (3, sum(map(encoding.num_bytes, SIZES)))
    again = decode(message, SIZES, encoding, torch.float64)
    # A scale in bf16 is off by 1/256: levels lie so far off, and the largest element may lie so far beyond them.
    wider = 1 if scale_bytes == 4 else 1 + 2**-8
    for part, value in zip(parts, again, strict=True):
        most = largest(part.double())
        worst = most * WORST[kind] if kind != "fp8" else torch.maximum(part.double().abs() / 16, most * 2**-10 / 448)
        slack = most * 2**-8 if scale_bytes == 2 else 0
        assert ((value - part.double()).abs() <= worst * wider * 1.0001 + slack).all()
        if scale_bytes == 4 and part.numel():
            torch.testing.assert_close(largest(value), most, rtol=1e-6, atol=0)
    once = [value.float() for value in again]
    if scale_bytes == 4 and kind != "fp8":
        assert all(map(torch.equal, decode(encode(once, encoding), SIZES, encoding), once))
    in_half = decode(message, SIZES, encoding, torch.bfloat16)
    assert all(map(torch.equal, in_half, [value.bfloat16() for value in once]))


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(kind, bad):
    encoding, part = Encoding(kind, BLOCK), torch.randn(1, 3 * BLOCK)
    part[0, BLOCK + 5] = bad
    value = decode(encode([part], encoding), [3 * BLOCK], encoding)[0][0]
    assert not value[BLOCK : 2 * BLOCK].isfinite().any()
    assert value[:BLOCK].isfinite().all()
    assert value[2 * BLOCK :].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_parts_travel_as_they_are(dtype):
    encoding = Encoding("int4", 8, 2)
    packing = Packing((40, 3, 17, 5), (True, False, True, False), encoding)
    given = torch.randn(2, 65).to(dtype)
    message = packing.pack(given)
    assert message.shape == (2, encoding.num_bytes(40) + encoding.num_bytes(17) + 8 * dtype.itemsize)
    result = torch.empty(2, 65)
    packing.unpack(message, dtype, result)
    for start, size, quantised in ((0, 40, True), (40, 3, False), (43, 17, True), (60, 5, False)):
        part, value = given[:, start : start + size].float(), result[:, start : start + size]
        assert torch.equal(part, value) != quantised
        assert (part - value).abs().max() <= part.abs().max() / 7
    whole = Packing((65,), (True,), None)
    whole.unpack(whole.pack(given), dtype, result)
    assert torch.equal(result, given.float())
