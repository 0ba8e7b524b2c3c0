"""A rank that never comes is named by all others within their limit, and nobody hangs: not even at the exit."""

import os
import subprocess
import sys

from tests.pool import free_port

_LIMIT_S = 3.0
_PROGRAM = f"""
import os, time
import meshwright.runtime.processes as processes
if os.environ["RANK"] == os.environ["ABSENT"]:
    processes.connect = lambda group: time.sleep(1e6)  # in the store, and no further
processes.init_distributed(backend="gloo", timeout_s={_LIMIT_S})
"""


def test_a_rank_that_never_comes_is_named_and_all_others_end():
    """gloo alone would wait for it forever, in a thread that Python waits for at its exit."""
    absent, world = "1", {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, **world, "RANK": str(rank), "ABSENT": absent},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            told = ranks[rank].communicate(timeout=60)[1]
            assert ranks[rank].returncode == 1
            assert "have not connected. Expected all 3 of a process group within 3 s. Got no word of rank 1" in told
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
