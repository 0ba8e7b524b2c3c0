import os

import pytest
import torch

from meshwright.runtime import memory_limit_bytes, preserved_rng, use_share_of_cores


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


@pytest.mark.parametrize(
    ("environment", "local", "threads"),
    [
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 4, 4),
        ({"OMP_NUM_THREADS": "1"}, 4, None),  # the user's
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}, 4, None),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 1, None),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 16, None),
    ],
)
def test_a_rank_uses_its_cores_where_torchrun_chose_one(monkeypatch, environment, local, threads):
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    chosen = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert use_share_of_cores(local) == threads
    assert chosen == ([] if threads is None else [threads])
