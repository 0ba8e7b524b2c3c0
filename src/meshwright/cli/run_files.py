"""Write the files of commands: single files, and the directory of a run with its metrics."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError, ConfigError
from meshwright.runtime.launch import launch_id, restart_count
from meshwright.store.tensor_files import write_text


def check_writable(option: str, path: Path | None, fix: str = "name another file") -> None:
    """Refuse a file that cannot be written, before any work is done.

    Raises:
        ConfigError: Naming the option.
    """
    wrong = None if path is None else _what_is_wrong(path)
    if wrong:
        raise ConfigError(
            f"{option} names no file that can be written",
            expected="a file in an existing directory",
            got=f"{path}, {wrong}",
            fix=fix,
        )


def _what_is_wrong(path: Path) -> str:
    if path.is_dir():
        return "a directory"
    folder = path.absolute().parent
    if not folder.is_dir():
        return "whose directory does not exist"
    if _is_special(path):
        return "" if os.access(path, os.W_OK) else "which this user may not write"
    try:
        tempfile.TemporaryFile(dir=folder).close()  # only an attempt shows it: some folders refuse even root
    except OSError as error:
        return f"in whose directory nothing can be written: {error.strerror}"
    return ""


def _is_special(path: Path) -> bool:
    """Return whether a path is a device or a pipe, such as /dev/stdout, which cannot be replaced."""
    return path.exists() and not path.is_file()


def write(option: str, path: Path, text: str) -> None:
    """Write a file atomically, and report it on standard error.

    Raises:
        ConfigError: When it cannot be written.
    """
    write_whole(path, text, f"{option} {path} cannot be written")
    sys.stderr.write(f"meshwright: wrote {path}\n")


def write_whole(
    path: Path, text: str, failure: str, fix: str = "name another file", *, makes_folder: bool = False
) -> None:
    """Write a file atomically: it gets its name only when it is complete.

    Raises:
        ConfigError: With the message ``failure``, when it cannot be written.
    """
    try:
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if _is_special(path):
            path.write_text(text, encoding="utf-8")
            return
        write_text(path.resolve(), text)
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            failure,
            expected="a directory in which this user may write",
            got=error.got if isinstance(error, CheckpointError) else error.strerror or str(error),
            fix=fix,
        ) from error


# --- The directory of a run
#
# config.json        the training file as resolved
# strategy.json      the strategy as applied
# metrics.jsonl      one object per step
# anomalies.jsonl    one object per step that was skipped, undone, or ended the run: its loss and its samples
# failures.jsonl     one object per event that has interrupted the run, and per time that it went on
# eval.jsonl         one object per validation
# samples.jsonl      one object per validation, if eval.samples: prompts and their continuations
# norms.jsonl        one object every run.norms_every steps: norms of weights and gradients by layer
# profile/           of run.profile: a trace and a memory snapshot per rank, and summary.txt
# checkpoints/       see meshwright.store
# best/              the checkpoint with the lowest validation loss, if eval.keep_best
# plan.txt           the plan, as it was shown before the first step
# tensorboard/       events, where tensorboard is installed; wandb/, mlflow.db and mlflow/, where these are asked for
# model_config.json  the config of a transformers model, for meshwright checkpoint export
# adapters.json      the config and names of adapters of peft, for the same
# .lock              locked by the run that writes here; names its host and process

CONFIG, STRATEGY, METRICS, CHECKPOINTS, PLAN, MODEL_CONFIG, ADAPTERS = (
    "config.json", "strategy.json", "metrics.jsonl", "checkpoints", "plan.txt", "model_config.json", "adapters.json",
)  # fmt: skip
ANOMALIES, EVAL, BEST, NORMS, PROFILE, FAILURES, SAMPLES = (
    "anomalies.jsonl", "eval.jsonl", "best", "norms.jsonl", "profile", "failures.jsonl", "samples.jsonl",
)  # fmt: skip
_RUNS = Path("runs")


def default_run_dir(file: Path) -> Path:
    """Return a directory that no run has, named after the training file and the time; nothing is made.

    Runs that start in the same second, as those of a job array do, also get other names.
    """
    name = f"{file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return _RUNS / f"{name}-{uuid.uuid4().hex[:6]}"


def is_restart(directory: Path | None) -> bool:
    """Return whether an earlier attempt of this process's launch may have begun the run in the directory."""
    return restart_count() > 0 or (directory is not None and _was_begun_by(launch_id(), directory))


