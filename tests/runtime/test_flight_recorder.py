"""What torch's flight recorder tells: of gloo in real groups, of NCCL by what it would write."""

import json
import threading
import time
import types

import torch
import torch.distributed as dist

from meshwright.runtime import flight_recorder, rank
from meshwright.runtime.flight_recorder import FlightRecorder
from meshwright.runtime.rank_reports import size_of_group
from meshwright.runtime.torch_internals import c10d


def _recorded():
    """What each rank has called in a group of both, while rank 1 does not come to the fourth all-reduce."""
    recorder = FlightRecorder()
    others = recorder.collectives(10.0).called.keys()
    pair, alone = dist.new_group([0, 1]), [dist.new_group([each]) for each in range(2)]
    dist.all_reduce(torch.ones(2), group=alone[rank()])
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=pair)
    work = dist.all_reduce(torch.ones(3), group=pair, async_op=True) if rank() == 0 else None
    deadline_s, is_settled = time.monotonic() + 60.0, False
    while not is_settled and time.monotonic() < deadline_s:  # another thread notes what has ended
        called, pending = recorder.collectives(10.0)
        found = {key: counts for key, counts in called.items() if key not in others}
        ended = [counts[1] >= min(counts[0], 3) for counts in found.values()]
        is_settled = all(ended) and max(counts[1] for counts in found.values()) >= 3
        is_settled = is_settled and (work is None or " 4 of group " in pending)
    dist.barrier()  # in the world: rank 0 has looked
    if work is None:
        dist.all_reduce(torch.ones(3), group=pair)
    else:
        work.wait()
    sizes = {size_of_group(key): counts for key, counts in found.items() if counts != (0, 0)}
    return sizes, pending, recorder.wait_share(10.0)


def test_gloo_tells_who_has_not_called(ranks):
    (waits, pending, share), (comes, *_) = ranks(2).run(_recorded)
    assert waits[2] == (4, 3)
    assert comes[2] == (3, 3)
    assert waits[1] == comes[1] == (1, 1)
    assert pending.startswith("gloo:all_reduce 4 of group ")
    assert share is None  # no device times anything


def _entry(number, *, seconds=None, group=("0", "default_pg"), retired=True, p2p=False, ago_s=1.0):
    timed = {} if seconds is None else {"duration_ms": 1000 * seconds}
    created = int((time.time() - ago_s) * 1e9)
    return {
        "record_id": number, "pg_id": 0, "process_group": group, "collective_seq_id": number, "is_p2p": p2p,
        "profiling_name": "nccl:all_reduce", "time_created_ns": created, "retired": retired, **timed,
    }  # fmt: skip


def _dump(entries, **status):
    return json.dumps({"entries": entries, "pg_status": {"0": {name: str(each) for name, each in status.items()}}})


def test_a_collective_that_has_ended_is_not_waited_for_though_the_status_follows_later():
    status = {"last_enqueued_collective": 9, "last_completed_collective": 6}
    late = FlightRecorder([lambda: _dump([_entry(7), _entry(8), _entry(9)], **status)], lambda: {"0": [0, 1]})
    assert late.collectives(5.0) == ({"nccl:0/0/2": (9, 9)}, "")
    entries = [_entry(7), _entry(8, p2p=True), _entry(9)]
    sent = FlightRecorder([lambda: _dump(entries, **status)], lambda: {"0": [0, 1]})
    assert sent.collectives(5.0).called == {"nccl:0/0/2": (9, 7)}


def test_nccl_tells_the_first_collective_that_has_not_ended():
    status = {"last_enqueued_collective": 9, "last_started_collective": 7, "last_completed_collective": 6}
    content = [_entry(6), _entry(7, retired=False, ago_s=0.9), _entry(8, retired=False, ago_s=0.8)]
    gone = _entry(3, group=("5", "destroyed"))
    recorder = FlightRecorder([lambda: _dump([*content, gone], **status)], lambda: {"0": [0, 1, 2, 3]})
    assert recorder.collectives(5.0) == ({"nccl:0/0/4": (9, 6)}, "nccl:all_reduce 7 of group default_pg")
    nothing = FlightRecorder([lambda: json.dumps({"version": "2.10"})], lambda: {"0": [0, 1]})
    assert nothing.collectives(5.0) == ({}, "")
    assert nothing.wait_share(5.0) is None


