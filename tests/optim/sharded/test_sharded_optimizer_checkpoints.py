"""Checkpoints of tensor parallelism times FSDP on 4 ranks go on under FSDP on 2, with states of every form."""

import pytest
import torch

import meshwright as mw
from meshwright.cost import memory
from meshwright.planner import measured_state
from meshwright.store import CheckpointStore, TrainingState
from tests.optim.contestants import BUILD
from tests.optim.plugin_parity import gradient, laid_out, model, whole
from tests.optim.sharded.layouts import full, relative_differences

BEFORE, AFTER = 9, 10  # a projector is made anew (every 7 steps) before and after the checkpoint
SHORT = ("Lamb", "Adafactor", "GaLore 8-bit", "Muon")  # every form of state; the others are long
SAVED_UNDER = [("parallel_mode", ([("tensor", 2), ("data", 2)], None)), "tensor_parallel", "fsdp"]


def job_of(kind, strategy):
    def build(params):
        return BUILD[kind]({str(number): parameter for number, parameter in enumerate(params)})

    return mw.accelerate(model(), build, strategy=strategy)


def move(job, steps):
    """Steps by given gradients, the same on every layout."""
    parameters = dict(job.model.named_parameters())
    for step in steps:
        for name, parameter in parameters.items():
            parameter.grad = laid_out(gradient(name, parameter.shape, step), parameter)
        job.optim.step()
    return parameters


def save_and_go_on(folder, kinds):
    results = {}
    for kind in kinds:
        job = job_of(kind, SAVED_UNDER)
        parameters = move(job, range(BEFORE))
        CheckpointStore(folder / kind).save(TrainingState(job.model, job.optim, step=BEFORE))
        start = {name: full(parameter) for name, parameter in parameters.items()}
        predicted = memory(job.plan.step, job._job.coordinate).optimizer
        assert predicted == measured_state(job.model, job.optim)["optimizer"], kind
        results[kind] = start, whole(move(job, range(BEFORE, BEFORE + AFTER)), job.optim)
    return results if mw.rank() == 0 else None


def load_and_go_on(folder, kinds):
    results = {}
    for kind in kinds:
        job = job_of(kind, ["fsdp"])
        move(job, range(50, 52))  # what is loaded replaces weights and states that have moved
        CheckpointStore(folder / kind).load(TrainingState(job.model, job.optim))
        parameters = move(job, range(BEFORE, BEFORE + AFTER))
        assert all(job.optim.state[parameter]["step"] == BEFORE + AFTER for parameter in parameters.values())
        results[kind] = whole(parameters, job.optim)
    return results if mw.rank() == 0 else None


@pytest.fixture(scope="module")
def runs(ranks, request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    kinds = tuple(BUILD) if request.config.getoption("--parity") == "all" else SHORT
    return ranks(4).run(save_and_go_on, folder, kinds)[0], ranks(2).run(load_and_go_on, folder, kinds)[0]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in SHORT else [pytest.mark.long]) for kind in BUILD]
)
def test_the_next_ten_steps_are_equal(runs, kind):
    (start, expected), found = runs[0][kind], runs[1][kind]
    assert set(found) == set(expected)
    assert max(relative_differences(found, expected, start).values()) < 1e-5
    for name, value in expected.items():
        if value.dtype == torch.uint8:
            assert torch.equal(found[name], value), name
