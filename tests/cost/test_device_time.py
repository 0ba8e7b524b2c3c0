import dataclasses

import pytest

from meshwright.cost import DEVICES, Constants, Efficiency, Op
from meshwright.cost.device_time import Machine, backward_s, forward_s

NO_GAP = Constants(gap_s=0.0, narrow=0.5, flash1=0.5, tile=2.0)
MACHINE = Machine(DEVICES["A100-80"], Efficiency(matmul=0.5, attention=0.25, memory=0.5), NO_GAP)
PEAK, BANDWIDTH = 312e12, 2.039e12


def test_a_matrix_product_by_hand():
    op = Op("matmul", m=1024, n=512, k=256)
    moved = 2 * (1024 * 256 + 256 * 512 + 1024 * 512)
    expected = 2 * 1024 * 512 * 256 / (0.5 * PEAK) + 2.0 * moved / (0.5 * BANDWIDTH)
    assert forward_s(op, MACHINE) == pytest.approx(expected)
    assert backward_s(op, MACHINE) == pytest.approx(2 * expected)  # both gradients read and write the same matrices
    again = dataclasses.replace(op, recomputed=True)
    assert backward_s(again, MACHINE) == pytest.approx(3 * expected)


def test_attention_by_hand():
    op = Op("attention", m=4096, n=4096, k=128, batch=32, causal=True)
    assert op.flops == 4 * 4096 * 4096 * 128 * 32 // 2
    moved = 2 * 32 * 128 * 4 * 4096
    expected = op.flops / (0.25 * PEAK) + moved / (0.5 * BANDWIDTH)
    assert forward_s(op, MACHINE) == pytest.approx(expected)
    assert backward_s(op, MACHINE) == pytest.approx(2.5 * expected)
    narrow = dataclasses.replace(op, k=32, batch=128)  # equal work at half the speed
    assert forward_s(narrow, MACHINE) == pytest.approx(2 * op.flops / (0.25 * PEAK) + moved / (0.5 * BANDWIDTH))
    first = dataclasses.replace(op, variant="flash1")
    slower = op.flops / (0.5 * 0.25 * PEAK) + moved / (0.5 * BANDWIDTH)
    assert forward_s(first, MACHINE) == pytest.approx(slower)
    assert backward_s(first, MACHINE) == pytest.approx(2.5 / 0.7 * slower)  # Dao 2023, §4.1
    assert forward_s(dataclasses.replace(first, k=32, batch=128), MACHINE) == pytest.approx(slower)
    named = dataclasses.replace(op, variant="flash2")
    assert forward_s(named, MACHINE) == forward_s(op, MACHINE)  # what torch takes by itself
    other = dataclasses.replace(MACHINE, efficiency=dataclasses.replace(MACHINE.efficiency, flash2=0.125))
    assert forward_s(named, other) == pytest.approx(op.flops / (0.125 * PEAK) + moved / (0.5 * BANDWIDTH))
    assert forward_s(op, other) == forward_s(op, MACHINE)


def test_kernels_bound_by_memory_and_gaps():
    op = Op("move", num_bytes=10**9, count=3)
    assert forward_s(op, MACHINE) == pytest.approx(3e9 / (0.5 * BANDWIDTH))
    assert backward_s(op, MACHINE) == pytest.approx(6e9 / (0.5 * BANDWIDTH))
    gaps = Machine(MACHINE.device, MACHINE.efficiency, Constants(gap_s=1e-5))
    assert forward_s(op, gaps) - forward_s(op, MACHINE) == pytest.approx(3e-5)


def test_fp8_gains_most_where_products_are_wide():
    hopper = Machine(DEVICES["H100-SXM"], Efficiency(), Constants(gap_s=0.0, tile=1.0))

    def gain(width):
        half = Op("matmul", 8192, width, width)
        return forward_s(half, hopper) / forward_s(dataclasses.replace(half, dtype="fp8"), hopper)

    assert 0.8 < gain(512) < gain(4096) < gain(16384) < 2


