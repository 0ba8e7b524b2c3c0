"""Stages of a pipeline through the booster: trained, saved and loaded as in one process."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from meshwright.booster import Booster, HybridParallelPlugin
from tests import tiny
from tests.methods.pipeline_runs import build
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import check_weights

STEPS, BATCH = 10, 8


class Labelled(tiny.Tokens):
    """Samples as transformers' models take them."""

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def criterion(output, inputs):
    return tiny.loss_func(inputs, output)


def reference(name, clip, steps=STEPS):
    """Losses, norms, first and last weights of one process."""
    model = build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim, losses, norms = sgd(model), [], []
    for batch in itertools.islice(DataLoader(Labelled(), batch_size=BATCH), steps):
        optim.zero_grad()
        loss = criterion(model(**batch), batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optim.step()
        losses.append(loss.item())
    return losses, norms, before, {key: value.detach() for key, value in model.named_parameters()}


def boosted(name, **options):
    booster = Booster(plugin=HybridParallelPlugin(**{"precision": "fp32", "num_microbatches": 4, **options}))
    plain = build(name)
    optim = sgd(plain)
    loader = booster.plugin.prepare_dataloader(Labelled(), BATCH)
    model, boosted_optim, *rest = booster.boost(plain, optim, criterion, loader)
    assert boosted_optim.unwrap() is optim
    assert rest[1:] == [loader, None]
    return booster, model, boosted_optim, loader


def step(booster, model, optim, batches):
    result = booster.execute_pipeline(batches, model, criterion, optim)
    assert result["outputs"] is None
    optim.step()
    optim.zero_grad()
    return result["loss"].item(), optim.get_grad_norm()


def train(name, clip, steps=STEPS, folder=None, **options):
    """Losses, norms and this rank's weights; saved in the end."""
    booster, model, optim, loader = boosted(name, max_norm=clip, **options)
    batches = iter(loader)
    told = [step(booster, model, optim, batches) for _ in range(steps)]
    weights = whole_weights(model)
    if folder is not None:
        for shard in (False, True):
            booster.save_model(model, folder / f"model{shard}", shard)
            booster.save_optimizer(optim, folder / f"optim{shard}", shard)
        booster.save_model(model, folder / "model.safetensors", use_safetensors=True)
    return [loss for loss, _ in told], [norm for _, norm in told], weights


def together(results):
    """The weights of all ranks, each name alike wherever it is."""
    every = {}
    for _, _, own in results:
        for name, value in own.items():
            assert name not in every or torch.equal(every[name], value), name
        every |= own
    return every


def check(results, expected):
    losses, norms, before, after = expected
    for own_losses, own_norms, _ in results:
        assert own_losses == pytest.approx(losses, rel=1e-4)
        assert own_norms == pytest.approx(norms, rel=1e-5)
    weights = together(results)
    assert weights.keys() == after.keys()
    check_weights(weights, before, after)


def two_ranks(folder):
    return {
        "1f1b": train("tied", 0.5, folder=folder, pp_size=2, zero_stage=1),
        "zbv": train("plainer", 0.5, steps=3, pp_size=2, pp_style="zbv"),
    }


def test_ten_steps_by_execute_pipeline(ranks, tmp_path):
    results = ranks(2).run(train, "tied", 0.5, folder=tmp_path, pp_size=2)
    check(results, reference("tied", 0.5))
