import json
import math
import warnings

import pytest
import torch
from hypothesis import given, strategies as st
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LRScheduler, MultiplicativeLR, SequentialLR

from meshwright.compat.bmtrain.lr_schedules import WSD, Cosine, Exponential, Linear, Noam, NoDecay, WarmupLRScheduler
from meshwright.errors import CheckpointError, ConfigError
from meshwright.lr_scheduler import warmup_decay
from meshwright.optim import Adafactor, GuardedOptimizer

S = 0.5
SEED = (NoDecay, Noam, Linear, Cosine, Exponential)


def optimizer(*lrs, default=0.1):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs or (default,)]
    return torch.optim.SGD(groups, lr=default)


def seed_formula(kind, n, w, e, gamma=0.95):
    """BMTrain's formulas, spelled out one by one; where BMTrain rises again or divides by zero, what is documented."""
    if n < w:
        return S * n / w**1.5 if kind is Noam else S * n / w
    return {
        NoDecay: lambda: S,
        Noam: lambda: S / (n or 1) ** 0.5,
        Linear: lambda: max(0.0, S * (e - n) / (e - w)) if e > w else S * (n == e),
        Cosine: lambda: S / 2 * (1 + math.cos(math.pi * (n - w) / max(1, e - w))) if n < max(e, w + 1) else 0.0,
        Exponential: lambda: S * gamma ** (n - w),
    }[kind]()


@pytest.mark.parametrize("kind", SEED)
@pytest.mark.parametrize(("w", "e"), [(40, 150), (0, 120), (0, 0), (30, 30)])
def test_the_seeds_curves_over_200_iterations(kind, w, e):
    optim = optimizer()
    scheduler = kind(optim, S, w, e)
    for n in range(200):
        assert scheduler.num_iter == scheduler.last_epoch == n
        assert scheduler.current_lr == pytest.approx(seed_formula(kind, n, w, e), rel=1e-12, abs=1e-15)
        assert optim.param_groups[0]["lr"] == scheduler.current_lr
        assert scheduler.get_last_lr() == scheduler.get_lr() == [scheduler.current_lr]
        optim.step()
        scheduler.step()


@given(
    kind=st.sampled_from(SEED),
    w=st.integers(0, 300),
    decay=st.integers(0, 300),
    start=st.integers(0, 700),
    jump=st.integers(0, 700),
)
def test_starting_jumping_and_loading_lead_to_the_same_rate_as_stepping(kind, w, decay, start, jump):
    begun = kind(optimizer(), S, w, w + decay, num_iter=start)
    assert begun.current_lr == pytest.approx(seed_formula(kind, start, w, w + decay), rel=1e-9, abs=1e-12)
    begun.step(jump)
    assert begun.current_lr == pytest.approx(seed_formula(kind, jump, w, w + decay), rel=1e-9, abs=1e-12)
    begun.step()
    assert begun.num_iter == jump + 1
    optim = optimizer()
    loaded = kind(optim, 7.0, 1, 2)
    loaded.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert loaded.state_dict() == begun.state_dict()
    assert optim.param_groups[0]["lr"] == loaded.current_lr == begun.current_lr
    assert 0.0 <= begun.current_lr <= S


WSD_HEIGHTS = {
    "linear": lambda r, m: m + (1 - m) * (1 - r),
    "exponential": lambda r, m: math.exp(r * math.log(m)),
    "1-sqrt": lambda r, m: m + (1 - m) * (1 - r**0.5),
}


@pytest.mark.parametrize("decay", WSD_HEIGHTS)
def test_wsd_warms_up_stays_and_decays(decay):
    scheduler = WSD(optimizer(), S, 20, 100, 150, min_lr_ratio=0.04, decay=decay)
    for n in range(200):
        if n < 20:
            expected = S * n / 20
        elif n < 100:
            expected = S
        else:
            expected = S * WSD_HEIGHTS[decay](min(1.0, (n - 100) / 50), 0.04)
        assert scheduler.current_lr == pytest.approx(expected, rel=1e-12)
        scheduler.step()
    assert WSD(optimizer(), S, 0, 5, 5, num_iter=6, decay="linear", min_lr_ratio=0.0).current_lr == 0.0


