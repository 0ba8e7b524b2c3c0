"""``meshwright train`` on a tiny project in which faults strike."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cli.helpers import meshwright, project

# What strikes: one line of JSON per fault, each once. "kill later" ends the process some milliseconds after the step,
# in a copy, a sum, a message to the neighbour, a checkpoint or the next step; "kill again" ends it at once, and the
# attempt that follows while that starts, joins, restores or trains.
FAULTS = """
import json, os, random, resource, signal, threading, time
from pathlib import Path

import torch

RANK = int(os.environ["RANK"])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_within(seconds, number, what):
    def end():
        time.sleep(random.Random(number).uniform(0.0, seconds))
        Path(f"{what}-{number}").touch()
        die()

    threading.Thread(target=end, daemon=True).start()


if RANK == 0:
    for path in Path().glob("again-*"):
        path.unlink()
        die_within(0.6, path.name.removeprefix("again-") + str(os.getppid()), "in-recovery")


class Faults:
    def __init__(self, job):
        self.job, self.limit = job, resource.getrlimit(resource.RLIMIT_FSIZE)
        self.output = None
        job.model.register_forward_hook(self.keep)

    def keep(self, module, given, output):
        if torch.is_grad_enabled() and type(output) is torch.Tensor and not output.is_meta:
            self.output = output.detach()

    def on_step(self, step, result):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limit)
        if self.output is not None:
            with open(f"outputs-{RANK}", "a") as file:
                file.write(f"{step} {self.output.double().sum().item()!r}\\n")
        for number, fault in enumerate(json.loads(Path("faults.json").read_text())):
            mark = Path(f"struck-{number}")
            if (fault["step"], fault["rank"]) == (step, RANK) and not mark.exists():
                mark.touch()
                self.strike(fault["kind"], number)

    def strike(self, kind, number):
        if kind == "kill":
            die()
        elif kind == "kill later":
            die_within(0.02, number, "soon")
        elif kind == "kill again":
            Path(f"again-{number}").touch()
            die()
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "hang":
            time.sleep(1e6)
        elif kind == "nan":
            def spoil(module, given, output):
                handle.remove()
                return output * float("nan")
            handle = self.job.model.register_forward_hook(spoil)
        elif kind == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, self.limit[1]))
        elif kind == "corrupt":
            token = Path("out/.snapshots").read_text()
            for path in Path("/dev/shm", f"meshwright-snapshots-{token}").glob(f"rank-{RANK:05d}/of-{RANK:05d}-*"):
                with path.open("r+b") as file:
                    file.seek(4096 + 100)
                    byte = file.read(1)
                    file.seek(4096 + 100)
                    file.write(bytes([byte[0] ^ 4]))
        else:
            raise RuntimeError("a bad day")
"""
OPTIONS = ("--set", "run.snapshot.every=1", "--set", "run.callbacks=['faulty:Faults']")

Fault = tuple[str, int, int]
"""What strikes, after which step, on which rank."""


def prepare(folder: Path, faults: Sequence[Fault] = ()) -> None:
    """Writes the project and its faults into a folder."""
    folder.mkdir(exist_ok=True)
    project(folder)
    (folder / "faulty.py").write_text(FAULTS)
    named = [dict(zip(("kind", "step", "rank"), each, strict=True)) for each in faults]
    (folder / "faults.json").write_text(json.dumps(named))


def train(folder: Path, nproc: int, *more: object, restarts: int = 3) -> subprocess.CompletedProcess[str]:
    """Trains the prepared project of a folder."""
    return meshwright(
        "train", "tiny.toml", "--nproc", nproc, "--out", "out", "--max-restarts", restarts, *OPTIONS, *more,
        folder=folder,
    )  # fmt: skip


def outputs(folder: Path) -> dict[tuple[str, int], str]:
    """By rank and step the sum of what its model has put out, exactly; a step that was repeated had it every time."""
    found: dict[tuple[str, int], str] = {}
    for path in sorted(folder.glob("outputs-*")):
        for line in path.read_text().splitlines():
            step, value = line.split()
            assert found.setdefault((path.name, int(step)), value) == value, f"{path}: step {step} went otherwise"
    return found


def events(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``failures.jsonl``."""
    return [json.loads(line) for line in (folder / "out/failures.jsonl").read_text().splitlines()]
