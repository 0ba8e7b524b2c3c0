"""Ranks that torchrun starts again: after a failure, and on another number of machines."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from meshwright.cli.run_failures import read_failures
from tests.cli.helpers import TIMEOUT_S, environment, losses, meshwright, project
from tests.pool import free_port

TORCHRUN = "torch.distributed.run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    result = meshwright("train", project(folder), "--out", "whole", "--steps", 12, folder=folder)
    assert result.returncode == 0, result.stderr
    return losses(folder / "whole")


@pytest.mark.long
def test_torchrun_starts_ranks_again_and_they_go_on(whole, tmp_path):
    project(tmp_path)
    launcher = (TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--no-python", sys.executable)
    # Rank 1 dies in its tenth step: step 10 of the first attempt, which no later attempt has so many of.
    dies = ("--set", "model.args.dies_at_step=10")
    result = meshwright("train", "tiny.toml", "--steps", 12, *dies, folder=tmp_path, launcher=launcher)
    assert result.returncode == 0, result.stderr
    assert "resuming after step 9" in result.stderr
    (out,) = (tmp_path / "runs").iterdir()  # nobody has named it: the launch is known by its id
    assert losses(out) == pytest.approx(whole, rel=1e-5)


def agent(folder, port, log, changes):
    """torchrun on one of two machines, with one rank on each."""
    command = [
        sys.executable, "-m", TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=job-7",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
        "--rdzv-conf=last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3", "--no-python",
        sys.executable, "-m", "meshwright", "train", "tiny.toml", "--out", "out", "--steps", "12",
        "--set", "model.args.pause_s=0.3", *(word for change in changes for word in ("--set", change)),
    ]  # fmt: skip
    with log.open("w") as stream:
        return subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=stream, stderr=stream, start_new_session=True
        )


def _steps_of(folder):
    path = folder / "out/metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.long
@pytest.mark.parametrize("kept", ["run.checkpoint_every=1", "run.snapshot.every=1"])
def test_the_run_goes_on_when_a_machine_is_gone(whole, tmp_path, kept):
    project(tmp_path)
    port, logs = free_port(), [tmp_path / f"agent-{number}.log" for number in range(2)]
    agents = [agent(tmp_path, port, logs[0], [kept])]
    time.sleep(3)  # the first one holds the store
    agents.append(agent(tmp_path, port, logs[1], [kept]))
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while _steps_of(tmp_path) < 5 and time.monotonic() < deadline:
            time.sleep(0.1)
            assert all(each.poll() is None for each in agents), [log.read_text()[-3000:] for log in logs]
        assert json.loads((tmp_path / "out/config.json").read_text())["ranks"] == 2
        lost = subprocess.run(["pgrep", "-P", str(agents[1].pid)], capture_output=True, text=True, check=True)
        for process in (agents[1].pid, *map(int, lost.stdout.split())):  # the agent and its rank: a machine is gone
            os.kill(process, signal.SIGKILL)
        status = agents[0].wait(TIMEOUT_S)
    finally:
        for each in agents:
            if each.poll() is None:
                each.terminate()  # which ends its ranks
                each.wait(TIMEOUT_S)
    said = logs[0].read_text()
    assert status == 0, said
    assert "written by 2 ranks" in said
    assert "planned anew for one rank" in said
    assert json.loads((tmp_path / "out/config.json").read_text())["ranks"] == 1
    if "snapshot" in kept:
        (told,) = [each for each in read_failures(tmp_path / "out") if each["what"] == "went on"]
        assert (told["source"], told["lost_steps"] <= 1) == ("snapshots of another layout", True)
    assert losses(tmp_path / "out") == pytest.approx(whole, rel=1e-5)
