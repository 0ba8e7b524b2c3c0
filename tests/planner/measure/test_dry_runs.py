"""Successive halving against a clock of its own, in ranks that live, and in processes that may die."""

import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import meshwright as mw
from meshwright.errors import ConfigError, StrategyError
from meshwright.planner.measure import (
    Outcome,
    measure,
    measured_best,
    run_in_processes,
    step_times,
)
from meshwright.strategy import Strategy
from tests import tiny


def plans(*names):
    return [types.SimpleNamespace(strategy=name, forecast=None) for name in names]


class Machine:
    """Runs that take what a table says, and a clock that they move on."""

    def __init__(self, step_s, start_s=1.0):
        self.now, self.step_s, self.start_s, self.runs = 0.0, step_s, start_s, []

    def run(self, plan, num_steps, limit_s):
        seconds = self.step_s[plan.strategy]
        self.runs.append((plan.strategy, num_steps))
        if isinstance(seconds, str):
            self.now += self.start_s
            return Outcome((), self.start_s, seconds)
        ended = min(num_steps, int((limit_s - self.start_s) / seconds))
        took = self.start_s + seconds * ended
        self.now += took
        return Outcome((seconds,) * ended, took, None if ended else "late", ended < num_steps)

    def measure(self, named, limit_s, **options):
        return measure(plans(*named), self.run, limit_s, clock=lambda: self.now, **options)


def test_the_faster_half_runs_twice_as_long():
    machine = Machine({"a": 0.4, "b": 0.1, "c": "out of memory", "d": 0.2, "e": 0.3})
    results = machine.measure("abcde", 1000)
    assert [each.plan.strategy for each in results] == ["b", "d", "e", "a", "c"]
    assert machine.runs == [*((name, 3) for name in "abcde"), *((name, 6) for name in "bde"), ("b", 12), ("d", 12)]
    assert results[-1].error == "out of memory"
    assert results[-1].step_time_s is None
    few = Machine({"a": 0.4, "b": 0.1})
    assert len(few.measure("ab", 1000, num_candidates=1)) == 1


def test_time_is_kept():
    machine = Machine(dict.fromkeys("abcdef", 0.5))
    results = machine.measure("abcdef", 9)
    assert machine.now <= 9
    assert 2 <= len(results) < 6
    late = Machine({"a": 0.1, "b": 5.0, "c": 0.1})
    assert late.measure("abc", 8)[0].plan.strategy == "a"
    with pytest.raises(ConfigError, match=r"too short to run one candidate.*one takes 1\.0 seconds or more"):
        Machine({"a": 5.0}).measure("a", 2)
    for wrong in (0, -3, True, "1", float("nan")):
        with pytest.raises(ConfigError, match="not a duration"):
            Machine({}).measure("", wrong)


def test_a_slow_one_leaves_half_of_the_time_to_the_others():
    machine = Machine({"a": 4.0, "b": 0.3, "c": 50.0, "d": 0.1})
    results = {each.plan.strategy: each for each in machine.measure("abcd", 20)}
    assert machine.now <= 20
    assert (results["a"].times_s, results["a"].error) == ((4.0, 4.0), None)  # of three
    assert (results["c"].times_s, results["c"].error) == ((), "late")
    assert results["d"].num_rounds > 1


def test_all_steps_count_and_not_those_of_the_last_round_alone():
    """In the last round the better one met with other programs."""
    times = {"a": [(1.0,) * 3, (1.0,) * 3, (1.3,) * 3], "b": [(1.2,) * 3] * 3}
    runs = {name: iter(each) for name, each in times.items()}
    results = measure(
        plans("a", "b"), lambda plan, steps, limit: Outcome(next(runs[plan.strategy]), 1.0), 50, clock=lambda: 0.0
    )
    assert [(each.plan.strategy, each.step_time_s, each.num_steps) for each in results] == [
        ("a", 1.0, 9),
        ("b", 1.2, 9),
    ]


def late_on_both():
    """Rank 0 decides: rank 1 has all the time in the world."""
    limit_s, steps = (1.0 if mw.rank() == 0 else 1e9), iter(range(100))
    times = step_times(lambda: time.sleep(0.4 if next(steps) else 0.01), 50, torch.device("cpu"), limit_s)
    return len(times), step_times(lambda: None, 3, torch.device("cpu"), 0.0 if mw.rank() == 0 else 1.0)


def test_ranks_end_after_the_same_step_when_time_is_up(ranks):
    (first, none), (second, none_there) = ranks(2).run(late_on_both)
    assert first == second
    assert 1 <= first <= 2
    assert none == none_there == ()


def test_the_best_says_why_and_nothing_is_chosen_where_all_fail():
    machine = Machine({"a": 0.4, "b": 0.1})
    best, reason, results = measured_best(plans("a", "b"), machine.run, 1000)
    assert best.strategy == "b"
    assert "chose b: the fastest of 2 that were run (of the 2 predicted to be best), 0.1 s a step over " in reason
    assert "; a 0.4 s over " in reason
    assert len(results) == 2
    with pytest.raises(StrategyError, match="a: crashed"):
        measured_best(plans("a"), Machine({"a": "crashed"}).run, 10)


class NotSharded(torch.nn.Module):
    """Refuses to run sharded over all ranks, as a user's model may."""

    def __init__(self):
        super().__init__()
        self.inner = tiny.plain()

    def forward(self, x):
        if isinstance(self, FSDPModule):
            raise RuntimeError("not when sharded")
        return self.inner(x)


