import torch

from tests.optim.galore.helpers import SHAPES, builder
from tests.optim.sharded.layouts import layouts_of, plain, relative_differences, start_values, trained


def on_every_layout():
    start = start_values(SHAPES)
    expected, _ = trained(builder(), plain, steps=7, shapes=SHAPES)
    worst = {}
    for layout, place in layouts_of(torch.distributed.get_world_size()).items():
        if layout == "pipeline":  # knows only its own parameters
            continue
        result, _ = trained(builder(), place, steps=7, shapes=SHAPES)
        differences = relative_differences(result, expected, start)
        name = max(differences, key=differences.get)
        worst[layout] = name, differences[name]
    return worst


def test_weights_and_states_are_those_of_one_process_on_every_layout(ranks):
    for world in (2, 4):
        for answer in ranks(world).run(on_every_layout):
            assert all(value < 1e-5 for _, value in answer.values()), answer
