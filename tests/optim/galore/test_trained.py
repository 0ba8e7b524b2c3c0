"""GaLore on a model that tensor parallelism divides, trained on its own gradients, against one process."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.compat.colossalai import Booster, HybridParallelPlugin
from meshwright.optim import GaLoreAdamW, get_galore_param_groups

STEPS = 10


def model():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def flat(trained):
    parameters = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in trained.parameters()]
    return torch.cat([each.detach().flatten() for each in parameters])


def run(plugin):
    trained = model()
    optimizer = GaLoreAdamW(get_galore_param_groups(trained, 1e-3, rank=8), lr=1e-2)
    if plugin is not None:
        trained, optimizer, *_ = Booster(plugin=plugin).boost(trained, optimizer)
    for step in range(STEPS):
        ids = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(step))
        trained(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(trained)


def test_two_ranks_are_as_near_to_one_process_as_rounding(ranks):
    """Vectors within the gradients' rank, and moments in fp32: docs/optimizers.md tells what either does otherwise."""
    expected, start = run(None), flat(model())
    for found in ranks(2).run(run, HybridParallelPlugin(tp_size=2, precision="fp32")):
        assert (found - expected).norm() < 5e-5 * (expected - start).norm()
