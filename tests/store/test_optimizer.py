"""Checkpoints of optimizers whose options decide what they keep, loaded where others were asked for."""

from functools import partial

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.data import GlobalOrder
from meshwright.errors import CheckpointError
from meshwright.optim import AdamOptimizer, AdamW8bit, GaLoreAdamW, get_galore_param_groups, inner_optimizer
from meshwright.optim.dtensors import local_tensor
from meshwright.store import CheckpointStore, TrainingState

BATCH, SAMPLES, STOP, MORE = 12, 60, 4, 6


def galore(model, rank):
    groups = get_galore_param_groups(model, weight_decay=0.01, rank=rank or 1, update_proj_gap=3)
    return [{key: value for key, value in group.items() if rank or key != "rank"} for group in groups]


EIGHT_BIT = partial(AdamW8bit, min_8bit_size=64)
OPTIMIZERS = {
    "8-bit": (EIGHT_BIT, None),
    "32-bit": (partial(AdamW8bit, nbits=32), None),
    "one scale": (partial(EIGHT_BIT, block_wise=False), None),
    "rank 2": (GaLoreAdamW, partial(galore, rank=2)),
    "rank 3": (GaLoreAdamW, partial(galore, rank=3)),
    "no rank": (GaLoreAdamW, partial(galore, rank=None)),
}


class Samples(torch.utils.data.Dataset):
    """Vectors of seven, in which the answer is hidden."""

    def __init__(self):
        self.rows = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.rows[index]


def loss_func(inputs, output):
    return (output.squeeze(1) - inputs[:, 0] * inputs[:, 1]).square().mean()


class Run:
    """A model of uneven shapes under one optimizer; ``options`` are a name in ``OPTIMIZERS``."""

    def __init__(self, options, strategy, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 21), nn.Tanh(), nn.Linear(21, 1))
        make, groups = OPTIMIZERS[options]
        self.order = GlobalOrder(SAMPLES, seed=5)
        self.job = mw.accelerate(
            model, make, Samples(), loss_func, strategy=strategy, optim_args={"lr": 1e-2}, optim_param_func=groups,
            dataloader_args={"batch_size": BATCH, "sampler": self.order},
        )  # fmt: skip
        self.state = TrainingState(self.job.model, self.job.optim)

    def train(self, steps):
        self.order.start = self.state.samples_seen
        for _, batch in zip(range(steps), self.job.dataloader, strict=False):
            self.job.step(batch)
            self.state.step += 1
            self.state.samples_seen += BATCH
        return self

    def weights(self):
        return torch.cat([whole(parameter).flatten() for parameter in self.job.model.parameters()])

    def held(self):
        """Everything that a refused load must leave as it is, of this rank."""
        inner = inner_optimizer(self.job.optim)
        states = [inner.state[parameter] for group in inner.param_groups for parameter in group["params"]]
        kept = [value for state in states for value in state.values() if torch.is_tensor(value)]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
        tensors = [local_tensor(value).detach().clone() for value in (*self.job.model.parameters(), *kept)]
        return tensors, groups, self.state.step


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def save_and_go_on(folder, names):
    """For each of these options: the weights at the save, and those of the run that was not interrupted."""
    found = {}
    for name in names:
        run = Run(name, [], seed=3).train(STOP)
        CheckpointStore(folder / name).save(run.state)
        if mw.rank() == 0:
            torch.save(run.job.optim.state_dict(), folder / f"{name}.pt")
        found[name] = run.weights(), run.train(MORE).weights()
    return found


def load_and_go_on(folder, pairs, strategy):
    """Of every pair, with other options than saved: a checkpoint, and a state dict; into runs that have trained."""
    found = []
    for saved, asked in pairs:
        run, other = (Run(asked, strategy, seed=9).train(2) for _ in range(2))
        CheckpointStore(folder / saved).load(run.state)
        CheckpointStore(folder / saved).load(TrainingState(other.job.model))
        other.job.optim.load_state_dict(torch.load(folder / f"{saved}.pt"))
        other.state.samples_seen = STOP * BATCH
        found.append((run.train(MORE).weights(), other.train(MORE).weights()))
    return found


PAIRS = [("8-bit", "32-bit"), ("rank 3", "rank 2")]
MORE_PAIRS = [("32-bit", "8-bit"), ("8-bit", "one scale"), ("rank 2", "rank 3"), ("one scale", "8-bit")]


@pytest.mark.parametrize(
    ("strategy", "pairs"), [(["fsdp"], PAIRS), pytest.param(["zero1"], PAIRS + MORE_PAIRS, marks=pytest.mark.long)]
)
def test_options_of_a_checkpoint_are_taken_over_with_its_states(ranks, tmp_path, strategy, pairs):
    (expected,) = ranks(1).run(save_and_go_on, tmp_path, sorted({saved for saved, _ in pairs}))
    found = ranks(2).run(load_and_go_on, tmp_path, pairs, strategy)[0]
    for (saved, asked), both in zip(pairs, found, strict=True):
        start, end = expected[saved]
        for weights in both:
            apart = (weights - end).norm() / (end - start).norm()
            # Where rounding tips a gradient over, a moment in 8 bits takes the next code.
            assert apart < (1e-4 if saved.startswith("rank") else 1e-2), (saved, asked, apart)


def refusals(folder):
    """What is said where states cannot be gone on with, and whether everything is as it was."""
    said = []
    for saved, asked in (("no rank", "rank 2"), ("rank 2", "8-bit")):
        run = Run(asked, ["fsdp"], seed=9).train(2)
        before = run.held()
        with pytest.raises(CheckpointError) as caught:
            CheckpointStore(folder / saved).load(run.state)
        after = run.held()
        assert all(map(torch.equal, before[0], after[0]))
        assert before[1:] == after[1:]
        run.train(1)
        said.append(str(caught.value))
    return said


def test_states_that_do_not_fit_are_refused_before_anything_is_changed(ranks, tmp_path):
    ranks(1).run(save_and_go_on, tmp_path, ["no rank", "rank 2"])
    first, second = ranks(2).run(refusals, tmp_path)
    assert first == second
    assert all(words in first[0] for words in ("exp_avg[33, 2]", "exp_avg[33, 7]")), first[0]
    assert "Expected AdamW8bit. Got GaLoreAdamW." in first[1]


def test_states_in_8_bits_are_refused_by_adam_when_they_are_loaded():
    weight = nn.Parameter(torch.ones(4, 64))
    weight.grad = torch.ones_like(weight)
    saved, own = EIGHT_BIT([weight]), AdamOptimizer([weight])
    saved.step()
    own.step()
    moment = own.state[weight]["exp_avg"].clone()
    with pytest.raises(CheckpointError, match=r"not those of an Adam.*Got .*exp_avg_codes"):
        own.load_state_dict(saved.state_dict())
    assert torch.equal(own.state[weight]["exp_avg"], moment)
    assert "nbits" not in own.param_groups[0]
    own.step()
