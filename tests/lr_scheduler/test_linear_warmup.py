import math

import pytest
import torch

from meshwright.errors import ConfigError
from meshwright.lr_scheduler import DECAYS, warmup_decay

PEAK = 0.4


def _scheduler(**options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=PEAK)
    return optimizer, warmup_decay(optimizer, **options)


def _rates(steps, **options):
    optimizer, scheduler = _scheduler(**options)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("decay", DECAYS)
def test_warm_up_is_linear_and_the_first_step_moves(decay):
    rates = _rates(4, num_steps=20, warmup_steps=4, decay=decay)
    assert rates == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK])


def test_decays_go_from_the_peak_to_the_lowest_rate_and_stay_there():
    linear = _rates(14, num_steps=10, decay="linear", min_lr_ratio=0.1)
    assert linear[:3] == pytest.approx([PEAK, PEAK * 0.91, PEAK * 0.82])
    assert linear[10:] == pytest.approx([PEAK * 0.1] * 4)
    cosine = _rates(14, num_steps=10, decay="cosine", min_lr_ratio=0.1)
    assert cosine[0] == pytest.approx(PEAK)
    assert cosine[5] == pytest.approx(PEAK * 0.55)
    assert cosine[9] == pytest.approx(PEAK * (0.1 + 0.45 * (1 + math.cos(0.9 * math.pi))))
    assert cosine[10:] == pytest.approx([PEAK * 0.1] * 4)
    assert _rates(14, num_steps=10, decay="constant") == pytest.approx([PEAK] * 14)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_resumed_schedule_goes_on(decay):
    options = {"num_steps": 12, "warmup_steps": 3, "decay": decay, "min_lr_ratio": 0.05}
    whole = _rates(12, **options)
    optimizer, scheduler = _scheduler(**options)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    resumed_optimizer, resumed = _scheduler(**options)
    resumed.load_state_dict(scheduler.state_dict())
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    rest = []
    for _ in range(7):
        rest.append(resumed_optimizer.param_groups[0]["lr"])
        resumed_optimizer.step()
        resumed.step()
    assert rest == whole[5:]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 5, "warmup_steps": -1}, "warmup_steps"),
        ({"num_steps": 5, "min_lr_ratio": 1.5}, "min_lr_ratio"),
        ({"num_steps": 5, "decay": "cosin"}, "did you mean 'cosine'"),
    ],
)
def test_impossible_schedules_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        _scheduler(**options)
