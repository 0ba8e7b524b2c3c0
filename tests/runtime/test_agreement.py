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
