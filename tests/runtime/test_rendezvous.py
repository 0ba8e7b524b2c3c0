"""Ranks of one attempt find each other in a store where those of earlier ones have been."""

import threading
import time
from datetime import timedelta

import pytest

from meshwright.errors import LaunchError
from meshwright.runtime import rendezvous
from meshwright.runtime.launch import loopback_store
from meshwright.runtime.rendezvous import launchers_store, meet
from tests.pool import free_port

LIMIT = timedelta(seconds=20)


def attempt(environment, order):
    """Ranks come in an order, each a moment after the one before; what each finds that rank 0 has written."""
    found = {}

    def come(rank):
        store = meet(launchers_store(environment, LIMIT), rank, len(order), LIMIT)
        if rank == 0:
            store.set("address", str(id(found)))
        found[rank] = store.get("address").decode()

    threads = [threading.Thread(target=come, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return found, str(id(found))


def test_no_attempt_reads_what_another_has_written():
    store, port = loopback_store()
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for order in ((0, 1, 2), (2, 1, 0), (1, 0), (3, 0, 2, 1), (0,)):  # later ones meet what earlier ones have left
        found, expected = attempt(environment, order)
        assert found == dict.fromkeys(order, expected)
    assert launchers_store({**environment, "TORCHELASTIC_USE_AGENT_STORE": "False"}, LIMIT) is None
    for rank, said in ((0, r"no word of ranks 1, 2"), (1, "no answer of rank 0")):
        with pytest.raises(LaunchError, match=f"have not met.*{said}"):
            meet(store, rank, 3, timedelta(seconds=0.1))


def test_a_store_that_is_not_there_is_missed_soon(monkeypatch):
    monkeypatch.setattr(rendezvous, "_STORE_WAIT", timedelta(seconds=0.5))
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with pytest.raises(LaunchError, match=r"store does not answer.*leave MASTER_PORT as torchrun has set it"):
        launchers_store(environment, timedelta(hours=1))
