import pytest

from meshwright.cost import DEVICES, find_device
from meshwright.cost.cluster import half_peak_flops_per_s
from meshwright.errors import ConfigError

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("h100", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("A100-SXM-80GB (Azure NDm A100 v4)", "A100-80"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("V100", "V100-32"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("L4", "L4"),
        ("B200?", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("8xH100 80GB SXM5", "H100-SXM"),
        ("DGX-GB300", "GB300"),
        ("B300", "B300"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200 141GB", "H200"),
        ("MI325X", "MI325X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H800 PCIe", "H800-PCIe"),
        ("NVIDIA A800 80GB PCIe", "A800-PCIe"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe-16"),
        ("Tesla V100S-PCIE-32GB", "V100S-PCIe"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx5090", "RTX-5090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
    ],
)
def test_a_name_means_the_narrowest_preset(name, preset):
    assert find_device(name).name == preset


@pytest.mark.parametrize("name", DEVICES)
def test_a_preset_is_the_same_however_its_name_is_spelt(name):
    # A10G has no 10 GB.
    assert find_device(name.lower()) == find_device(f"NVIDIA {name}") == DEVICES[name]


def test_memory_power_and_bandwidth_in_a_name_count():
    board = find_device("H100-SXM-96GB-HBM2e-500W")
    assert board.memory_bytes == 96 * GIB
    assert board.bandwidth_bytes_per_s < DEVICES["H100-SXM"].bandwidth_bytes_per_s
    assert board.power_fraction == pytest.approx(500 / 700)
    assert find_device("B200-power-limited").power_fraction < 1


@pytest.mark.parametrize(
    ("name", "fraction"),
    [
        ("H100-SXM", 1.0), ("H200", 1.0), ("A100-40", 1.0), ("A100-PCIe-80", 0.75), ("H100-PCIe", 0.5 * 989.4 / 756),
        ("B200", 1.0), ("GB200", 1.2 * 2.25 / 2.5), ("GB300", 1.4 * 2.25 / 2.5), ("L40S", 1.0),
        ("H100 PCIe 175W", 0.25 * 989.4 / 756), ("GB200 900W", 0.9 * 2.25 / 2.5),
    ],
)  # fmt: skip
def test_boards_of_one_chip_have_the_power_of_their_own(name, fraction):
    assert find_device(name).power_fraction == pytest.approx(fraction)


def test_the_nominal_size_is_not_taken_for_another_device():
    assert find_device("H100-80GB") == DEVICES["H100-SXM"]
    assert find_device("NVIDIA GH200 480GB") == DEVICES["GH200"]  # 480 GB are the host's


def test_an_unknown_device_is_named_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"GTX 1080.*H100-SXM"):
        find_device("GTX 1080")


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "Quadro RTX 6000", "RTX 5000 Ada"])
def test_boards_with_like_names_are_not_taken_for_each_other(name):
    with pytest.raises(ConfigError):
        find_device(name)


def test_peaks_by_type():
    assert DEVICES["H100-SXM"].peak_flops_per_s("fp8") == pytest.approx(2 * 989.4e12, rel=1e-3)
    assert DEVICES["A100-80"].peak_flops_per_s("fp8") == DEVICES["A100-80"].peak_flops_per_s("half")  # it has none
    assert DEVICES["GB300"].peak_flops_per_s("fp4") == 15e15
    assert DEVICES["H100-SXM"].peak_flops_per_s("fp4") == DEVICES["H100-SXM"].peak_flops_per_s("fp8")
    assert DEVICES["V100-32"].peak_flops_per_s("fp32") == 15.7e12


def test_every_preset_has_a_price_but_where_none_is_listed():
    unpriced = {name for name, device in DEVICES.items() if device.price_per_hour is None}
    assert unpriced == {
        "A100-PCIe-40", "A100-PCIe-80", "A800", "A800-PCIe", "B300", "GB200", "GB300", "GH200", "H20", "H800",
        "H800-PCIe", "MI250X", "MI325X", "MI350X", "MI355X", "RTX-6000-Ada", "RTX-A6000", "RTX-PRO-6000",
        "V100-PCIe-16", "V100-PCIe-32", "V100S-PCIe",
    }  # fmt: skip
    assert DEVICES["B200"].price_per_hour > DEVICES["H100-SXM"].price_per_hour > DEVICES["L4"].price_per_hour > 0
    wanted = "V100-16 V100-32 A100-40 A100-80 H100-SXM H100-PCIe H200 B200 MI300X L4 A10 CPU"
    assert set(wanted.split()) <= set(DEVICES)


def test_memory_is_what_drivers_report_and_not_the_nominal_size():
    reported = {"A10": 23_028, "A10G": 23_028, "L4": 23_034, "L40S": 46_068, "H100-SXM": 81_559, "RTX-4090": 24_564}
    assert reported == {name: DEVICES[name].memory_bytes // 2**20 for name in reported}


@pytest.mark.parametrize(
    ("name", "compute", "memory", "gib"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 1 / 7, 1 / 8, 5),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 3 / 7, 1 / 2, 40),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", 1 / 7, 1 / 2, 40),
        ("NVIDIA H200 MIG 1g.18gb+me", 1 / 7, 1 / 8, 18),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 1, 1, 80),
    ],
)
def test_an_instance_of_a_divided_gpu_has_its_part(name, compute, memory, gib):
    whole, part = find_device(name.partition(" MIG")[0]), find_device(name)
    assert part.half_flops_per_s == half_peak_flops_per_s(name) == pytest.approx(whole.half_flops_per_s * compute)
    assert part.bandwidth_bytes_per_s == pytest.approx(whole.bandwidth_bytes_per_s * memory)
    assert part.memory_bytes == gib * 2**30
