"""Where ranks of one machine meet: a store that no other machine can reach, and a new one for each attempt."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "meshwright-loopback"
_ADDRESS = "127.0.0.1"
_TIMEOUT = timedelta(minutes=5)


def loopback_store() -> tuple[Store, int]:
    """A TCPStore that listens on 127.0.0.1 only, and its port.

    Left to itself torch's store listens on every interface, and whoever reaches it can write there what ranks then
    unpickle.
    """
    with socket.socket() as listening:
        listening.bind((_ADDRESS, 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        store = TCPStore(
            _ADDRESS,
            port,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    return store, port


class LoopbackRendezvous(RendezvousHandler):
    """torchrun's rendezvous for one machine.

    Every attempt gets a store of its own: keys of ranks that have died are not found by those that follow
    (pytorch#135712).
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False

    def get_backend(self) -> str:
        """Its name."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet in this store too, instead of making one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Makes the store of the next attempt."""
        self._store, port = loopback_store()
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_ADDRESS, port))

    def is_closed(self) -> bool:
        """Whether no attempt will follow."""
        return self._closed

    def set_closed(self) -> None:
        """Says so."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """No other machine ever joins."""
        return 0

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """There is nothing to close but the store, which goes with the process."""
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


rendezvous_handler_registry.register(NAME, _create)
