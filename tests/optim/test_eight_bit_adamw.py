import argparse

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import CheckpointError, ConfigError, ModelError
from meshwright.optim import AdamW8bit
from tests.optim.sharded.layouts import (
    gradients,
    layouts_of,
    plain,
    relative_differences,
    start_values,
    trained,
)

# Rows longer than a block and not, split between blocks and within them, and rows of several dims.
SHAPES = {
    "tall": (90, 6),
    "between blocks": (6, 1024),
    "within blocks": (7, 650),
    "bias": (600,),
    "experts": (4, 30, 20),
    "convolution": (6, 30, 3, 3),
    "tiny": (3,),
}
LAYOUTS = {"ddp", "fsdp", "tensor, row", "tensor row x fsdp", "tensor column x fsdp", "mixed meshes"}
OPTIONS = {
    "blocks": {"min_8bit_size": 16},
    "one scale, clipped": {"min_8bit_size": 16, "block_wise": False, "percentile_clipping": 40},
}


def build(**options):
    return lambda parameters: AdamW8bit(list(parameters.values()), **{"lr": 1e-2, **options})


def on_every_layout(names, steps=3):
    start, worst = start_values(SHAPES), {}
    for name in names:
        options = OPTIONS[name]
        expected, _ = trained(build(**options), plain, steps=steps, shapes=SHAPES)
        for layout, place in layouts_of(dist.get_world_size()).items():
            if layout not in LAYOUTS:
                continue
            result, _ = trained(build(**options), place, steps=steps, shapes=SHAPES)
            codes = {key: value for key, value in result.items() if "codes" in key}
            flips = [(value != expected[key]).sum().item() for key, value in codes.items()]
            others = {key: value for key, value in result.items() if key not in codes}
            worst[name, layout] = max(relative_differences(others, expected, start).values()), sum(flips)
    return worst


def test_weights_scales_and_codes_are_those_of_one_process_on_every_layout(ranks):
    for world, names in ((2, [*OPTIONS]), (4, ["blocks"])):
        for answer in ranks(world).run(on_every_layout, names):
            assert all(difference < 1e-5 and not flips for difference, flips in answer.values()), answer


def test_steps_are_near_those_of_fp32():
    """And those of fp32 are AdamW's."""
    start = start_values(SHAPES)
    exact, _ = trained(build(nbits=32, weight_decay=0.0), plain, steps=20, shapes=SHAPES)
    theirs, _ = trained(
        lambda parameters: torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.0),
        plain,
        steps=20,
        shapes=SHAPES,
    )
    weights = {name: value for name, value in exact.items() if name in SHAPES}
    assert max(relative_differences(weights, theirs, start).values()) < 1e-5
    for options in ({"min_8bit_size": 16}, {"min_8bit_size": 16, "is_paged": True}):
        rounded, _ = trained(build(weight_decay=0.0, **options), plain, steps=20, shapes=SHAPES)
        differences = relative_differences({name: rounded[name] for name in SHAPES}, exact, start)
        assert differences["tiny"] == 0
        assert all(0 < value < 0.03 for name, value in differences.items() if name != "tiny"), differences


def test_blocks_keep_their_precision_beside_large_ones():
    """One huge gradient spoils the scale of its block, and of no other."""
    weight = torch.nn.Parameter(torch.zeros(2, 512))
    optimizer = AdamW8bit([weight], lr=1.0, weight_decay=0.0)
    optimizer.param_groups[0]["min_8bit_size"] = 1
    for _ in range(2):
        weight.grad = torch.full((2, 512), 1e-6)
        weight.grad[0, 300] = 1e6
        optimizer.step()
    moved = weight.detach().abs()
    assert (moved[0, :256] > 1.0).all()
    assert (moved[1] > 1.0).all()
    assert (moved[0, 256:300] < 1.0).all()


def test_a_second_moment_above_zero_never_becomes_zero():
    """Else a gradient that vanishes leaves its first moment divided by eps."""
    weight = torch.nn.Parameter(torch.zeros(256))
    optimizer = AdamW8bit([weight], lr=1e-3, weight_decay=0.0, min_8bit_size=1)
    for step in range(4):
        weight.grad = torch.linspace(0, 1, 256).pow(4) * (step == 0) + torch.eye(256)[-1]
        optimizer.step()
    assert weight.abs().max() < 4 * 1e-3 * 4


