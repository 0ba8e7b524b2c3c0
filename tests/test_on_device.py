"""``pytest --device``: what runs there, and that ranks of a pool compute there and answer from the host."""

import os
import pickle
from pathlib import Path

import torch

from meshwright.runtime import init_distributed, shutdown_distributed
from tests import on_device
from tests.methods import pair_runs
from tests.methods.pair_runs import Case
from tests.pool import free_port

TESTS = Path(__file__).parent
CASE = Case(("grad_clip",), 1)


def test_files_and_tests_that_are_named_exist():
    assert len(set(on_device.FILES)) == len(on_device.FILES)
    for name in on_device.FILES:
        assert (TESTS / name).is_file(), name
    for test in (*on_device.ON_HOST, *on_device.NOT_ON_STAND_IN):
        file, _, name = test.partition("::")
        assert file in on_device.FILES, test
        assert f"def {name}(" in (TESTS / file).read_text(), test


def test_without_a_gpu_one_line_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert on_device.why_not("cpu") is on_device.why_not("stand-in") is None
    told = on_device.why_not("cuda")
    assert told.startswith("--device cuda: torch sees no GPU")
    assert "\n" not in told


def test_what_a_test_makes_is_on_the_device():
    with on_device.default_device("stand-in"):
        made = [torch.randn(2), torch.tensor([1.0, 2.0]), torch.arange(2), torch.nn.Linear(2, 2).weight]
        assert all(each.is_cuda for each in made)
    assert not torch.ones(1).is_cuda


def train_there(port):
    shutdown_distributed()
    before = {name: os.environ[name] for name in ("MASTER_PORT", "LOCAL_RANK")}
    os.environ["MASTER_PORT"] = str(port)
    with on_device.rank_of_pool("stand-in", 1) as backend:
        init_distributed(backend=backend, timeout_s=60.0)
        outcome = pair_runs.train(CASE)
        packed = on_device.packed((outcome, all(each.is_cuda for each in outcome[1].values())))
        shutdown_distributed()
    os.environ.update(before, MASTER_PORT=str(free_port()))
    return pickle.loads(packed)  # here: the pool pauses this process, which shares the tensors' memory


def test_a_rank_computes_there_and_answers_from_the_host(ranks):
    ((outcome, was_there),) = ranks(1).run(train_there, free_port())
    assert was_there
    assert pair_runs.worst_difference(CASE, [outcome]) < pair_runs.FP32_LIMIT
