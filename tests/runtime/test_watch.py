"""A rank that hangs, and one that is slow, get a name from the others."""

import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.runtime import agreement, rank, watch
from meshwright.runtime.watch import Report, Watch, slow_ranks, verdict

LIMIT_S = 0.5


def _steps(watch, seconds, meeting=dist.barrier):
    """Steps in each of which this rank takes so many seconds before it meets the others."""
    for pause_s in seconds:
        watch.beat()
        time.sleep(pause_s)
        meeting()


def _seconds_until(told, started_s, deadline_s):
    while not told and time.monotonic() < started_s + deadline_s:
        time.sleep(0.01)
    return time.monotonic() - started_s


def _hang():
    """Rank 1 sleeps in step 3 for as long as it takes: (texts, seconds until the first)."""
    told: list[str] = []
    with Watch(LIMIT_S, told.append) as watch:
        _steps(watch, [0, 0])
        timer, started_s = [], time.monotonic()
        listener = threading.Thread(target=lambda: timer.append(_seconds_until(told, started_s, 6 * LIMIT_S)))
        listener.start()
        _steps(watch, [4 * LIMIT_S if rank() == 1 else 0])
        listener.join()
    return told, timer[0]


def _disagree():
    """Ranks wait in different collectives until each one's helper thread does the other's; what they were told."""
    told: list[str] = []
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
    collectives = [lambda: dist.barrier(one), lambda: dist.all_reduce(torch.ones(1), group=two)]
    helper = threading.Timer(4 * LIMIT_S, collectives[1 - rank()])
    with Watch(LIMIT_S, told.append) as watch:
        _steps(watch, [0, 0])
        watch.beat()
        helper.start()
        collectives[rank()]()
        helper.join()
    return told


def _apart():
    """Rank 1 sleeps in step 3, and rank 0, which waits for nobody, hangs in step 4 for as long."""
    told: list[str] = []
    with Watch(LIMIT_S, told.append) as watch:
        _steps(watch, [0, 0])
        _steps(watch, [4 * LIMIT_S] if rank() == 1 else [0, 4 * LIMIT_S], meeting=lambda: None)
        dist.barrier()
    return told


def _slow():
    told: list[str] = []
    with Watch(100.0, told.append) as watch:
        watch._pause_s = 0.3
        _steps(watch, [0.02 if rank() == 1 else 0] * 130)
    return told


def _no_hang():
    told: list[str] = []
    with Watch(0.2, told.append) as watch:
        time.sleep(0.5)  # the first step may compile
        _steps(watch, [0, 0, 0.05])
        with watch.paused():
            time.sleep(0.5)
    return told


def _all():
    return _hang(), _disagree(), _slow(), _no_hang(), _apart()


@pytest.mark.long  # it holds seconds against a limit: not for a machine that others use
def test_who_holds_up_the_others_is_named(ranks):
    (first, second) = ranks(2).run(_all)
    told = first[0][0] + second[0][0]
    (found,) = [text for text in told if "no step has ended" in text]
    assert "rank 1: not in a collective, while others wait in one" in found
    assert "rank 0: step 3, in barrier, test_watch.py" in found
    assert "in _steps" in found
    (own,) = [text for text in second[0][0] if "rank 1 holds up" in text]
    assert "time.sleep(pause_s)" in own
    assert min(first[0][1], second[0][1]) < 2 * LIMIT_S
    (apart,) = [text for text in first[1] + second[1] if "no step has ended" in text]
    assert "do not call the same collectives" in apart
    assert "in all_reduce" in apart
    assert "in barrier" in apart
    (slow,) = first[2]
    assert slow.startswith("rank 1 is slow")
    assert second[2] == first[3] == second[3] == []
    (hang,) = [text for text in first[4] + second[4] if "no step has ended" in text]
    assert "rank 0: step 4" in hang
    assert "rank 1: step 3" in hang