def test_the_share_of_time_in_collectives(monkeypatch):
    monkeypatch.setattr(flight_recorder, "enable_timings", lambda: None)
    now = [1000.0]
    monkeypatch.setattr(flight_recorder.time, "time", lambda: now[0])
    entries = []
    recorder = FlightRecorder([lambda: _dump(entries)] * 2, lambda: {"0": [0, 1]})  # both show the same
    entries += [_entry(0, seconds=2.0, ago_s=0), _entry(1, ago_s=0), _entry(2, seconds=5.0, p2p=True, ago_s=0)]
    now[0] = 1010.0
    assert abs(recorder.wait_share(5.0) - 0.2) < 1e-6
    entries[1]["duration_ms"] = 3000.0  # it has ended meanwhile
    entries.append(_entry(3, seconds=1.0, ago_s=0))
    now[0] = 1020.0
    assert abs(recorder.wait_share(5.0) - 0.4) < 1e-6
    # The recorder was too small: what it holds began five seconds ago.
    entries[:] = [_entry(40, seconds=1.0, ago_s=0), _entry(41, seconds=1.0, ago_s=0)]
    now[0] = 1025.0
    recorder._last_s = 1000.0
    entries[0]["time_created_ns"] = entries[1]["time_created_ns"] = int(1020e9)
    assert abs(recorder.wait_share(5.0) - 0.4) < 1e-6


def test_recorders_that_time_nothing_are_read_less_and_less(monkeypatch):
    """Do not hold up steps on a CPU, where nothing in full recorders is timed."""
    monkeypatch.setattr(flight_recorder, "enable_timings", lambda: None)
    entries, reads = [_entry(0)], []
    recorder = FlightRecorder([lambda: reads.append(1) or _dump(entries)], lambda: {"0": [0, 1]})
    for _ in range(1 + 2 + 4 + 8 + 16 + 32 + 64 + 64):
        assert recorder.wait_share(5.0) is None
    assert len(reads) == 8
    entries.append(_entry(1, seconds=0.5))
    shares = [recorder.wait_share(5.0) for _ in range(64)]
    assert shares[:-1] == [None] * 63
    assert shares[-1] > 0
    assert recorder.wait_share(5.0) is not None  # from now on each call reads


def test_a_recorder_that_does_not_answer_is_asked_once():
    answer, asked = threading.Event(), []

    def dump():
        asked.append(1)
        answer.wait(20.0)
        return _dump([_entry(1)], last_enqueued_collective=1, last_completed_collective=1)

    recorder = FlightRecorder([dump], lambda: {"0": [0, 1]})
    for _ in range(3):
        assert recorder.collectives(0.01) == ({}, "")
    answer.set()
    deadline_s = time.monotonic() + 20.0
    while not recorder.collectives(1.0).called and time.monotonic() < deadline_s:
        pass
    assert recorder.collectives(5.0).called == {"nccl:0/0/2": (1, 1)}
    assert asked[:1] == [1]


def test_nccl_alone_is_asked_to_time_its_collectives(monkeypatch):
    class Group:
        timed = False

        def _enable_collectives_timing(self):
            self.timed = True

    mixed, gloo, gone = Group(), Group(), Group()
    world = types.SimpleNamespace(
        pg_names={mixed: "0", gloo: "1", gone: "2"},
        pg_backend_config={mixed: "cpu:gloo,cuda:nccl", gloo: "cpu:gloo,cuda:gloo"},
        pg_group_ranks={mixed: {1: 0, 0: 1}, gloo: {3: 0}},
    )
    monkeypatch.setattr(c10d, "world_state", world)
    c10d.enable_timings()
    assert [each.timed for each in (mixed, gloo, gone)] == [True, False, False]
    assert c10d.ranks_of_groups() == {"0": [0, 1], "1": [3]}
