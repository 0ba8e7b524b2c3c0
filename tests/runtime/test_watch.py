"""A rank that hangs, and one that is slow, get a name from the others."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.runtime import rank, watch
from meshwright.runtime.flight_recorder import Collectives
from meshwright.runtime.rank_reports import Report
from meshwright.runtime.watch import Watch

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


def _hang_behind_the_first():
    """Rank 1 sleeps behind its first step, which takes longer than the limit; what was told before and after."""
    told: list[str] = []
    with Watch(LIMIT_S, told.append) as watch:
        _steps(watch, [2 * LIMIT_S])
        before = len(told)
        watch.warm()
        time.sleep(4 * LIMIT_S if rank() == 1 else 0)
        dist.barrier()
    return before, told


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
        watch._pause_s = 0.1
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


def _early(compute):
    """Usual steps, then rank 1 sleeps or computes in one for 3 s; what was told, long before the limit."""
    told: list[str] = []
    with Watch(60.0, told.append, restart_s=0.1) as watch:
        _steps(watch, [0.005] * 30)
        watch.beat()
        end_s = time.monotonic() + 3.0
        while rank() == 1 and time.monotonic() < end_s:
            if not compute:
                time.sleep(0.1)
        dist.barrier()
    return told


def _both_early():
    return _early(False), _early(True)


@pytest.mark.long  # it holds seconds against a limit: not for a machine that others use
def test_a_rank_that_does_nothing_is_named_before_the_limit_and_one_that_computes_is_not(ranks):
    (first, second) = ranks(2).run(_both_early)
    (found,) = [text for text in first[0] + second[0] if "no step has ended" in text]
    assert "rank 1: not in a collective, while others wait in one" in found
    assert first[1] == second[1] == []


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


def test_a_rank_that_hangs_behind_the_first_step_is_named(ranks):
    every = ranks(2).run(_hang_behind_the_first)
    assert [before for before, _ in every] == [0, 0]  # the first step may take as long as it likes
    (found,) = [text for _, texts in every for text in texts if "no step has ended" in text]
    assert "rank 1: not in a collective, while others wait in one" in found


def test_a_limit_is_a_duration():
    with pytest.raises(ConfigError, match="not a duration"):
        Watch(0.0)


def test_of_four_ranks_the_one_that_hangs_is_named(ranks):
    every = ranks(4).run(_hang)
    told = [text for texts, _ in every for text in texts]
    (found,) = [text for text in told if "no step has ended" in text]
    assert "rank 1: not in a collective, while others wait in one" in found
    assert "ranks 0, 2, 3: step 3, in barrier, test_watch.py" in found
    assert any("rank 1 holds up the others" in text for text in every[1][0])


def _report(number):
    return Report(number, 5, "all_reduce", "a.py:1 in f")


# --- Whole worlds of watches in one process: their looks are called in turn, by a clock that the test moves on.


class CountingStore:
    """A store that counts its operations, and the reports that are read from it."""

    def __init__(self, store):
        self.store, self.operations, self.reports = store, 0, 0

    def __getattr__(self, name):
        self.operations += 1
        return getattr(self.store, name)

    def multi_get(self, names):
        self.operations += 1
        found = self.store.multi_get(names)
        self.reports += sum(text.count(b'"caller"') for text in found)
        return found


class World:
    """Ranks of hosts, each with a watch; what they tell is kept by rank."""

    def __init__(self, monkeypatch, tmp_path, hosts):
        self.now_s, self.told, self.frozen = 0.0, [], set()
        self.store = CountingStore(dist.HashStore())
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now_s)
        host_of = [host for host, size in enumerate(hosts) for _ in range(size)]
        real = watch.HostReports

        def host_reports(name, own):
            with monkeypatch.context() as patched:
                patched.setattr(watch.os, "access", lambda *_: False)
                folder = tmp_path / f"host-{host_of[own]}"
                folder.mkdir(exist_ok=True)
                patched.setattr(watch.tempfile, "gettempdir", lambda: str(folder))
                return real(name, own)

        monkeypatch.setattr(watch, "HostReports", host_reports)
        self.watches = []
        for number in range(len(host_of)):
            each = Watch(10.0, lambda text, number=number: self.told.append((number, text)))
            each._rank, each._size, each._store, each._keys = number, len(host_of), self.store, "watch"
            each._watched, each._recorder = threading.get_ident(), Recorder()
            self.watches.append(each)

    def beat(self, *numbers):
        for number in numbers or range(len(self.watches)):
            self.watches[number].beat()

    def pass_time(self, seconds, order=1):
        """All but the frozen look once in every pause, one after the other."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += self.watches[0]._pause_s
            for number, each in [*enumerate(self.watches)][::order]:
                if number not in self.frozen:
                    each._look()


class Recorder:
    """In the place of a flight recorder."""

    def __init__(self):
        self.called, self.share = {}, None

    def collectives(self, patience_s):
        return Collectives(self.called, "")

    def wait_share(self, patience_s):
        return self.share