def begun_run_dir(file: Path) -> Path | None:
    """Return the newest directory that :func:`default_run_dir` gave an earlier attempt of this launch; None: none."""
    name = launch_id()
    found = [path for path in _RUNS.glob(f"{file.stem}-*") if _was_begun_by(name, path)] if name is not None else []
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _was_begun_by(launch: str | None, directory: Path) -> bool:
    return bool(_written_by(launch, directory))


def _written_by(launch: str | None, directory: Path) -> dict[str, Any]:
    """Return the ``config.json`` that an attempt of a launch has written; empty if none has."""
    try:
        found = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if launch is not None and isinstance(found, dict) and found.get("launch") == launch else {}


def known_peak_flops_per_s(directory: Path, ranks: int) -> float | None:
    """Return the peak of all ranks that an earlier attempt of this launch has measured; None: none has."""
    found = _written_by(launch_id(), directory)
    peak = found.get("peak_flops_per_s")
    return peak if isinstance(peak, float) and peak > 0 and found.get("ranks") == ranks else None


def check_run_dir(directory: Path, *, resume: bool | None) -> None:
    """Refuse to overwrite a run, and to resume one without a checkpoint; nothing is changed.

    Args:
        directory: The run's.
        resume: Whether there must be a checkpoint (True) or no run (False); None: either, or a run without any.

    Raises:
        ConfigError: When ``directory`` contains a run, or cannot contain one.
        CheckpointError: When there is nothing to resume.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory", expected="a new or an empty one", got="a file", fix="name another --out"
        )
    if resume is None:
        return
    if resume:
        _check_resumable(directory)
        return
    present = [name for name in (CONFIG, STRATEGY, METRICS, CHECKPOINTS) if (directory / name).exists()]
    if present:
        raise ConfigError(
            f"{directory} contains a run already; nothing was overwritten",
            expected="a directory without one",
            got=", ".join(present),
            fix="resume it with --resume auto, name another --out, or move it away",
        )


def _check_resumable(directory: Path) -> None:
    checkpoints = directory / CHECKPOINTS
    if not any(checkpoints.glob("step-*")):
        raise CheckpointError(
            "There is no checkpoint to resume from",
            expected=f"a directory step-… in {checkpoints}",
            got="none" if directory.is_dir() else f"no directory {directory}",
            fix="name the run by --out; --resume auto (--set run.resume=auto) begins a run that has no checkpoint yet",
        )


_LOCK = ".lock"


class RunLock:
    """The right of one run to write into a directory, from its first file to the end of its process.

    It is a record lock of the operating system: it ends with the process, however that ends, and no forked process,
    such as a worker of a data loader, has a part in it. Its file stays. Some network file systems have no such locks;
    two runs would not notice each other there, which is said.

    Args:
        directory: Directory of the run; made if it is missing.

    Raises:
        ConfigError: When another process has it, naming its host and process, or the file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = -1
        if sys.platform == "win32":
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{directory} cannot be written",
                expected="a directory in which this user may write",
                got=error.strerror or str(error),
                fix="name another --out",
            ) from error
        self._lock(directory)

    def _lock(self, directory: Path) -> None:
        import fcntl

        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 1000).decode(errors="replace").strip()
            self.release()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _other_run(directory, holder) from None
            text = f"{directory} cannot be locked ({error.strerror}): let no other run write there"
            print(f"meshwright: {text}", file=sys.stderr, flush=True)
            return
        own = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, own.encode())

    def release(self) -> None:
        """Let other runs write. Calling it again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _other_run(directory: Path, holder: str) -> ConfigError:
    return ConfigError(
        f"Another run is writing into {directory}; nothing was changed",
        expected="one run in a directory at a time",
        got=holder or "a process that has just begun",
        fix="wait for it or end it, or name another --out",
    )


def check_not_running(directory: Path) -> None:
    """Refuse a directory into which a run is writing now; a run that starts later is found by its own lock.

    Raises:
        ConfigError: Naming the other run's host and process.
    """
    if (directory / _LOCK).is_file() and os.access(directory / _LOCK, os.R_OK | os.W_OK):
        RunLock(directory).release()


def write_document(path: Path, text: str) -> None:
    """Write a document of a run atomically, and its directory if there is none.

    Raises:
        ConfigError: When it cannot be written.
    """
    write_whole(path, text, f"{path} cannot be written", "name another --out", makes_folder=True)


class MetricsFile:
    """A file such as ``metrics.jsonl``, appended to after every step so that a killed run loses no line.

    Args:
        path: The file.
        resumed_step: Lines of later steps, and an incomplete last one, are dropped: they will be written again.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        every = read_records(path)
        self.records = [record for record in every if record["step"] <= resumed_step]
        self.dropped = [record for record in every if record["step"] > resumed_step]
        write_document(path, "".join(map(line_of, self.records)))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for the whole run
        self._pending = b""  # lines for which the disk had no room
        self._reported = False

    def append(self, record: dict[str, Any]) -> None:
        """Append one line; infinities and nan, which JSON lacks, become null.

        A full disk is reported once. Its lines stay pending and are written when there is room again.
        """
        self.records.append(record)
        self._pending += line_of(record).encode()
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
            self._reported = False
        except OSError as error:
            if not self._reported:
                report_unwritten(self._path, error, "its lines are written when there is room again")
            self._reported = True

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps, which will be repeated."""
        self._file.close()
        self.records[:] = [record for record in self.records if record["step"] <= step]
        try:
            write_document(self._path, "".join(map(line_of, self.records)))
            self._pending = b""
        except ConfigError as error:
            report_unwritten(self._path, error, f"lines after step {step} that were undone stay in it")
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open for the whole run

    def close(self) -> None:
        """Close the file, and report lines that could not be written."""
        if self._pending:
            report_unwritten(
                self._path, "no room until the end", f"{len(self._pending.splitlines())} lines are missing"
            )
        self._file.close()


def line_of(record: dict[str, Any]) -> str:
    """Return a record as a line of JSON; infinities and nan, which JSON lacks, become null."""
    return json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False) + "\n"


_unwritten: dict[Path, bytes] = {}  # whole lines for which the disk had no room


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a line to a file of records; one that cannot be written is reported, and written with the next."""
    _unwritten[path] = _unwritten.get(path, b"") + line_of(record).encode()
    append_unwritten(path)


def append_unwritten(path: Path) -> None:
    """Append the lines for which there was no room so far, if there are some."""
    left, length = _unwritten.get(path, b""), None
    if not left:
        return
    try:
        with path.open("ab", buffering=0) as file:
            length = file.seek(0, os.SEEK_END)
            while left:
                left = left[file.write(left) :]
    except OSError as error:
        with contextlib.suppress(OSError):
            if length is not None:
                os.truncate(path, length)  # another process's line must not follow half of one
        report_unwritten(path, error, "its lines are written when there is room again")
    else:
        del _unwritten[path]


def report_unwritten(path: Path, error: object, consequence: str) -> None:
    """Report on stderr that a file of records cannot be written, which is no reason to end the run."""
    print(
        f"meshwright: {path} cannot be written ({error}); training goes on, and {consequence}. What to do: make room "
        "on the disk, for the next checkpoint needs some",
        file=sys.stderr,
        flush=True,
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that are records of steps; empty where there is no file."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the process that wrote it was killed within the line
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records
