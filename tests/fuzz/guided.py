"""One parser under atheris: inputs are kept that reach new code, and changed further.

FOLDER/corpus grows with inputs that reach new code, FOLDER/findings holds one input for each place that fails.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from typing import NoReturn

import atheris

_LARGE_BYTES = 512 << 20
_HANG_S = 20.0  # of processor time
_LOST_S = 1200  # by the clock, for what hangs in a library's C
_RSS_MIB = 4096
# Where bytes turn into values, and what checks those; instrumenting everything else only takes time.
_INSTRUMENTED = [
    "tomllib", "meshwright.strategy", "meshwright.store", "meshwright.methods", "meshwright.data",
    "meshwright.lr_scheduler", "meshwright.cost.cluster", "meshwright.cost.calibration",
    "meshwright.cli.train_config", "meshwright.cli.train_options", "meshwright.cli.run_files",
    "meshwright.cli.plan_and_compare", "published_runs",
    "meshwright.planner.model_shapes", "meshwright.planner.explain", "meshwright.planner.plan_request",
    "meshwright.planner.workload", "meshwright.planner.config_models", "meshwright.runtime.rank_reports",
    "meshwright.compat.bmtrain.lr_schedules", "meshwright.comm.message_header",
]  # fmt: skip

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch  # noqa: E402 - what is not ours is imported before imports are instrumented, and stays as it is
import transformers  # noqa: E402, F401

with atheris.instrument_imports(include=_INSTRUMENTED, enable_loader_override=False):
    from tests.fuzz.mutations import changed
    from tests.fuzz.parsers import PARSERS, Trial, regressions, write_valid

torch.set_num_threads(1)


class Hang(BaseException):
    """An input that keeps the processor busy."""


def _hang(*_: object) -> None:
    raise Hang


class Findings:
    """Inputs that end in something other than a value or the documented error, one for each place."""

    def __init__(self, trial: Trial, folder: Path, seconds: float) -> None:
        self._trial, self._folder, self._seen = trial, folder, set[str]()
        self._ends_s = time.process_time() + seconds
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, content: bytes) -> None:
        started_s, before = time.process_time(), _peak_bytes()
        signal.setitimer(signal.ITIMER_VIRTUAL, _HANG_S)
        try:
            self._trial(content)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in a library's Rust is no Exception
            self._write(_place(error), content, "".join(traceback.format_exception(error)))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        took_s, more = time.process_time() - started_s, _peak_bytes() - before
        if took_s > self._trial.parser.slow_s:
            self._write("slow", content, f"{took_s:.1f} s of processor time")
        if more > _LARGE_BYTES:
            self._write("large", content, f"{more >> 20} MiB of memory")
        if time.process_time() > self._ends_s:
            os.kill(os.getpid(), signal.SIGUSR1)  # libFuzzer prints its figures and ends

    def _write(self, place: str, content: bytes, told: str) -> None:
        if place in self._seen:
            return
        self._seen.add(place)
        name = hashlib.sha256(content).hexdigest()[:12]
        (self._folder / name).write_bytes(content)
        (self._folder / f"{name}.why").write_text(f"{place}\n{told[-4000:]}\n", errors="backslashreplace")
        print(f"finding {name}: {place}", file=sys.stderr, flush=True)


def _place(error: BaseException) -> str:
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "meshwright" in frame.filename]
    last = own[-1] if own else None
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}" if last else type(error).__name__


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(name: str, seconds: float, folder: Path, place: Path) -> NoReturn:
    """Fuzzes for so many seconds of processor time, which other programs do not shorten; libFuzzer ends the process.

    Args:
        name: Of the parser.
        seconds: For it.
        folder: For corpus and findings.
        place: An existing folder for the file that is read, again and again: best in memory.
    """
    valid = Path(tempfile.mkdtemp(dir=place))
    write_valid(valid)
    trial = Trial(name, valid)
    trial.valid_is_read()
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    (corpus / "valid").write_bytes(trial.valid)
    for known in regressions(name):
        shutil.copy(known, corpus)

    def mutate(content: bytes, max_size: int, seed: int) -> bytes:
        def raw(part: bytes) -> bytes:
            return atheris.Mutate(part, max(16, min(max_size, 2 * len(part))))

        return changed(PARSERS[name].kind, content, Random(seed), raw)[:max_size]

    options = [
        "guided", f"-timeout={_LOST_S}", f"-report_slow_units={_LOST_S}", f"-rss_limit_mb={_RSS_MIB}",
        f"-max_len={max(4096, 3 * len(trial.valid))}", "-print_final_stats=1",
        f"-artifact_prefix={folder / 'findings'}/", str(corpus),
    ]  # fmt: skip
    signal.signal(signal.SIGVTALRM, _hang)
    atheris.Setup(options, Findings(trial, folder / "findings", seconds), custom_mutator=mutate)
    atheris.Fuzz()
    raise SystemExit(0)
