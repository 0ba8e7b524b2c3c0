"""Climbing goes from the best plan to neighbours of it, and finds with few predictions what bounds find with many."""

import itertools
from unittest import mock

import pytest

from meshwright.cost import find_cluster
from meshwright.planner import FamilyWorkload, default_space, parse_family
from meshwright.planner.search import search
from meshwright.planner.search.branch_and_bound import Engine, Leaf, Neighbours, _key, _sizes
from meshwright.planner.search.search_space import Candidates
from meshwright.planner.search.search_state import rank_of_plan
from tests.planner.search.test_search import workload


@pytest.fixture(scope="module")
def candidates():
    subject = workload("h100x16", batch=32)
    space = default_space(subject)
    small = space.replace(sizes={axis: space.sizes[axis] for axis in ("tensor", "context", "pipeline")})
    return Candidates(small, subject.world, 8, subject.batch_size)


def every_leaf(candidates, meshes):
    for mesh in meshes:
        for branch, number in itertools.product(candidates.branches(mesh), candidates.micro_batches(mesh)):
            yield Leaf(branch, number)


def test_neighbours_are_candidates_that_are_one_step_away(candidates):
    meshes = list(candidates.meshes())
    known = {_key(leaf): leaf for leaf in every_leaf(candidates, meshes)}
    start = next(leaf for leaf in known.values() if leaf.branch.mesh.pipeline == 4 and leaf.branch.mesh.inner)
    found = list(Neighbours(candidates, meshes).of(start, lambda mesh: 32 // mesh.replicas))
    assert len({_key(leaf) for leaf in found}) == len(found)
    assert known.keys() >= {_key(leaf) for leaf in found}
    here, others = start.branch.mesh, [leaf for leaf in found if leaf.branch.mesh is not start.branch.mesh]
    for leaf in others:
        sizes = _sizes(leaf.branch.mesh)
        factors = {sizes.get(axis, 1) / _sizes(here).get(axis, 1) for axis in {*sizes, *_sizes(here)}}
        assert factors <= {0.5, 1, 2}
    assert {_sizes(leaf.branch.mesh)["pipeline"] for leaf in others} == {2, 4, 8}
    same = [leaf for leaf in found if leaf.branch.mesh is here]
    assert {leaf.branch.schedule.schedule for leaf in same} > {start.branch.schedule.schedule}
    assert {leaf.micro_batches for leaf in same if leaf.branch is start.branch} == {2}  # the next after one


def test_without_the_last_pipeline_every_way_to_shard_is_a_neighbour(candidates):
    meshes = list(candidates.meshes())
    pipelines = [leaf for leaf in every_leaf(candidates, meshes) if leaf.branch.mesh.pipeline == 2]
    start = next(leaf for leaf in pipelines if leaf.branch.mesh.inner and leaf.branch.sharding)
    found = list(Neighbours(candidates, meshes).of(start, lambda mesh: 32 // mesh.replicas))
    without = [leaf.branch for leaf in found if leaf.branch.mesh.pipeline == 1]
    alike = [branch for branch in without if branch.recompute == start.branch.recompute]
    assert {branch.sharding for branch in alike} == set(candidates.space.sharding)


def test_climbing_finds_with_few_predictions_what_bounds_alone_do_not():
    subject = FamilyWorkload(parse_family("gpt-3-175b"), find_cluster("a100-80x1024"), 1536)
    others = ["compile", "context_parallel", "offload", "sequence_parallel"]
    few = {"space": default_space(subject), "top": 1, "max_predictions": 60, "excluded": others}
    climbed = search(subject, **few).plans[0]
    with mock.patch.object(Engine, "_climb", return_value=None):
        bounded = search(subject, **few).plans[0]
    assert rank_of_plan(climbed, "tokens_per_s")[0] < 0.8 * rank_of_plan(bounded, "tokens_per_s")[0]
    # Equal plans have the simplest sharding method: all stages of ZeRO are one in a pipeline.
    assert "zero1" in climbed.strategy


@pytest.mark.parametrize(("cluster", "options"), [("h100x16", {}), ("a100x2", {"limit_bytes": 1600 * 2**20})])
def test_no_prediction_is_made_twice(cluster, options):
    subject = workload(cluster, batch=32, **options)
    asked = []
    original = FamilyWorkload.outline

    def outline(self, strategy, number=None):
        asked.append((str(strategy), number))
        return original(self, strategy, number)

    space = default_space(subject)
    space = space.replace(sizes={axis: space.sizes[axis] for axis in ("tensor", "pipeline")}, hybrid=False)
    with mock.patch.object(FamilyWorkload, "outline", outline):
        search(subject, space=space, top=3)
    assert len(asked) == len(set(asked)) > 10