def test_a_rebuilt_scheduler_gets_its_saved_hyperparameters_back():
    saved = Exponential(optimizer(), S, 3, 9, num_iter=5, gamma=0.5)
    rebuilt = Exponential(optimizer(), 1.0, 0, 1)
    rebuilt.load_state_dict(saved.state_dict())
    assert (rebuilt.gamma, rebuilt.warmup_iter, rebuilt.end_iter, rebuilt.start_lr) == (0.5, 3, 9, S)
    rebuilt.load_state_dict({"start_lr": 1.0, "warmup_iter": 2, "end_iter": 8, "num_iter": 3})  # as BMTrain saves it
    assert rebuilt.current_lr == 0.5
    wsd = WSD(optimizer(), 1.0, 0, 0, 1)
    wsd.load_state_dict(WSD(optimizer(), S, 1, 4, 8, 6, 0.25, "1-sqrt").state_dict())
    assert wsd.current_lr == pytest.approx(S * (1 - 0.75 * 0.5**0.5))


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    optim = optimizer()
    scheduler = Linear(optim, S, 2, 10, num_iter=4)
    before, state = scheduler.state_dict(), scheduler.state_dict()
    for wrong, error, word in [
        (Exponential(optimizer(), S, 2, 10).state_dict(), CheckpointError, "unknown: gamma"),
        (ExponentialLR(optimizer(), 0.9).state_dict(), CheckpointError, "missing: end_iter"),
        (Linear(optimizer(0.1, 0.2), S, 2, 10).state_dict(), CheckpointError, "1 groups"),
        ({**state, "end_iter": 1}, ConfigError, "ends before"),
        ({**state, "num_iter": -2}, ConfigError, "num_iter"),
        ({**state, "start_lr": 10**400}, ConfigError, "start_lr"),
        ({**state, "group_ratios": [10**400]}, ConfigError, "group_ratios"),
    ]:
        with pytest.raises(error, match=word):
            scheduler.load_state_dict(wrong)
        assert scheduler.state_dict() == before
        assert optim.param_groups[0]["lr"] == pytest.approx(S * 6 / 8)


def test_a_rate_that_no_float_holds_is_named_and_changes_nothing():
    optim = optimizer()
    scheduler = Exponential(optim, S, 2, 10, gamma=2.0)
    before = scheduler.state_dict()
    with pytest.raises(ConfigError, match="Exponential has no learning rate for iteration 5000"):
        scheduler.load_state_dict({**before, "num_iter": 5000})
    assert scheduler.state_dict() == before


def test_groups_keep_their_ratio_to_the_default_rate():
    equal, unequal, no_default = optimizer(0.3, 0.3), optimizer(0.1, 0.01, 0.0), optimizer(0.2, 0.05, default=0.0)
    for optim, expected in ((equal, [S, S]), (unequal, [S, S / 10, 0.0]), (no_default, [S, S / 4])):
        scheduler = NoDecay(optim, S, 2, 10)
        assert scheduler.get_last_lr() == [0.0] * len(expected)
        scheduler.step(2)
        assert [group["lr"] for group in optim.param_groups] == pytest.approx(expected)
        assert scheduler.current_lr == S
    other = NoDecay(optimizer(1.0, 1.0, 1.0, default=1.0), S, 0, 10)
    unequal_scheduler = NoDecay(unequal, S, 0, 10)  # a second one on the same optimizer finds the first rates
    other.load_state_dict(unequal_scheduler.state_dict())
    assert other.get_last_lr() == pytest.approx([S, S / 10, 0.0])
    equal.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.03})
    scheduler = NoDecay(equal, S, 0, 10)
    equal.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.2})
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([S * 3, S * 3, S * 0.3, S * 2])  # the default is 0.1


def test_rates_in_tensors_are_filled_in_place():
    parameter = torch.nn.Parameter(torch.ones(1))
    optim = torch.optim.Adam([parameter], lr=torch.tensor(0.1), capturable=False, foreach=False)
    rate = optim.param_groups[0]["lr"]
    scheduler = Linear(optim, S, 0, 10)
    scheduler.step()
    assert optim.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(S * 0.9)
    last = scheduler.get_last_lr()
    scheduler.step()
    assert last[0].item() == pytest.approx(S * 0.9)  # a copy


def test_it_is_one_of_torchs_schedulers():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim = GuardedOptimizer(optimizer(), skip_nonfinite=True)
        scheduler = Noam(optim, S, 4, 10, num_iter=3)
        assert isinstance(scheduler, LRScheduler)
        scheduler.step()  # before any optimizer.step, as after a resume
        assert optim.param_groups[0]["lr"] == S / 2

        def sequence():
            inner = optimizer()
            parts = [Linear(inner, S, 3, 3), ExponentialLR(inner, 0.5), Cosine(inner, S, 0, 4)]
            return inner, SequentialLR(inner, parts, milestones=[3, 5])

        inner, whole = sequence()
        seen, states = [], []
        for _ in range(9):
            seen.append(inner.param_groups[0]["lr"])
            states.append(whole.state_dict())
            inner.step()
            whole.step()
        expected = [0, S / 3, S * 2 / 3, 0.1, 0.05, *(S / 2 * (1 + math.cos(math.pi * k / 4)) for k in range(4))]
        assert seen == pytest.approx(expected)
        for index in (2, 6):
            resumed_inner, resumed = sequence()
            resumed.load_state_dict(states[index])
            assert resumed_inner.param_groups[0]["lr"] == pytest.approx(expected[index])
            resumed.step()
            assert resumed_inner.param_groups[0]["lr"] == pytest.approx(expected[index + 1])

        inner = optimizer()
        parts = [Linear(inner, S, 0, 10), MultiplicativeLR(inner, lambda n: 0.5)]
        chain = ChainedScheduler(parts)
        inner.step()
        chain.step()
        assert chain.get_last_lr() == pytest.approx([S * 0.9 * 0.5])


