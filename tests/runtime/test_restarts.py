"""Ranks that a server forks, and forks again when one fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.runtime import launch as restarts
from tests.cli.helpers import ROOT, environment

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(f"ran-{attempt}-{rank}").write_text(json.dumps([sys.argv, os.getpid(), os.environ["TORCHELASTIC_RUN_ID"]]))
kind = sys.argv[1]
if rank == "1" and attempt == "0" and kind != "waits":
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(kind))
def save(*_):
    Path(f"saved-{rank}").touch()
    sys.exit(0)


if kind == "waits":
    signal.signal(signal.SIGTERM, save)
    Path(f"ready-{rank}").touch()
if attempt == "0":
    time.sleep(60)
"""

LAUNCHER = """
import sys
from meshwright.runtime.launch import launch

if __name__ == "__main__":
    tell = lambda failure: print("told", failure.attempt, failure.rank, failure.status, failure.signal_name, flush=True)
    sys.exit(launch(["-m", "program", sys.argv[1]], 2, max_restarts=int(sys.argv[2]), tell=tell))
"""


def _start(folder, kind, num_restarts):
    (folder / "program.py").write_text(PROGRAM)
    (folder / "launcher.py").write_text(LAUNCHER)
    command = [sys.executable, "launcher.py", kind, str(num_restarts)]
    given = {**environment(), "PYTHONPATH": f"{ROOT / 'src'}:{folder}"}
    return subprocess.Popen(command, cwd=folder, env=given, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _ran(folder, attempt, rank):
    argv, pid, run = json.loads((folder / f"ran-{attempt}-{rank}").read_text())
    assert argv[1:] in (["killed"], ["waits"], ["3"])
    return pid, run


def _is_running(pid):
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _wait_until(condition, seconds=200.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_all_ranks_are_started_again_and_the_last_status_counts(tmp_path):
    launcher = _start(tmp_path, "killed", 1)
    told, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 0
    assert told.splitlines() == ["told 0 1 -9 SIGKILL"]
    ran = [_ran(tmp_path, attempt, rank) for attempt in (0, 1) for rank in (0, 1)]
    assert len({pid for pid, _ in ran}) == 4
    assert len({run for _, run in ran}) == 1
    assert not any(_is_running(pid) for pid, _ in ran)


@pytest.mark.long  # each launcher imports torch
def test_without_restarts_the_status_is_that_of_the_rank_that_failed(tmp_path):
    launcher = _start(tmp_path, "3", 0)
    launcher.communicate(timeout=100)
    assert launcher.returncode == 3


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children with their parent on Linux alone")
def test_a_launcher_that_is_killed_leaves_nothing_behind(tmp_path):
    launcher = _start(tmp_path, "waits", 0)
    _wait_until(lambda: all((tmp_path / f"ran-0-{rank}").exists() for rank in (0, 1)))
    time.sleep(0.2)
    pids = [_ran(tmp_path, 0, rank)[0] for rank in (0, 1)]
    server = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pids[1], signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    _wait_until(lambda: not any(map(_is_running, [server, *pids])), 10.0)


POOL = """
import os, sys, time
from tests.pool import Pool

if __name__ == "__main__":
    pool = Pool(2)
    print(*pool.run(os.getpid), flush=True)
    time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children with their parent on Linux alone")
def test_paused_workers_and_their_server_end_with_the_tests(tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    given = {**environment(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    tests = subprocess.Popen([sys.executable, str(tmp_path / "pool.py")], env=given, stdout=subprocess.PIPE, text=True)
    pids = [int(each) for each in tests.stdout.readline().split()]
    assert len(pids) == 2
    server = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    tests.kill()
    tests.wait()
    _wait_until(lambda: not any(map(_is_running, [server, *pids])), 10.0)


@pytest.mark.long
@pytest.mark.parametrize("to_all", [False, True])  # Slurm signals all processes of a job, the server too
def test_a_stop_signal_reaches_the_ranks_and_nobody_starts_again(tmp_path, to_all):
    launcher = _start(tmp_path, "waits", 3)
    _wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
    os.killpg(launcher.pid, signal.SIGTERM) if to_all else launcher.terminate()
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))
    assert not (tmp_path / "ran-1-0").exists()


def test_memory_kills_are_read_where_the_kernel_counts_them(tmp_path, monkeypatch):
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\n")
    monkeypatch.setattr(restarts, "_memory_events", lambda: iter([tmp_path / "absent", events]))
    assert restarts._memory_kills() == 2
    assert restarts.Failure(0, 1, -9, 0.0, True).signal_name == "SIGKILL"
    assert restarts.Failure(0, 1, 3, 0.0, False).signal_name == ""
