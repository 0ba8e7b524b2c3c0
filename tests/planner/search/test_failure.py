"""What is said when nothing can be found."""

import dataclasses
from unittest import mock

import pytest

from meshwright.cost import find_cluster
from meshwright.errors import StrategyError
from meshwright.planner import FamilyWorkload, parse_family
from meshwright.planner.plan_request import PlanRequest, named_model
from meshwright.planner.search import find, search, search_and_trace, within_time
from meshwright.planner.search.find import nothing_works
from meshwright.planner.search.within_time import TimeLimit, out_of_time
from meshwright.strategy import Strategy

GIB = 2**30


def test_why_what_was_wished_cannot_be_comes_first():
    refused = {
        "offload: activations stay on the device under a pipeline": "a",
        "a pipeline has more stages than the model has blocks": "b",
        "zero1 does not go together with fsdp": "c",
        "offload: nothing to send": "d",
        "tensor_parallel: the tensor axis does not divide embed": "e",
    }
    told = str(nothing_works(4, refused, ["tensor_parallel"]))
    assert "Got tensor_parallel: the tensor axis does not divide embed; offload: activations" in told
    assert "does not go together" not in told
    assert "Got offload: activations" in str(nothing_works(4, refused, []))


def subject(host_gib):
    """Return GPT-2 XL, whose parameters and states take 17.4 GiB, on two devices with 2 GiB and a host of each."""
    cluster = dataclasses.replace(find_cluster("a100x2"), host_memory_bytes=round(host_gib * GIB))
    return FamilyWorkload(parse_family("gpt2-xl"), cluster, 2, limit_bytes=2 * GIB)


@pytest.mark.parametrize(("host_gib", "tried"), [(7.3, False), (7.6, True)])
def test_what_fills_devices_and_hosts_is_not_offloaded_in_every_way(host_gib, tried):
    passes = []

    def through(self, space, before=None):
        passes.append(space)
        return own(self, space, before)

    own = find._Passes._through
    with mock.patch.object(find._Passes, "_through", through), pytest.raises(StrategyError) as refused:
        search(subject(host_gib))
    assert any(space.offload != ((),) for space in passes) == tried
    # What the first pass shows is not looked for in others: the one more is the search for enough devices.
    assert len(passes) == 1 or tried
    assert "No strategy fits into the memory of a rank" in str(refused.value)
    assert "of host memory" in str(refused.value)
    assert "take 4 of these devices" in str(refused.value)


def test_where_there_is_no_time_to_look_for_enough_devices_states_tell_how_many_are_too_few(monkeypatch):
    monkeypatch.setattr(find, "_GROWTH_S", 0.0)
    with pytest.raises(
        StrategyError, match=r"take more than 2 of these devices, for activations come on top"
    ) as refused:
        search(subject(5), limit_s=60.0)
    told = str(refused.value)
    assert "at most 2.00 GiB and 4.50 GiB of host memory for each of 2 devices" in told
    assert "Got 17.41 GiB of parameters and optimizer states, 8.70 GiB for each" in told


def test_what_formulas_find_too_large_is_told_when_the_time_is_up():
    error = StrategyError("No strategy fits", expected="at most 2 GiB", got="3 GiB for zero1", fix="take 4 devices")
    told = str(within_time._fits_nowhere(error, TimeLimit(20.0), 0.9))
    assert "within 20 s of processor time. Got none by formulas in 90% of the memory: 3 GiB for zero1" in told
    assert "take 4 devices; or give it more time" in told


def test_where_the_time_ends_the_smallest_that_was_tried_is_named():
    plan = subject(64).plan(Strategy(["zero1"]), 1)
    told = str(out_of_time(TimeLimit(1.0), plan))
    assert f"the smallest so far, zero1, needs {plan.needed_bytes / GIB:.2f} GiB of 2.00 GiB" in told
    offloading = subject(4).plan(Strategy(["zero1", ("offload", "optimizer")]), 1)
    offloading = dataclasses.replace(offloading, limit_bytes=2 * offloading.needed_bytes)
    assert offloading.fits_device
    assert "GiB of 3.60 GiB" in str(out_of_time(TimeLimit(1.0), offloading))


@pytest.mark.parametrize("limit_s", [20.0, None])
def test_an_error_for_want_of_time_names_that_of_the_whole_search(monkeypatch, limit_s):
    cluster = find_cluster("h100x2")
    request = PlanRequest(named_model("gpt2"), cluster, 4, limit_s=limit_s)

    def searched(self, progress):
        raise out_of_time(TimeLimit(6.86))  # what formulas left of it

    monkeypatch.setattr(PlanRequest, "_searched", searched)
    with pytest.raises(StrategyError, match="within 20 s" if limit_s else r"within 6\.86 s"):
        request.found()


def test_a_search_that_finds_what_is_too_small_says_so_whatever_time_is_left():
    error = StrategyError("No strategy fits", expected="more memory", got="", fix="")

    def searched(*_):
        raise error

    with pytest.raises(StrategyError, match="No strategy fits"):
        search_and_trace(searched, subject(64), 2 * GIB, "tokens_per_s", 1, 1e-9)
    # By formulas of another model, in a part of the memory, it is not certain.
    with pytest.raises(StrategyError, match="The time was up"):
        search_and_trace(searched, subject(64), 2 * GIB, "tokens_per_s", 1, 1e-9, resembles=True)
