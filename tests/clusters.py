"""Try launchers as a cluster has them, on this machine: ``make clusters``, or ``python -m tests.clusters [slurm …]``.

``slurm`` brings up a cluster of one node from Debian's packages, unpacked into a scratch folder and not installed, with
a configuration of its own on loopback. It submits the manual's own sbatch file, lets a job of higher priority take the
node, and sees the run stopped, requeued, resumed and finished. ``torchrun`` starts two agents, of which one loses a
rank; ``torchx`` uses TorchX' local scheduler. Every run must have the losses of one that nothing has interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.docs.pages import blocks

ROOT = Path(__file__).parents[1]
STEPS = 60
PATIENCE_S = 600
TRAIN = f"""
[model]
source = "gpt2:GPT2"
args = {{ dim = 32, num_layers = 2, num_heads = 2 }}
[data]
source = "text.txt"
seq_len = 32
[run]
steps = {STEPS}
batch_size = 4
checkpoint_every = 10
callbacks = ["pause:Pause"]
device = "cpu"
"""
# Long enough to be interrupted in.
PAUSE = """
import time

class Pause:
    def on_step(self, step, result):
        time.sleep(0.25)
"""


def project(folder: Path) -> None:
    """Write a training file and what it names."""
    folder.mkdir()
    shutil.copy(ROOT / "examples" / "gpt2" / "gpt2.py", folder)
    (folder / "train.toml").write_text(TRAIN)
    (folder / "pause.py").write_text(PAUSE)
    (folder / "text.txt").write_text("".join(f"{number} is followed by {number + 1}. " for number in range(2000)))


def environment() -> dict[str, str]:
    """Return the environment of jobs: this Python's programs, and the package as it is here."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def losses(run_dir: Path) -> list[float]:
    """Return the losses of a run by step; every step must be there once."""
    with contextlib.suppress(FileNotFoundError):
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [each["step"] for each in records] == list(range(1, len(records) + 1)), records
        return [each["loss"] for each in records]
    return []


def wait(what: str, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {PATIENCE_S} s")
        time.sleep(0.5)
    print(f"   {what}", flush=True)


def check(run_dir: Path, expected: list[float], name: str) -> None:
    """Compare a run's losses with those of one that nothing has interrupted."""
    found = losses(run_dir)
    assert len(found) == len(expected) == STEPS, (len(found), len(expected))
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert worst < 1e-5, worst
    print(f"{name}: right ({STEPS} steps, losses within {worst:.0e} of an uninterrupted run)", flush=True)


def uninterrupted(folder: Path) -> list[float]:
    """Return the losses of the same run, left alone."""
    project(folder)
    command = [sys.executable, "-m", "meshwright", "train", "train.toml", "--nproc", "2", "--out", "runs/alone"]
    (folder / "pause.py").write_text(PAUSE.replace("0.25", "0"))
    subprocess.run(command, cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)
    return losses(folder / "runs/alone")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --- Slurm

_PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
_CONFIG = """
ClusterName=throwaway
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SchedulerParameters=sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
KillWait=120
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=spare Nodes=localhost PriorityTier=1 Default=YES MaxTime=UNLIMITED State=UP
PartitionName=urgent Nodes=localhost PriorityTier=10 PreemptMode=OFF MaxTime=UNLIMITED State=UP
"""


class Unavailable(Exception):
    """This machine lacks what a launcher needs."""


def unpacked(folder: Path) -> Path:
    """Return a folder with Debian's Slurm, downloaded and unpacked; nothing is installed and no service is started."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unavailable("Slurm's packages are downloaded from Debian's archive, which needs root on Debian or Ubuntu")
    archives = folder / "archives"
    (archives / "partial").mkdir(parents=True)
    options = ["--yes", "--no-install-recommends", "--download-only", "--reinstall"]
    command = ["apt-get", "install", *options, "-o", f"Dir::Cache::archives={archives}", *_PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(archives.glob("*.deb"))
    if done.returncode or not found:
        said = done.stderr.strip()[-300:]
        raise Unavailable(f"apt-get cannot download {', '.join(_PACKAGES)} (apt-get update?): {said}")
    for archive in found:
        subprocess.run(["dpkg", "-x", str(archive), str(folder / "root")], check=True)
    return folder / "root"


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster of one node; yield the environment of its commands."""
    root = unpacked(folder)
    plugins = next(root.glob("usr/lib/*/slurm-wlm"))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    config, key = folder / "slurm.conf", folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(64))
    ports = {"controller": free_port(), "node": free_port(), "cpus": os.cpu_count()}
    config.write_text(_CONFIG.format(folder=folder, plugins=plugins, user="root", **ports))
    inside = environment() | {"SLURM_CONF": str(config), "LD_LIBRARY_PATH": f"{plugins.parent}:{plugins}"}
    inside["PATH"] = f"{root}/usr/bin:{inside['PATH']}"
    programs = root / "usr" / "sbin"
    munge = {"key-file": key} | {f"{name}-file": folder / f"munged.{name}" for name in ("pid", "log", "seed")}
    munge["socket"] = folder / "munge.socket"
    commands = [
        ["munged", "--foreground", *(f"--{name}={value}" for name, value in munge.items())],
        ["slurmctld-wlm", "-D", "-c", "-f", str(config)],
        ["slurmd-wlm", "-D", "-N", "localhost", "-f", str(config), "-d", str(programs / "slurmstepd-wlm")],
    ]
    running = []
    try:
        for name, *arguments in commands:
            with (folder / f"{name}.out").open("wb") as out:
                words = [str(programs / name), *arguments]
                running.append(subprocess.Popen(words, env=inside, stdout=out, stderr=subprocess.STDOUT))
            time.sleep(2)
        wait("Slurm's node is up", lambda: "idle" in told(inside, "sinfo", "-h", "-o", "%T"))
        yield inside
    finally:
        told(inside, "scancel", "--full", "--user", "root")
        time.sleep(2)
        for process in reversed(running):
            process.terminate()
            process.wait(30)


