"""Stacked matrices of which there are fewer than ranks: cut inside of the matrices, they train as one process does."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import meshwright as mw
from meshwright.cost import memory
from meshwright.methods.zero_config import shard_dim
from meshwright.planner import measured_state
from meshwright.store import CheckpointStore, TrainingState
from tests.methods.test_traffic import Counter

STEPS, SAMPLES = 10, 8
BATCH = torch.randn(STEPS + 2, SAMPLES, 5, 7, generator=torch.Generator().manual_seed(5))


class Experts(nn.Module):
    """Stacked matrices, of which each token takes a mixture; the dims of some do not divide among ranks."""

    def __init__(self, number, width=16, inner=20):
        super().__init__()
        self.router = nn.Linear(width, number)
        self.up = nn.Parameter(torch.randn(number, width, inner) * 0.2)
        self.down = nn.Parameter(torch.randn(number, inner, width) * 0.2)
        self.odd = nn.Parameter(torch.randn(number, 3, width + 1) * 0.2)

    def forward(self, x):
        share = self.router(x).softmax(-1)
        hidden = torch.einsum("btd,edf->betf", x, self.up).tanh()
        out = torch.einsum("betf,efd->betd", hidden, self.down)
        return x + torch.einsum("betd,bte->btd", out, share) + self.odd.sum() * 0.1


class Model(nn.Module):
    def __init__(self, number=2):
        super().__init__()
        self.first, self.last = nn.Linear(7, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(Experts(number) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def loss_func(inputs, output):
    return (output.float() - inputs[..., :3].float().sin()).square().mean()


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
    "lamb": (mw.optim.Lamb, {"lr": 3e-3}),
    "adafactor": (mw.optim.Adafactor, {"lr": 3e-3, "relative_step": False}),
    "came": (mw.optim.CAME, {"lr": 3e-3}),
    "8bit": (mw.optim.AdamW8bit, {"lr": 3e-3}),
}


def build(strategy, optimizer="sgd", micro=1, number=2):
    torch.manual_seed(1)
    optim_func, optim_args = OPTIMIZERS[optimizer]
    return mw.accelerate(
        Model(number), optim_func, None, loss_func, strategy=strategy, optim_args=optim_args, batch_size=SAMPLES,
        num_micro_batches=micro, sample_batch=BATCH[0, :2],
    )  # fmt: skip


def own_part(job, step):
    rows = SAMPLES // job.num_replicas
    return BATCH[step][job.replica * rows :][:rows].clone()


def whole(model):
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def train(strategy, optimizer="sgd", micro=1, number=2):
    """Weights and losses of a run, and in what predictions differ from what is held and sent."""
    job = build(strategy, optimizer, micro, number)
    results = [job.step(own_part(job, step)) for step in range(STEPS - 1)]
    with Counter() as counter:
        results.append(job.step(own_part(job, STEPS - 1)))
    predicted = memory(job.plan.step, job._job.coordinate)
    wrong = [
        f"{kind}: {getattr(predicted, kind)} {size}"
        for kind, size in measured_state(job.model, job.optim).items()
        if getattr(predicted, kind) != size
    ]
    sent = {}
    for traffic in job.plan.step.traffic:
        sent[traffic.kind] = sent.get(traffic.kind, 0) + traffic.bytes_per_step
    # Rules of whole matrices add up numbers over their shards, which is not predicted.
    wrong += [f"sent: {sent} {counter.bytes}"] if sent != counter.bytes and optimizer in ("sgd", "adamw") else []
    placed = {name: p.placements for name, p in job.model.named_parameters() if isinstance(p, DTensor)}
    return whole(job.model), [result.loss.item() for result in results], wrong, placed


def train_all(runs):
    return [train(*run) for run in runs]


RUNS = {
    "fsdp": (["fsdp"], "sgd"),
    "zero2": (["zero2", ("offload", "optimizer")], "sgd", 2),
}
MORE = {
    "zero1": (["zero1"], "sgd", 2),
    "fsdp_checkpoint": (["fsdp", "checkpoint"], "sgd", 2),
    "half": (["fsdp", ("half", "bf16")], "adamw"),
    # One matrix, and two replicas of its shards.
    "hybrid": ([("parallel_mode", {"axes": [("zero", 2), ("data", 2)]}), "fsdp"], "sgd", 1, 1),
    "hybrid_twice": ([("parallel_mode", {"axes": [("zero", 2), ("data", 2)]}), "zero2"], "sgd", 2, 1),
    "nearby": ([("fsdp", {"reshard_after_forward": 2})], "sgd"),
    "ema": (["fsdp", ("ema", {"decay": 0.9})], "sgd"),
    "offload": (["fsdp", "offload"], "sgd"),
    **{f"optimizer_{name}": (["fsdp"], name) for name in OPTIMIZERS if name != "sgd"},
}


def distance(first, second):
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.parametrize("runs", [RUNS, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_every_sharding_trains_as_one_process_does(ranks, runs):
    alone = ranks(1).run(train_all, [([], run[1], 1, *run[3:]) for run in runs.values()])[0]
    found = ranks(4).run(train_all, [*runs.values()])
    for (name, run), expected, *each in zip(runs.items(), alone, *found, strict=True):
        weights, losses, _, _ = expected
        torch.manual_seed(1)
        start = dict(Model(*run[3:]).named_parameters())
        moved = distance(weights, start)
        for theirs, their_losses, wrong, placed in each:
            assert wrong == [], name
            if "half" not in name and run[1] != "8bit":
                assert distance(theirs, weights) <= 1e-5 * moved, name
            assert their_losses == pytest.approx(losses, rel=2e-2 if "half" in name else 1e-4), name
            own = Shard(0) if name == "nearby" else Shard(1)
            assert placed["layers.0.up"][-1] == own, name
            assert placed["layers.0.odd"][-1] == Shard(0), name


def stop_and_go_on(directory, strategies):
    """Save under the first strategy, load under each, and go on: the losses."""
    store, found = CheckpointStore(directory), []
    for number, strategy in enumerate(strategies):
        job = build(strategy, "adamw")
        state = TrainingState(job.model, job.optim)
        if number == 0 and mw.world_size() == 4:
            for step in range(3):
                job.step(own_part(job, step))
            store.save(state)
        else:
            store.load(state)
        found.append([job.step(own_part(job, step)).loss.item() for step in range(3, 6)])
    return found


def test_checkpoints_go_from_ranks_to_ranks(ranks, tmp_path):
    (first, *others), *_ = ranks(4).run(stop_and_go_on, tmp_path, [["fsdp"], ["fsdp"], ["zero1"], []])
    for losses in (*others, *ranks(2).run(stop_and_go_on, tmp_path, [["fsdp"], []])[0]):
        assert losses == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "parts", "dim"),
    [
        ((8, 64, 32), 8, 0), ((8, 64, 32), 16, 1), ((8, 60, 32), 16, 2), ((8, 60, 30), 16, 0), ((8, 64), 16, 0),
        ((8,), 16, 0), ((), 16, 0), ((8, 0, 32), 16, 2), ((9, 64, 32), 8, 0),
    ],
)  # fmt: skip
def test_the_dim_that_is_cut(shape, parts, dim):
    assert shard_dim(shape, parts) == dim
