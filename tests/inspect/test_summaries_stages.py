"""Inspection over the stages of a pipeline: complete, and in the order of one process."""

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.inspect import inspect_model, inspect_tensor, record_tensor

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))


class Layer(nn.Module):
    def __init__(self, width, index):
        super().__init__()
        self.inner, self.index = nn.Linear(width, width), index

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        if self.index != 2:  # the stage of the third block may have nothing to tell
            record_tensor(hidden, "hidden", group="layer" if self.index % 2 else None)
        return x + hidden


class Model(nn.Module):
    """Records in front of its blocks, in them, between them, and behind."""

    def __init__(self, width=6):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, index) for index in range(4))
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = record_tensor(self.first(x), "entering")
        for layer in self.layers:
            x = layer(x)
            record_tensor(x, "between")
        return record_tensor(self.last(x), "leaving")


def loss(inputs, output):
    squares = record_tensor(output.square().mean(1), "squares")
    return record_tensor(squares.mean(), "loss")


def tables(step):
    with inspect_tensor() as inspector:
        step()
        step()
    return inspector.get_summary(), inspector.summary


def plain_tables():
    model = Model()

    def step():
        model.zero_grad()
        loss(ROWS, model(ROWS)).backward()

    return tables(step)[0], inspect_model(model, "*weight", "model.")


def job_of(strategy):
    return mw.accelerate(
        Model(), torch.optim.SGD, None, loss, strategy=strategy, optim_args={"lr": 0.0}, num_micro_batches=2,
        sample_batch=ROWS[:2],
    )  # fmt: skip


def by_schedule(*strategy):
    """Each replica's part of the rows, cut into micro-batches."""
    job = job_of(strategy)
    part = ROWS.chunk(job.num_replicas)[job.replica]
    summary, own = tables(lambda: job.step(part))
    return summary, inspect_model(job.model, "*weight", "model."), [line["name"] for line in own]


def by_hand(*strategy):
    job = job_of(strategy)

    def step():
        job.optim.zero_grad()
        job.loss_func(ROWS, job.model(ROWS)).backward()

    summary, _ = tables(step)
    with inspect_tensor() as inspector:
        record_tensor(ROWS, "outside")
        job.evaluate(ROWS)
    return summary, inspect_model(job.model, "*weight", "model."), [x["name"] for x in inspector.get_summary()]


def two_ranks():
    pipeline = ("parallel_mode", {"pipeline": 2})
    return {
        "1f1b": by_schedule(pipeline, "pipeline_parallel"),
        "v": by_schedule(pipeline, ("pipeline_parallel", {"schedule": "zbv"}), "checkpoint"),
        "by hand": by_hand(pipeline, "pipeline_parallel"),
        "v by hand": by_hand(pipeline, ("pipeline_parallel", {"schedule": "zbv"})),
    }


def assert_same(found, expected, replicas=1):
    """Lines of one process; each replica's loss is that of its own samples, so gradients and 0-dim tensors differ."""
    assert [line["name"] for line in found] == [line["name"] for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["shape"] == theirs["shape"], mine["name"]
        for key in ("max", "min", "std", "mean"):
            if theirs["shape"] != ():
                assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), (mine["name"], key)
        for key in ("grad_std", "grad_mean"):
            if theirs["shape"] != () and theirs[key] is not None:
                wanted = pytest.approx(theirs[key] * replicas, rel=1e-4, abs=1e-7)
                assert mine[key] == wanted, (mine["name"], key)


def check(results, replicas=1):
    recorded, parameters = plain_tables()
    for summary, inspected, _ in results:
        assert summary == results[0][0], "equal on every rank"
        assert_same(summary, recorded, replicas)
        assert_same(inspected, parameters)
        assert summary[-1]["mean"] == pytest.approx(recorded[-1]["mean"], rel=1e-5)


def test_stages_tell_what_one_process_tells(ranks):
    every = ranks(2).run(two_ranks)
    for case in every[0]:
        check([result[case] for result in every])
    own = [result["1f1b"][2] for result in every]
    assert own[0][:2] == ["entering", "hidden"]
    assert "leaving" not in own[0]
    assert own[1][-1] == "loss"
    assert every[0]["by hand"][2][:3] == ["0.outside", "0.entering", "0.hidden"]
    assert every[0]["by hand"] == every[1]["by hand"]


@pytest.mark.long
def test_replicas_of_stages_are_taken_together(ranks):
    mesh = ("parallel_mode", {"pipeline": 2, "zero": 2})
    check(ranks(4).run(by_schedule, mesh, "pipeline_parallel", "fsdp"), replicas=2)
