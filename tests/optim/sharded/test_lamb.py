import torch

from meshwright.optim.lamb import Lamb
from tests.optim.sharded.layouts import layouts_of, plain, relative_differences, start_values, trained

OPTIONS = {
    "paper": {"lr": 1e-2, "weight_decay": 0.01},
    "lr": {"lr": 1e-2, "bias_correction": "lr"},
    "per matrix": {"lr": 1e-2, "weight_decay": 0.1, "per_matrix": True},
    "adam": {"lr": 1e-2, "adam": True, "bias_correction": False},
}


def on_every_layout(options):
    world = torch.distributed.get_world_size()

    def build(parameters):
        return Lamb(list(parameters.values()), **options)

    start = start_values()
    expected, _ = trained(build, plain)
    worst = {}
    for layout, place in layouts_of(world).items():
        result, _ = trained(build, place)
        worst[layout] = max(relative_differences(result, expected, start).values())
    return worst


def test_layouts(ranks):
    for world in (2, 4):
        for name, options in OPTIONS.items():
            for answer in ranks(world).run(on_every_layout, options):
                print(name, answer)
                assert all(value < 1e-5 for value in answer.values()), (name, answer)