def live():
    model = NotSharded()
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    arguments = {"optim_func": torch.optim.AdamW, "dataset": tiny.Tokens(), "loss_func": tiny.loss_func}
    arguments |= {"dataloader_args": {"batch_size": 4}}
    before = torch.get_rng_state()
    try:
        mw.accelerate(model, **arguments, time_limit=1e-4)
    except ConfigError as error:
        too_short = str(error)
    assert torch.equal(torch.get_rng_state(), before)
    result = mw.accelerate(model, **arguments, time_limit=60.0, included=["checkpoint"])
    after = {name.replace("module.", "", 1): value for name, value in result.model.named_parameters()}
    same = all(torch.equal(after[name].detach(), value) for name, value in weights.items())
    loss = result.step(next(iter(result.dataloader))).loss.item()
    return too_short, same, loss, result.strategy.names


class Centred(torch.nn.Module):
    """A loss with a weight that trains and statistics."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls = torch.nn.Parameter(torch.ones(())), 0
        self.register_buffer("mean", torch.zeros(tiny.VOCAB))

    def forward(self, inputs, logits):
        self.calls += 1
        self.mean.lerp_(logits.detach().mean((0, 1)), 0.5)
        return tiny.loss_func(inputs, (logits - self.mean) * self.weight)


CENTRED = Centred()


def through_another(inputs, logits):
    return CENTRED(inputs, logits)


def beside():
    """What the functions use stays as it was; a model that cannot be copied, and one that fails on one rank."""
    model, closed = tiny.plain(), Centred()
    decay = lambda: 1e-3 * sum(each.square().sum() for each in model.parameters())  # noqa: E731
    arguments = {"optim_func": torch.optim.AdamW, "dataset": tiny.Tokens(), "dataloader_args": {"batch_size": 4}}
    losses = (lambda x, y: through_another(x, y) + closed(x, y) + decay(), CENTRED)
    kept = []
    for loss in losses:
        model = tiny.plain()
        mw.accelerate(model, loss_func=loss, **arguments, time_limit=60.0, included=["zero1"])
        for each in (CENTRED, closed):
            kept.append((each.calls, each.mean.abs().sum().item(), each.weight.item(), each.weight.grad))
        kept.append((0, 0.0, 1.0, next((p.grad for p in model.parameters() if p.grad is not None), None)))
    locked = tiny.plain()
    locked.lock = threading.Lock()
    with pytest.raises(mw.ModelError, match=r"cannot be copied.*_thread\.lock.*leave time_limit out"):
        mw.accelerate(locked, loss_func=tiny.loss_func, **arguments, time_limit=60.0)
    return kept


@pytest.mark.long
def test_what_functions_use_beside_the_model_stays_as_it_was(ranks):
    for kept in ranks(2).run(beside):
        assert kept == [(0, 0.0, 1.0, None)] * 6


ALONE = """
import sys
import torch
import meshwright as mw
from meshwright.training import trials
from tests import tiny
trials._PATIENCE_S = 1.0
mw.init_distributed()
class Fails(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tiny.plain()
    def forward(self, x):
        if mw.rank() == 1 and not isinstance(x, torch._subclasses.FakeTensor):
            raise MemoryError("no room here")
        return self.inner(x)
arguments = dict(optim_func=torch.optim.AdamW, dataset=tiny.Tokens(), dataloader_args={"batch_size": 4})
mw.accelerate(Fails(), loss_func=tiny.loss_func, **arguments, time_limit=60.0, included=[])
"""


@pytest.mark.long
def test_a_rank_that_fails_alone_says_so_and_ends_the_program(tmp_path):
    """The others wait for it in a collective of training: it must not meet them in another one, nor stay."""
    (tmp_path / "alone.py").write_text(ALONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}  # of the tests: the script lies elsewhere
    ended = subprocess.run(
        [*command, str(tmp_path / "alone.py")], capture_output=True, text=True, timeout=300, env=here
    )
    assert ended.returncode == 1
    assert "failed on some ranks while others wait for them" in ended.stderr
    assert "parallel_mode(data=2): MemoryError: no room here" in ended.stderr


def test_live_ranks_choose_by_running_copies(ranks):
    every = ranks(2).run(live)
    for too_short, same, _, names in every:
        assert "too short to run one candidate" in too_short
        assert same
        assert names == ("parallel_mode", "checkpoint")  # the sharded candidates failed
    assert every[0][2] == every[1][2]


ENTRY = """
import os, pathlib, signal, time
def build(strategy, num_micro_batches):
    if "zero1" in strategy.names:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
        os.kill(os.getpgrp(), signal.SIGKILL)  # the launcher, who leads this group
        time.sleep(600)
    if "zero2" in strategy.names:
        raise MemoryError("no room")
    if "checkpoint" in strategy.names:
        os._exit(7)
    if "fsdp" in strategy.names:
        time.sleep(600)
    return lambda: time.sleep(0.01)
"""


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
def test_processes_that_fail_crash_or_hang_are_results(tmp_path):
    (tmp_path / "entry.py").write_text(ENTRY)
    run = run_in_processes(f"{tmp_path}/entry.py:build", nproc=1)

    def outcome(*methods, limit_s=120.0):
        plan = types.SimpleNamespace(
            strategy=Strategy(["parallel_mode", *methods]), step=types.SimpleNamespace(num_micro_batches=1)
        )
        return run(plan, 2, limit_s)

    fine = outcome()
    assert len(fine.times_s) == 2
    assert 0.01 <= min(fine.times_s) < 0.2
    assert outcome("zero2").error == "MemoryError: no room"
    assert outcome("checkpoint").times_s == ()
    assert "-9" in outcome("zero1").error  # its launcher, as when a machine's memory is full
    orphan, end_s = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while is_alive(orphan) and time.monotonic() < end_s:
        time.sleep(0.2)
    assert not is_alive(orphan)
    hung = outcome("fsdp", limit_s=15.0)
    assert hung.timed_out
    assert hung.times_s == ()
