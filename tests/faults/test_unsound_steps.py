"""A step that holds nan, or whose loss jumps, leaves nothing behind: it might never have been."""

import pytest
import torch

import meshwright as mw
from meshwright import NonFiniteError
from meshwright.errors import LossSpikeError
from meshwright.optim import AdamW8bit
from tests.faults.vocabulary import IN_STEP, nan

STEPS, BAD = 6, 4


class Normed(torch.nn.Module):
    """With statistics that run along, and would keep a nan for ever."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16)
        self.last = torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def rows(step):
    own = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return own.chunk(mw.world_size())[mw.rank()]


def weights_of(model):
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in every.items()}


def train(strategy, faults, optimizer=torch.optim.AdamW, without=()):
    """Losses, skipped steps, and the weights after each step; a step of ``without`` does not take place."""
    step = 0

    def loss_func(inputs, output):
        for fault in faults:
            if fault.is_due(mw.rank(), step, IN_STEP):
                fault.strike(output)
        return output.float().square().mean()

    result = mw.accelerate(
        Normed(), optimizer, None, loss_func, strategy=strategy, optim_args={"lr": 0.01}, sample_batch=torch.ones(4, 8),
    )  # fmt: skip
    losses, skipped, weights = [], [], []
    for step in range(1, STEPS + 1):
        if step in without:
            continue
        told = result.step(rows(step))
        losses.append(told.loss.item())
        if told.skipped:
            skipped.append(step)
        weights.append(weights_of(result.model))
    return losses, skipped, weights


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


CASES = [  # and whether it is compared with a run that never takes that step
    (["skip_nonfinite"], torch.optim.AdamW, True),
    ([("skip_nonfinite", "skip"), "zero2"], torch.optim.AdamW, False),
    (["skip_nonfinite", "fsdp"], AdamW8bit, True),
    (["skip_nonfinite", ("amp_native", "fp16")], torch.optim.AdamW, False),
    (["loss_spike", "fsdp"], torch.optim.AdamW, False),
]


def check_cases():
    for strategy, optimizer, compared in CASES:
        losses, skipped, weights = train(strategy, [nan(rank=1, at_step=BAD)], optimizer)
        half = "fp16" in str(strategy)  # its loss scale may find other steps to skip, and falls for this one
        assert skipped == [BAD] or (half and BAD in skipped), strategy
        assert same(weights[BAD - 1], weights[BAD - 2]), strategy  # running statistics, too
        assert not same(weights[-1], weights[BAD - 1]), strategy
        if compared:
            never, _, expected = train(strategy, [], optimizer, without=(BAD,))
            assert losses[:3] + losses[4:] == never, strategy
            assert same(weights[-1], expected[-1]), strategy
    return [value for value in weights[-1].values() if value.dim()][:4]


def test_a_nan_on_one_rank_leaves_nothing_behind(ranks):
    first, second = ranks(2).run(check_cases)
    assert all(torch.equal(one, other) for one, other in zip(first[:2], second[:2], strict=True))


def spikes():
    """A loss that jumps: skipped, told, and the end; a loss that stays up, which is no spike."""
    found, scale = {}, 1.0

    def loss_func(inputs, output):
        return output.float().square().mean() * scale

    for case in ("skip", "warn", "stop", "rollback", "up"):
        action = "skip" if case == "up" else case
        result = mw.accelerate(
            Normed(), torch.optim.SGD, None, loss_func,
            strategy=[("loss_spike", {"action": action, "window": 8, "patience": 3})], optim_args={"lr": 1e-3},
            sample_batch=torch.ones(4, 8),
        )  # fmt: skip
        told, weights, error = [], [weights_of(result.model)], ""
        for step in range(1, 13):
            scale = 50.0 if (mw.rank() == 1 and (step == 8 or (case == "up" and step > 8))) else 1.0
            try:
                told.append(result.step(rows(1)).spike)
            except LossSpikeError as caught:
                error = str(caught) if caught.agreed and same(weights_of(result.model), weights[-1]) else "changed"
                break
            weights.append(weights_of(result.model))
        found[case] = (told, same(weights[7], weights[8]) if len(weights) > 8 else None, error)
    return found


def test_loss_spikes(ranks):
    first, second = ranks(2).run(spikes)
    assert first == second  # one rank's loss alone had jumped
    nothing = [None] * 7
    assert first["skip"] == ([*nothing, "skip", *[None] * 4], True, "")
    assert first["warn"] == ([*nothing, "warn", *[None] * 4], False, "")
    assert first["rollback"] == ([*nothing, "rollback", *[None] * 4], True, "")
    assert first["stop"][:2] == (nothing, None)
    assert "The loss of a step is a spike" in first["stop"][2]
    assert first["up"][0] == [*nothing, "skip", "skip"]
    assert "has been up for 3 steps in a row, which is no spike" in first["up"][2]


def no_loss():
    """A loss that is nan beside finite gradients ends the run, with the words of what was found."""
    model = torch.nn.Linear(8, 2)
    result = mw.accelerate(
        model, torch.optim.SGD, None, lambda x, out: out.square().mean() + torch.tensor(float("nan")),
        strategy=[("skip_nonfinite", "stop")], optim_args={"lr": 0.1}, sample_batch=torch.ones(4, 8),
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match="and a loss of nan") as caught:
        result.step(rows(1))
    return caught.value.agreed


def test_a_loss_alone_may_be_nan(ranks):
    assert ranks(1).run(no_loss) == [True]
