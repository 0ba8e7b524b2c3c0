"""Ranks that are gone early are noticed by all others within their limit, and nobody hangs: not even at the exit.

gloo alone would wait forever for a rank with which it has not connected yet, in a thread that Python waits for.
"""

import os
import subprocess
import sys
import time

from tests.pool import free_port

_LIMIT_S = 3.0
_NEVER_COMES = f"""
import os, time
import meshwright.runtime.processes as processes
if os.environ["RANK"] == "1":
    processes.connect = lambda group: time.sleep(1e6)  # in the store, and no further
processes.init_distributed(backend="gloo", timeout_s={_LIMIT_S})
"""
_DIES_EARLY = """
import os, time, torch
import meshwright.runtime as runtime
runtime.init_distributed(backend="gloo", timeout_s=600)
group = runtime.background_group()
if runtime.rank() == 1:
    os._exit(0)
time.sleep(0.5)
torch.distributed.all_reduce(torch.ones(3), group=group)  # the first of this group
"""


def _ends(program):
    """Exit codes and errors of ranks 0 and 2 of three."""
    world = {
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCH_GLOO_LAZY_INIT": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **world, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        told = {rank: ranks[rank].communicate(timeout=90)[1] for rank in (0, 2)}
        return [(ranks[rank].returncode, told[rank]) for rank in (0, 2)]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_rank_that_never_comes_is_named_and_all_others_end():
    for code, told in _ends(_NEVER_COMES):
        assert code == 1
        assert "have not connected. Expected all 3 of a process group within 3 s. Got no word of rank 1" in told


def test_a_rank_that_dies_before_the_first_collective_of_a_group_is_missed_at_once():
    began_s = time.monotonic()
    for code, told in _ends(_DIES_EARLY):
        assert code == 1
        assert "Connection" in told
    assert time.monotonic() - began_s < 90
