"""Ranks of one attempt find each other in a store where those of earlier ones have been."""

import socket
import threading
import time
from datetime import timedelta

import pytest

from meshwright.errors import LaunchError
from meshwright.runtime import rendezvous
from meshwright.runtime.launch import loopback_store
from meshwright.runtime.rendezvous import launchers_store, meet, unreachable_warning
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
    for rank, said in ((0, r"no word of ranks 1, 2"), (1, "no answer of rank 0")):
        with pytest.raises(LaunchError, match=f"have not met.*{said}"):
            meet(store, rank, 3, timedelta(seconds=0.1))


def sizes_come(store, sizes, limit):
    """Returns what each rank is told whose WORLD_SIZE is the one at its place; None if it has met the others."""
    told = {}

    def come(rank):
        try:
            meet(store, rank, sizes[rank], limit)
            told[rank] = None
        except LaunchError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(len(sizes)))]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    return [told[rank] for rank in range(len(sizes))]


def test_every_rank_is_told_of_another_world_size(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PROMPT_S", 0.2)
    monkeypatch.setattr(rendezvous, "_LONGEST_PAUSE_S", 0.5)
    store, _ = loopback_store()
    for sizes in ([3, 3, 4], [3, 2, 3], [2, 3, 3]):
        began_s = time.monotonic()
        texts = sizes_come(store, sizes, LIMIT)
        assert time.monotonic() - began_s < LIMIT.total_seconds()
        for text in texts:
            assert f"WORLD_SIZE differs between ranks. Expected {sizes[0]}, as on rank 0. Got " in text
    assert sizes_come(store, [2, 2], LIMIT) == [None, None]  # an attempt with fewer ranks, after those
    *_, late = sizes_come(store, [2, 2, 3], timedelta(seconds=1))
    assert "WORLD_SIZE is 3 here" in late or "differs" in late  # if it comes too late for rank 0 to wait for it


def test_without_a_launcher_rank_0_serves_the_store_and_another_run_stays_out():
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    stores = {}

    def come(rank):
        store = launchers_store({**place, "RANK": str(rank)}, LIMIT)
        stores[rank] = meet(store, rank, 2, LIMIT)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[0].set("address", "here")
    assert stores[1].get("address") == b"here"
    late = launchers_store({**place, "RANK": "1"}, LIMIT)
    with pytest.raises(LaunchError, match=r"have not met.*no answer of rank 0"):
        meet(late, 1, 2, timedelta(seconds=0.1))
    assert stores[1].get("address") == b"here"


def test_a_port_that_another_program_uses_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1]), "RANK": "0"}
        with pytest.raises(LaunchError, match=r"Rank 0 cannot open the store.*a free port.*set another MASTER_PORT"):
            launchers_store(place, LIMIT)


def test_a_master_that_does_not_resolve_is_named(monkeypatch):
    def fail(*args, **options):
        raise OSError("Name or service not known")

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", fail)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "1"}
    with pytest.raises(LaunchError, match=r"Rank 0 does not answer.*127.0.0.1 does not resolve on .*not known"):
        launchers_store(place, timedelta(seconds=0.2))


SPREAD = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "found", "told"),
    [
        (SPREAD, "127.0.1.1", "leads to 127.0.1.1, and gloo listens there"),
        (SPREAD, None, "does not resolve"),
        (SPREAD, "10.0.0.2", None),
        ({**SPREAD, "LOCAL_RANK": "1"}, "127.0.1.1", None),
        ({**SPREAD, "GLOO_SOCKET_IFNAME": "eth0"}, "127.0.1.1", None),
        ({**SPREAD, "LOCAL_WORLD_SIZE": "4"}, "127.0.1.1", None),
        ({**SPREAD, "MASTER_ADDR": "localhost"}, "127.0.1.1", None),
    ],
)
def test_a_machine_that_others_cannot_reach_is_told(monkeypatch, environment, found, told):
    def look_up(name, port):
        if found is None:
            raise OSError("Name or service not known")
        return [(2, 1, 6, "", (found, 0))]

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", look_up)
    warning = unreachable_warning(environment)
    assert (warning is None) == (told is None)
    assert told is None or (told in warning and "GLOO_SOCKET_IFNAME" in warning)


def test_a_store_that_is_not_there_is_missed_soon(monkeypatch):
    monkeypatch.setattr(rendezvous, "_STORE_WAIT", timedelta(seconds=0.5))
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with pytest.raises(LaunchError, match=r"store does not answer.*leave MASTER_PORT as torchrun has set it"):
        launchers_store(environment, timedelta(hours=1))