def test_anything_with_param_groups_is_an_optimizer():
    class Duck:
        param_groups = [{"lr": 0.1}, {"lr": 0.1}]  # noqa: RUF012

    scheduler = Cosine(Duck(), S, 0, 2, num_iter=1)
    assert Duck.param_groups[1]["lr"] == scheduler.current_lr == pytest.approx(S / 2)


def test_a_schedule_of_ones_own():
    class Steps(WarmupLRScheduler):
        def __init__(self, optimizer, every, **kwargs):
            self.every = every
            super().__init__(optimizer, **kwargs)

        def get_lr_warmup(self, num_iter):
            return self.start_lr / 10

        def get_lr_decay(self, num_iter):
            return self.start_lr * 0.5 ** ((num_iter - self.warmup_iter) // self.every)

    options = {"start_lr": S, "warmup_iter": 2, "end_iter": 10}
    scheduler = Steps(optimizer(), 3, **options)
    rates = [scheduler.current_lr, *(scheduler.step() or scheduler.current_lr for _ in range(5))]
    assert rates == pytest.approx([S / 10, S / 10, S, S, S, S / 2])
    other = Steps(optimizer(), 1, **options)
    other.load_state_dict(scheduler.state_dict())
    assert (other.every, other.current_lr) == (3, S / 2)


def own_steps():
    return Adafactor([torch.nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Noam(None, S, 1, 2), "A scheduler without its optimizer.*Got NoneType"),
        (lambda: Noam(torch.nn.Linear(1, 1), S, 1, 2), "A scheduler without its optimizer.*Got Linear"),
        (lambda: Noam(type("Empty", (), {"param_groups": []})(), S, 1, 2), "nothing to schedule"),
        (lambda: Noam(own_steps(), S, 1, 2), "no learning rate to schedule.*relative_step=False"),
        (lambda: warmup_decay(own_steps(), num_steps=2), "no learning rate to schedule"),
        (lambda: Linear(optimizer(), S, -1, 2), "warmup_iter"),
        (lambda: Linear(optimizer(), S, 1, 2, -1), "num_iter"),
        (lambda: Linear(optimizer(), S, 1, 2).step(-1), "num_iter"),
        (lambda: Linear(optimizer(), -S, 1, 2), "start_lr.*highest learning rate"),
        (lambda: Linear(optimizer(), S, 1, math.nan), "end_iter"),
        (lambda: Linear(optimizer(), S, 1, -1), "end_iter"),
        (lambda: Noam(optimizer(), S, 1, -2), "end_iter"),
        (lambda: Cosine(optimizer(), S, 3, 2), "end_iter at or above warmup_iter"),
        (lambda: Exponential(optimizer(), S, 1, 2, gamma=0.0), "gamma"),
        (lambda: WSD(optimizer(), S, 1, 0, 2), "decay_iter between 1 and 2"),
        (lambda: WSD(optimizer(), S, 0, 1, 2, min_lr_ratio=0.0), "above 0"),
        (lambda: WSD(optimizer(), S, 0, 1, 2, min_lr_ratio=1.5, decay="linear"), "0 to 1"),
        (lambda: WSD(optimizer(), S, 0, 1, 2, decay="linaer"), "did you mean 'linear'"),
    ],
)
def test_impossible_schedules_are_refused(make, word):
    with pytest.raises(ConfigError, match=word):
        make()


@pytest.mark.parametrize("kind", [NoDecay, Noam, Exponential])
def test_schedules_that_do_not_decay_to_an_end_need_none(kind):
    endless, ending = (kind(optimizer(), S, 3, end_iter) for end_iter in (-1, 1000))
    for _ in range(8):
        assert endless.current_lr == ending.current_lr
        endless.step()
        ending.step()
    again = kind(optimizer(), S, 3, 1000)
    again.load_state_dict(endless.state_dict())
    assert (again.end_iter, again.current_lr) == (-1, endless.current_lr)
