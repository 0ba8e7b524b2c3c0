"""How far off step times of published runs are, predicted as a user would: the intervals that plans carry.

    python benchmarks/plan_intervals.py [--write] [FILE.csv …]

Every row is predicted by its strategy in Meshwright's own methods with the default implementation, whoever ran it. By
kind of device and of layout, the ratios of measured to predicted step times at 10 and 90 % are printed, and written to
``src/meshwright/planner/explain/intervals.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from published_runs.cases import Case, NotCovered, case_of
from published_runs.scores import published_tokens_per_s

from meshwright.cost import make_cluster
from meshwright.errors import MeshwrightError
from meshwright.planner.explain.intervals import ANY, layout_kind
from meshwright.planner.explain.plan_figures import per_gpu
from meshwright.planner.family_workload import FamilyModel
from published_runs import read_rows

DATA = Path(__file__).parent / "data"
TABLES = ("published_runs.csv", "late_runs.csv")
RESIDUALS = Path(__file__).parent.parent / "src" / "meshwright" / "planner" / "explain" / "intervals.json"
_LOW, _HIGH = 0, -1  # of ten parts: a tenth of the runs is faster, a tenth slower


def ratio(case: Case) -> float | None:
    """Return the measured step time over the predicted one; None where the table says nothing."""
    measured = published_tokens_per_s(case)
    if not measured or case.run.dtype == "fp4":
        return None
    cluster = case.cluster
    plain = make_cluster(cluster.device, cluster.num_devices, cluster.devices_per_node)
    cluster = dataclasses.replace(cluster, inter=dataclasses.replace(cluster.inter, latency_s=plain.inter.latency_s))
    subject = FamilyModel(case.row.text("model"), case.shape).subject(cluster, case.global_batch, None)
    strategy = case.strategy if case.run.dtype != "fp8" else case.strategy.with_method("fp8")
    predicted = per_gpu(subject.plan(strategy, case.run.num_micro_batches))
    return None if predicted is None else predicted / measured


def residuals(files: Sequence[Path]) -> Iterator[tuple[str, str, float]]:
    """Yield the kind of device, the kind of layout and the ratio of every row that can be predicted."""
    for row in (row for file in files for row in read_rows(file)):
        try:
            case = case_of(row)
            found = ratio(case)
        except (NotCovered, MeshwrightError):
            continue
        if found is not None:
            yield case.cluster.device.efficiency, layout_kind(case.steps[0].axes), found


def intervals(found: Sequence[tuple[str, str, float]]) -> dict[str, dict[str, float]]:
    """Return the ratios at 10 and 90 % by kind, with how many runs there are."""
    groups: dict[str, list[float]] = defaultdict(list)
    for device, kind, value in found:
        for key in (f"{device}/{kind}", f"{device}/{ANY}", f"{ANY}/{kind}", f"{ANY}/{ANY}"):
            groups[key].append(value)
    return {key: _of(values) for key, values in sorted(groups.items()) if len(values) > 1}


def _of(values: list[float]) -> dict[str, float]:
    parts = statistics.quantiles(values, n=10, method="inclusive")
    # A plan's own time lies inside, however one-sided the few runs of a kind are.
    return {"runs": len(values), "low": round(min(parts[_LOW], 1.0), 3), "high": round(max(parts[_HIGH], 1.0), 3)}


def main() -> None:
    """Print the intervals, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="tables of published runs")
    parser.add_argument("--write", action="store_true", help="write intervals.json")
    options = parser.parse_args()
    files = options.files or [DATA / name for name in TABLES]
    text = json.dumps(intervals(list(residuals(files))), indent=1) + "\n"
    print(text)
    if options.write:
        RESIDUALS.write_text(text)


if __name__ == "__main__":
    main()
