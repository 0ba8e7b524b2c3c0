import contextlib
import gc

from meshwright.collector import paused_collection


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
