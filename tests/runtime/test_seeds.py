import contextlib

import pytest
import torch

from meshwright.runtime import preserved_rng


@pytest.mark.parametrize(("initialized", "expected"), [(False, []), (True, [5])])
def test_generators_of_other_ranks_devices_are_left_alone(monkeypatch, initialized, expected):
    forked = []

    def fork_rng(devices=None):
        forked.append(devices)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    with preserved_rng():
        pass
    assert forked == [expected]
