"""``MoeHybridParallelPlugin``: experts divided between ranks, trained by a Booster as by one process."""

import itertools

import pytest
import torch
from torch import nn

from meshwright.compat.colossalai import Booster, MoeHybridParallelPlugin
from tests import tiny
from tests.compat.colossalai.test_booster_pipeline import Labelled, criterion, sgd
from tests.methods.expert_runs import build
from tests.methods.split_runs import whole_weights
from tests.methods.test_parity import check_weights


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


STEPS, BATCH = 10, 8
BESIDE = {
    "tensor": (4, "mixtral", {"tp_size": 2}),
    "tokens of tensor ranks": (
        4, "qwen3", {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
    ),
    "sequence": (4, "mixtral", {"sp_size": 2, "enable_sequence_parallelism": True, "zero_stage": 1}),
    "pipeline": (4, "qwen3", {"pp_size": 2, "num_microbatches": 2, "zero_stage": 1}),
    "zbv": (4, "mixtral 4", {"pp_size": 2, "num_microbatches": 4, "pp_style": "zbv", "num_model_chunks": 2}),
    "tensor pipeline": (
        8, "mixtral", {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "zero_stage": 2, "moe_dp_outside": False}
    ),
}  # fmt: skip


def boosted(name, options):
    """Ten steps; losses, norms, and this rank's whole weights by name."""
    booster = Booster(plugin=MoeHybridParallelPlugin(ep_size=2, precision="fp32", max_norm=0.5, **options))
    plain = build(name)
    loader = booster.plugin.prepare_dataloader(Labelled(), BATCH // 2)
    model, optim, loss_func, loader, _ = booster.boost(plain, sgd(plain), criterion, loader)
    losses, norms, batches = [], [], iter(loader)
    for _ in range(STEPS):
        if "pp_size" in options:
            loss = booster.execute_pipeline(batches, model, loss_func, optim)["loss"]
        else:
            batch = next(batches)
            loss = loss_func(model(**batch), batch)
            booster.backward(loss, optim)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        norms.append(optim.get_grad_norm())
    return losses, norms, whole_weights(model)


def reference(name):
    """Losses, norms, first and last weights of one process."""
    model = build(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optim, losses, norms = sgd(model), [], []
    for batch in itertools.islice(torch.utils.data.DataLoader(Labelled(), batch_size=BATCH), STEPS):
        optim.zero_grad()
        loss = criterion(model(**batch), batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optim.step()
        losses.append(loss.item())
    return losses, norms, before, {key: value.detach() for key, value in model.named_parameters()}


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[] if each == "tensor" else pytest.mark.long) for each in BESIDE]
)
def test_experts_beside_other_axes_train_as_in_one_process(ranks, case):
    world, name, options = BESIDE[case]
    results = ranks(world).run(boosted, name, options)
    losses, norms, before, expected = reference(name)
    mean = torch.tensor([result[0] for result in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-6)
    for result in results:
        assert result[1] == pytest.approx(norms, rel=1e-5)
    check_weights({key: value for result in results for key, value in result[2].items()}, before, expected)
