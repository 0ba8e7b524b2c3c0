import json

import pytest

from meshwright.cost import find_cluster, make_cluster, read_cluster
from meshwright.errors import ConfigError


def test_presets():
    cluster = find_cluster("h100x64")
    assert (cluster.device.name, cluster.num_devices, cluster.devices_per_node) == ("H100-SXM", 64, 8)
    assert cluster.inter.bytes_per_s == 50e9  # 3200 Gbit/s of a node over 8 devices
    assert find_cluster("a100-40x2").devices_per_node == 2
    assert find_cluster("A100-40x128").device.name == "A100-40"


def test_a_node_with_fewer_devices_leaves_each_its_own_network_card():
    assert make_cluster("A100", 8, 4).inter == make_cluster("A100", 8, 8).inter
    assert make_cluster("A100", 8, 8, node_gbps=800).inter.bytes_per_s == 12.5e9


@pytest.mark.parametrize("name", ["h100", "h100x0", "x64", "tpux8", ""])
def test_names_that_mean_nothing_are_refused(name):
    with pytest.raises(ConfigError):
        find_cluster(name)


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("device = 'h100'", "num_devices"),
        ("device = 'h100'\nnum_devices = 8\nnodes = 1", "nodes"),
        ("device = 'h100'\nnum_devices = -8", "num_devices"),
        ("device = 'h100'\nnum_devices = 8\n[intra]\nspeed = 3", "speed"),
        ("device = 'h100'\nnum_devices = 8\n[inter]\ngbps = 0", "inter.bytes_per_s"),
        ("device = 'h100'\nnum_devices = 8\n[inter]\ngbps = 200\nbytes_per_s = 1e9", "inter has both"),
        ("device = ", "Invalid value"),
        ("device = 'abacus'\nnum_devices = 8", "abacus"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, says):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_cluster(path)
