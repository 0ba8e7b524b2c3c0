import pytest
import torch

from meshwright.runtime import preserved_rng


@pytest.mark.parametrize("initialized", [False, True])
def test_generators_of_other_ranks_devices_are_left_alone(monkeypatch, initialized):
    asked, state = [], torch.zeros(1, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *device: asked.append(device) or state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new, *device: asked.append((new is state, *device)))
    with preserved_rng():
        pass
    assert asked == ([(), (True,)] if initialized else [])  # no device named: the current one's
