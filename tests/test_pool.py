"""A worker that crashes in native code is told of, and passes only if it does not crash again."""

import os

import pytest

from tests.pool import Crash, Pool, RemoteFailure


def _crashes_until(path):
    """Dies as glibc ends a process whose heap is damaged, on one rank, as long as the file is not there."""
    if os.environ["RANK"] == "1" and not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.abort()
    return os.environ["RANK"]


def test_what_crashes_once_is_run_again_and_told(tmp_path, capfd):
    pool = Pool(2)
    try:
        with pytest.warns(Crash, match="(?s)_crashes_until crashed and was run again.*exit code -6"):
            assert pool.run(_crashes_until, tmp_path / "crashed") == ["0", "1"]
    finally:
        pool.stop()
    assert "c10::FatalSignalHandler" in capfd.readouterr().err, "no native stack"


def test_what_crashes_always_fails(tmp_path):
    pool = Pool(2)
    try:
        with pytest.raises(RemoteFailure, match="exit code -6"):
            pool.run(_always_crashes)
    finally:
        pool.stop()


def _always_crashes():
    os.abort()
