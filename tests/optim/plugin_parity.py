"""A model under every plugin, fed the same gradients as on one device."""

import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.compat.colossalai import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from tests.optim.contestants import BUILD
from tests.optim.sharded.layouts import full, placed, relative_differences

STEPS = 20
PLUGINS = {
    "HybridParallel, tp 2, zero 0": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=0, precision="fp32"),
    "HybridParallel, tp 2, zero 1": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, precision="fp32"),
    "HybridParallel, tp 2, zero 2": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=2, precision="fp32"),
    "HybridParallel, tp 4": lambda: HybridParallelPlugin(tp_size=4, pp_size=1, precision="fp32"),
    "LowLevelZero, stage 1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "LowLevelZero, stage 2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "TorchDDP": TorchDDPPlugin,
    "Gemini (ZeRO-3)": lambda: GeminiPlugin(precision="fp32"),
    "TorchFSDP": TorchFSDPPlugin,
    "MoeHybridParallel, zero 2": lambda: MoeHybridParallelPlugin(ep_size=1, zero_stage=2, precision="fp32"),
}


def model():
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=44, hidden_size=16, intermediate_size=28, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gradient(name, shape, step):
    generator = torch.Generator().manual_seed(hash_of(name) + step)
    return torch.randn(shape, generator=generator) * (0.1 + step % 3)


def hash_of(name):
    return sum(ord(letter) * (index + 1) for index, letter in enumerate(name)) * 100


def on_one_device(build, steps, gradient=gradient):
    single = model()
    parameters = dict(single.named_parameters())
    start = {name: full(parameter) for name, parameter in parameters.items()}
    optimizer = build(parameters)
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, parameter.shape, step)
        optimizer.step()
    return start, whole(parameters, optimizer)


def largest_by_rounding(build, steps=STEPS, draws=5):
    """Return the largest difference that gradients which differ in their last bit make of a run on one device.

    A split sum differs so. Where singular values are near each other, their vectors differ by far more.
    """
    start, expected = on_one_device(build, steps)
    found = []
    for draw in range(draws):

        def changed(name, shape, step, draw=draw):
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * draw + hash_of(name) + step))
            return gradient(name, shape, step) * (1 + torch.finfo(torch.float32).eps * noise)

        found.append(max(relative_differences(on_one_device(build, steps, changed)[1], expected, start).values()))
    return max(found)


def whole(parameters, optimizer):
    found = {name: full(parameter) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        states = optimizer.state[parameter].items()
        found |= {f"{name}.{key}": full(value) for key, value in states if isinstance(value, torch.Tensor)}
    return found


def under_plugin(make_plugin, build, steps):
    plain_model = model()
    names = list(dict(plain_model.named_parameters()))
    optimizer = build(dict(plain_model.named_parameters()))
    boosted, wrapped, *_ = Booster(plugin=make_plugin()).boost(plain_model, optimizer)
    parameters = dict(zip(names, boosted.unwrap().parameters(), strict=True))
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.grad = laid_out(gradient(name, parameter.shape, step), parameter)
        wrapped.step()
    return whole(parameters, optimizer)


def laid_out(value, parameter):
    if not isinstance(parameter, DTensor):
        return value
    return placed(value, parameter.device_mesh, parameter.placements)


def worst_by_plugin(kinds=tuple(BUILD), plugins=tuple(PLUGINS), steps=STEPS):
    """For every plugin and optimizer the largest relative difference of weights and states."""
    cells = {}
    for name in kinds:
        start, expected = on_one_device(BUILD[name], steps)
        for plugin in plugins:
            found = under_plugin(PLUGINS[plugin], BUILD[name], steps)
            cells[plugin, name] = max(relative_differences(found, expected, start).values())
    return cells