def test_less_power_is_slower_and_not_in_proportion():
    op = Op("matmul", 8192, 8192, 8192)
    limited = Machine(dataclasses.replace(DEVICES["H100-SXM"], power_fraction=0.5), Efficiency(), Constants())
    whole = Machine(DEVICES["H100-SXM"], Efficiency(), Constants())
    assert 1 < forward_s(op, limited) / forward_s(op, whole) < 2


def test_4_bits_gain_on_8_where_products_are_wide():
    blackwell = Machine(DEVICES["B200"], Efficiency(), Constants(gap_s=0.0, tile=1.0))
    wide = Op("matmul", 16384, 16384, 16384, dtype="fp8")
    assert 1.5 < forward_s(wide, blackwell) / forward_s(dataclasses.replace(wide, dtype="fp4"), blackwell) < 2


def test_the_slowest_of_many_devices_counts():
    spread = Constants(spread=0.02)
    alone = Machine(DEVICES["H100-SXM"], Efficiency(), spread)
    among = dataclasses.replace(alone, num_devices=512)
    assert alone.sustained == 1.0
    assert among.sustained == pytest.approx(1 / (1 + 0.02 * 3.532), rel=1e-3)
    assert among.bytes_per_s == alone.bytes_per_s


def test_products_of_early_libraries_and_casts():
    machine = Machine(DEVICES["H100-SXM"], Efficiency(), Constants(gap_s=0.0, early=0.5, tile=0.0))
    product = Op("matmul", 4096, 4096, 4096)
    assert forward_s(dataclasses.replace(product, variant="early"), machine) == pytest.approx(
        2 * forward_s(product, machine)
    )
    cast = dataclasses.replace(product, dtype="fp8")  # 3 bytes of both inputs, whatever the tiles cost
    arithmetic = 2 * 4096**3 / machine.matmul_flops_per_s("fp8")
    assert forward_s(cast, machine) == pytest.approx(arithmetic + 6 * 4096**2 / machine.bytes_per_s)


def test_what_was_cast_once_is_not_cast_again():
    op = Op("matmul", m=4096, n=8192, k=2048, dtype="fp8")
    delayed = dataclasses.replace(op, scaling="delayed")
    read = 1 / (0.5 * BANDWIDTH)
    # Each product casts what it takes (3 bytes an element), or forward its inputs and backward a gradient (4).
    inputs, weights, gradients = 4096 * 2048, 2048 * 8192, 4096 * 8192
    each = forward_s(op, MACHINE) - forward_s(delayed, MACHINE)
    assert each == pytest.approx(-read * (inputs + weights))
    once = backward_s(op, MACHINE) - backward_s(delayed, MACHINE)
    assert once == pytest.approx(read * (2 * gradients + 3 * inputs + 3 * weights))
    cached = dataclasses.replace(delayed, casts_weight=False)
    assert forward_s(delayed, MACHINE) - forward_s(cached, MACHINE) == pytest.approx(4 * read * weights)


def test_precisions_gain_what_transformer_engine_documents():
    # Its gemm_profiling, on B300: how much sooner the twelve products of a layer are done than in bf16, with casts
    # before each product, and without any. A layer casts each tensor once, which is in between.
    measured = {"delayed": (1.64, 1.92), "current": (1.39, 1.92), "blocks": (1.42, 1.83), "nvfp4": (1.98, 3.48)}
    b300 = Efficiency(matmul=0.73, fp8=0.716, fp4=0.457, memory=0.9)
    machine = Machine(DEVICES["B300"], b300, Constants())
    widths = ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384))
    layer = [Op("matmul", 15872, n, k) for n, k in widths]

    def seconds(**changes):
        ops = [dataclasses.replace(op, **changes) for op in layer]
        return sum(forward_s(op, machine) + backward_s(op, machine) for op in ops)

    half = seconds()
    assert half == pytest.approx(12.9e-3, rel=0.03)
    for scaling, (least, most) in measured.items():
        dtype = "fp4" if scaling == "nvfp4" else "fp8"
        assert least < half / seconds(dtype=dtype, scaling=scaling) < most, scaling
