import itertools

import pytest
from hypothesis import given, strategies as st

from meshwright import StrategyError
from meshwright.runtime import (
    AXES,
    axis_groups,
    build_mesh,
    coordinate_of,
    fit_axes,
    joint_axis,
    mesh_order,
    rank,
    rank_grid,
)


def test_the_16_rank_example_of_the_seed():
    groups = axis_groups([("tensor", 4), ("pipeline", 2), ("data", 2)])
    assert groups["tensor"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups["pipeline"] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert groups["data"] == [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]


@pytest.mark.parametrize(
    ("axes", "order", "expected"),
    [
        ([("tensor", 2), ("data", 2)], [0, 2, 1, 3], {"tensor": [[0, 2], [1, 3]], "data": [[0, 1], [2, 3]]}),
        ([("zero", 2), ("data", 2)], None, {"zero": [[0, 1], [2, 3]], "data": [[0, 2], [1, 3]]}),
        (
            [("tensor", 2), ("pipeline", 2), ("data", 4)],
            None,
            {
                "tensor": [[i, i + 1] for i in range(0, 16, 2)],
                "pipeline": [[i, i + 2] for i in (0, 1, 4, 5, 8, 9, 12, 13)],
                "data": [[i, i + 4, i + 8, i + 12] for i in range(4)],
            },
        ),
    ],
)
def test_groups(axes, order, expected):
    assert axis_groups(axes, order) == expected


@pytest.mark.parametrize(
    ("axes", "world", "fitted"),
    [
        ([], 16, [("data", 16)]),
        ([("data", 8)], 16, [("data", 16)]),
        ([("data", 8)], 2, [("data", 2)]),
        ([("tensor", 2), ("pipeline", 2), ("data", 2)], 16, [("tensor", 2), ("pipeline", 2), ("data", 4)]),
        ([("zero", 4), ("data", 4)], 4, [("zero", 4), ("data", 1)]),
    ],
)
def test_the_size_of_data_follows_the_world(axes, world, fitted):
    assert fit_axes(axes, world) == tuple(fitted)


@pytest.mark.parametrize(("axes", "world"), [([("zero", 3)], 4), ([("zero", 3), ("data", 1)], 4), ([("zero", 8)], 4)])
def test_sizes_that_do_not_multiply_to_the_world(axes, world):
    with pytest.raises(StrategyError, match=r"Expected axis sizes that multiply to 4.*Got zero.*What to do"):
        fit_axes(axes, world)


def test_a_rank_order_must_be_a_permutation():
    with pytest.raises(StrategyError, match="permutation"):
        rank_grid([("data", 2)], [0, 0])


@given(st.permutations(AXES), st.lists(st.integers(1, 3), min_size=len(AXES), max_size=len(AXES)), st.randoms())
def test_groups_partition_the_world_and_agree_with_coordinates(names, sizes, random):
    axes = list(zip(names, sizes, strict=True))
    world = rank_grid(axes).size
    order = random.choice([None, random.sample(range(world), world), list(reversed(range(world)))])
    for dim, (name, groups) in enumerate(axis_groups(axes, order).items()):
        assert sorted(itertools.chain(*groups)) == list(range(world))
        for group in groups[:4]:
            try:
                where = [list(coordinate_of(rank, axes, order).values()) for rank in sorted(group)]
            except StrategyError:  # the order crosses groups
                continue
            assert [place[dim] for place in where] == list(range(len(group)))
            others = {tuple(place[:dim] + place[dim + 1 :]) for place in where}
            assert len(others) == 1, name


def _mesh_ranks(axes, order):
    mesh = build_mesh(axes, order, "cpu")
    where = coordinate_of(rank(), axes, order)
    for name, _ in axes:
        assert mesh.get_local_rank(name) == where[name]
    pair = mesh["data", "zero"]
    return {name: sorted(pair[name].mesh.tolist()) for name in ("data", "zero")}


def test_axes_that_are_sharded_over_together_stand_side_by_side():
    axes = [("tensor", 2), ("context", 2), ("data", 3), ("zero", 2), ("sequence", 1), ("pipeline", 2)]
    assert mesh_order(axes) == ("pipeline", "data", "sequence", "zero", "context", "tensor")
    assert joint_axis(axes, "zero") == "zero_context"
    assert mesh_order([("zero", 2), ("context", 2)]) == ("context", "zero")
    assert joint_axis([("data", 2), ("sequence", 2)], "data") == "sequence_data"
    assert joint_axis([("context", 1), ("zero", 4)], "zero") == "zero"


@pytest.mark.parametrize("order", [None, [0, 2, 1, 3], [3, 2, 1, 0], [2, 3, 0, 1]])
@pytest.mark.parametrize("names", [("zero", "data"), ("data", "zero")])
def test_the_device_mesh_has_the_same_groups_whatever_the_order_of_axes(ranks, names, order):
    axes = [(name, 2) for name in names]
    groups = axis_groups(axes, order)
    for index, seen in enumerate(ranks(4).run(_mesh_ranks, axes, order)):
        for name in names:
            assert seen[name] in [sorted(group) for group in groups[name]]
            assert index in seen[name]
