"""Bytes of numbers in few bits, and which ranks of an axis share a node."""

import pytest

from meshwright.cost import Compression, Encoding
from meshwright.errors import StrategyError


@pytest.mark.parametrize(
    ("encoding", "numel", "num_bytes"),
    [
        (Encoding("int8", 64), 128, 128 + 8),
        (Encoding("fp8", 64, 2), 129, 129 + 6),
        (Encoding("int4", 64), 129, 65 + 12),
        (Encoding("int4", 64, 2), 0, 0),
    ],
)
def test_bytes_of_codes_and_scales(encoding, numel, num_bytes):
    assert encoding.num_bytes(numel) == num_bytes
    compression = Compression(min_numel=1000)
    assert compression.num_bytes(encoding, 1000, numel, 2) == num_bytes
    assert compression.num_bytes(encoding, 999, numel, 2) == compression.num_bytes(None, 1000, numel, 2) == 2 * numel


@pytest.mark.parametrize(
    ("per_node", "axes", "found"),
    [
        (None, [("data", 8)], None),
        (4, [("data", 8)], 4),
        (8, [("data", 8)], None),
        (16, [("data", 8)], None),
        (1, [("data", 8)], None),
        (8, [("tensor", 2), ("data", 8)], 4),
        (8, [("tensor", 8), ("data", 4)], None),
        (4, [("tensor", 8), ("data", 4)], None),
    ],
)
def test_neighbours_on_a_node(per_node, axes, found):
    assert Compression(ranks_per_node=per_node).neighbours(axes, "data") == found


@pytest.mark.parametrize(("per_node", "axes"), [(3, [("data", 8)]), (6, [("tensor", 4), ("data", 4)])])
def test_nodes_that_cut_an_axis_are_refused(per_node, axes):
    with pytest.raises(StrategyError, match="unequal parts"):
        Compression(ranks_per_node=per_node).neighbours(axes, "data")
