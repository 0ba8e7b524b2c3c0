"""One switch leaves out every comparison of the ranks in a step, and must be alike on all of them."""

import contextlib
import os

import pytest
import torch

import meshwright as mw
from tests import tiny


@contextlib.contextmanager
def guards(value):
    os.environ["MESHWRIGHT_GUARDS"] = value
    try:
        yield
    finally:
        del os.environ["MESHWRIGHT_GUARDS"]


def accelerated(strategy):
    torch.manual_seed(0)
    return mw.accelerate(
        tiny.Mlp(), torch.optim.SGD, None, lambda x, out: out.square().mean(), strategy=strategy,
        optim_args={"lr": 0.1}, sample_batch=torch.ones(4, 7),
    )  # fmt: skip


def without_guards():
    with guards("0"):
        sharded, replicated = accelerated(["fsdp"]), accelerated(["parallel_mode"])
    assert sharded._job.gather_order_check is None
    losses = [job.step(torch.ones(4, 7)).loss.item() for job in (sharded, replicated)]
    replicated.optim.zero_grad()
    replicated.model.module.last.weight.grad = torch.full_like(replicated.model.module.last.weight, mw.rank())
    replicated.optim.step()  # nobody has averaged it, and nobody asks
    return losses


def test_a_switch_leaves_them_out(ranks):
    for losses in ranks(2).run(without_guards):
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def apart():
    with guards(str(mw.rank())), pytest.raises(mw.LaunchError, match="MESHWRIGHT_GUARDS alike"):
        accelerated(["fsdp"])


def test_ranks_that_differ_in_it_are_refused(ranks):
    ranks(2).run(apart)
