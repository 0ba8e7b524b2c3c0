import contextlib
import gc
import weakref
from unittest import mock

import meshwright.optim
from meshwright.optim import guarded_step
from meshwright.runtime import lazy
from meshwright.runtime.lazy import paused_collection, settling


def test_nothing_is_collected_inside_and_the_setting_comes_back():
    with paused_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with contextlib.suppress(ValueError), paused_collection():
        raise ValueError
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off():
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Cycle:
    def __init__(self):
        self.itself = self


def test_what_is_there_to_stay_counts_as_old_unless_somebody_has_frozen_things():
    gc.unfreeze()  # tests/conftest.py has frozen what was imported
    with paused_collection(to_stay=True):
        stays = Cycle()
    assert any(each is stays for each in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        with paused_collection(to_stay=True):
            young = Cycle()
        # Thawed, none would be left; how many there are changes meanwhile: other threads drop what was frozen.
        assert gc.get_freeze_count() > 0
        assert not any(each is young for each in gc.get_objects(generation=2))
    finally:
        gc.unfreeze()


def test_what_is_alive_when_training_has_settled_is_left_alone_until_the_end():
    gc.unfreeze()
    gone, alive = Cycle(), Cycle()
    seen = weakref.ref(gone)
    del gone
    with contextlib.suppress(ValueError), settling() as settle:
        assert gc.get_freeze_count() == 0
        settle()
        assert seen() is None  # garbage is not kept
        assert not any(each is alive for each in gc.get_objects())
        raise ValueError
    assert gc.get_freeze_count() == 0
    assert any(each is alive for each in gc.get_objects())


def test_what_a_caller_has_frozen_stays_frozen():
    gc.freeze()
    try:
        with settling() as settle:
            settle()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_what_is_frozen_for_good_is_not_counted():
    names = ("freeze", "unfreeze", "get_freeze_count")
    watched = mock.patch.multiple("gc", **dict.fromkeys(names, mock.DEFAULT))
    with watched as calls, mock.patch.object(lazy, "_is_frozen", False):
        lazy.freeze()
        with settling() as settle, paused_collection(to_stay=True):
            settle()
    assert calls["freeze"].call_count == 2
    assert not calls["unfreeze"].called
    assert not calls["get_freeze_count"].called


def test_names_that_a_package_lacks_cost_no_look_at_the_collector():
    """Pickle asks all modules for each, and counting what is frozen takes a tenth of a second in large programs."""
    with mock.patch.multiple("gc", disable=mock.DEFAULT, get_freeze_count=mock.DEFAULT) as calls:
        assert not hasattr(meshwright.optim, "nothing")
        assert not hasattr(meshwright.optim, "_nothing")
        assert meshwright.optim.guarded_step is guarded_step  # imported already
    assert not any(call.called for call in calls.values())
