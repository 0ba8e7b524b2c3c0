"""Tensor parallelism through the booster: trained, saved, loaded and trained on, as in one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from meshwright.compat.colossalai import Booster, HybridParallelPlugin
from meshwright.strategy.value import METHOD_CONFIGS
from tests import tiny

STOP, STEPS, BATCH = 3, 6, 4


def build(seed=3):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=62, hidden_size=24, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=tiny.SEQ_LEN, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optim, backward, first, last):
    losses = []
    for step in range(first, last):
        ids = tiny.Tokens().ids[step * BATCH : (step + 1) * BATCH]
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def stopped(zero_stage, precision, folder):
    plugin = HybridParallelPlugin(tp_size=2, zero_stage=zero_stage, precision=precision, initial_scale=64.0)
    booster = Booster(plugin=plugin)
    model, optim, *_ = booster.boost(*build())
    losses = train(model, optim, optim.backward, 0, STOP)
    booster.save_model(model, folder / "model", shard=True)
    booster.save_optimizer(optim, folder / "optim", shard=True)
    if precision == "fp16":
        check_for_transformers(model, folder / "model")
    model, optim, *_ = booster.boost(*build(seed=9))
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optim, folder / "optim")
    return losses + train(model, optim, optim.backward, STOP, STEPS)


def check_for_transformers(model, folder):
    """``from_pretrained`` builds the same class."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    read, wanted = AutoModelForCausalLM.from_pretrained(folder), model.state_dict()
    assert type(read) is LlamaForCausalLM
    assert all(torch.equal(value, wanted[name].full_tensor()) for name, value in read.state_dict().items())
    assert model.unwrap().config.architectures is None, "the live config is as it was"


class Plain(nn.Module):
    """Brings no plan and no dummy inputs: a sample shows how its layers can be divided."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def plain(batch):
    torch.manual_seed(3)
    booster, model = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32")), Plain()
    expected = nn.functional.mse_loss(model(batch[0]), batch[1]).item()
    loader = booster.plugin.prepare_dataloader(TensorDataset(*batch), BATCH)
    model, _, criterion, *_ = booster.boost(model, None, nn.MSELoss(), loader)
    assert any("DTensor" in type(parameter).__name__ for parameter in model.parameters())
    return criterion(model(batch[0]), batch[1]).item(), expected


def cases(folder):
    loss, alone = plain((torch.linspace(-1, 1, 24).reshape(4, 6), torch.linspace(0, 1, 24).reshape(4, 6)))
    assert loss == pytest.approx(alone, rel=1e-5)
    model, optim = build()
    expected = train(model, optim, torch.Tensor.backward, 0, STEPS)
    for zero_stage in (0, 2, 3):
        assert stopped(zero_stage, "fp32", folder / str(zero_stage)) == pytest.approx(expected, rel=1e-4), zero_stage
    assert stopped(1, "fp16", folder / "fp16") == pytest.approx(expected, rel=3e-2)
    return True


@pytest.mark.skipif("tensor_parallel" not in METHOD_CONFIGS, reason="the method tensor_parallel is not there yet")
def test_a_split_model_goes_on(ranks, tmp_path):
    assert all(ranks(2).run(cases, tmp_path))
