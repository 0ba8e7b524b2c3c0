"""Half precision with fp32 masters, saved and restored with torch's own calls: as if nothing had been interrupted."""

import io

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import CheckpointError

BATCHES = torch.randn(14, 8, 7, generator=torch.Generator().manual_seed(5))
DILOCO = {"rule": "diloco", "sync_every": 2}


class Mlp(nn.Module):
    """Blocks of two layers, which a tensor axis can split."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def loss_func(inputs, output):
    return (output - inputs[:, :3]).square().mean()


def accelerate(strategy, optim_func=torch.optim.AdamW, model=None):
    torch.manual_seed(3)
    return mw.accelerate(
        model or Mlp(), optim_func, None, loss_func, strategy=strategy, optim_args={"lr": 1e-3},
        sample_batch=torch.randn(4, 7), batch_size=8,
    )  # fmt: skip


def train(job, batches):
    return [job.step(batch.chunk(job.num_replicas)[job.replica]).loss.item() for batch in batches]


def in_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def resumed(strategy, optim_func):
    """Losses of a run that is not interrupted, and of those that are after 4 of its 14 steps, one for each order."""
    job = accelerate(strategy, optim_func)
    train(job, BATCHES[:4])
    saved = in_a_file({"model": job.model.state_dict(), "optim": job.optim.state_dict()})
    found = [train(job, BATCHES[4:])]
    for order in ORDERS:
        job = accelerate(strategy, optim_func)
        train(job, BATCHES[2:3])
        read = in_a_file(saved)  # what an optimizer loads it goes on to change
        for part in order:
            getattr(job, part).load_state_dict(read[part])
        found.append(train(job, BATCHES[4:]))
    return found


def resumed_each(strategies, optim_func):
    return [resumed(strategy, optim_func) for strategy in strategies]


ORDERS = (("model", "optim"), ("optim", "model"))
STRATEGIES = [
    ["parallel_mode", ("half", "bf16")],
    ["parallel_mode", ("half", "fp16")],
    ["parallel_mode", ("half", "bf16"), ("offload", "optimizer")],
    [("parallel_mode", {"tensor": 2}), "tensor_parallel", ("half", "bf16")],
    [("parallel_mode", {"replica": 2}), ("half", "bf16"), ("outer", DILOCO)],
]


@pytest.mark.parametrize(
    "optim_func",
    [pytest.param(torch.optim.AdamW, id="adamw", marks=pytest.mark.long), pytest.param(mw.optim.Lamb, id="lamb")],
)
def test_a_run_saved_and_restored_as_torch_does_goes_on_exactly(ranks, optim_func):
    for every in ranks(2).run(resumed_each, STRATEGIES, optim_func):
        for losses, *others in every:
            assert others == [losses] * len(ORDERS)
            assert len(set(losses)) == len(losses)


def gathered_by(strategy, folder):
    """Save whole states at rank 0 in the middle of a run; the losses that follow."""
    job = accelerate(strategy)
    train(job, BATCHES[:4])
    saved = job.optim.gathered_state_dict()
    model = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in weights(job).items()}
    if mw.rank() == 0:
        torch.save({"optim": saved, "model": model}, folder / "saved.pt")
    return train(job, BATCHES[4:])


def weights(job):
    return getattr(job.model, "module", job.model).state_dict()


def taken_by(strategy, folder):
    saved = torch.load(folder / "saved.pt", weights_only=False)
    model = Mlp()
    model.load_state_dict(saved["model"])
    job = accelerate(strategy, model=model)
    job.optim.take_laid_out(job.optim.laid_out(saved["optim"]))
    return train(job, BATCHES[4:])


def test_gathered_masters_are_laid_out_anew(ranks, tmp_path):
    split = [("parallel_mode", {"tensor": 2}), "tensor_parallel", ("half", "bf16")]
    whole = ["parallel_mode", ("half", "bf16")]
    losses = ranks(2).run(gathered_by, split, tmp_path)[0]
    assert ranks(2).run(taken_by, split, tmp_path)[0] == losses
    other = ranks(2).run(taken_by, whole, tmp_path)[0]
    torch.testing.assert_close(other, losses, rtol=2e-2, atol=0)  # bf16 in other shapes


def misfits():
    job, other = accelerate(["parallel_mode", ("half", "bf16")]), accelerate(["parallel_mode", ("half", "bf16")])
    saved = other.optim.state_dict()
    state = saved["inner"]["state"]
    key = next(iter(state))
    state[key] = {**state[key], "master": state[key]["master"][:1]}
    before = [parameter.clone() for parameter in job.model.parameters()]
    with pytest.raises(CheckpointError, match="not for these parameters"):
        job.optim.load_state_dict(saved)
    return all(map(torch.equal, before, job.model.parameters()))


def test_masters_of_other_shapes_are_refused(ranks):
    assert all(ranks(1).run(misfits))