def told(inside: dict[str, str], *command: str) -> str:
    """Return what a command of Slurm's prints."""
    return subprocess.run(command, env=inside, capture_output=True, text=True).stdout


def sbatch_file() -> str:
    """Return the manual's sbatch file for one node of two ranks without GPUs."""
    (block,) = [each for each in blocks("docs/clusters.md", "bash") if each.title == "train.sbatch"]
    text = block.code
    for before, after in (
        ("--nodes=4", "--nodes=1"),
        ("#SBATCH --gpus-per-node=8\n", ""),
        ("--cpus-per-task=64", "--cpus-per-task=1"),
        ("OMP_NUM_THREADS=8", "OMP_NUM_THREADS=1"),
        ("--nproc_per_node 8", "--nproc_per_node 2"),
        ("$head_node:29500", f"$head_node:{free_port()}"),
    ):
        assert before in text, before
        text = text.replace(before, after)
    return text


def slurm(folder: Path, expected: list[float]) -> None:
    """Submit, preempt, requeue, resume."""
    work = folder / "work"
    project(work)
    (work / "train.sbatch").write_text(sbatch_file())
    with slurm_cluster(folder) as inside:
        submit = ["sbatch", "--parsable", f"--chdir={work}"]
        job = told(inside, *submit, str(work / "train.sbatch")).strip()
        run_dir = work / "runs" / f"meshwright-{job}"
        wait("the run trains", lambda: len(losses(run_dir)) >= 15)
        urgent = told(inside, *submit, "--partition=urgent", "--output=urgent.log", "--wrap=sleep 3").strip()
        wait("a job of higher priority has the node", lambda: "RUNNING" in state(inside, urgent))
        stopped = len(losses(run_dir))
        assert stopped < STEPS, "it was not interrupted"
        print(f"   the run was stopped after step {stopped}", flush=True)
        wait("the run goes on", lambda: len(losses(run_dir)) > stopped)
        wait("the run is over", lambda: "COMPLETED" in state(inside, job))
        assert "Restarts=1" in told(inside, "scontrol", "show", "job", job)
    log = (work / f"meshwright-{job}.log").read_text()
    assert f"step {stopped}" in log, log
    check(run_dir, expected, "slurm")


def state(inside: dict[str, str], job: str) -> str:
    """Return the state of a job."""
    text = told(inside, "scontrol", "show", "job", job)
    return text.partition("JobState=")[2].partition(" ")[0]


# --- torchrun and TorchX


def torchrun(folder: Path, expected: list[float]) -> None:
    """Start an agent per host as the manual does, kill a rank, and see the run resume."""
    project(folder)
    words = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--max_restarts", "3"]
    words += ["--rdzv_endpoint", f"localhost:{free_port()}", "--rdzv_id", "run-a"]
    words += ["-m", "meshwright", "train", "train.toml", "--out", "runs/a", "--resume", "auto"]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    agents = []
    try:
        for number in range(2):
            with (folder / f"agent{number}.log").open("wb") as out:
                started = subprocess.Popen(command, cwd=folder, env=environment(), stdout=out, stderr=subprocess.STDOUT)
                agents.append(started)
        wait("the run trains", lambda: len(losses(folder / "runs/a")) >= 15)
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(agents[1].pid)], capture_output=True)
        os.kill(int(found.stdout.split()[0]), signal.SIGKILL)
        print("   a rank was killed", flush=True)
        wait("both agents are done", lambda: all(agent.poll() is not None for agent in agents))
        assert not any(agent.returncode for agent in agents), [agent.returncode for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(60)
    check(folder / "runs/a", expected, "torchrun")


def torchx(folder: Path, expected: list[float]) -> None:
    """Let TorchX start two ranks on this machine."""
    if shutil.which("torchx", path=environment()["PATH"]) is None:
        raise Unavailable("pip install torchx")
    project(folder)
    words = ["run", "--scheduler", "local_cwd", "--wait", "--log", "dist.ddp", "-j", "1x2", "-m", "meshwright", "--"]
    words += ["train", "train.toml", "--out", "runs/a", "--resume", "auto"]
    subprocess.run(["torchx", *words], cwd=folder, env=environment(), check=True, timeout=PATIENCE_S)
    check(folder / "runs/a", expected, "torchx")


ALL: dict[str, Callable[[Path, list[float]], None]] = {"slurm": slurm, "torchrun": torchrun, "torchx": torchx}


def main(names: list[str]) -> int:
    """Try the launchers of these names, or all; return how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="clusters-") as place:
        os.chmod(place, 0o755)
        expected = uninterrupted(Path(place) / "alone")
        for name in names or list(ALL):
            print(f"{name}:", flush=True)
            folder = Path(place) / name
            try:
                if name == "slurm":
                    folder.mkdir()
                ALL[name](folder, expected)
            except Unavailable as missing:
                print(f"{name}: not tried: {missing}", flush=True)
            except Exception as error:
                failed += 1
                print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
                for log in sorted(folder.rglob("*.log")):
                    print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
