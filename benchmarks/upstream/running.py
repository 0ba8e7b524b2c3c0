"""Run the files of an upstream suite on Meshwright, each in a copy of the checkout with its changes made."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .suite import Case, Change, Outcome, Suite

_PROGRAM = Path(__file__).with_name("on_cpu.py")
_LOSSES_KEPT = 10


def run_file(suite: Suite, source: Path, name: str, log_dir: Path) -> Outcome:
    """Run one file on every number of ranks of its case; without its changes first, where it has some."""
    case = suite.case(name)
    if case.because:
        return Outcome(name, "does not apply", why=case.because)
    begun = time.monotonic()
    tried: tuple[tuple[Change, ...], ...] = ((), case.changes) if case.changes else ((),)
    for changes in tried:
        outcome = _run_with(suite, source, name, case, changes, log_dir)
        if outcome.verdict != "fails":
            break
    outcome.seconds = round(time.monotonic() - begun, 1)
    return outcome


def _run_with(suite: Suite, source: Path, name: str, case: Case, changes: tuple[Change, ...], log_dir: Path) -> Outcome:
    ranks: dict[str, str] = {}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(suite, source, Path(folder) / "checkout", name, (*case.sizes, *changes))
        for number in case.ranks:
            label = str(number) if number else "its own"
            code, output = _started(suite, copy, case, name, number)
            (log_dir / f"{name.replace('/', '.')}.{label.replace(' ', '_')}.txt").write_text(output)
            ranks[label] = "passed" if code == 0 else _last_words(output, code)
            if case.project:
                found = [float(text) for text in re.findall(suite.losses, output)]
                losses[label] = found[:_LOSSES_KEPT]
    passed = all(result == "passed" for result in ranks.values())
    why = "; ".join(dict.fromkeys(change.why for change in (*case.sizes, *changes)))
    return Outcome(name, ("with a change" if changes else "as it is") if passed else "fails", ranks, why, losses)


def copied(suite: Suite, source: Path, target: Path, name: str, changes: tuple[Change, ...]) -> Path:
    """Copy the checkout, its imports renamed everywhere and ``changes`` made in the file ``name``."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".git"), symlinks=True)
    for path in target.rglob("*.py"):
        before = path.read_text(errors="surrogateescape")
        after = before
        edits = (*suite.imports, *changes) if path == target / name else suite.imports
        for change in edits:
            after = change.edit(after)
        if after != before:
            path.write_text(after, errors="surrogateescape")
    return target


def _started(suite: Suite, copy: Path, case: Case, name: str, ranks: int) -> tuple[int, str]:
    """Start the file's processes and wait for them; a time-out is code 124."""
    program = [str(_PROGRAM), *shlex.split(case.run.format(file=copy / name))]
    command = [sys.executable, *program]
    if ranks:
        address = ["--master_addr=127.0.0.1", f"--master_port={_free_port()}"]
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", *address, *program]
    paths = [*(str(copy / folder) for folder in suite.python_path), str(Path(__file__).parents[2])]
    kept = os.environ.get("PYTHONPATH", "")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([*paths, *filter(None, [kept])]))
    process = subprocess.Popen(
        command, cwd=(copy / name).parent, env=environment, text=True, start_new_session=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=case.timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 124, output
    return process.returncode, output


def _last_words(output: str, code: int) -> str:
    """Return the line that says what failed, for the page."""
    if code == 124:
        return "no end within its time"
    said = [
        line.strip()
        for line in output.splitlines()
        if re.match(r"^(\[rank\d+\]: ?)?\w*(\.\w+)*(Error|Exception)\b", line)
    ]
    said += [line.strip() for line in output.splitlines() if line.startswith("E  ")]
    return (said[0] if said else f"ended with code {code}")[:200]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