def test_percentile_clipping():
    """The factor is that of bitsandbytes, but of the norms that there have been."""
    weight, exact = torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.zeros(8))
    clipped = AdamW8bit([weight], percentile_clipping=50, nbits=32)
    other = AdamW8bit([exact], nbits=32)
    norms = []
    for step in range(130):
        size = 1.0 + (step * 37 % 50)
        gradient = torch.randn(8, generator=torch.Generator().manual_seed(step))
        weight.grad = gradient / gradient.norm() * size
        norms = [*norms, weight.grad.norm()][-100:]
        limit = sorted(norms)[50 * len(norms) // 100]
        exact.grad = weight.grad * min(1.0, limit / norms[-1])
        clipped.step()
        other.step()
        assert weight.grad.norm() == norms[-1]  # gradients are the user's
    torch.testing.assert_close(weight.detach(), exact.detach(), rtol=1e-4, atol=1e-7)


def test_args_override():
    args = argparse.Namespace(optim_bits=8, percentile_clipping=20, block_wise=False, min_8bit_size=7, other=1)
    for given in (args, vars(args)):
        (group,) = AdamW8bit([torch.nn.Parameter(torch.zeros(8))], nbits=32, args=given).param_groups
        assert (group["nbits"], group["percentile_clipping"]) == (8, 20)
        assert (group["block_wise"], group["min_8bit_size"]) == (False, 7)
        assert "other" not in group


@pytest.mark.parametrize(
    "wrong",
    [{"nbits": 4}, {"percentile_clipping": 0}, {"percentile_clipping": 5.5}, {"min_8bit_size": -1}, {"lr": -1.0}],
)
def test_bad_hyperparameters(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AdamW8bit([torch.nn.Parameter(torch.zeros(8))], **wrong)


def test_states_of_other_precision_are_refused():
    shapes = {"weight": (4, 64)}
    for here, there in (({"nbits": 32}, {}), ({}, {"nbits": 32}), ({}, {"block_wise": False})):
        _, saved = trained(build(min_8bit_size=1, **here), plain, steps=1, shapes=shapes)
        weight = torch.nn.Parameter(start_values(shapes)["weight"])
        optimizer = build(min_8bit_size=1, **there)({"weight": weight})
        weight.grad = gradients(2, shapes)["weight"]
        with pytest.raises((CheckpointError, ModelError)):
            load_and_step(optimizer, saved.state_dict(), there)


def load_and_step(optimizer, saved, options):
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0].update(options)  # a state dict brings its own
    if "nbits" not in options:
        optimizer.param_groups[0]["nbits"] = 8
    optimizer.step()


def test_zeros_scalars_and_bytes():
    shapes = {"scalar": (), "matrix": (16, 512)}
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    optimizer = build(min_8bit_size=1)(parameters)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all((parameter == 0).all() for parameter in parameters.values())
    state = optimizer.state[parameters["matrix"]]
    assert sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor)) == 2 * (16 * 512 + 4 * 32)
    assert {value.dtype for name, value in state.items() if "codes" in name} == {torch.uint8}


@pytest.mark.parametrize("nbits", [8, 32])
def test_transposed_parameters(nbits):
    """The layout in memory of a weight changes nothing."""
    results = []
    for make in (lambda whole: whole.clone(), lambda whole: whole.t().contiguous().t()):
        whole = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
        weight = torch.nn.Parameter(make(whole))
        optimizer = AdamW8bit([weight], nbits=nbits, min_8bit_size=1)
        for step in range(3):
            weight.grad = make(torch.randn(6, 300, generator=torch.Generator().manual_seed(step)))
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(*results)


def test_states_of_torchs_adamw_are_refused_when_they_are_loaded():
    weight = torch.nn.Parameter(torch.ones(4, 64))
    weight.grad = torch.ones_like(weight)
    given = torch.optim.AdamW([weight])
    given.step()
    with pytest.raises(
        CheckpointError, match=r"lacks states.*exp_avg_codes.*Got exp_avg\[4, 64\].* step for.*nbits=32"
    ):
        AdamW8bit([weight], min_8bit_size=8).load_state_dict(given.state_dict())
    small = AdamW8bit([weight])
    small.load_state_dict(given.state_dict())
    small.step()
