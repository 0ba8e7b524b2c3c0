"""``MoeHybridParallelPlugin``: experts divided between ranks, trained by a Booster as by one process."""

import torch
from torch import nn

from meshwright.compat.colossalai import Booster, MoeHybridParallelPlugin
from tests import tiny
from tests.methods.expert_runs import build


def optimizer_of(model):
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    weights = [p for name, p in model.named_parameters() if "bias" not in name]
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.03}], lr=0.1, momentum=0.9)


def train(zero_stage):
    """Three steps of a loop by hand, with clipping, beside the same in plain torch; how far losses are apart."""
    data = torch.utils.data.TensorDataset(tiny.Tokens().ids)
    plugin = MoeHybridParallelPlugin(ep_size=2, zero_stage=zero_stage, precision="fp32", max_norm=0.5)
    booster, loader = Booster(plugin=plugin), plugin.prepare_dataloader(data, 4)
    model, plain = build("listed"), build("listed")
    model, optim, criterion, _, _ = booster.boost(model, optimizer_of(model), nn.CrossEntropyLoss())
    whole = optimizer_of(plain)
    apart = []
    for (ids,), (every,) in zip(loader, torch.utils.data.DataLoader(data, batch_size=8), strict=False):
        loss = criterion(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        booster.backward(loss, optim)
        optim.step()
        optim.zero_grad()
        expected = nn.functional.cross_entropy(plain(every)[:, :-1].flatten(0, 1), every[:, 1:].flatten())
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        whole.step()
        whole.zero_grad()
        apart.append((loss.item(), expected.item(), optim.get_grad_norm(), norm.item()))
        if len(apart) == 3:
            return apart
    return apart


def test_experts_train_as_in_one_process(ranks):
    for zero_stage in (0, 2):
        for first, second in zip(*ranks(2).run(train, zero_stage), strict=True):
            assert abs((first[0] + second[0]) / 2 - first[1]) < 1e-5 * first[1]
            assert abs(first[2] - first[3]) < 1e-5 * first[3]
