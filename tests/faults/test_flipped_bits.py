"""A bit that flips in one replica is found by a vote, its rank and weight are named, and it is mended."""

import pytest
import torch

import meshwright as mw
from meshwright.errors import ReplicaError
from meshwright.optim import inner_optimizer
from tests import tiny
from tests.faults.vocabulary import BEFORE_STEP, flip

GUILTY, AT = 2, 3


def rows(step, job):
    own = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
    return own.chunk(job.num_replicas)[job.replica]


def train(strategy, keys, target, steps=6):
    """Six steps with a flipped bit before the third; the votes' texts, and whether all ranks' weights are equal."""
    torch.manual_seed(5)
    job = mw.accelerate(
        tiny.Mlp(), torch.optim.AdamW, None, lambda x, out: out.float().square().mean(),
        strategy=[*strategy, ("weight_vote", keys)], optim_args={"lr": 0.01}, sample_batch=torch.ones(4, 7),
    )  # fmt: skip
    weights, said, error = {n: p for n, p in job.model.named_parameters() if n.endswith("last.weight")}, [], ""
    (weight,) = weights.values()
    voter = job._job.voter
    if "parallel_mode" in job.strategy and job.plan.step.shard_axis is None:  # cost's twin: no other gathers here
        sent = [(t.bytes_per_step, t.every) for t in job.plan.step.traffic if t.kind == "all_gather"]
        assert sent == [(8 * 4 * voter._ballot._most, keys["every"])]
    hold = voter.hold
    voter.hold = lambda: said.extend((voter.num_steps, str(each)) for each in hold())
    strike_gradient = [flip(GUILTY, AT)] * (target == "gradient" and mw.rank() == GUILTY)

    def before_update(*_):
        if strike_gradient and voter.num_steps == AT - 1:
            strike_gradient.pop().strike(weight.grad)

    inner_optimizer(job.optim).register_step_pre_hook(before_update)
    for step in range(1, steps + 1):
        if target != "gradient" and flip(GUILTY, AT).is_due(mw.rank(), step, BEFORE_STEP):
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            states = [own for p, own in inner_optimizer(job.optim).state.items() if p.shape == weight.shape]
            state = states[-1]["exp_avg"] if target == "state" else local  # of its master, in half precision
            flip(GUILTY, AT).strike(state.to_local() if hasattr(state, "to_local") else state)
        try:
            job.step(rows(step, job))
        except ReplicaError as caught:
            error = f"{step} {caught}" if caught.agreed else "not agreed"
            break
    every = mw.runtime.gather_objects([(p.to_local() if hasattr(p, "to_local") else p).tolist() for p in [weight]])
    return said, error, every


def heals_and_stops():
    heal = {"every": 2, "action": "heal"}
    found = {
        "weight": train([("parallel_mode", {"data": 4})], heal, "weight"),
        "state": train([("parallel_mode", {"data": 4})], heal, "state", steps=8),
        "gradient": train([("parallel_mode", {"data": 4})], heal, "gradient"),
        "shard": train(["fsdp"], {"every": 2, "action": "heal", "at_rest": True}, "weight"),
        "hybrid": train([("parallel_mode", {"zero": 2, "data": 2}), "fsdp"], {"every": 2, "action": "warn"}, "weight"),
        "stop": train([("half", "bf16"), ("parallel_mode", {"data": 4})], {"every": 1, "action": "stop"}, "state"),
    }
    return {name: (said, error, every[0] == every[GUILTY]) for name, (said, error, every) in found.items()}


def test_a_flipped_bit_is_found_named_and_mended(ranks):
    for found in ranks(4).run(heals_and_stops):
        for case in ("weight", "state", "gradient"):
            said, error, equal = found[case]
            assert error == "", case
            assert equal, case
            assert said[0][0] == 4, case  # the first vote after the third step
            assert all(text.endswith("on rank 2, while ranks 0, 1, 3 hold the same") for _, text in said), case
            assert "last.weight" in said[0][1], case
            assert {at for at, _ in said} == {4}, case
        said, error, _ = found["shard"]
        assert said == []
        assert error.startswith("4 Weights have changed between two steps, and nobody has written to them")
        assert "last.weight on rank 2 before the update of step 3" in error
        said, error, equal = found["hybrid"]
        assert error == ""
        assert not equal
        # Of two replicas of a shard nobody knows which is right; the other shard is equal on its two ranks.
        assert {text for _, text in said} == {"last.weight on ranks 0, 2, of which no majority holds the same"}
        said, error, _ = found["stop"]
        assert said == []
        assert error.startswith("3 Weights differ between ranks that are to hold the same")
        assert "after step 2 they were equal" in error
        assert "last.weight on rank 2, while" in error


def alone_and_apart():
    """Nothing to compare is told; replicas of an outer optimizer vote when they are equal."""
    notices, found = [], []
    for strategy in (["fsdp"], [("outer", {"rule": "local_sgd", "sync_every": 3})]):
        torch.manual_seed(5)
        job = mw.accelerate(
            tiny.Mlp(), torch.optim.SGD, None, lambda x, out: out.square().mean(),
            strategy=[*strategy, ("weight_vote", {"every": 2})], optim_args={"lr": 0.01}, sample_batch=torch.ones(4, 7),
        )  # fmt: skip
        for step in range(1, 8):
            job.step(rows(step, job) if strategy == ["fsdp"] else rows(step + 10 * mw.rank(), job))
        notices.append([notice for notice in job._job.notices if "nothing to compare" in notice])
        found.append((job._job.voter.num_votes, job._job.voter.equal_at))
    return notices, found


@pytest.mark.parametrize("world", [2])
def test_what_is_held_once_cannot_be_voted_on(ranks, world):
    for notices, found in ranks(world).run(alone_and_apart):
        assert len(notices[0]) == 1
        assert notices[1] == []
        assert found == [(0, None), (2, 6)]
