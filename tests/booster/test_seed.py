"""The example of ColossalAI's document on distributed optimizers, with a small model and on the CPU."""

import torch

import meshwright as mw
from meshwright.booster import Booster, launch_from_torch
from meshwright.booster.plugin import HybridParallelPlugin
from meshwright.strategy import METHOD_CONFIGS

TP_SIZE = 2 if "tensor_parallel" in METHOD_CONFIGS else 1


def seed_example():
    from transformers import LlamaConfig, LlamaModel

    launch_from_torch(backend="gloo", seed=0)
    configuration = LlamaConfig(
        vocab_size=62, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=100,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaModel(configuration)

    def criterion(x):
        return x.mean()

    dist_optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plugin = HybridParallelPlugin(
        tp_size=TP_SIZE, zero_stage=2, pp_size=1, enable_all_optimization=True, precision="bf16"
    )
    booster = Booster(plugin=plugin)
    model, dist_optim, criterion, _, _ = booster.boost(model, dist_optim, criterion)
    losses = []
    for _ in range(10):
        input_ids = torch.ones(1, 100, dtype=torch.int)
        attention_mask = input_ids.clone()
        outputs = model(input_ids, attention_mask)
        loss = criterion(outputs.last_hidden_state)
        booster.backward(loss, dist_optim)
        dist_optim.step()
        dist_optim.zero_grad()
        losses.append(loss.item())
    return losses, mw.sum_loss(loss).item(), loss.dtype


def test_the_example_trains(ranks):
    for losses, mean, dtype in ranks(2).run(seed_example):
        assert losses[-1] < losses[0] - 0.05
        assert abs(losses[-1] - mean) < 1e-2  # every rank has the same data
        assert dtype == torch.float32
