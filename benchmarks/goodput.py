"""Measure goodput under failures: snapshots in host memory, checkpoints alone, and torchrun with torch's checkpoints.

    python benchmarks/goodput.py                                            about 40 minutes
    python benchmarks/goodput.py --seconds 60 --every-s 20 --ranks 2        about five minutes

Each way trains the same model on CPU ranks for the same time, under the same failures at the same moments, in turns.
The kinds are drawn by shares after the interruptions that the Llama 3 report lists (most of them hardware that ends a
process), rounded, with rare kinds raised to 2 %. A step sleeps for most of its time, as a rank of a large model waits
for its device, so that ranks do not fight for cores. Goodput is the number of distinct steps, times the time of a step
without failures, snapshots and checkpoints, divided by the time that passed from the first step to the end.

A hang is found after ``HANG_S`` in all ways, by the watch or by the limit of the process group, but for our snapshots:
with them the watch does not wait so long for a rank that does nothing (``docs/failures.md``).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

Fault = tuple[float, str, int]
Steps = dict[int, tuple[float, float]]

SHARES = {"kill": 0.70, "error": 0.12, "hang": 0.10, "nan": 0.02, "slow": 0.02, "disk": 0.02, "corrupt": 0.02}
HANG_S, SLOW_S, PAUSE_S, SAVE_EVERY, MEET_S = 5.0, 2.0, 0.1, 50, 60.0
DIM, LAYERS, BATCH = 256, 4, 8
WAYS = ("snapshots", "checkpoints", "torchrun + DCP", "torchft")
"""The last one where its package is installed."""
ROOT = Path(__file__).parents[1]

CONFIG = f"""
[model]
source = "goodput:model"

[data]
source = "goodput:data"

[optimizer]
lr = 1e-3

[run]
steps = 1000000
batch_size = {BATCH}
device = "cpu"
trackers = []
checkpoint_every = {SAVE_EVERY}
background_checkpoints = true
hang_limit_s = {HANG_S}
callbacks = ["goodput:Faults"]
"""


# --- What all ways train, and what strikes them


def model() -> Any:
    """Return the model, whose loss is a part of its output."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [torch.nn.Linear(DIM, DIM) for _ in range(LAYERS)]
            self.layers = torch.nn.Sequential(*(part for each in layers for part in (each, torch.nn.Tanh())))
            self.spoiled = False

        def forward(self, x: Any) -> dict[str, Any]:
            if torch.is_grad_enabled() and not x.is_meta and type(x) is torch.Tensor:
                time.sleep(PAUSE_S)
            out = (self.layers(x) - x.sin()).square().mean()
            spoiled, self.spoiled = self.spoiled, False
            return {"loss": out * float("nan") if spoiled else out}

    return Net()


def data(seed: int = 0) -> Any:
    """Return the samples."""
    import torch

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.randn(DIM, generator=torch.Generator().manual_seed(index + seed))}

    return Samples()


