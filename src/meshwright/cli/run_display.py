"""Show and record a run on rank 0: plan, progress bar, metrics, trackers, and the report at the end."""

from __future__ import annotations

import io
import math
import statistics
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from meshwright.cli.run_failures import RunFailures
from meshwright.cli.run_files import EVAL, METRICS, NORMS, PLAN, PROFILE, SAMPLES, MetricsFile, report_unwritten
from meshwright.cli.session import Session
from meshwright.cli.trackers import RunInfo, Trackers
from meshwright.cli.train_corpus import Corpus
from meshwright.cli.validation import Result, Sample
from meshwright.data import ByteTokenizer
from meshwright.errors import readable_bytes
from meshwright.planner import plan_table
from meshwright.runtime import world_size
from meshwright.runtime.terminal import PlainConsole

if TYPE_CHECKING:
    from meshwright.training.step_profile import StepProfile

UNKNOWN = "–"


class TrainingProgress(Progress):
    """A progress bar over the steps with one line of figures; invisible without a terminal.

    Attributes:
        above: Shown above the bar while it is set.
    """

    def __init__(self, console: Console, steps: int, done: int) -> None:
        ends = TextColumn("ETA {task.fields[eta]}")
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TaskProgressColumn(), TimeElapsedColumn())
        self.above: RenderableType | None = None
        super().__init__(*columns, ends, console=console, disable=not console.is_terminal, expand=True)
        self._line = "first step …"
        self._steps_task = self.add_task("step", total=steps, completed=done, eta=UNKNOWN)

    @property
    def visible(self) -> bool:
        """Return whether there is a terminal to draw on."""
        return not self.disable

    def show(self, step: int, line: str, eta_s: float | None) -> None:
        """Move the bar and change the line."""
        self._line = line
        self.update(self._steps_task, completed=step, eta=duration(eta_s))

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the renderable above, the bar and the line."""
        if self.above is not None:
            yield self.above
        yield self.make_tasks_table(self.tasks)
        yield Text(getattr(self, "_line", ""))  # rich calls this before __init__ is done


def status_line(record: Mapping[str, Any], smoothed_loss: float | None) -> str:
    """Format a step's record as one line of 80 columns."""
    return "  ".join(
        (
            f"loss {smoothed_loss if smoothed_loss is not None else record['loss']:.3f}",
            f"lr {record['lr']:.1e}",
            f"norm {record['grad_norm']:.2f}{' skipped' if record['skipped'] else ''}",
            speed([record]),
            f"MFU {percent(record['mfu'])}",
            f"mem {readable_bytes(record['peak_memory_bytes'])}",
        )
    )


def speed(records: Sequence[Mapping[str, Any]]) -> str:
    """Format the steps' median speed in tokens/s, or in samples/s where samples are no tokens."""
    unit = "tokens" if figures(records, "tokens_per_s") else "samples"
    known = figures(records, f"{unit}_per_s")
    return f"{readable_count(statistics.median(known))} {unit}/s" if known else UNKNOWN


