"""Every parser under atheris, one process each: ``python -m tests.fuzz [--seconds 300] [--out FOLDER] [PARSER …]``.

Ends with a table, and with status 1 when there are findings. What a finding is worth keeping for goes into
``tests/fuzz/regressions/PARSER/``: every file there is read again by ``make test``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

try:
    import atheris  # noqa: F401
except ImportError:
    sys.exit("atheris is not installed: pip install 'meshwright[fuzz]' (it exists for Linux on x86-64)")

from tests.fuzz.guided import fuzz
from tests.fuzz.parsers import PARSERS

_OWN_FAILURE = 70
_MEMORY = Path("/dev/shm")  # ten times as many runs as on a disk
_PROGRESS = re.compile(r"#(\d+)\s.*?cov: (\d+) ft: (\d+) corp: (\d+)")


def run(name: str, seconds: float, folder: Path) -> tuple[int, ...]:
    """Fuzzes one parser; where an input ends its process, another goes on until the time is over.

    Returns:
        Runs, coverage, features, inputs in the corpus, findings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    left, runs, reached = seconds, 0, [0, 0, 0]
    while left >= 1:
        before = log.stat().st_size if log.exists() else 0
        with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as place:
            left -= _in_a_child(name, left, log, Path(place))
        text = log.read_bytes()[before:].decode(errors="replace")
        told = _PROGRESS.findall(text)
        if not told:
            raise SystemExit(f"{name} did not start:\n{text[-3000:]}")
        runs, reached = runs + int(told[-1][0]), [int(figure) for figure in told[-1][1:]]
    findings = [path for path in (folder / "findings").glob("*") if path.suffix != ".why"]
    return runs, *reached, len(findings)


def _in_a_child(name: str, seconds: float, log: Path, place: Path) -> float:
    """Forked, since importing and instrumenting take longer than everything else; its seconds of processor time.

    Raises:
        SystemExit: When the fuzzer itself fails: what was fuzzed until then is no result.
    """
    child = os.fork()
    if child == 0:
        try:
            stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            fuzz(name, seconds, log.parent, place)
        except SystemExit:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(_OWN_FAILURE)
    _, status, used = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status) == _OWN_FAILURE:
        raise SystemExit(f"the fuzzer of {name} failed itself; see the end of {log}")
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Runs what was asked for and prints the table."""
    arguments = argparse.ArgumentParser(prog="python -m tests.fuzz")
    arguments.add_argument("parsers", nargs="*", metavar="PARSER", default=list(PARSERS))
    arguments.add_argument("--seconds", type=float, default=300, help="of processor time, for each parser")
    arguments.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="corpus and findings")
    options = arguments.parse_args()
    unknown = sorted(set(options.parsers) - set(PARSERS))
    if unknown:
        arguments.error(f"no parser {', '.join(unknown)}; there are {', '.join(PARSERS)}")
    print(f"{'parser':16} {'runs':>9} {'coverage':>8} {'features':>8} {'corpus':>6} {'findings':>8}", flush=True)
    total = 0
    for name in options.parsers:
        folder = options.out.resolve() / name.replace(" ", "_")
        runs, coverage, features, corpus, findings = run(name, options.seconds, folder)
        print(f"{name:16} {runs:9,} {coverage:8,} {features:8,} {corpus:6,} {findings:8}", flush=True)
        total += findings
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
