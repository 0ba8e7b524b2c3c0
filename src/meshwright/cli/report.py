"""The short report at the end of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from meshwright.cli.corpus import Corpus
from meshwright.cli.progress import UNKNOWN, duration, percent, speed
from meshwright.cli.session import Session
from meshwright.planner import readable_bytes
from meshwright.runtime import world_size
from meshwright.utils.terminal import PlainConsole

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 56


def print_report(session: Session, records: Sequence[Mapping[str, Any]], peak_bytes: int) -> None:
    """Prints what came of a run.

    Args:
        session: The run, after its last step.
        records: Its lines of ``metrics.jsonl``.
        peak_bytes: The largest rank's peak memory.
    """
    steps = session.state.step
    checkpoints = sorted(session.store.directory.glob("step-*"))
    ranks = f"{world_size()} ranks" if world_size() > 1 else "one rank"
    table = Table(title=f"Trained {steps} steps on {ranks}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in (
        ("loss", _loss_text(session, records)),
        ("loss curve", sparkline([_number(record["loss"]) for record in records], _CURVE_WIDTH)),
        ("median speed", _speed_text(records)),
        ("peak of a rank", _memory_text(session, peak_bytes)),
        ("checkpoint", _short(checkpoints[-1]) if checkpoints else UNKNOWN),
        ("metrics", str(session.run_dir / "metrics.jsonl")),
    ):
        table.add_row(label, text)
    console = PlainConsole()
    console.print(table)
    # Outside of the table, so that it can be copied.
    wanted = session.prepared.config.run.steps
    command = session.options.resume_command(session.run_dir, wanted if steps < wanted else 2 * steps)
    console.print(f"Go on with it:\n  {command}", soft_wrap=True, highlight=False, markup=False)


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _loss_text(session: Session, records: Sequence[Mapping[str, Any]]) -> str:
    losses = [_number(record["loss"]) for record in records]
    finite = [loss for loss in losses if math.isfinite(loss)]
    best = f"{min(finite):.4f}" if finite else UNKNOWN
    return f"{losses[0]:.4f} first, {losses[-1]:.4f} last, {best} best{_unit(session)}"


def _unit(session: Session) -> str:
    if session.prepared.config.model.loss is not None or not isinstance(session.prepared.corpus, Corpus):
        return ""
    return ", nats per byte" if session.prepared.config.data.tokenizer == "bytes" else ", nats per token"


def _speed_text(records: Sequence[Mapping[str, Any]]) -> str:
    step_time_s = statistics.median(record["step_time_s"] for record in records)
    known = [mfu for record in records if (mfu := record.get("mfu")) is not None]
    mfu = percent(statistics.median(known) if known else None)
    total_s = duration(sum(record["step_time_s"] for record in records))
    return f"{speed(records)}, {step_time_s:.3f} s a step, MFU {mfu}; {total_s} in all"


def _memory_text(session: Session, peak_bytes: int) -> str:
    accelerated = session.accelerated
    predicted = readable_bytes(accelerated.plan.memory.total)
    measured = readable_bytes(peak_bytes)
    if accelerated.device.type == "cuda":
        return f"{predicted} predicted, {measured} measured"
    return f"{predicted} predicted, {measured} the whole process"


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of block characters: means of equal stretches, from the lowest to the highest.

    Args:
        values: Numbers; infinities and nan are left out.
        width: Most characters.
    """
    count = min(width, len(values))
    parts = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    finite = [[value for value in part if math.isfinite(value)] for part in parts]
    means = [statistics.fmean(part) if part else math.nan for part in finite]
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return ""
    lowest, span = min(known), max(known) - min(known)
    return "".join(" " if math.isnan(mean) else _bar((mean - lowest) / span if span else 0.0) for mean in means)


def _bar(height: float) -> str:
    return _BARS[min(int(height * len(_BARS)), len(_BARS) - 1)]
