"""grad_clip, gradient_accumulation and skip_nonfinite: what arguments say, said by a strategy, and what contradicts."""

import pytest
import torch

import meshwright as mw
from meshwright.errors import NonFiniteError, StrategyError
from meshwright.methods import num_micro_batches
from meshwright.strategy import Strategy
from tests import tiny

SGD = {"lr": 0.1, "momentum": 0.9}


def loss_func(inputs, output):
    return output.square().mean()


def accelerate(strategy, **changes):
    torch.manual_seed(3)
    return mw.accelerate(
        tiny.Mlp(), torch.optim.SGD, None, loss_func, strategy=strategy, optim_args=SGD,
        sample_batch=torch.ones(4, 7), **changes,
    )  # fmt: skip


def rows(number):
    return torch.randn(8, 7, generator=torch.Generator().manual_seed(number)) * 4


def full(model):
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def reference(max_norm, norm_type):
    torch.manual_seed(3)
    model = tiny.Mlp()
    optim, norms = torch.optim.SGD(model.parameters(), **SGD), []
    for step in range(10):
        optim.zero_grad()
        loss_func(None, model(rows(step))).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).item())
        optim.step()
    return full(model), norms


def clipped(cases):
    """Ten steps under each norm, in two micro-batches that the strategy asks for, sharded."""
    found = []
    for max_norm, norm_type in cases:
        keys = {"max_norm": max_norm, "norm_type": norm_type}
        result = accelerate(["fsdp", ("grad_clip", keys), ("gradient_accumulation", 2)])
        assert result.num_micro_batches == result.plan.step.num_micro_batches == 2
        rank = torch.distributed.get_rank()
        norms = [result.step(rows(step)[rank::2]).grad_norm.item() for step in range(10)]
        found.append((full(result.model), norms))
    return found


CASES = [(0.1, 2.0), (0.02, float("inf")), (0.5, 1.0)]


def test_clipping_is_torchs_whatever_the_norm(ranks):
    for found in ranks(2).run(clipped, CASES):
        for (weights, norms), (max_norm, norm_type) in zip(found, CASES, strict=True):
            expected, seen = reference(max_norm, norm_type)
            assert norms == pytest.approx(seen, rel=1e-4)
            assert max(seen) > 2 * max_norm  # else nothing was clipped
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)


def nonfinite():
    """One rank's gradients hold NaN in the second step; weights of before and after, and what is told."""
    found = []
    for strategy in (["skip_nonfinite"], ["fsdp", ("skip_nonfinite", "stop")]):
        result = accelerate(strategy)
        result.step(rows(0))
        before = full(result.model)
        bad = rows(1)
        if torch.distributed.get_rank() == 1:
            bad[0, 0] = float("nan")
        raised = None
        try:
            skipped = result.step(bad).skipped
        except NonFiniteError as error:
            skipped, raised = True, error
        after = full(result.model)
        equal = all(torch.equal(value, after[name]) for name, value in before.items())
        moved = result.step(rows(2)).skipped is False and not torch.equal(full(result.model)["last.weight"],
                                                                          after["last.weight"])  # fmt: skip
        found.append((equal, skipped, moved, result.num_skipped_steps, str(raised or "")))
    return found


def test_nan_on_one_rank_leaves_all_weights_as_they_were(ranks):
    for skip, stop in ranks(2).run(nonfinite):
        assert skip == (True, True, True, 1, "")
        assert stop[:4] == (True, True, True, 0)
        assert "The gradients of a step hold inf or nan" in stop[4]


def contradictions():
    said = []
    for strategy, changes in (
        ([("grad_clip", 0.5)], {"max_grad_norm": 1.0}),
        ([("gradient_accumulation", 2)], {"num_micro_batches": 4}),
    ):
        with pytest.raises(StrategyError) as caught:
            accelerate(strategy, **changes)
        said.append(str(caught.value))
    agreed = accelerate([("grad_clip", 0.5), ("gradient_accumulation", 2)], max_grad_norm=0.5, num_micro_batches=2)
    assert (agreed.max_grad_norm, agreed.num_micro_batches) == (0.5, 2)
    return said


def test_two_sources_that_contradict_each_other(ranks):
    ((clip, accumulation),) = ranks(1).run(contradictions)
    assert "grad_clip and max_grad_norm name different norms" in clip
    assert "gradient_accumulation and num_micro_batches name different numbers" in accumulation
    staged = [("parallel_mode", {"pipeline": 2}), ("pipeline_parallel", {"num_micro_batches": 2})]
    with pytest.raises(StrategyError, match="pipeline_parallel and num_micro_batches name different numbers"):
        num_micro_batches(Strategy(staged), (("pipeline", 2),), 4)
    assert {num_micro_batches(Strategy(staged), (("pipeline", 2),), given) for given in (None, 2)} == {2}


def test_notices_and_forms():
    assert "changes nothing" in Strategy([("gradient_accumulation", 1)]).methods[0].notices()[0]
    assert Strategy([("gradient_accumulation", 2)]).methods[0].notices() == []
    assert Strategy([("grad_clip", {"norm_type": float("inf")})]) == Strategy("grad_clip(norm_type='inf')")
    for bad in (("grad_clip", 0), ("grad_clip", {"norm_type": -1}), ("gradient_accumulation", None),
                ("gradient_accumulation", 0), ("skip_nonfinite", "sometimes"), ("ema", 1.5),
                ("loss_spike", {"window": 1}), ("loss_spike", "undo"), ("weight_vote", 0),
                ("weight_vote", "mend")):  # fmt: skip
        with pytest.raises(StrategyError, match="What to do"):
            Strategy([bad])
