"""Tensors are lent to modules for the time of a call."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import meshwright as mw
from meshwright.nn import call_with, run_with
from tests import tiny


class Twice(nn.Module):
    """A module under two names, a weight of two modules, a buffer, and a weight that is computed."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a
        self.blocks = nn.ModuleList([nn.BatchNorm1d(4)] * 3)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.a.weight
        self.computed = weight_norm(nn.Linear(4, 4))

    def forward(self, x, scale=1.0):
        x = self.computed(self.tied(self.b(self.a(x))))
        for block in self.blocks:
            x = block(x)
        return x * scale


def own(module):
    return {
        (id(each), name): tensor
        for each in module.modules()
        for name, tensor in (*each._parameters.items(), *each._buffers.items())
    }


@pytest.mark.parametrize("fails", [False, True])
def test_modules_get_their_own_tensors_back(fails):
    torch.manual_seed(0)
    module, other, x = Twice(), Twice(), torch.randn(8, 4)
    before = own(module)
    state = dict(other.state_dict(keep_vars=True))
    state = {name: state[name] for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if fails:
        with pytest.raises(RuntimeError):
            call_with(module, state, (x[:, :3],))
    else:
        assert torch.equal(call_with(module, state, (x,), {"scale": 2.0}), other(x, scale=2.0))
        assert torch.equal(run_with(lambda model, inputs: model(inputs) * 2, module, state, x), other(x, scale=2.0))
    after = own(module)
    assert before.keys() == after.keys()
    assert all(after[place] is tensor for place, tensor in before.items())


def test_what_has_no_name_stays():
    module, x = Twice().eval(), torch.randn(8, 4)
    lent = call_with(module, {"a.weight": torch.zeros(4, 4)}, (x,))
    assert torch.equal(lent, lent[:1].expand_as(lent))
    assert not torch.equal(module(x), lent)


def teacher():
    model = tiny.build("plain")
    model.register_buffer("calls", torch.zeros(()))  # DDP takes rank 0's in every forward
    return model


def distilled(strategy):
    """Losses of two steps towards a teacher that is distributed, and how far its answers are from a plain one's."""
    ids, apart = torch.arange(2 * tiny.SEQ_LEN).view(2, -1) % tiny.VOCAB, []
    sharded, plain = mw.accelerate(teacher(), strategy=strategy).model, teacher()

    def loss_func(inputs, output):
        with torch.no_grad():
            answer = sharded(inputs)
        apart.append(torch.dist(answer, plain(inputs)).item())
        return (output - answer).square().mean()

    job = mw.accelerate(
        tiny.build("plain", seed=4), torch.optim.SGD, None, loss_func, strategy=["fsdp"], optim_args={"lr": 0.1},
        sample_batch=ids,
    )  # fmt: skip
    losses = [job.step(ids).loss.item() for _ in range(2)]
    return losses, apart


@pytest.mark.parametrize("strategy", [["fsdp"], [("parallel_mode", {"data": 2})]], ids=["fsdp", "data"])
def test_a_distributed_model_in_the_loss_is_not_run_without_data(ranks, strategy):
    """Predictions would leave it with tensors that hold nothing, on rank 0 alone, or wait for the others."""
    for losses, apart in ranks(2).run(distilled, strategy):
        assert max(apart) < 1e-5
        assert len(apart) == 2
        assert losses[1] < losses[0]
