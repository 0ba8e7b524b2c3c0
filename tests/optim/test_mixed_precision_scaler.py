import pytest
import torch

from meshwright import ConfigError
from meshwright.optim import LossScaler


def scales(scaler, overflows):
    """The scale after each step, of which some overflow."""
    found = []
    for overflow in overflows:
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.grad = torch.full((2,), float("inf") if overflow else 1.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert bool((parameter == 1).all()) == overflow, "a step that overflows is skipped in any case"
        scaler.update()
        found.append(scaler.get_scale())
    return found


def test_without_bounds_it_is_that_of_torch():
    pattern = [0, 1, 0, 0, 1, 1, 0, 0, 0]
    options = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    theirs = scales(torch.amp.GradScaler("cpu", 64.0, **options), pattern)
    assert scales(LossScaler("cpu", initial_scale=64.0, **options), pattern) == theirs
    assert len(set(theirs)) > 2


def test_patience_lasts_until_the_scale_grows():
    scaler = LossScaler("cpu", initial_scale=64.0, growth_interval=2, hysteresis=2)
    assert scales(scaler, [1, 1, 1, 0, 0, 1, 1]) == [64, 32, 16, 16, 32, 32, 16]


def test_bounds_hold():
    scaler = LossScaler("cpu", initial_scale=64.0, growth_interval=1, min_scale=32.0, max_scale=128.0)
    assert scales(scaler, [1, 1, 0, 0, 0]) == [32, 32, 64, 128, 128]


def test_a_loaded_scale_remembers_its_overflows():
    scaler = LossScaler("cpu", initial_scale=64.0, hysteresis=2)
    assert scales(scaler, [1]) == [64]
    other = LossScaler("cpu", initial_scale=4.0, hysteresis=2)
    other.load_state_dict(scaler.state_dict())
    assert scales(other, [1]) == [32]
    other.load_state_dict(torch.amp.GradScaler("cpu", 8.0).state_dict())
    assert scales(other, [1, 1]) == [8, 4]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"initial_scale": 1.0, "min_scale": 2.0}, "outside its bounds"),
        ({"initial_scale": 4.0, "max_scale": 2.0}, "outside its bounds"),
        ({"growth_factor": 1.0}, "do not move"),
        ({"backoff_factor": 2.0}, "do not move"),
    ],
)
def test_numbers_that_make_no_scale(options, text):
    with pytest.raises(ConfigError, match=text):
        LossScaler("cpu", **options)
