"""Which optimizers a step can drive."""

import pytest
import torch

from meshwright import ConfigError
from meshwright.optim import Lamb
from meshwright.optim.dtensors import check_steps_alone


def test_only_optimizers_that_need_a_closure_are_refused():
    for build in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, Lamb):
        optimizer = build([torch.nn.Parameter(torch.zeros(2, 2))])
        assert check_steps_alone(optimizer) is optimizer
    with pytest.raises(ConfigError, match=r"LBFGS needs a closure.*step\(closure\)"):
        check_steps_alone(torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(2))]))
