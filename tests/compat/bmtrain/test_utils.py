import contextlib
import io
import sys

import pytest
import torch

from meshwright import ConfigError
from meshwright.compat.bmtrain import AverageRecorder, print_block, print_dict, see_memory

BLOCK = """\
========================= a title ==========================
two
lines
============================================================
"""
PAIRS = """\
========================= settings =========================
lr:    0.1
steps: 3
============================================================
"""


def _everything():
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_block("a title", "two\nlines")
        print_dict("settings", {"lr": 0.1, "steps": 3})
        print_block("alone")
        held = torch.ones(2**22)
        numbers = see_memory("after the model")
        see_memory("in detail", detail=True)
        del held
    return text.getvalue(), numbers


def test_prints_are_framed_and_on_rank_0_only(ranks):
    (shown, numbers), (silent, other_numbers) = ranks(2).run(_everything)
    assert silent == ""
    assert shown.startswith(BLOCK + PAIRS + " alone ".center(60, "=") + "\nafter the model\n")
    assert list(numbers) == list(other_numbers)
    assert numbers["max_resident_bytes"] >= 2**24
    if sys.platform == "linux":
        assert 2**24 <= numbers["resident_bytes"] <= numbers["max_resident_bytes"] + 2**20
        assert f"resident: {numbers['resident_bytes'] / 2**30:.3f} GiB" in shown
        assert "RssAnon: " in shown.split("in detail")[1]


def test_average_of_records():
    recorder = AverageRecorder(alpha=0.5, start_value=7)
    assert recorder.value == 7
    decayed = 0.0
    for count, value in enumerate([2.0, torch.tensor(4.0), 1.0], start=1):
        recorder.record(value)
        decayed = 0.5 * decayed + 0.5 * float(value)
        assert recorder.value == pytest.approx(decayed / (1 - 0.5**count))
    constant = AverageRecorder()
    for _ in range(50):
        constant.record(3.0)
        assert constant.value == pytest.approx(3.0, rel=1e-12)


def test_an_average_goes_on_from_its_state():
    first, second = AverageRecorder(0.8), AverageRecorder()
    for value in (1.0, 5.0):
        first.record(value)
    second.load_state_dict(first.state_dict())
    first.record(2.0)
    second.record(2.0)
    assert second.value == first.value
    with pytest.raises(ConfigError, match="Got no decayed_sum"):
        second.load_state_dict({"alpha": 0.1, "start_value": 0, "weight": 0})
    assert second.value == first.value


@pytest.mark.parametrize("alpha", [1.0, -0.1])
def test_alpha_is_a_share(alpha):
    with pytest.raises(ConfigError, match="0 <= alpha < 1"):
        AverageRecorder(alpha)
