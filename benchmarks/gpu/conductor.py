"""Run cases one after the other, keep what they find as they find it, and go on where an earlier run was cut off."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from gpu.cases import Case
from gpu.machine import BENCHMARKS, Machine, environment
from gpu.table import markdown

_LEAST_S = 15.0  # less time is left than any case takes
_SLOWER = 5  # than a machine with a GPU may the one be that tries the cases on a CPU, beside other work
_FORMAT = 1
WORKER = [sys.executable, "-m", "gpu.worker"]


class Conductor:
    """The run: a folder with what is known, and a budget of seconds.

    Args:
        machine: What there is.
        folder: Of ``gpu.json``, ``gpu.md`` and what the cases print.
        budget_s: Seconds after which no case begins; one that runs is ended then.
        tiny: Tiny sizes, and the stand-in.
        fresh: Forget what is in the folder.
    """

    def __init__(self, machine: Machine, folder: Path, budget_s: float, *, tiny: bool, fresh: bool = False) -> None:
        self.machine, self.folder, self.tiny = machine, folder, tiny
        self.ends_s = time.monotonic() + budget_s
        folder.mkdir(parents=True, exist_ok=True)
        self.document: dict[str, Any] = {} if fresh else self._known()
        self.document.update(format=_FORMAT, tiny=tiny, machine=asdict(machine) | {"shared": machine.shared})
        self.found: dict[str, Any] = self.document.setdefault("cases", {})

    def run(self, cases: Sequence[Case]) -> int:
        """Run the cases that have no result yet; return 0 if nothing has failed and something was tried."""
        for line in filter(None, (self.machine.why_not, self.machine.shared)):
            print(f"this machine: {line}", flush=True)
        for case in cases:
            if self.found.get(case.name, {}).get("state") in ("ok", "failed"):
                continue
            self._run(case)
            self._tell(case)
            self._write()
        self._write()
        print(f"\n{self.folder / 'gpu.md'}: the table; {self.folder / 'gpu.json'}: everything", flush=True)
        states = [self.found[case.name]["state"] for case in cases]
        return int("failed" in states or not {"ok", "cut off"} & set(states))

    def _known(self) -> dict[str, Any]:
        """What an earlier run on such a machine has found."""
        try:
            document = json.loads((self.folder / "gpu.json").read_text())
        except (OSError, ValueError):
            return {}
        same = document.get("format") == _FORMAT and document.get("tiny") == self.tiny
        names = [each.get("name") for each in (document.get("machine", {}), asdict(self.machine))]
        if not same or names[0] != names[1]:
            print(f"{self.folder} holds figures of {names[0]}: they are left out", flush=True)
            return {}
        return document

    def _run(self, case: Case) -> None:
        entry = self.found.setdefault(case.name, {"part": case.part, "about": case.about, "items": {}})
        entry.pop("why", None)
        why = case.why_not(self.machine)
        left_s = self.ends_s - time.monotonic()
        if why is not None or left_s < _LEAST_S:
            entry.update(state="left out" if why else "not begun", why=why or "no time was left")
            return
        started_s = time.monotonic()
        own_s = case.limit_s * (_SLOWER if self.tiny else 1)
        limit_s = min(own_s, left_s)
        (self._run_script if case.is_script else self._run_function)(case, entry, started_s + limit_s)
        entry["wall_s"] = round(entry.get("wall_s", 0.0) + time.monotonic() - started_s, 1)
        if entry["state"] == "late":  # by its own limit it has failed; by the end of the run it goes on next time
            entry["state"] = "failed" if limit_s == own_s else "cut off"

    def _run_script(self, case: Case, entry: dict[str, Any], ends_s: float) -> None:
        """A benchmark of its own: its figures are what it has written."""
        file = self.folder / f"{case.name}.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, str(BENCHMARKS / case.run), *(case.tiny_args if self.tiny else case.args)]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.tiny else {}
        code = self._wait([self._start([*command, "--json", str(file)], case, **hidden)], ends_s)
        with contextlib.suppress(OSError, ValueError):
            entry["items"]["figures"] = {"ok": True, "figures": json.loads(file.read_text())}
        self._close(case, entry, code)

    def _run_function(self, case: Case, entry: dict[str, Any], ends_s: float) -> None:
        """Processes that report item by item; after one that dies, others go on behind the item that it died in."""
        while True:
            lines = self.folder / f"{case.name}.jsonl"
            lines.unlink(missing_ok=True)
            known = len(entry["items"])
            told = {"case": case.name, "lines": str(lines), "tiny": self.tiny, "done": list(entry["items"])}
            command = [*WORKER, json.dumps(told)]
            places = [self._place(case, rank) for rank in range(case.ranks)]
            code = self._wait([self._start(command, case, **place) for place in places], ends_s)
            begun = _read(lines, entry["items"])
            self._close(case, entry, code)
            if code in (None, 0) or (begun is None and len(entry["items"]) == known):
                return
            why = entry.pop("why", f"exit code {code}")
            if begun is not None:
                entry["items"][begun] = {"ok": False, "why": why}

    def _place(self, case: Case, rank: int) -> dict[str, str]:
        """The environment of one rank: alone, with a GPU of its own, or on one that all share."""
        if case.ranks == 1:
            return {}
        own = rank if case.gpus > 1 else 0
        port = 20000 + (os.getpid() * 7 + len(self.found)) % 20000
        size = {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)}
        return {"RANK": str(rank), "LOCAL_RANK": str(own), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **size}

    def _start(self, command: list[str], case: Case, **more: str) -> subprocess.Popen[bytes]:
        output: IO[bytes] = (self.folder / f"{case.name}.log").open("ab")
        with output:  # a session of its own, so that it ends with all that it has started
            return subprocess.Popen(
                command, env=environment(**more), stdout=output, stderr=output, cwd=BENCHMARKS.parent,
                start_new_session=True,
            )  # fmt: skip

    def _wait(self, processes: list[subprocess.Popen[bytes]], ends_s: float) -> int | None:
        """Return the first exit code that is not 0, or 0; None when time was up. No process is left."""
        try:
            while True:
                codes = [process.poll() for process in processes]
                failed = [code for code in codes if code]
                if failed:
                    return failed[0]
                if all(code == 0 for code in codes):
                    return 0
                if time.monotonic() > ends_s:
                    return None
                time.sleep(0.05)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _close(self, case: Case, entry: dict[str, Any], code: int | None) -> None:
        wrong = [name for name, item in entry["items"].items() if not item["ok"]]
        entry["state"] = "late" if code is None else "failed" if code or wrong or not entry["items"] else "ok"
        if code is None:
            entry["why"] = "its time was up"
        elif code:
            entry["why"] = f"exit code {code}: {_last_line(self.folder / f'{case.name}.log')}"

    def _tell(self, case: Case) -> None:
        entry = self.found[case.name]
        good = sum(item["ok"] for item in entry["items"].values())
        counted = f"{good} of {len(entry['items'])}" if entry["items"] else ""
        print(f"{case.name:<18} {entry['state']:<9} {counted:<9} {entry.get('why', '')}".rstrip(), flush=True)
        for name, item in entry["items"].items():
            if not item["ok"]:
                print(f"  {name}: {item['why']}", flush=True)

    def _write(self) -> None:
        for name, text in (
            ("gpu.json", json.dumps(self.document, indent=2) + "\n"),
            ("gpu.md", markdown(self.document)),
        ):
            partial = self.folder / f"{name}.part"
            partial.write_text(text)
            partial.replace(self.folder / name)


def _read(lines: Path, items: dict[str, Any]) -> str | None:
    """Take up the items that a process has reported; return the one that it had begun and not ended."""
    begun = None
    for line in lines.read_text().splitlines() if lines.exists() else ():
        try:
            told = json.loads(line)
        except ValueError:  # the last line of a process that was ended
            continue
        name = told.pop("item")
        begun = name if told == {} else None
        if told:
            items[name] = told
    return begun


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
        found = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return found[-1].strip()[:200] if found else "no output"
