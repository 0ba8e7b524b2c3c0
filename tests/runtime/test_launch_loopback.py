from pathlib import Path

import pytest
from torch.distributed import TCPStore

from meshwright.runtime.launch import loopback_store

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
    (first, port), (second, other) = loopback_store(), loopback_store()
    assert [_listening(each) for each in (port, other)] == [["0100007F"], ["0100007F"]]
    client = TCPStore("127.0.0.1", port, is_master=False)
    client.set("key", "of the first attempt")
    assert first.get("key") == b"of the first attempt"
    assert not second.check(["key"])
