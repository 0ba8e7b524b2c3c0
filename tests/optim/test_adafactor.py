import pytest
import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.optim import Adafactor, DistributedAdaFactor, factored as block
from tests.optim.sharded.layouts import layouts_of, plain, relative_differences, start_values, trained

OPTIONS = {
    "relative step": {},
    "warm-up": {"warmup_init": True, "eps": (1e-30, 0.3)},
    "lr": {"lr": 0.3, "relative_step": False, "weight_decay": 0.1},
    "momentum": {"lr": 0.1, "relative_step": False, "beta1": 0.9, "scale_parameter": False, "weight_decay": 0.1},
    "momentum, relative step": {"beta1": 0.9, "decay_rate": -0.5, "clip_threshold": 0.5, "eps": (1e-12, 10.0)},
}
# Steps of a hundredth of the weights: the rounding of fp32 weights alone is 1e-6 of the distance moved in 20 of them.
TOLERANCE = {"relative step": 3e-6}


def reference():
    """Imported here, where it is used: with it come peft and bitsandbytes, which no rank of a pool needs."""
    from transformers.optimization import Adafactor

    return Adafactor


def built(kind, options):
    return lambda parameters: kind(list(parameters.values()), **options)


@pytest.mark.parametrize("elements", [1 << 17, 24], ids=["whole", "small blocks"])
@pytest.mark.parametrize("name", OPTIONS)
def test_moves_weights_as_transformers_does(name, elements, monkeypatch):
    options = OPTIONS[name]
    monkeypatch.setitem(block._BLOCK_ELEMENTS, "cpu", elements)
    expected, _ = trained(built(reference(), options), plain)
    result, _ = trained(built(Adafactor, options), plain)
    differences = relative_differences(result, expected, start_values())
    assert len(differences) == 7 + 5 * 2 + 2 + ("beta1" in options) * 7  # weights, rows and columns, squares, momentum
    assert max(differences.values()) < TOLERANCE.get(name, 1e-6), differences


def on_every_layout(options):
    expected, _ = trained(built(Adafactor, options), plain, steps=10)
    found = {}
    for layout, place in layouts_of(dist.get_world_size()).items():
        result, _ = trained(built(Adafactor, options), place, steps=10)
        found[layout] = max(relative_differences(result, expected, start_values()).values())
    return found


@pytest.mark.parametrize(("world", "name"), [(2, "relative step"), pytest.param(4, "momentum", marks=pytest.mark.long)])
def test_layouts(ranks, world, name):
    for answer in ranks(world).run(on_every_layout, OPTIONS[name]):
        assert max(answer.values()) < 2 * TOLERANCE.get(name, 1e-6), answer


def test_continues_a_state_of_transformers():
    expected, _ = trained(built(reference(), OPTIONS["momentum"]), plain, steps=8)
    _, halfway = trained(built(reference(), OPTIONS["momentum"]), plain, steps=4)
    start = dict(zip(start_values(), halfway.param_groups[0]["params"], strict=True))

    def resumed(parameters):
        for name, parameter in parameters.items():
            parameter.data.copy_(start[name])
        optimizer = built(Adafactor, OPTIONS["momentum"])(parameters)
        optimizer.load_state_dict(halfway.state_dict())
        return optimizer

    result, _ = trained(resumed, plain, steps=4, first_step=5)
    result = {name: value for name, value in result.items() if not name.endswith(".RMS")}  # theirs alone, for logs
    assert len(result) == 7 + 5 * 2 + 2 + 7
    assert max(relative_differences(result, expected, start_values()).values()) < 1e-6


def test_a_row_without_gradients_beside_large_ones_stays():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = Adafactor([weight])
    for _ in range(3):
        weight.grad = torch.full((4, 3), 1e6)
        weight.grad[2] = 0
        optimizer.step()
    assert weight[2].tolist() == [1.0, 1.0, 1.0]
    assert (weight[[0, 1, 3]] < 1).all()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1e-3},
        {"relative_step": False},
        {"relative_step": False, "lr": 1e-3, "warmup_init": True},
        {"lr": -1.0, "relative_step": False},
        {"eps": (0.0, 1e-3)},
        {"eps": 1e-3},
        {"clip_threshold": 0.0},
        {"decay_rate": 0.8},
        {"beta1": 1.0},
        {"weight_decay": -0.1},
    ],
)
def test_refuses(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Adafactor([torch.nn.Parameter(torch.ones(2, 2))], **options)


def test_the_seeds_name_is_the_same_optimizer():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = DistributedAdaFactor([parameter])
    optimizer.setup_distributed(None, None, use_zero=False)
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.allclose(parameter, torch.full((2, 2), 1 - 1e-2))


def test_the_seeds_name_takes_an_lr_that_does_not_count():
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"lr=0.5 changes nothing.*relative_step=False") as told:
        optimizers = [DistributedAdaFactor(weights[:1], lr=0.5), DistributedAdaFactor(weights[1:])]
    assert told[0].filename == __file__
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.ones(2, 2)
        optimizer.step()
    assert torch.equal(*weights)
    assert DistributedAdaFactor(weights, lr=0.5, relative_step=False).param_groups[0]["lr"] == 0.5
