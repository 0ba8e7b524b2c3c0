"""A deep copy of replicas trains as they do, over the same ranks, and apart from them."""

import copy

import pytest
import torch
from torch import nn

import meshwright as mw
from tests import tiny
from tests.methods.pipeline_runs import build

STEPS = 10


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(7, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(self.frozen(self.first(x).tanh()).tanh())


def batches():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(STEPS, 8, 7, generator=generator)


def train(model, no_sync, unfreezes, share=1, rank=0):
    """Steps of two micro-batches, each with its own part of the samples; the frozen layer may train from the fifth."""
    optim = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    frozen = next(p for name, p in model.named_parameters() if "frozen.weight" in name)
    for step, batch in enumerate(batches()):
        frozen.requires_grad_(unfreezes and step >= 4)
        own = batch.chunk(share)[rank]
        first, second = own[::2], own[1::2]
        optim.zero_grad()
        with no_sync():
            (model(first).square().mean() / 2).backward()
        loss = model(second).square().mean() / 2
        loss.backward(retain_graph=True)
        loss.backward()  # DDP alone would leave this one to each rank
        optim.step()
    return torch.cat([parameter.detach().clone().flatten() for parameter in model.parameters()])


def runs(strategy, unfreezes):
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    job = mw.accelerate(
        model, torch.optim.SGD, None, lambda x, out: out.square().mean(), strategy=strategy, optim_args={"lr": 0.1},
        sample_batch=torch.ones(4, 7),
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(job.model.module.get_parameter(name))
    twin = copy.deepcopy(job.model)
    assert twin.process_group is job.model.process_group
    assert twin.module is not job.model.module
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    copied = train(twin, twin.no_sync, unfreezes, mw.world_size(), mw.rank())
    assert all(map(torch.equal, before, job.model.parameters()))  # the copy has weights of its own
    job.model.last.weight.requires_grad_(False)  # and is not asked what of the model is frozen
    twin(batches()[0, :4])
    job.model.last.weight.requires_grad_(True)
    original = train(job.model, job.no_sync, unfreezes, mw.world_size(), mw.rank())
    return copied, original, train(plain, torch.enable_grad, unfreezes)


def test_a_copy_of_replicas_trains_as_they_do(ranks):
    results = ranks(2).run(runs, ["parallel_mode"], unfreezes=True)
    for copied, original, plain in results:
        assert torch.equal(copied, results[0][0])
        torch.testing.assert_close(copied, plain, rtol=0, atol=1e-6)
        torch.testing.assert_close(original, plain, rtol=0, atol=1e-6)


def test_a_copy_compresses_its_averages_as_the_model_does(ranks):
    bits = {"reduce": "int8", "min_numel": 16, "block_size": 32}
    results = ranks(2).run(runs, ["parallel_mode", ("comm", bits)], unfreezes=False)
    for copied, original, plain in results:
        assert torch.equal(copied, original)
        assert torch.equal(copied, results[0][0])
        assert not torch.allclose(copied, plain, rtol=0, atol=1e-6)  # the averages are not exact


def refusal(strategy):
    model = build("tied")
    ids = torch.arange(4 * tiny.SEQ_LEN).view(4, tiny.SEQ_LEN) % tiny.VOCAB
    job = mw.accelerate(
        model, torch.optim.SGD, None, tiny.loss_func, strategy=strategy, optim_args={"lr": 0.1},
        sample_batch={"input_ids": ids, "labels": ids}, model_input_format="unpack_dict", num_micro_batches=2,
    )  # fmt: skip
    with pytest.raises(mw.ModelError, match="cannot be deep-copied"):
        copy.deepcopy(job.model)
    return job.step({"input_ids": ids, "labels": ids}).loss.item()


@pytest.mark.parametrize("method", ["tensor", "pipeline"])
def test_a_divided_model_refuses_a_deep_copy(ranks, method):
    losses = ranks(2).run(refusal, [("parallel_mode", {method: 2}), f"{method}_parallel"])
    assert losses[0] == losses[1]
