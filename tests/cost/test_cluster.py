import json

import pytest

from meshwright.cost import find_cluster, make_cluster, read_cluster, write_cluster
from meshwright.errors import ConfigError


def test_presets():
    cluster = find_cluster("h100x64")
    assert (cluster.device.name, cluster.num_devices, cluster.devices_per_node) == ("H100-SXM", 64, 8)
    assert cluster.inter.bytes_per_s == 50e9  # 3200 Gbit/s of a node over 8 devices
    assert find_cluster("a100-40x2").devices_per_node == 2
    assert find_cluster("A100-40x128").device.name == find_cluster("a100-40x128").device.name == "A100-40"
    assert find_cluster("v100-16x4").device.name == "V100-16"


def test_a_node_with_fewer_devices_leaves_each_its_own_network_card():
    assert make_cluster("A100", 8, 4).inter == make_cluster("A100", 8, 8).inter
    assert make_cluster("A100", 8, 8, node_gbps=800).inter.bytes_per_s == 12.5e9


def test_links_are_those_of_the_board_and_not_of_its_family():
    # NVLink joins all boards of a node with SXM alone; A800 and H800 have 400 GB/s of it in both directions together.
    assert make_cluster("A100-PCIe-80", 8).intra.bytes_per_s == 32e9
    assert make_cluster("V100S-PCIe", 8).intra.bytes_per_s == make_cluster("V100-PCIe-16", 8).intra.bytes_per_s == 16e9
    assert make_cluster("H100-NVL", 8).intra.bytes_per_s == make_cluster("H100-PCIe", 8).intra.bytes_per_s == 64e9
    assert make_cluster("A800", 8).intra.bytes_per_s == make_cluster("H800", 8).intra.bytes_per_s == 200e9
    boards = {name: make_cluster(name, 2) for name in ("RTX-4090", "RTX-A6000", "RTX-5090", "RTX-PRO-6000")}
    assert boards["RTX-4090"].intra.bytes_per_s < boards["RTX-A6000"].intra.bytes_per_s  # GeForce goes by the host
    assert boards["RTX-4090"].host_link.bytes_per_s < boards["RTX-5090"].host_link.bytes_per_s  # PCIe 4 and 5
    assert make_cluster("V100", 16).inter.bytes_per_s == 6.25e9  # DGX-1: 4 x 100 Gbit/s over 8 devices
    assert make_cluster("L4", 1).host_link.bytes_per_s == make_cluster("A100", 1).host_link.bytes_per_s  # PCIe 4
    assert make_cluster("GH200", 1).host_link.bytes_per_s > 5 * make_cluster("H200", 1).host_link.bytes_per_s
    assert make_cluster("GH200", 1).host_memory.bytes_per_s == 2 * make_cluster("GB200", 1).host_memory.bytes_per_s


def test_devices_behind_one_switch_share_its_link_to_the_host(tmp_path):
    alone, pair, node = (find_cluster(f"a100-80x{count}") for count in (1, 2, 8))
    assert alone.host_share == alone.host_link
    assert 2 * pair.host_share.bytes_per_s == 2 * node.host_share.bytes_per_s == alone.host_link.bytes_per_s
    assert find_cluster("v100x8").host_share.bytes_per_s == 6e9  # DGX-1: pairs on PCIe 3
    for name in ("h100x8", "a100-pcie-80x8", "mi300xx8"):
        assert find_cluster(name).host_share == find_cluster(name).host_link
    assert pair.resized(1).host_share == alone.host_link
    path = tmp_path / "cluster.toml"
    path.write_text('device = "l4"\nnum_devices = 8\ndevices_per_host_link = 4\n')
    assert 4 * find_cluster(str(path)).host_share.bytes_per_s == find_cluster("l4x8").host_link.bytes_per_s
    plain = read_cluster(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as editors of Windows begin a file
    assert read_cluster(path) == plain
    path.write_text('device = "a100"\nnum_devices = 8\n[host_link]\nbytes_per_s = 20e9\n')
    assert find_cluster(str(path)).host_share.bytes_per_s == 20e9  # a share, as that of the other links
    written = tmp_path / "written.json"
    written.write_text(write_cluster(node))
    assert read_cluster(written) == node


def test_nvlink_joins_a_rack_of_nvl72():
    assert find_cluster("gb200x64").devices_per_node == 64
    assert find_cluster("gb300x144").devices_per_node == 72
    assert find_cluster("gb200x128").devices_per_node == 64  # of each rack as many
    assert find_cluster("b200x64").devices_per_node == 8


@pytest.mark.parametrize("name", ["h100", "h100x0", "x64", "tpux8", ""])
def test_names_that_mean_nothing_are_refused(name):
    with pytest.raises(ConfigError):
        find_cluster(name)


def test_host_memory_is_a_devices_share_of_its_nodes(tmp_path):
    shares = {"h100x4": 256, "a100-40x8": 128, "a100-80x8": 256, "gh200x4": 480, "v100x8": 64}
    assert {name: find_cluster(name).host_memory_bytes // 2**30 for name in shares} == shares
    assert find_cluster("cpux2").host_memory_bytes is None
    path = tmp_path / "cluster.toml"
    path.write_text('device = "h100"\nnum_devices = 8\nhost_memory_bytes = 64e9\n')
    assert find_cluster(str(path)).host_memory_bytes == 64_000_000_000
    written = tmp_path / "written.json"
    written.write_text(write_cluster(find_cluster(str(path))))
    assert read_cluster(written).host_memory_bytes == 64_000_000_000


def test_files(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        'device = "h100"\nnum_devices = 32\ndevices_per_node = 4\nprice_per_hour = 2.5\n'
        "[inter]\ngbps = 200\nlatency_s = 2e-5\n"
    )
    cluster = find_cluster(str(path))
    assert (cluster.num_devices, cluster.devices_per_node, cluster.price_per_hour) == (32, 4, 80.0)
    assert (cluster.inter.bytes_per_s, cluster.inter.latency_s) == (25e9, 2e-5)
    assert cluster.intra.bytes_per_s == 450e9
    own = {"name": "mine", "memory_bytes": 2**34, "half_flops_per_s": 1e14, "fp32_flops_per_s": 1e13,
           "bandwidth_bytes_per_s": 1e12}  # fmt: skip
    other = tmp_path / "cluster.json"
    other.write_text(json.dumps({"device": own, "num_devices": 2}))
    assert read_cluster(other).device.name == "mine"
    assert read_cluster(other).host_memory_bytes is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("device = 'h100'", "num_devices"),
        ("device = 'h100'\nnum_devices = 8\nnodes = 1", "nodes"),
        ("device = 'h100'\nnum_devices = -8", "num_devices"),
        ("device = 'h100'\nnum_devices = 8\n[intra]\nspeed = 3", "speed"),
        ("device = 'h100'\nnum_devices = 8\n[inter]\ngbps = 0", "inter.bytes_per_s"),
        ("device = 'h100'\nnum_devices = 8\n[inter]\ngbps = 200\nbytes_per_s = 1e9", "inter has both"),
        ("device = 'h100'\nnum_devices = 8\nhost_memory_bytes = 0", "host_memory_bytes must be"),
        ("device = 'h100'\nnum_devices = 8\ndevices_per_host_link = 0", "devices_per_host_link must be"),
        ("device = ", "Invalid value"),
        ("device = 'abacus'\nnum_devices = 8", "abacus"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, says):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_cluster(path)
