import torch

from meshwright.optim.galore import GaLoreAdafactor
from tests.optim.galore.helpers import SHAPES, builder
from tests.optim.sharded.layouts import layouts_of, plain, relative_differences, start_values, trained

KINDS = {
    "AdamW": builder(),
    "Adafactor": builder(GaLoreAdafactor, relative_step=False, beta1=0.9, lr=0.2),
}
# Replicas alone divide nothing: ddp and hsdp, and all others, are in the parity tables of make parity.
LAYOUTS = {
    "AdamW": {"fsdp", "tensor, row", "tensor row x fsdp", "tensor column x fsdp", "experts x fsdp"},
    "Adafactor": {"tensor, row", "tensor row x fsdp"},
}


def on_every_layout(kind):
    start = start_values(SHAPES)
    expected, _ = trained(KINDS[kind], plain, steps=7, shapes=SHAPES)
    worst = {}
    for layout, place in layouts_of(torch.distributed.get_world_size()).items():
        if layout not in LAYOUTS[kind]:
            continue
        result, _ = trained(KINDS[kind], place, steps=7, shapes=SHAPES)
        differences = relative_differences(result, expected, start)
        name = max(differences, key=differences.get)
        worst[layout] = name, differences[name]
    return worst


def test_weights_and_states_are_those_of_one_process_on_every_layout(ranks):
    for world in (2, 4):
        for kind in KINDS:
            for answer in ranks(world).run(on_every_layout, kind):
                assert all(value < 1e-5 for _, value in answer.values()), (kind, answer)