@pytest.mark.parametrize(
    ("hosts", "order"),
    [([2], 1), ([4, 4], -1), ([1, 3, 2], 1), ([4] * 4, -1), pytest.param([8] * 5, 1, marks=pytest.mark.long)],
)
def test_a_hang_is_found_by_few_operations_of_the_store(monkeypatch, tmp_path, hosts, order):
    world = World(monkeypatch, tmp_path, hosts)
    size, guilty = sum(hosts), sum(hosts) - 1
    for _ in range(3):
        world.beat()
        world.pass_time(5.0, order)
    routine = world.store.operations
    world.pass_time(1.0, order)
    assert world.store.operations - routine <= 2 * len(hosts) + 5  # one value of each host, and a search for slow ranks
    world.watches[guilty]._recorder.called = {f"0/0/{size}": (6, 6)}
    for number in range(size - 1):
        world.watches[number]._recorder.called = {f"0/0/{size}": (8, 6)}
    world.beat()
    world.pass_time(9.0, order)
    before, world.store.reports = world.store.operations, 0
    world.pass_time(6.0, order)
    (_, found), (own, stack) = sorted(world.told, key=lambda told: "holds up" in told[1])
    assert f"rank {guilty}: not in a collective, while others wait in one" in found
    assert own == guilty
    assert f"rank {guilty} holds up the others" in stack
    assert world.store.operations - before <= 12 * size + 30
    assert world.store.reports <= 5 * size
    told = len(world.told)
    world.pass_time(30.0, order)
    assert len(world.told) == told
    world.beat()
    world.pass_time(16.0, order)  # the next hang has a verdict of its own
    assert len(world.told) == told + 2


@pytest.mark.parametrize("frozen", [0, 1, 3, 4, 7])
def test_a_rank_whose_process_stands_still_is_named_whatever_its_part(monkeypatch, tmp_path, frozen):
    """Whoever sends the reports of its host, reads them first, or does nothing: others take over."""
    world = World(monkeypatch, tmp_path, [4, 4])
    for _ in range(3):
        world.beat()
        world.pass_time(5.0)
    world.beat()
    world.frozen.add(frozen)
    world.pass_time(15.0)
    ((_, found),) = world.told
    assert f"rank {frozen}: no sign of life" in found


def test_the_next_in_turn_reads_when_the_first_stops_in_the_middle(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, [4, 4])
    for _ in range(3):
        world.beat()
        world.pass_time(5.0)
    world.beat()
    world.pass_time(11.0)
    (first,) = [each._rank for each in world.watches if each._diagnosis and each._diagnosis.before is not None]
    world.frozen.add(first)
    world.pass_time(12.0)
    ((_, found),) = world.told
    assert f"rank {first}: no sign of life" in found


def test_steps_that_end_late_do_not_delay_the_verdict_of_a_later_hang(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, [4, 4])
    for _ in range(6):
        world.beat()
        world.pass_time(11.0)  # every rank has taken its turn, and goes on
    assert world.told == []
    world.beat()
    world.frozen.add(5)
    world.pass_time(15.0)
    ((_, found),) = world.told
    assert "rank 5: no sign of life" in found


def test_a_whole_host_that_is_gone_is_named(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, [3, 3, 3])
    for _ in range(3):
        world.beat()
        world.pass_time(5.0)
    world.beat()
    world.frozen.update((0, 1, 2))
    world.pass_time(15.0)
    ((_, found),) = world.told
    assert "ranks 0, 1, 2: no sign of life" in found


def test_slow_ranks_are_found_by_the_time_of_the_device(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, [2, 2])
    for each, share in zip(world.watches, (0.6, 0.5, 0.1, 0.6), strict=True):
        each._recorder.share, each._samples = share, 200
    for _ in range(4):
        world.beat()
        world.pass_time(5.0)
    ((_, text),) = world.told
    assert text == "rank 2 is slow, and the others wait for it: it waits 10% of its time in collectives, the others 60%"


def test_a_lost_store_is_told_once_on_each_host(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path, [3, 2])
    for _ in range(3):
        world.beat()
        world.pass_time(5.0)
    world.beat()
    world.now_s += 11.0
    for each in world.watches:
        each._report_lost_store(RuntimeError("Broken pipe\nat tcp"))
    assert [number for number, _ in world.told] == [0, 3]
    assert "cannot reach the store of the ranks, which rank 0 or the launcher keeps: Broken pipe" in world.told[0][1]


def test_the_files_of_a_host_go_with_its_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(watch.os, "access", lambda *_: False)
    monkeypatch.setattr(watch.tempfile, "gettempdir", lambda: str(tmp_path))
    store, hosts = dist.HashStore(), [watch.HostReports("x", number) for number in range(2)]
    for number, each in enumerate(hosts):
        each.write(_report(number=number).to_json())
        assert each.is_sender() == (number == 0)
    hosts[0].send(store, "keys")
    assert sorted(watch.read_hosts(store, "keys")) == [0, 1]
    for each in hosts:
        each.leave()
    assert not [*tmp_path.iterdir()]
    killed = tmp_path / "meshwright-watch-killed"
    killed.mkdir()
    living = watch.HostReports("y", 0)
    assert not killed.exists()
    watch.HostReports("z", 0).leave()
    assert [each.name for each in tmp_path.iterdir()] == ["meshwright-watch-y"]
    living.leave()


def test_without_room_for_files_a_rank_is_a_host_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(watch.os, "access", lambda *_: False)
    monkeypatch.setattr(watch.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    store, hosts = dist.HashStore(), [watch.HostReports("x", number) for number in range(2)]
    for number, each in enumerate(hosts):
        each.write(_report(number=number).to_json())
        assert each.is_sender()
        each.send(store, "keys")
    assert sorted(watch.read_hosts(store, "keys")) == [0, 1]
