"""A call of all ranks that one makes alone: it says so, and ends in an error instead of a foreign collective."""

import contextlib
import io
import time
from datetime import timedelta
from unittest import mock

import pytest
from torch._C._distributed_c10d import HashStore

from meshwright.errors import LaunchError
from meshwright.runtime import agreement as together, rank, wait_for_all_ranks


def _late():
    told = io.StringIO()
    wait_for_all_ranks("a test")  # from here on they are equally far
    with mock.patch.object(together, "_PATIENCE_S", 0.1), contextlib.redirect_stderr(told):
        time.sleep(0.4 * rank())
        wait_for_all_ranks("a test")
    return told.getvalue()


def test_who_waits_long_says_for_whom(ranks):
    told, nothing = ranks(2).run(_late)
    assert "rank 0 has waited 0 s in a test for rank 1; if it stays so: call it on every rank" in told
    assert nothing == ""


def test_ranks_that_never_come_are_named(monkeypatch):
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    for name, value in {"default_store": lambda: store, "world_size": lambda: 3, "_PATIENCE_S": 0.05}.items():
        monkeypatch.setattr(together, name, value)
    with pytest.raises(LaunchError, match=r"save was not called on every rank.*ranks 1, 2"):
        wait_for_all_ranks("save")


def _gathered():
    here, kind = rank(), "odd" if rank() % 2 else "even"
    together.send_bytes(b"abc" * here, 0) if here else None
    received = [together.receive_bytes(other) for other in range(1, 3)] if here == 0 else []
    return (
        together.gather_distinct(f"{kind} {here}", kind),
        together.gather_distinct("same", "same"),
        together.gather_numbers([here, -here]),
        together.gather_on_first({"rank": here}),
        received,
    )


def test_values_that_differ_travel_once_for_each_kind(ranks):
    found = ranks(3).run(_gathered)
    for number, (distinct, same, numbers, on_first, received) in enumerate(found):
        assert distinct == [([0, 2], "even 0"), ([1], "odd 1")]
        assert same == [([0, 1, 2], "same")]
        assert numbers == [[0, 0], [1, -1], [2, -2]]
        assert on_first == ([{"rank": each} for each in range(3)] if number == 0 else [])
        assert received == ([b"abc", b"abcabc"] if number == 0 else [])
