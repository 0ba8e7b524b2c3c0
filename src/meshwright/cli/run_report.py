"""Write one self-contained page about a run: loss, speed, failures, and the share of time that trained."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.cli.run_display import duration, figures, loss_text, percent, speed_text
from meshwright.cli.run_failures import read_failures
from meshwright.cli.run_files import METRICS, read_records, write
from meshwright.errors import ConfigError

_WIDTH, _HEIGHT, _LEFT, _BELOW = 860, 240, 64, 28
_MOST_POINTS = 2000
_TICKS = 4

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
svg {{ max-width: 100%; height: auto; }}
svg text {{ font-size: 12px; fill: currentColor; }}
svg .axis {{ stroke: currentColor; opacity: 0.25; }}
svg .curve {{ stroke: var(--c1, #2a78d6); stroke-width: 1.5; fill: none; }}
svg .failure {{ stroke: var(--c2, #d64545); stroke-dasharray: 3 3; }}
</style>
</head>
<body>
<main>
<header><h1>{title}</h1><p>{about}</p></header>
<section><div class="scroll"><table>{summary}</table></div></section>
<section><h2>Loss</h2>{loss}</section>
<section><h2>Seconds of a step</h2>{speed}</section>
<section><h2>Failures</h2>{failures}</section>
<footer>Dashed lines are failures. From <code>metrics.jsonl</code> and <code>failures.jsonl</code>.</footer>
</main>
</body>
</html>
"""


def goodput(records: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return the useful seconds of a run and the seconds that passed, from its first step to its last.

    Useful are the steps that count: a step that was taken twice counts once.

    Args:
        records: Lines of ``metrics.jsonl``; None is returned where they do not tell times.
    """
    ends, lengths = figures(records, "time_s"), figures(records, "step_time_s")
    if not ends or len(ends) != len(records) or len(lengths) != len(records):
        return None
    passed_s = ends[-1] - ends[0] + lengths[0]
    return min(math.fsum(lengths), passed_s), passed_s


def report(run_dir: Path, out: Path | None) -> int:
    """Write the page of a run and return the exit status.

    Args:
        run_dir: The run's directory.
        out: The page; None: ``report.html`` in the run's directory.

    Raises:
        ConfigError: When the directory holds no run.
    """
    records = read_records(run_dir / METRICS)
    if not records:
        raise ConfigError(
            f"{run_dir} holds no steps of a run",
            expected=f"a directory of meshwright train, with lines in {METRICS}",
            got="no line" if (run_dir / METRICS).exists() else f"no {METRICS}",
            fix="name a run's directory",
        )
    write("--out", out or run_dir / "report.html", page(str(run_dir), records, read_failures(run_dir)))
    return 0


_FOLLOWING = ("went on", "lost")  # what followed from a failure that has a line of its own


def page(name: str, records: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML page of a run.

    Args:
        name: Title.
        records: Lines of ``metrics.jsonl``.
        events: Lines of ``failures.jsonl``.
    """
    found, failures = goodput(records), [each for each in events if each["what"] not in _FOLLOWING]
    went_on = [each for each in events if each["what"] == "went on"]
    rows = [
        ("steps", f"{records[-1].get('step')}"),
        ("loss", loss_text(records)),
        ("speed", speed_text(records)),
        ("failures", str(len(failures))),
        ("steps taken again", f"{sum(figures(went_on, 'lost_steps')):g}"),
        ("seconds lost", f"{math.fsum(figures(went_on, 'lost_s')):.1f}"),
    ]
    if found is not None:
        rows += [("time", duration(found[1])), ("goodput", percent(found[0] / found[1]))]
    marks = figures(went_on, "step")
    steps = [int(record["step"]) for record in records]
    return _PAGE.format(
        title=html.escape(f"Run {name}"),
        about="Goodput is the time of the steps that count, divided by the time that passed.",
        style=(resources.files("meshwright.planner.explain") / "page.css").read_text(),
        summary="".join(f"<tr><th>{label}</th><td>{html.escape(text)}</td></tr>" for label, text in rows),
        loss=_curve(steps, [_value(record, "loss") for record in records], marks),
        speed=_curve(steps, [_value(record, "step_time_s") for record in records], marks),
        failures=_table(events, records) if events else "<p>None.</p>",
    )


def _value(record: Mapping[str, Any], key: str) -> float:
    found = figures([record], key)
    return found[0] if found else math.nan


def _curve(steps: Sequence[int], values: Sequence[float], marks: Sequence[float]) -> str:
    """Draw a curve over the steps, with a dashed line at each failure."""
    stride = max(len(steps) // _MOST_POINTS, 1)
    points = [each for each in zip(steps, values, strict=True) if math.isfinite(each[1])][::stride]
    if not points:
        return "<p>No finite figures.</p>"
    lowest, highest = min(value for _, value in points), max(value for _, value in points)
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 8) * (step - first) / (last - first)

    def y(value: float) -> float:
        return 8 + (_HEIGHT - _BELOW - 8) * (highest - value) / ((highest - lowest) or 1.0)

    parts = []
    for number in range(_TICKS + 1):
        value, step = lowest + (highest - lowest) * number / _TICKS, first + (last - first) * number / _TICKS
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{step:.0f}</text>')
    for mark in marks:
        at = f"{x(min(max(mark, first), last)):.1f}"
        parts.append(f'<line class="failure" x1="{at}" x2="{at}" y1="8" y2="{_HEIGHT - _BELOW}"/>')
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    parts.append(f'<polyline class="curve" points="{path}"/>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _table(events: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> str:
    """List the events in time, each with its cost where it is known."""
    began_s = min([*figures(records, "time_s"), *figures(events, "time_s")], default=0.0)
    rows = ["<tr><th>after</th><th>what</th><th>details</th><th>lost</th></tr>"]
    for each in events:
        times, costs = figures([each], "time_s"), figures([each], "lost_s")
        steps = math.fsum(figures([each], "lost_steps")) if costs else 0
        lost = f"{costs[0]:.1f} s, {steps:g} steps" if costs else ""
        text = each.get("text") or (f"after step {each.get('step')}, from {each.get('source')}" if costs else "")
        when = duration(times[0] - began_s) if times else ""
        cells = (when, each["what"], str(text), lost)
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'