def test_ranks_that_wait_in_the_store_wait_and_those_that_add_up_bits_work(monkeypatch):
    has_come = threading.Event()

    class Store:
        def add(self, key, amount):
            return 2 if has_come.is_set() else 1

    monkeypatch.setattr(agreement, "world_size", lambda: 2)
    monkeypatch.setattr(agreement, "default_store", Store)
    thread = threading.Thread(target=agreement.wait_for_all_ranks, args=("save",))
    thread.start()
    seen = set()
    deadline_s = time.monotonic() + 10.0
    while "wait_for_all_ranks" not in seen and time.monotonic() < deadline_s:
        seen.add(watch.place_of(thread.ident).operation)
    has_come.set()
    thread.join()
    assert "wait_for_all_ranks" in seen
    found = {}
    exec(compile("def bit_sum(): return sys._getframe()", agreement.__file__, "exec"), {"sys": sys}, found)
    assert watch._operation(found["bit_sum"]()) == ""


def _report(step=5, operation="all_reduce", caller="a.py:1 in f", number=3):
    return Report(number, step, operation, caller)


@pytest.mark.parametrize(
    ("reports", "silent", "guilty", "words"),
    [
        ([_report(), _report(operation="")], [], [1], "not in a collective"),
        ([_report(), _report(step=4), _report()], [], [1], "behind"),
        ([_report(), _report(), _report(operation="broadcast")], [], [2], "same collectives"),
        ([_report(), _report(operation="broadcast")], [], [0, 1], "same collectives"),
        ([_report(), _report()], [], [], "all are in the same place"),
        ([_report(operation="", caller=f"a.py:{line} in f") for line in (1, 1, 2)], [], [2], "same collectives"),
        ([_report(), _report(operation="")], [3], [3], "no sign of life"),
    ],
)
def test_the_verdict(reports, silent, guilty, words):
    found = verdict(dict(enumerate(reports)), silent)
    assert found.guilty == guilty
    assert words in str(found)
    assert str(found).count(": step") == len({str(report) for report in reports})


def test_who_is_slow():
    assert slow_ranks({0: 0.6, 1: 0.1, 2: 0.7}) == [1]
    assert slow_ranks({0: 0.6, 1: 0.5}) == []
    assert slow_ranks({0: 0.2, 1: 0.0, 2: 0.2}) == []
    assert slow_ranks({0: 0.9, 1: 0.1}) == [1]


def test_a_report_travels_as_text():
    assert Report.from_json(_report().to_json()) == _report()
    with pytest.raises(ConfigError, match="not a duration"):
        Watch(0.0)


class _Looks:
    """In the place of a watch's event: before each look the other rank may report, and this one's reports are kept."""

    def __init__(self, store, reports_before):
        self.store, self.reports_before, self.numbers = store, reports_before, []

    def is_set(self):
        return False

    def wait(self, duration_s):
        self.numbers.append(Report.from_json(self.store.get("watch/0")).number)
        if len(self.numbers) == self.reports_before:
            self.store.set("watch/1", _report(number=4).to_json())


@pytest.mark.parametrize("reports_before", [1, 2, 3, None])
def test_a_rank_that_reports_late_is_not_silent(monkeypatch, reports_before):
    """Ranks diagnose in the same moments: each reports on meanwhile, and has three pauses to."""
    monkeypatch.setattr(watch, "rank", lambda: 0)
    monkeypatch.setattr(watch, "world_size", lambda: 2)
    told, store = [], dist.HashStore()
    watching = Watch(LIMIT_S, told.append)
    watching._watched, watching._keys, watching._store = threading.get_ident(), "watch", store
    watching._step, watching._over = 2, _Looks(store, reports_before)
    store.set("watch/1", _report().to_json())
    watching._look()
    assert watching._over.numbers == list(range(1, (reports_before or 3) + 1))
    assert ("rank 1: no sign of life" in told[0]) == (reports_before is None)
