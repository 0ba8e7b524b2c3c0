"""What is refused before a process is started."""

import pytest

from meshwright.errors import LaunchError
from meshwright.runtime import device, launch


def test_more_processes_than_memory_holds_are_refused_and_none_is_started(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "_prepare_environment", lambda nproc: None)
    monkeypatch.setattr(launch.forkserver, "ensure_running", lambda: started.append("server"))
    monkeypatch.setattr(device, "host_share_bytes", lambda ranks: 3 * 2**28)
    with pytest.raises(LaunchError, match=r"at most 3: .*Got 4"):
        launch.launch(["-m", "nothing"], 4)
    assert not started
    launch.start_server(3)
    assert started == ["server"]
