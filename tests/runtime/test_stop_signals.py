"""A signal to one rank is an answer on all of them; one that cannot stop in time is ended."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from unittest import mock

from meshwright.runtime import StopSignals, rank, stop_signals as stop


def _asked(number):
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        answers = [signals.asked()]
        if rank() == 1:
            os.kill(os.getpid(), number)
            time.sleep(0.2)  # the thread that listens
        answers += [signals.asked(), signals.asked()]
    assert signal.getsignal(signal.SIGTERM) is before
    return answers


def _one_after_the_other():
    return [_asked(signal.SIGTERM), _asked(signal.SIGINT)]


def test_all_ranks_hear_of_a_signal_to_one(ranks):
    assert ranks(2).run(_one_after_the_other) == [[[0, 15, 15], [0, 2, 2]]] * 2


def _stuck(grace_s, number, told):
    """A rank that waits in C++, as in a collective: its main thread handles no signal."""
    os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    with mock.patch.object(stop, "_SAME_CTRL_C_S", 0.2), StopSignals(grace_s):
        for moment_s in (0.1, 0.5):
            threading.Timer(moment_s, lambda: os.kill(os.getpid(), number)).start()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def test_a_rank_that_cannot_leave_is_ended(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    given = [(1, signal.SIGTERM, tmp_path / "late"), (100, signal.SIGINT, tmp_path / "twice")]
    both = [context.Process(target=_stuck, args=each) for each in given]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [143, 130]
    assert "rank 0 1 s after SIGTERM the step has not ended" in (tmp_path / "late").read_text()
    assert "interrupted again" in (tmp_path / "twice").read_text()


def _fork_and_end():
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        time.sleep(0.1)
        os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_a_rank_forks_is_ended_by_its_own_signals():
    """A ``multiprocessing.Pool`` in the loop terminates its workers: that is no word to the rank."""
    with StopSignals() as signals:
        assert _fork_and_end() == -signal.SIGTERM, "and not Ctrl-C"
        time.sleep(0.1)
        assert signals.asked() == 0
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
