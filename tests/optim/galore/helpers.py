"""GaLore optimizers over small parameters whose names say how they are projected."""

from collections import defaultdict

import torch

from meshwright.optim.galore import GaLoreAdafactor, GaLoreAdamW

RANK = 3
PROJECTIONS = {
    "std": {},
    "reverse": {"proj_type": "reverse_std"},
    # The first R of this kind is diagonal: a small eps would make steps of the rounding errors beside the diagonal.
    "full": {"proj_type": "full", "eps": 0.1},
    "randomised": {"svd": "randomised"},
}
SHAPES = {
    "std wide": (6, 20),
    "std tall": (33, 16),
    "std uneven": (7, 5),
    "std experts": (4, 6, 10),
    "reverse wide": (6, 20),
    "reverse tall": (33, 16),
    "full tall": (33, 16),
    "randomised wide": (6, 20),
    "plain bias": (16,),
    "plain short": (3,),
}


def groups(parameters, gap=3, kind=GaLoreAdamW):
    """One group for every kind of projection, and one without."""
    adafactor = {name: {**options, "eps": (1e-30, 1e-3)} for name, options in PROJECTIONS.items()}
    projections = adafactor if kind is GaLoreAdafactor else PROJECTIONS
    kinds = defaultdict(list)
    for name, parameter in parameters.items():
        kinds[name.split()[0]].append(parameter)
    projection = {"rank": RANK, "update_proj_gap": gap, "scale": 1.0}
    return [
        {"params": members, **({**projection, **projections[name]} if name in projections else {})}
        for name, members in kinds.items()
    ]


def builder(kind=GaLoreAdamW, **options):
    """For :func:`tests.optim.sharded.layouts.trained`."""
    return lambda parameters: kind(groups(parameters, kind=kind), **{"lr": 5e-2, "weight_decay": 0.1, **options})


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
