from pathlib import Path

import pytest
from torch.distributed import TCPStore

from meshwright.runtime.launch import LoopbackRendezvous

LISTENING = "0A"


def _listening(port):
    """Local addresses, in the kernel's notation, on which this machine listens at a port."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == LISTENING and local.endswith(f":{port:04X}"):
                found.append(local.split(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads what Linux tells of sockets")
def test_each_attempt_meets_in_a_store_of_its_own_that_other_machines_cannot_reach():
    rendezvous = LoopbackRendezvous("run")
    first, second = rendezvous.next_rendezvous(), rendezvous.next_rendezvous()
    ports = [each.bootstrap_store_info.master_port for each in (first, second)]
    assert [_listening(port) for port in ports] == [["0100007F"], ["0100007F"]]
    client = TCPStore("127.0.0.1", ports[0], is_master=False)
    client.set("key", "of the first attempt")
    assert first.store.get("key") == b"of the first attempt"
    assert not second.store.check(["key"])
