"""The directory of a run: who may write into it, and what lies where.

RUN_DIR/config.json     the training file as resolved      metrics.jsonl   one object per step
        strategy.json   the strategy as applied            checkpoints/    see meshwright.store
        tensorboard/    events, where tensorboard is installed
        model_config.json   the config of a transformers model, for meshwright checkpoint export
        adapters.json       the config and names of adapters of peft, for the same
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError, ConfigError

CONFIG, STRATEGY, METRICS, CHECKPOINTS, TENSORBOARD, MODEL_CONFIG, ADAPTERS = (
    "config.json", "strategy.json", "metrics.jsonl", "checkpoints", "tensorboard", "model_config.json", "adapters.json",
)  # fmt: skip
_RUNS = Path("runs")


def default_run_dir(file: Path) -> Path:
    """A directory that does not exist yet, named after the training file and the time."""
    name = f"{file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (_RUNS / (name if number == 1 else f"{name}-{number}") for number in range(1, 1000))
    return next(path for path in candidates if not path.exists())


def check_run_dir(directory: Path, *, resume: bool) -> None:
    """Refuses to overwrite a run, and to resume one that has no checkpoint. Changes nothing.

    Raises:
        ConfigError: When ``directory`` holds a run, or cannot hold one.
        CheckpointError: When there is nothing to resume.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory", expected="a new or an empty one", got="a file", fix="name another --out"
        )
    if resume:
        _check_resumable(directory)
        return
    present = [name for name in (CONFIG, STRATEGY, METRICS, CHECKPOINTS) if (directory / name).exists()]
    if present:
        raise ConfigError(
            f"{directory} holds a run already; nothing was overwritten",
            expected="a directory without one",
            got=", ".join(present),
            fix="go on with it by --resume, name another --out, or move it away",
        )


def _check_resumable(directory: Path) -> None:
    checkpoints = directory / CHECKPOINTS
    if not any(checkpoints.glob("step-*")):
        raise CheckpointError(
            "There is no checkpoint to resume from",
            expected=f"a directory step-… in {checkpoints}",
            got="none" if directory.is_dir() else f"no directory {directory}",
            fix="name the run by --out, or start from the beginning without --resume",
        )


def write_text(path: Path, text: str) -> None:
    """Writes a small file, whole or not at all.

    Raises:
        ConfigError: When it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written",
            expected="a directory in which this user may write",
            got=error.strerror or str(error),
            fix="name another --out",
        ) from error


class MetricsFile:
    """``metrics.jsonl``: appended to after every step, so that a run can be watched and loses nothing when killed.

    Args:
        path: The file.
        resumed_step: Lines of later steps, and an incomplete last one, are dropped: they will be written again.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.records = [record for record in _read_lines(path) if record["step"] <= resumed_step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open for the whole run

    def append(self, record: dict[str, Any]) -> None:
        """Writes one line. Infinities and nan, which JSON lacks, become null."""
        self.records.append(record)
        self._file.write(json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False) + "\n")

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _read_lines(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by the end of the process that wrote it
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records