class Faults:
    """Strikes this rank at the moments of ``faults.json``, once each."""

    def __init__(self, job: Any = None, net: Any = None) -> None:
        self.net = net if net is not None else job.model
        self.rank = int(os.environ.get("REPLICA_GROUP_ID", os.environ["RANK"]))
        self.limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.folder = Path(os.environ["GOODPUT_FOLDER"])
        self.faults = json.loads((self.folder / "faults.json").read_text())

    def on_step(self, step: int, result: Any = None) -> None:
        """Strike if it is time to."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limit)
        begun = self.folder / "begun"
        if self.rank == 0 and not begun.exists():
            begun.touch()
        passed_s = time.time() - begun.stat().st_mtime if begun.exists() else 0.0
        for number, (at_s, kind, rank) in enumerate(self.faults):
            mark = self.folder / f"struck-{number}"
            if rank == self.rank and passed_s >= at_s and not mark.exists():
                mark.touch()
                self.strike(kind)

    def strike(self, kind: str) -> None:
        """Do it."""
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "error":
            raise RuntimeError("a bad day")
        elif kind == "hang":
            time.sleep(1e6)
        elif kind == "slow":
            time.sleep(SLOW_S)
        elif kind == "nan":
            next(each for each in self.net.modules() if hasattr(each, "spoiled")).spoiled = True
        elif kind == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, self.limit[1]))
        elif kind == "corrupt":
            _flip_in_newest(self.folder / "out")


def _flip_in_newest(folder: Path) -> None:
    """Flip a bit of the newest checkpoint, and of this rank's snapshots."""
    files = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".distcp")]
    with contextlib.suppress(OSError):
        token = (folder / ".snapshots").read_text()
        place = Path("/dev/shm", f"meshwright-snapshots-{token}", f"rank-{int(os.environ['RANK']):05d}")
        files += place.glob(f"of-{int(os.environ['RANK']):05d}-*")
    for path in files:
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.seek(max(path.stat().st_size // 2, 0))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))


# --- Plain torchrun, DDP and torch.distributed.checkpoint, as its tutorials have it


def worker() -> None:
    """Train as one rank of torchrun."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with torchrun, which starts ranks in sessions of their own
    dist.init_process_group("gloo", timeout=timedelta(seconds=MEET_S))  # ranks begin unevenly
    rank, size, folder = dist.get_rank(), dist.get_world_size(), Path(os.environ["GOODPUT_FOLDER"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.parallel.DistributedDataParallel(
        model(), process_group=dist.new_group(timeout=timedelta(seconds=HANG_S))
    )
    optim = torch.optim.AdamW(net.parameters(), lr=1e-3)
    faults, samples, step = Faults(net=net), data(), 0
    for path in sorted((folder / "out").glob("step-*"), reverse=True):
        weights, states = get_state_dict(net, optim)
        try:
            dcp.load({"model": weights, "optim": states}, checkpoint_id=path)
        except Exception:  # unfinished, or damaged
            continue
        set_state_dict(net, optim, model_state_dict=weights, optim_state_dict=states)
        step = int(path.name.removeprefix("step-"))
        break
    share = BATCH // size
    with (folder / "steps").open("a", buffering=1) as log:
        while True:
            began_s = time.perf_counter()
            first = step * BATCH + rank * share
            x = torch.stack([samples[(first + i) % len(samples)]["x"] for i in range(share)])
            loss = net(x)["loss"]
            optim.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if not bool(torch.isfinite(norm)):
                raise RuntimeError("nan")  # which starts all ranks again
            optim.step()
            step += 1
            if rank == 0:
                log.write(f"{step} {time.time()} {time.perf_counter() - began_s}\n")
            faults.on_step(step)
            if "GOODPUT_ALONE" not in os.environ and step % SAVE_EVERY == 0:
                weights, states = get_state_dict(net, optim)
                dcp.save({"model": weights, "optim": states}, checkpoint_id=folder / "out" / f"step-{step:08d}")


# --- torchft's DDP as its README has it: a torchrun for each replica, and one lighthouse


def supervise(replicas: int) -> None:
    """Start a lighthouse and a torchrun per replica, and wait for them."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    coordination = importlib.import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=100
    )
    started = []
    for number in range(replicas):
        given = {**os.environ, "REPLICA_GROUP_ID": str(number)}
        # It names itself by the host's name, and listens on this machine alone.
        given["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
            "--nproc-per-node=1", "--max-restarts=1000", "--monitor-interval=0.1", __file__, "--replica",
        ]  # fmt: skip
        started.append(subprocess.Popen(command, env=given))
    for each in started:
        each.wait()


def replica() -> None:
    """Train as one replica of torchft."""
    from datetime import timedelta

    import torch

    torchft = importlib.import_module("torchft")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    own, folder = int(os.environ["REPLICA_GROUP_ID"]), Path(os.environ["GOODPUT_FOLDER"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = model()
    optim = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def load(state: Any) -> None:
        net.load_state_dict(state["model"])
        optim.load_state_dict(state["optim"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=HANG_S)), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optim": optim.state_dict()}, replica_id=f"replica_{own}_",
        timeout=timedelta(seconds=HANG_S), hostname="127.0.0.1",
    )  # fmt: skip
    wrapped, committing = torchft.DistributedDataParallel(manager, net), torchft.Optimizer(manager, optim)
    faults, samples, share = Faults(net=net), data(), BATCH // int(os.environ["GOODPUT_RANKS"])
    with (folder / "steps").open("a", buffering=1) as log:
        while True:
            began_s, step = time.perf_counter(), manager.current_step()
            first = step * BATCH + own * share
            x = torch.stack([samples[(first + i) % len(samples)]["x"] for i in range(share)])
            committing.zero_grad()  # asks who takes part
            wrapped(x)["loss"].backward()
            if not bool(torch.isfinite(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))):
                manager.report_error(RuntimeError("nan"))  # the step is not committed
            committing.step()
            if manager.current_step() > step:
                log.write(f"{manager.current_step()} {time.time()} {time.perf_counter() - began_s}\n")
            faults.on_step(step)


# --- One run of one way


def run(
    way: str, ranks: int, seconds: float, faults: list[Fault], *, alone: bool = False, snapshot_every: int = 1
) -> tuple[float, Steps, int, Path]:
    """Return the seconds of a run since its first step, its steps, how many failures have struck, and its folder."""
    folder = Path(tempfile.mkdtemp(prefix="goodput-"))
    (folder / "out").mkdir()
    (folder / "faults.json").write_text(json.dumps(faults))
    given = {**os.environ, "GOODPUT_FOLDER": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    given.pop("PYTHONDONTWRITEBYTECODE", None)  # which containers set: every restart would compile this file
    given["GOODPUT_RANKS"] = str(ranks)
    given |= {"GOODPUT_ALONE": "1"} if alone else {}
    if way == WAYS[2]:
        # Otherwise ranks that are started again find the addresses of dead ones in the agent's store (pytorch#135712).
        given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            "--max-restarts=1000", "--monitor-interval=0.1", __file__, "--worker",
        ]  # fmt: skip
    elif way == WAYS[3]:
        command = [sys.executable, __file__, "--supervise", str(ranks)]
    else:
        (folder / "goodput.py").write_text(Path(__file__).read_text())
        (folder / "goodput.toml").write_text(CONFIG)
        changes = [f"run.snapshot.every={snapshot_every}"] if way == WAYS[0] and not alone else []
        changes += ["run.checkpoint_every=1000000"] if alone else []
        command = [
            sys.executable, "-m", "meshwright", "train", str(folder / "goodput.toml"), "--nproc", str(ranks), "--out",
            str(folder / "out"), "--max-restarts", "1000", *(word for change in changes for word in ("--set", change)),
        ]  # fmt: skip
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, env=given, stdout=said, stderr=said, start_new_session=True)
        while not (folder / "begun").exists():
            time.sleep(0.05)
        time.sleep(seconds)
        passed_s = time.time() - (folder / "begun").stat().st_mtime
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with contextlib.suppress(OSError):
        shutil.rmtree(Path("/dev/shm", f"meshwright-snapshots-{(folder / 'out/.snapshots').read_text()}"))
    return passed_s, steps_of(folder, way), len(list(folder.glob("struck-*"))), folder


