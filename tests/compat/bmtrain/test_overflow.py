import math

import pytest
from hypothesis import given, strategies as st

from meshwright import ConfigError
from meshwright.compat.bmtrain.overflow import LossScale


def test_it_halves_grows_and_stays_within_its_limits():
    scale = LossScale(8.0, steps=3, lowest=3.0, highest=20.0)
    assert scale.overflow()
    assert scale.value == 4
    assert scale.overflow()
    assert scale.value == 3  # not 2
    assert not scale.overflow()
    for expected in (3, 3, 6, 6, 6, 12, 12, 12, 20, 20, 20, 20):
        scale.clean()
        assert scale.value == expected


def test_overflow_restarts_the_count():
    scale = LossScale(8.0, steps=2)
    scale.clean()
    scale.overflow()
    scale.clean()
    assert scale.value == 4
    scale.clean()
    assert scale.value == 8


@pytest.mark.parametrize("options", [{"value": 8.0, "steps": None}, {"value": None}])
def test_a_fixed_scale_never_changes(options):
    scale = LossScale(**options)
    before = scale.value
    assert not scale.overflow()
    for _ in range(3000):
        scale.clean()
    assert scale.value == before


@given(st.lists(st.booleans(), max_size=60), st.floats(0.25, 4.0), st.floats(1.5, 5.0))
def test_no_history_leaves_the_limits(history, low, factor):
    scale = LossScale(low * 2, factor, steps=2, lowest=low, highest=low * 7)
    for overflowed in history:
        scale.overflow() if overflowed else scale.clean()
        assert low <= scale.value <= low * 7


def test_a_factor_below_one_is_inverted_and_the_state_is_complete():
    scale = LossScale(8.0, 0.5, 5, 2.0, 64.0)
    scale.clean()
    other = LossScale(None, 3.0, 7)
    other.load_state_dict(scale.state_dict())
    assert vars(other) == vars(scale)
    assert scale.factor == 2


@pytest.mark.parametrize(
    "bad",
    [{"value": 0.0}, {"value": math.inf}, {"value": math.nan}, {"value": 0.5}, {"value": 4.0, "highest": 2.0},
     {"value": 4.0, "factor": 1.0}, {"value": 4.0, "factor": -2.0}, {"value": 4.0, "steps": 0},
     {"value": None, "lowest": 3.0, "highest": 2.0}],
)  # fmt: skip
def test_numbers_that_make_no_scale(bad):
    with pytest.raises(ConfigError, match=r"Expected.*Got.*What to do"):
        LossScale(**bad)
