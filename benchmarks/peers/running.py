"""The processes of one system, which wait for their turn."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from peers.case import ROOT, Case

_TIMEOUT_S, _POLL_S = 600, 1.0


class SystemFailed(RuntimeError):
    """A rank ended, or did not answer; holds what it said last."""


class Running:
    """A system's ranks, from their start on; as torchrun starts them, without its own process and agent.

    Args:
        counting: Whether tensors are counted; such processes are not timed.
        folder: Where the ranks' output goes.
    """

    def __init__(self, case: Case, system: str, world: int, folder: Path, *, counting: bool = False) -> None:
        self.system, self.world = system, world
        self._logs = [folder / f"{case.name}-{system}-{rank}-{counting}.log".replace(" ", "_") for rank in range(world)]
        self._replies: list[IO[str]] = []
        self._processes: list[subprocess.Popen[str]] = []
        port = _free_port()
        for rank in range(world):
            self._start(rank, port, {"case": dataclasses.asdict(case), "system": system, "counting": counting})

    def _start(self, rank: int, port: int, told: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        self._replies.append(os.fdopen(reading))
        told = told | {"reply": writing, "started_s": time.time()}
        with self._logs[rank].open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "peers.worker", json.dumps(told)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=(writing,),
                env=os.environ | _environment(rank, self.world, port),
            )  # fmt: skip
        os.close(writing)
        self._processes.append(process)

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Every rank's answer."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise SystemFailed(self._last_words()) from None
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        return [self._answer(reply) for reply in self._replies]

    def _answer(self, reply: IO[str]) -> dict[str, Any]:
        until = time.monotonic() + _TIMEOUT_S
        while not select.select([reply], [], [], _POLL_S)[0]:
            if time.monotonic() > until or any(process.poll() is not None for process in self._processes):
                raise SystemFailed(self._last_words())
        line = reply.readline()
        if not line:
            raise SystemFailed(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        """The last lines of the rank that said most."""
        return max((log.read_text(errors="replace") for log in self._logs), key=len)[-2000:]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for reply in self._replies:
            reply.close()


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    threads = max((os.cpu_count() or 1) // world, 1)
    paths = (ROOT / "benchmarks", ROOT / "src", ROOT, os.environ.get("PYTHONPATH", ""))
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_RUN_ID": "peers",  # how Lightning knows that its ranks have been started
        "PYTHONDONTWRITEBYTECODE": "",  # an installed package is compiled
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),  # DeepSpeed's ninja
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
