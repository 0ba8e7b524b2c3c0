import pytest
import torch

from meshwright.runtime import memory_limit_bytes, preserved_rng


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


GIB = 2**30


@pytest.mark.parametrize(
    ("free", "held", "fraction", "limit"),
    [
        (79.0, 0.0, 1.0, 78.0),  # an empty device: less what a communicator and kernels take
        (60.0, 0.0, 1.0, 59.0),  # another process holds some
        (60.0, 15.0, 1.0, 74.0),  # the model is there already: its bytes are counted in predictions
        (79.0, 0.0, 0.5, 39.5),  # as much as the process allows itself
        (0.25, 0.0, 1.0, 1 / GIB),  # never 0, which would stand for none
    ],
)
def test_the_limit_is_what_a_driver_says_is_free(monkeypatch, free, held, fraction, limit):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(held * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    assert memory_limit_bytes(torch.device("cuda", 1), 4) == limit * GIB
