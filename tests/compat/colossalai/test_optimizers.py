"""ColossalAI's names, classes and modules, lead to ours."""

import importlib

import pytest
import torch

from meshwright import optim
from meshwright.nn import optimizer as colossalai

MODULES = {
    "distributed_lamb": ["DistributedLamb"],
    "distributed_adafactor": ["DistributedAdaFactor"],
    "distributed_came": ["DistributedCAME"],
    "distributed_galore": ["DistGaloreAwamW"],
    "lamb": ["Lamb"],
    "adafactor": ["Adafactor"],
    "came": ["CAME"],
    "galore": ["GaLoreAdamW8bit", "GaLoreAdamW", "GaLoreAdafactor", "get_galore_param_groups"],
}


@pytest.mark.parametrize("module", MODULES)
def test_modules(module):
    found = importlib.import_module(f"meshwright.nn.optimizer.{module}")
    assert set(found.__all__) == set(MODULES[module])
    for name in MODULES[module]:
        assert getattr(found, name) is getattr(optim, name) is getattr(colossalai, name)


def test_casting_keeps_the_optimizer():
    optimizer = optim.CAME([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
    assert optim.cast_to_distributed(optimizer) is optimizer
