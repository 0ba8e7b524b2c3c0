"""What is refused before a process is started."""

import pytest

from meshwright.errors import LaunchError
from meshwright.runtime import launch as module


def test_more_processes_than_memory_holds_are_refused_and_none_is_started(monkeypatch):
    started = []
    monkeypatch.setattr(module, "elastic_launch", lambda *given: lambda *arguments: started.append(arguments))
    monkeypatch.setattr(module, "host_share_bytes", lambda ranks: 3 * 2**28)
    with pytest.raises(LaunchError, match=r"at most 3: .*Got 4"):
        module.launch(["-m", "nothing"], 4)
    assert not started
    assert module.launch(["-m", "nothing"], 3) == 0
    assert started == [("-m", "nothing")]