def steps_of(folder: Path, way: str) -> Steps:
    """Return the steps that rank 0 has written down, the last time that each was taken."""
    if way in WAYS[2:]:
        lines = [line.split() for line in (folder / "steps").read_text().splitlines()]
        found = {int(step): (float(at), float(taken)) for step, at, taken in (line for line in lines if len(line) == 3)}
    else:
        records = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
        found = {each["step"]: (each["time_s"], each["step_time_s"]) for each in records}
    last = max(found, key=lambda step: found[step][0])
    return {step: each for step, each in found.items() if step <= last}


def drawn(seconds: float, every_s: float, ranks: int, seed: int, only: str | None = None) -> list[Fault]:
    """Return failures: when, what (or one kind alone), and on which rank."""
    rng, at_s = random.Random(seed), 0.0
    found: list[Fault] = []
    while (at_s := at_s + rng.expovariate(1 / every_s)) < seconds:
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        found.append((at_s, only or kind, rng.randrange(ranks)))
    return found


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per way and number of ranks."""
    rows = []
    ways = [way for way in WAYS if way != WAYS[3] or importlib.util.find_spec("torchft") is not None]
    ways = [way for way in ways if not options.way or way in options.way]
    for ranks in options.ranks:
        ideal = {}
        for way in dict.fromkeys(WAYS[1] if each == WAYS[0] else each for each in ways):
            _, steps, _, _ = run(way, ranks, options.warm_s, [], alone=True)
            ideal[way] = statistics.median(taken for _, taken in steps.values())
        ideal[WAYS[0]] = ideal.get(WAYS[1], 0.0)
        results: dict[str, list[tuple[float, int, int]]] = {way: [] for way in ways}
        for number in range(options.rounds):
            faults = drawn(options.seconds, options.every_s, ranks, 100 * ranks + number, options.only)
            for way in ways:
                passed_s, steps, struck, folder = run(
                    way, ranks, options.seconds, faults, snapshot_every=options.snapshot_every
                )
                results[way].append(((len(steps) - 1) * ideal[way] / passed_s, struck, len(faults)))
                share = results[way][-1][0]
                print(f"{ranks} ranks, {way}: {len(steps)} steps in {passed_s:.0f} s, goodput {share:.3f}, "
                      f"{struck} of {len(faults)} failures ({folder})", flush=True)  # fmt: skip
        for way, found in results.items():
            rows.append({
                "ranks": ranks, "way": way, "goodput": statistics.mean(share for share, _, _ in found),
                "failures": sum(struck for _, struck, _ in found), "step_s": ideal[way],
            })  # fmt: skip
    return rows


def main() -> None:
    """Measure, and write a table, figures as JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--supervise", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run, under failures")
    parser.add_argument("--every-s", type=float, default=60.0, help="mean time between two failures")
    parser.add_argument("--warm-s", type=float, default=15.0, help="of each run without failures")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--way", action="append", choices=WAYS, help="several times for several; default: all")
    parser.add_argument("--only", choices=SHARES, help="one kind of failure, at the same moments")
    parser.add_argument("--snapshot-every", type=int, default=1, metavar="STEPS", help="between two snapshots")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, default=None, help="JSON of the rows; a plot beside it as SVG")
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    if options.replica:
        replica()
        return
    if options.supervise:
        supervise(options.supervise)
        return
    rows = measure(options)
    print("\n| ranks | way | goodput | failures | seconds of a step |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['ranks']} | {row['way']} | {row['goodput']:.3f} | {row['failures']} | {row['step_s']:.3f} |")
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
        options.out.with_suffix(".svg").write_text(plot(rows))


def plot(rows: list[dict[str, Any]]) -> str:
    """Return bars of goodput as SVG."""
    parts, height = [], 26
    for number, row in enumerate(rows):
        y, width = 8 + number * height, 420 * min(row["goodput"], 1.0)
        parts.append(f'<rect x="200" y="{y}" width="{width:.0f}" height="18" fill="#1f6feb"/>')
        parts.append(f'<text x="192" y="{y + 14}" text-anchor="end">{row["ranks"]} ranks, {row["way"]}</text>')
        parts.append(f'<text x="{206 + width:.0f}" y="{y + 14}">{row["goodput"]:.3f}</text>')
    size = f'viewBox="0 0 700 {16 + len(rows) * height}"'
    font = 'font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{"".join(parts)}</svg>'


if __name__ == "__main__":
    main()
