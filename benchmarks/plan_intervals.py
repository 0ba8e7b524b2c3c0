"""Derive the intervals that plans carry from published runs of which it is known what their engines ran.

    python benchmarks/plan_intervals.py [--write] [FILE.csv …]                  about a minute

Every row is predicted by the conventions of its source, as a plan is predicted for our own engine, whose kernels are
known. By kind of device and of layout, the ratios of measured to predicted step times at 10 and 90 % are written to
``src/meshwright/planner/explain/intervals.json``. They are widened until four of five runs lie inside intervals that
are taken from other projects alone: a user's runs are of a project that no table has. Beside them stands the highest
MFU by precision that any run of the kind has reached, in all tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published_runs.cases import Case, NotCovered, case_of
from published_runs.scores import predict_case, published_tokens_per_s

from meshwright.errors import MeshwrightError
from meshwright.planner.explain.plan_figures import ANY, FEWEST, kinds_of, layout_kind
from published_runs import read_rows

DATA = Path(__file__).parent / "data"
TABLES = ("published_runs.csv", "late_runs.csv", "more_runs.csv", "other_runs.csv")
FIELDS = ("nanotron_runs.csv", "vtrain_runs.csv")  # whole fields of strategies: most of them bad ones
INTERVALS = Path(__file__).parent.parent / "src" / "meshwright" / "planner" / "explain" / "intervals.json"
SHARE = 0.8  # of runs that lie inside
_LOW, _HIGH = 0, -1  # of ten parts: a tenth of the runs is faster, a tenth slower
_WIDEST = 4.0


@dataclass(frozen=True)
class Residual:
    """The measured step time of a run over the predicted one.

    Args:
        project: Whose run it is.
        device: Name of its devices.
        kinds: Keys of the intervals that it counts for, the narrowest kind first.
        ratio: Measured over predicted seconds.
    """

    project: str
    device: str
    kinds: tuple[str, ...]
    ratio: float


def cases(files: Iterable[Path]) -> Iterator[tuple[Case, float]]:
    """Yield the rows that are covered, with the tokens per second and device that they publish."""
    for row in (row for file in files for row in read_rows(file)):
        with suppress(NotCovered, MeshwrightError):
            case = case_of(row)
            if measured := published_tokens_per_s(case):
                yield case, measured


def residuals(files: Iterable[Path]) -> Iterator[Residual]:
    """Yield every row that can be predicted."""
    for case, measured in cases(files):
        device, ratio = case.cluster.device, predict_case(case).tokens_per_s_per_gpu / measured
        yield Residual(case.row.source.split()[0], device.name, kinds_of(device, case.steps[0].axes), ratio)


def intervals(found: Iterable[Residual], width: float = 1.0) -> dict[str, dict[str, float]]:
    """Return the ratios at 10 and 90 % by kind, to a power, with how many runs there are."""
    groups: dict[str, list[float]] = defaultdict(list)
    for each in found:
        for kind in each.kinds:
            groups[kind].append(each.ratio)
    return {kind: _of(values, width) for kind, values in sorted(groups.items()) if len(values) >= FEWEST}


def _of(values: list[float], width: float) -> dict[str, float]:
    parts = statistics.quantiles(values, n=10, method="inclusive")
    # A plan's own time lies inside, however one-sided the runs of a kind are.
    low, high = min(parts[_LOW], 1.0) ** width, max(parts[_HIGH], 1.0) ** width
    return {"runs": len(values), "low": round(low, 3), "high": round(high, 3)}


def inside(tried: Sequence[Residual], known: dict[str, dict[str, float]]) -> list[bool]:
    """Return which runs lie inside the interval of their kind."""
    found = []
    for each in tried:
        kind = next((kind for kind in each.kinds if kind in known), None)
        if kind is not None:
            found.append(known[kind]["low"] <= each.ratio <= known[kind]["high"])
    return found


def left_out(found: Sequence[Residual], width: float) -> float:
    """Return the share of runs that lie inside intervals taken from other projects."""
    results: list[bool] = []
    for project in sorted({each.project for each in found}):
        known = intervals((each for each in found if each.project != project), width)
        results += inside([each for each in found if each.project == project], known)
    return sum(results) / len(results)


def wide_enough(found: Sequence[Residual]) -> float:
    """Return the least power, in steps of a twentieth, with which enough runs of left out projects lie inside."""
    width = 1.0
    while left_out(found, width) < SHARE and width < _WIDEST:
        width = round(width + 0.05, 2)
    return width


def highest(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the highest MFU by kind of device and of layout, and by precision, with how many runs there are."""
    groups: dict[str, list[float]] = defaultdict(list)
    for case, measured in cases(files):
        device = case.cluster.device
        # Of attention's scores the needed half counts, as in every plan.
        flops = measured * case.shape.model_flops_per_token(causal=True)
        for kind in (layout_kind(case.steps[0].axes), ANY):
            used = flops / device.peak_flops_per_s(case.run.dtype)
            groups[f"{device.efficiency}/{kind}/{case.run.dtype}"].append(used)
    return {
        kind: {"runs": len(values), "mfu": round(max(values), 3)}
        for kind, values in sorted(groups.items())
        if len(values) >= FEWEST
    }


def main() -> None:
    """Print the intervals, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="tables of published runs")
    parser.add_argument("--write", action="store_true", help="write intervals.json")
    options = parser.parse_args()
    found = list(residuals(options.files or [DATA / name for name in TABLES]))
    width = wide_enough(found)
    print(f"{len(found)} runs. Inside, of projects left out: {left_out(found, 1.0):.0%}; to the power {width}: "
          f"{left_out(found, width):.0%}. Of all: {_mean(inside(found, intervals(found, width)))}")  # fmt: skip
    known = {
        "devices": sorted({each.device for each in found}),
        "width": width,
        "step_time": intervals(found, width),
        "highest_mfu": highest(options.files or [DATA / name for name in (*TABLES, *FIELDS)]),
    }
    text = json.dumps(known, indent=1) + "\n"
    print(text)
    if options.write:
        INTERVALS.write_text(text)


def _mean(results: Sequence[bool]) -> str:
    return f"{sum(results) / len(results):.0%}"


if __name__ == "__main__":
    main()
