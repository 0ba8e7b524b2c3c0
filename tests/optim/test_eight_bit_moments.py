import pytest
import torch

from meshwright.optim.eight_bit_moments import Codec, dynamic_map

CPU = torch.device("cpu")


def hard_values(signed):
    """Numbers of all sizes, every number of the map, every border between two and its neighbours."""
    generator = torch.Generator().manual_seed(0)
    numbers = dynamic_map(signed)
    borders = (numbers[1:] + numbers[:-1]) / 2
    small = 10 ** (-9 * torch.rand(20_000, generator=generator))
    values = [torch.rand(20_000, generator=generator) * 2 - 1, small, -small, numbers, borders, torch.zeros(1)]
    values += [torch.nextafter(borders, torch.full_like(borders, end)) for end in (-2.0, 2.0)]
    every = torch.cat(values)
    return every if signed else every[every >= 0]


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_nearest_numbers(signed):
    numbers, values = dynamic_map(signed).double(), hard_values(signed)
    assert len(numbers.unique()) == 256
    decoded = Codec.on(signed, CPU).decode(Codec.on(signed, CPU).encode(values)).double()
    distance = (values.double()[:, None] - numbers).abs().amin(1)
    nearest = (decoded - values.double()).abs() <= distance + values.double().abs() * 2e-7  # borders are rounded
    # In an unsigned map 0 stands for 0 alone.
    kept = torch.ones_like(nearest) if signed else values.double() > numbers[1] / 2
    assert nearest[kept].all()
    assert (decoded[values > 0] > 0).all() or signed


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_of_the_map_keep_their_codes(signed):
    codec = Codec.on(signed, CPU)
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(codec.encode(codec.decode(codes)), codes)
    assert codec.encode(torch.tensor([torch.nan])).item() == 255


def test_maps_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        torch.testing.assert_close(dynamic_map(signed), functional.create_dynamic_map(signed), rtol=0, atol=1e-7)


def test_blocks_are_as_precise_as_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    values = torch.randn(40, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 40)[:, None]
    codes, state = functional.quantize_blockwise(values, code=functional.create_dynamic_map(True), blocksize=256)
    theirs = (functional.dequantize_blockwise(codes, state) - values).abs()
    scales = values.abs().amax(1, keepdim=True)
    codec = Codec.on(True, CPU)
    ours = (codec.decode(codec.encode(values / scales)) * scales - values).abs()
    assert (ours.sum(1) <= theirs.sum(1) * (1 + 1e-5)).all()
    assert (ours <= scales * 0.9 / 128 * 1.001).all()  # half a step of the largest decade
