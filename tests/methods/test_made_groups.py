"""Every rank takes part in the making of every process group, in the same order; see [Note: groups by split]."""

import pytest

from tests.methods import made_groups as runs

TRIPLE = {"tensor": 2, "zero": 2, "pipeline": 2}
SPLIT_STAGES = ["tensor_parallel", "pipeline_parallel", "zero1"]
COMM = ("comm", {"reduce": "int8", "min_numel": 64, "hierarchical": 2})
TOKENS = ["sequence_parallel", "context_parallel", "fsdp"]
NEARBY = ("fsdp", {"reshard_after_forward": 2})
long = pytest.mark.long
LAYOUTS = {
    "tensor in replicas": (8, {"tensor": 2, "zero": 2, "replica": 2}, ["tensor_parallel", "fsdp", "outer"], "muon"),
    "hsdp": (4, {"zero": 2, "data": 2}, ["fsdp"], "muon"),
    "pipeline": (4, {"pipeline": 2, "zero": 2}, ["pipeline_parallel", "zero1"], "muon"),
    "tensor in stages": (8, TRIPLE, SPLIT_STAGES, "muon"),
    "tensor in stages, came": (8, TRIPLE, SPLIT_STAGES, "came"),
    "comm": (4, {"zero": 4}, ["fsdp", COMM], "adamw"),
    "comm beside data": (8, {"zero": 4, "data": 2}, ["fsdp", COMM], "adamw"),
    "comm in stages": (8, {"data": 4, "pipeline": 2}, ["pipeline_parallel", COMM], "adamw"),
    "sequence and context": (
        8,
        {"sequence": 2, "context": 2, "zero": 2},
        ["sequence_parallel", "context_parallel", "fsdp"],
        "muon",
    ),
    "nearby": (8, {"zero": 4, "data": 2}, [NEARBY], "adamw"),
    "nearby in replicas": (8, {"zero": 4, "replica": 2}, [NEARBY, "outer"], "adamw"),
}
FEW = ("tensor in replicas", "comm")


@pytest.mark.parametrize("layout", [each if each in FEW else pytest.param(each, marks=long) for each in LAYOUTS])
def test_every_rank_takes_part(ranks, layout):
    world, mesh, methods, optimizer = LAYOUTS[layout]
    results = ranks(world).run(runs.of_strategy, mesh, methods, optimizer)
    first, count, losses = results[0]
    for made, own, same in results:
        assert (made, own, same) == (first, count, losses)


def test_weights_that_stay_nearby(ranks):
    """All units share one mesh, for which torch makes one each; they train as if weights were freed."""
    made, count, losses = ranks(4).run(runs.of_strategy, {"zero": 4}, [NEARBY], "adamw")[0]
    assert (count, len(made)) == (2, 4)  # pairs, and the pairs across
    assert losses == ranks(4).run(runs.of_strategy, {"zero": 4}, ["fsdp"], "adamw")[0][2]
