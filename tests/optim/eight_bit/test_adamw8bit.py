import torch.distributed as dist

from meshwright.optim.eight_bit import AdamW8bit
from tests.optim.sharded.layouts import layouts_of, plain, relative_differences, start_values, trained

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
SCALAR = {"scalar": ()}
OPTIONS = {
    "blocks": {"min_8bit_size": 16},
    "one scale, clipped": {"min_8bit_size": 16, "block_wise": False, "percentile_clipping": 40},
}


def build(**options):
    return lambda parameters: AdamW8bit(list(parameters.values()), **{"lr": 1e-2, **options})


def on_every_layout(names, steps=4):
    start, worst = start_values(SHAPES), {}
    for name in names:
        options = OPTIONS[name]
        expected, _ = trained(build(**options), plain, steps=steps, shapes=SHAPES)
        for layout, place in layouts_of(dist.get_world_size()).items():
            if layout == "pipeline":  # knows only its own parameters
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
            print(answer)
            assert all(difference < 1e-5 and not flips for difference, flips in answer.values()), answer
