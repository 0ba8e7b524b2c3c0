"""Processes: which are refused before they start, and what the one is like that forks the others."""

import subprocess
import sys

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


def test_a_server_that_has_imported_the_compiler_may_fork_and_has_asked_what_each_rank_would():
    code = """
        import os
        from meshwright.runtime.torch_internals.interpreter import COMPILER
        __import__(COMPILER)
        import meshwright.cli.preloaded
        from torch._inductor import codecache, cpu_vec_isa
        codecache.build_code_hash = None
        codecache.torch_key()
        assert cpu_vec_isa.valid_vec_isa_list.cache_info().misses == 1
        print(len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 1)
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    found = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, timeout=120)
    assert found.stdout == "1\n", found.stderr  # thread
