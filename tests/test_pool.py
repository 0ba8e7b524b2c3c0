"""Check that failures below Python are told, in native code or between sockets, and pass only if they do not return."""

import os

import pytest

from tests.pool import Crash, Pool, RemoteFailure


def _crashes_until(path):
    """Dies on one rank as glibc ends a process whose heap is damaged, but for the second time."""
    if os.environ["RANK"] == "1" and not path.exists():
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), 2)
        os.abort()
    return os.environ["RANK"]


def test_what_crashes_once_is_run_again_and_told(tmp_path):
    pool, words = Pool(2), tmp_path / "words"
    try:
        with pytest.warns(Crash, match="(?s)_crashes_until crashed and was run again.*exit code -6"):
            assert pool.run(_crashes_until, words) == ["0", "1"]
    finally:
        pool.stop()
    assert "c10::FatalSignalHandler" in words.read_text(), "no native stack"


def _loses_a_connection_until(folder):
    """Fails as gloo does that makes a group whose ranks have closed a connection, but for the second time."""
    tried = folder / os.environ["RANK"]
    if not tried.exists():
        tried.touch()
        raise RuntimeError("Gloo connectFullMesh failed with […] Connection closed by peer")
    return os.environ["RANK"]


def test_a_group_that_could_not_connect_once_is_made_again_and_told(tmp_path):
    pool = Pool(2)
    try:
        with pytest.warns(Crash, match="(?s)_loses_a_connection_until found ranks unconnected.*rank 0 of 2 failed"):
            assert pool.run(_loses_a_connection_until, tmp_path) == ["0", "1"]
        with pytest.raises(RemoteFailure, match="connectFullMesh failed"):
            pool.run(_never_connects)
    finally:
        pool.stop()


def _never_connects():
    raise RuntimeError("Gloo connectFullMesh failed with […] Connection closed by peer")


def test_what_crashes_always_fails(tmp_path):
    pool = Pool(2)
    try:
        with pytest.raises(RemoteFailure, match="exit code -6"):
            pool.run(_always_crashes)
    finally:
        pool.stop()


def _always_crashes():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.abort()
