"""The code of ColossalAI's document on distributed optimizers runs with another package name, and does what it says.

The files in ``colossalai/`` hold its code blocks as they stand there. Supplied from outside: a small ``LlamaConfig``
(the default is a 7B model), the CPU in the place of ``"cuda"``, and the seed of the ranks.
"""

import functools
import runpy
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from meshwright import launch_from_torch

FOLDER = Path(__file__).parent / "colossalai"
STEPS = 10


def small_config():
    from transformers.models.llama import LlamaConfig

    return LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip


def _run_example():
    real_ones = torch.ones

    def ones_on_cpu(*args, device=None, **kwargs):
        return real_ones(*args, device="cpu" if device == "cuda" else device, **kwargs)

    with (
        mock.patch("transformers.LlamaConfig", small_config),
        mock.patch.object(nn.Module, "cuda", lambda self: self),
        mock.patch.object(torch.Tensor, "cuda", lambda self: self),
        mock.patch("torch.ones", ones_on_cpu),
        # The ranks of the pool live on from test to test, with one seed.
        mock.patch("meshwright.launch_from_torch", functools.partial(launch_from_torch, seed=0)),
    ):
        return runpy.run_path(str(FOLDER / "adafactor.py"))


def _example():
    found = _run_example()
    model = found["model"]
    split = [parameter for parameter in model.parameters() if parameter.to_local().numel() < parameter.numel()]
    assert len(split) > 10
    optimizer = found["dist_optim"].unwrap() if hasattr(found["dist_optim"], "unwrap") else found["dist_optim"]
    assert any("exp_avg_sq_row" in state for state in optimizer.state.values())
    assert found["dataloader"] is None
    return float(found["loss"])


def test_the_example_on_four_ranks(ranks):
    losses = ranks(4).run(_example)
    assert all(abs(loss) < 10 for loss in losses)


def test_the_galore_block():
    model = nn.Sequential(nn.Linear(96, 64), nn.LayerNorm(64), nn.Linear(64, 96))
    found = runpy.run_path(
        str(FOLDER / "galore.py"), init_globals={"model": model, "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    )
    optimizer = found["optim"]
    assert [group.get("rank") for group in optimizer.param_groups].count(8) == 1
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 96)).square().mean().backward()
        optimizer.step()
    assert all(
        (parameter - start).abs().max() > 1e-3 for parameter, start in zip(model.parameters(), before, strict=True)
    )
    assert all(value.shape[-1] in (8, 96, 64) or value.shape[0] == 8 for value in _matrices(optimizer))


def _matrices(optimizer):
    return [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.ndim == 2
    ]
