import pytest
import torch
import torch.distributed as dist
from came_pytorch import CAME as Reference

from meshwright.errors import ConfigError
from meshwright.optim import CAME, DistributedCAME, factored as block
from tests.optim.sharded.layouts import layouts_of, plain, relative_differences, start_values, trained

OPTIONS = {
    "default": {"lr": 1e-2},
    "decay": {"lr": 2e-2, "weight_decay": 0.1},
    "short memory": {"lr": 0.1, "betas": (0.5, 0.9, 0.8), "clip_threshold": 0.3, "eps": (1e-12, 1e-4)},
}


def built(kind, options):
    return lambda parameters: kind(list(parameters.values()), **options)


@pytest.mark.parametrize("elements", [1 << 17, 24], ids=["whole", "small blocks"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_moves_weights_as_the_authors_does(options, elements, monkeypatch):
    monkeypatch.setitem(block._BLOCK_ELEMENTS, "cpu", elements)
    with torch.no_grad():
        expected, _ = trained(built(Reference, options), plain)
    result, _ = trained(built(CAME, options), plain)
    differences = relative_differences(result, expected, start_values())
    assert len(differences) == 7 + 7 + 5 * 4 + 2  # weights, momentum, rows and columns of both, squares
    assert max(differences.values()) < 1e-6, differences


def on_every_layout(options):
    expected, _ = trained(built(CAME, options), plain, steps=10)
    found = {}
    for layout, place in layouts_of(dist.get_world_size()).items():
        result, _ = trained(built(CAME, options), place, steps=10)
        found[layout] = max(relative_differences(result, expected, start_values()).values())
    return found


@pytest.mark.parametrize(("world", "name"), [(2, "short memory"), pytest.param(4, "decay", marks=pytest.mark.long)])
def test_layouts(ranks, world, name):
    for answer in ranks(world).run(on_every_layout, OPTIONS[name]):
        assert max(answer.values()) < 2e-6, answer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": -1.0},
        {"lr": 1e-3, "betas": (0.9, 0.999)},
        {"lr": 1e-3, "eps": (0.0, 1e-16)},
        {"lr": 1, "clip_threshold": 0},
    ],
)
def test_refuses(options):
    with pytest.raises(ConfigError, match=list(options)[-1] if options else "learning rate"):
        CAME([torch.nn.Parameter(torch.ones(2, 2))], **options)


def test_every_group_may_bring_its_own_learning_rate():
    first, second = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = DistributedCAME([{"params": [first], "lr": 0.0}, {"params": [second], "lr": 0.1}])
    for parameter in (first, second):
        parameter.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(first, torch.ones(2, 2))
    assert (second < 1).all()