def figures(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the numbers of records under a key; a file may hold lines that are older, or of other programs."""
    return [value for record in records if math.isfinite(value := _number(record.get(key)))]


def percent(fraction: float | None) -> str:
    """Format a fraction as ``"41 %"``; None as a dash."""
    return UNKNOWN if fraction is None else f"{100 * fraction:.0f} %"


def readable_count(value: float) -> str:
    """Format a number as ``"12.3k"``."""
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def duration(seconds: float | None) -> str:
    """Format seconds as ``"1:02:03"`` or ``"2:03"``; None as a dash."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --- During the run

_SMOOTHING = 0.9
_PROMPT_WIDTH = 40
_LINES_BELOW = 4  # the bar, the line, and room for a prompt
_SCALARS = ("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "expert_imbalance")


class Observer:
    """Rank 0's display and records of a run, as a context manager that closes files and releases the terminal.

    Attributes:
        records: All lines of ``metrics.jsonl``, those before a resume included.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plan = session.accelerated.plan
        self._run = session.prepared.config.run
        self._first_step = session.state.step + 1
        self._console = PlainConsole()
        self._metrics = MetricsFile(session.run_dir / METRICS, session.state.step)
        self.records = self._metrics.records
        self.failures = RunFailures(
            session.run_dir, session.state.step, self._metrics.dropped, self.records[-1] if self.records else None
        )
        self._validations = None
        if session.validation is not None:
            self._validations = MetricsFile(session.run_dir / EVAL, session.state.step)
        self._samples = None
        if session.samples is not None:
            self._samples = MetricsFile(session.run_dir / SAMPLES, session.state.step)
        self._norms = None
        if self._run.norms_every is not None:
            self._norms = MetricsFile(session.run_dir / NORMS, session.state.step)
        info = RunInfo(session.run_dir, session.prepared.config.model_dump(mode="json"), session.state.step)
        self._trackers = Trackers(session.prepared.trackers, info)
        self._progress = TrainingProgress(self._console, self._run.steps, session.state.step)
        # The ETA counts from the end of the first step, which is slower than the others.
        self._started_s = 0.0
        self._smoothed: float | None = None

    def __enter__(self) -> Self:
        table = plan_table(self._plan)
        self._keep_plan(table)
        # Until the first step has measured the memory; without a terminal it is printed then, or when the run fails.
        self._progress.above = table
        if self._progress.visible and len(self._console.render_lines(table)) >= self._console.height - _LINES_BELOW:
            self._print_instead(table)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._print_instead(self._progress.above)
        self._progress.stop()
        self._metrics.close()
        for file in (self._validations, self._samples, self._norms):
            if file is not None:
                file.close()
        self._trackers.close()

    def _keep_plan(self, table: RenderableType) -> None:
        path, console = self._session.run_dir / PLAN, Console(width=100, no_color=True, file=io.StringIO())
        console.print(table)
        try:
            path.write_text(console.file.getvalue(), encoding="utf-8")  # type: ignore[attr-defined]
        except OSError as error:
            report_unwritten(path, error, "the plan is shown alone")
        else:
            self._trackers.file(path)

    def show_measured(self, measured: Mapping[str, int]) -> None:
        """Print the plan with the memory that the first step has measured."""
        self._print_instead(plan_table(self._plan, measured))

    def _print_instead(self, table: RenderableType | None) -> None:
        """Print a table, in place of the one above the bar."""
        self._progress.above = None
        if table is not None:
            self._console.print(table)

    def show_step(self, record: dict[str, Any]) -> None:
        """Record one step, and show it."""
        if record["step"] == self._first_step:
            self.failures.went_on(record, self._session.source)
        self._metrics.append(record)
        self._trackers.log({name: record.get(name) for name in _SCALARS}, record["step"])
        self._smooth(record["loss"])
        line, eta_s = status_line(record, self._smoothed), self._eta_s(record["step"])
        if self._progress.visible:
            self._progress.show(record["step"], line, eta_s)
        elif record["step"] % self._run.log_every == 0 or record["step"] in (self._first_step, self._run.steps):
            line = f"step {record['step']}/{self._run.steps}  {line}  ETA {duration(eta_s)}"
            self._console.print(line, soft_wrap=True, highlight=False)

    def show_validating(self, done: int, total: int) -> None:
        """Show how far a validation is."""
        if self._progress.visible:
            self._progress.show(self._session.state.step, f"validating, batch {done} of {total}", None)

    def show_validation(self, result: Result) -> None:
        """Record a validation, and show it."""
        assert self._validations is not None
        figures = result.figures()
        self._validations.append({"step": result.step, **figures})
        self._trackers.log({f"eval/{name}": value for name, value in figures.items()}, result.step)
        self._console.print(result.line(), soft_wrap=True, highlight=False, markup=False)

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Record what the model has written, and show it."""
        assert self._samples is not None
        step = self._session.state.step
        self._samples.append(
            {"step": step, "samples": [{"prompt": each.prompt, "text": each.text} for each in samples]}
        )
        self._trackers.texts(samples, step)
        for each in samples:
            prompt = textwrap.shorten(each.prompt, _PROMPT_WIDTH, placeholder=" …")
            text = f"sample at step {step}: {prompt!r} → {each.text!r}"
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def show_norms(self, norms: Mapping[str, tuple[float, float | None]]) -> None:
        """Record the norms of every layer's weights and gradients."""
        assert self._norms is not None
        step = self._session.state.step
        kinds = [{name: both[index] for name, both in norms.items()} for index in range(2)]
        self._norms.append({"step": step, "weights": kinds[0], "gradients": kinds[1]})
        named = zip(("norm", "grad_norm"), kinds, strict=True)
        self._trackers.log({f"{kind}/{name}": value for kind, own in named for name, value in own.items()}, step)

    def show_profile(self, profile: StepProfile) -> None:
        """Print where the profiled steps went, and say where their traces are."""
        folder = self._session.run_dir / PROFILE
        if profile.summary:
            self._console.print(profile.summary, soft_wrap=True, highlight=False)
            self._trackers.file(folder / "summary.txt")
        if traces := sorted(folder.glob("trace-rank*")):
            self._console.print(
                f"Traces: {_short(traces[0])} and the like, for https://ui.perfetto.dev", soft_wrap=True
            )

    def rewind(self, step: int) -> None:
        """Drop all records after a step."""
        self._metrics.rewind(step)
        for file in (self._validations, self._samples, self._norms):
            if file is not None:
                file.rewind(step)
        self._first_step, self._smoothed = step + 1, None
        self._trackers.rewind(step)

    def _smooth(self, loss: float) -> None:
        before = self._smoothed
        if before is None or not math.isfinite(before):
            self._smoothed = loss
        else:
            self._smoothed = _SMOOTHING * before + (1 - _SMOOTHING) * loss

    def _eta_s(self, step: int) -> float | None:
        if step == self._first_step:
            self._started_s = time.perf_counter()
            return None
        per_step_s = (time.perf_counter() - self._started_s) / (step - self._first_step)
        return per_step_s * (self._run.steps - step)


# --- The report at the end

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 56


def print_report(session: Session, records: Sequence[Mapping[str, Any]], peak_bytes: int) -> None:
    """Print the report of a run.

    Args:
        session: The run, after its last step.
        records: Its lines of ``metrics.jsonl``.
        peak_bytes: Largest peak memory of any rank.
    """
    steps = session.state.step
    checkpoints = sorted(session.store.directory.glob("step-*"))
    ranks = f"{world_size()} ranks" if world_size() > 1 else "one rank"
    table = Table(title=f"Trained {steps} steps on {ranks}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in (
        ("loss", f"{loss_text(records)}{_unit(session)}"),
        ("loss curve", sparkline([_number(record.get("loss")) for record in records], _CURVE_WIDTH)),
        ("median speed", speed_text(records)),
        ("peak of a rank", _memory_text(session, peak_bytes)),
        ("checkpoint", _short(checkpoints[-1]) if checkpoints else UNKNOWN),
        ("metrics", str(session.run_dir / "metrics.jsonl")),
    ):
        table.add_row(label, text)
    console = PlainConsole()
    console.print(table)
    # Outside of the table, so that users can copy it.
    wanted = session.prepared.config.run.steps
    command = session.options.resume_command(session.run_dir, wanted if steps < wanted else 2 * steps)
    console.print(f"Resume it with:\n  {command}", soft_wrap=True, highlight=False, markup=False)


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _number(value: object) -> float:
    """Return a value as a float; nan for what is none, such as an integer beyond floats."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else math.nan  # type: ignore[arg-type,operator]


def loss_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Describe the losses of a run: the first, the last and the best."""
    losses, finite = [_number(record.get("loss")) for record in records], figures(records, "loss")
    best = f"{min(finite):.4f}" if finite else UNKNOWN
    return f"{losses[0]:.4f} first, {losses[-1]:.4f} last, {best} best"


def _unit(session: Session) -> str:
    if session.prepared.config.model.loss is not None or not isinstance(session.prepared.corpus, Corpus):
        return ""
    is_bytes = isinstance(session.prepared.corpus.tokenizer, ByteTokenizer)
    return ", nats per byte" if is_bytes else ", nats per token"


def speed_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Describe the speed of a run: its median, the MFU, and the time of all steps."""
    times_s, known = figures(records, "step_time_s"), figures(records, "mfu")
    step_time_s = f"{statistics.median(times_s):.3f}" if times_s else UNKNOWN
    mfu = percent(statistics.median(known) if known else None)
    return f"{speed(records)}, {step_time_s} s a step, MFU {mfu}; {duration(math.fsum(times_s))} in all"


def _memory_text(session: Session, peak_bytes: int) -> str:
    accelerated = session.accelerated
    predicted = readable_bytes(accelerated.plan.memory.total)
    measured = readable_bytes(peak_bytes)
    if accelerated.device.type == "cuda":
        return f"{predicted} predicted, {measured} measured"
    return f"{predicted} predicted, {measured} the whole process"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve of block characters: each is the mean of an equal part, scaled from the lowest to the highest.

    Args:
        values: Numbers; infinities and nan are ignored.
        width: Maximum number of characters.
    """
    count = min(width, len(values))
    parts = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    finite = [[value for value in part if math.isfinite(value)] for part in parts]
    means = [statistics.fmean(part) if part else math.nan for part in finite]
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return ""
    lowest, span = min(known), max(known) - min(known)
    heights = [(mean - lowest) / span if span else 0.0 for mean in means]
    top = len(_BARS) - 1
    return "".join(" " if math.isnan(each) else _BARS[min(int(each * len(_BARS)), top)] for each in heights)
