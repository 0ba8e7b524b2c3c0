"""Lazy modules are named before anything asks for their shapes."""

import pytest
import torch
from torch import nn

from meshwright import ModelError
from meshwright.nn import check_initialized


def test_lazy_modules_are_refused_until_they_have_run():
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(ModelError, match=r"1\.weight.*2\.running_mean"):
        check_initialized(model)
    model(torch.randn(2, 3))
    check_initialized(model)
