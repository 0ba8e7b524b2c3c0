"""Verdicts on plain reports, and how reports travel."""

import itertools
import sys
import threading
import time

import pytest

from meshwright.errors import LaunchError
from meshwright.runtime import agreement, rank_reports
from meshwright.runtime.rank_reports import Report, joined_reports, read_joined, slow_ranks, verdict


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
        seen.add(rank_reports.place_of(thread.ident).operation)
    has_come.set()
    thread.join()
    assert "wait_for_all_ranks" in seen
    found = {}
    exec(compile("def bit_sum(): return sys._getframe()", agreement.__file__, "exec"), {"sys": sys}, found)
    assert rank_reports._operation(found["bit_sum"]()) == ""


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
    report = Report(3, 5, "all_reduce", "a.py:1 in f", 0.25, {"0/0/2": (4, 3)}, "gloo:all_reduce 4 of group default_pg")
    assert str(Report.from_json(report.to_json())) == str(report)
    assert dict(Report.from_json(report.to_json()).called) == {"0/0/2": [4, 3]}
    older = Report(2, 4, "", "b.py:1 in g")
    texts = [joined_reports({0: older.to_json(), 7: report.to_json()}), joined_reports({0: report.to_json()})]
    for order in itertools.permutations(texts):
        found = read_joined([each.encode() for each in order])
        assert {number: each.number for number, each in found.items()} == {0: 3, 7: 3}
    for wrong in ("[]", '{"a": {}}', '{"0": 3}', '{"0": {"number": "1"}}'):
        with pytest.raises(LaunchError, match="cannot be read"):
            read_joined([wrong.encode()])
    with pytest.raises(LaunchError, match="cannot be read"):
        Report.from_json(report.to_json().replace("[4, 3]", "[4]"))


def _called(*counts, step=5, operation="", caller="loop.py:9 in step", pending=""):
    """A rank whose host ran ahead: by process group, the collectives that it has called and that have ended."""
    return Report(3, step, operation, caller, 0.0, dict(counts), pending)


WORLD, LEFT, RIGHT = "0/0/4", "1/0/2", "1/2/2"


@pytest.mark.parametrize(
    ("reports", "guilty", "words"),
    [
        # Rank 2 sleeps; rank 0 reads the loss early, so its host has called less than that of the others.
        ([_called((WORLD, (7, 6))), *[_called((WORLD, (9, 6)))] * 1, _called((WORLD, (6, 6)))], [2], "not in a coll"),
        # Rank 1 waits for rank 0 in their group; rank 0 waits for rank 2, which does nothing, in the world.
        (
            [
                _called((WORLD, (7, 6)), (LEFT, (3, 3))),
                _called((WORLD, (6, 6)), (LEFT, (4, 3))),
                _called((WORLD, (6, 6)), (RIGHT, (8, 8))),
                _called((WORLD, (7, 6)), (RIGHT, (8, 8))),
            ],
            [2],
            "not in a collective",
        ),
        # Each waits in a group in which the other does not call.
        ([_called((WORLD, (7, 6)), (LEFT, (3, 3))), _called((WORLD, (6, 6)), (LEFT, (4, 3)))], [0, 1], "the same coll"),
        # Groups of other ranks may have the same name: their numbers are not compared.
        ([_called(("1/0/1", (4, 3))), _called(("1/1/1", (9, 8)))], [], "a network or a device"),
        # All have called what they wait in; steps and places of hosts that ran ahead accuse nobody.
        (
            [_called(("0/0/2", (8, 6)), step=6), _called(("0/0/2", (7, 6)), caller="a.py:1 in f")],
            [],
            "network or a dev",
        ),
        # Of a group of two only one rank is known to have called: no statement.
        ([_called((LEFT, (1, 0)), operation="barrier"), _called(("2/0/2", (1, 0)))], [1], "not in a collective"),
    ],
)
def test_who_has_not_called_a_collective(reports, guilty, words):
    found = verdict(dict(enumerate(reports)), [])
    assert found.guilty == guilty
    assert words in found.reason


def test_thousands_of_ranks_are_told_in_few_words():
    reports = {number: _called((WORLD, (2, 1)), caller=f"a.py:{number} in f") for number in range(5000)}
    reports[4321] = _called((WORLD, (1, 1)), caller="the.py:1 in culprit")
    found = verdict(reports, [])
    assert found.guilty == [4321]
    assert "the.py:1 in culprit" in str(found)
    assert str(found).endswith("4988 more places")
    assert len(str(found)) < 1500


def test_a_rank_whose_recorder_tells_nothing_is_told_with_the_others_at_its_place():
    waits = [
        _called((WORLD, (3, 2)), step=5, operation="barrier", pending=f"gloo:barrier 3 of group {name}")
        for name in "aab"
    ]
    silent, busy = _called(operation="barrier"), _called((WORLD, (2, 2)))
    told = str(verdict({0: waits[0], 1: busy, 2: waits[1], 3: silent}, []))
    assert "ranks 0, 2, 3: step 5, in barrier, loop.py:9 in step, waiting for gloo:barrier 3 of group a" in told
    told = str(verdict({0: waits[0], 1: busy, 2: waits[2], 3: silent}, []))  # either could be what it waits for
    assert "rank 3: step 5, in barrier, loop.py:9 in step;" in told + ";"
