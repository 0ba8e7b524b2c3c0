"""How far off step times of published runs are, predicted as a user would: the intervals that plans carry.

    python benchmarks/plan_intervals.py [--write] [FILE.csv …]

Every row is predicted by its strategy in Meshwright's own methods with the default implementation, whoever ran it. By
kind of device and of layout, the ratios of measured to predicted step times at 10 and 90 % are printed, and written to
``src/meshwright/planner/explain/intervals.json``. Beside them stands the highest MFU by precision that any run of the
kind has reached, in all tables of published runs and of whole fields of strategies.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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
EVERY_TABLE = (*TABLES, "more_runs.csv", "other_runs.csv", "nanotron_runs.csv", "vtrain_runs.csv")
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


def mfu_of(case: Case) -> float | None:
    """Return the MFU of a run, of which the needed half of the attention's scores counts; None where none is known."""
    measured = published_tokens_per_s(case)
    if not measured:
        return None
    peak = case.cluster.device.peak_flops_per_s(case.run.dtype)
    return measured * case.shape.model_flops_per_token(causal=True) / peak


def cases(files: Sequence[Path]) -> Iterator[Case]:
    """Yield the rows that can be predicted."""
    for row in (row for file in files for row in read_rows(file)):
        with suppress(NotCovered, MeshwrightError):
            yield case_of(row)


def keys_of(case: Case) -> tuple[str, ...]:
    """Return the kinds that a run is of: of device and layout, and of either."""
    device, kind = case.cluster.device.efficiency, layout_kind(case.steps[0].axes)
    return f"{device}/{kind}", f"{device}/{ANY}", f"{ANY}/{kind}", f"{ANY}/{ANY}"


def intervals(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the ratios at 10 and 90 % by kind, with how many runs there are."""
    groups: dict[str, list[float]] = defaultdict(list)
    for case in cases(files):
        with suppress(MeshwrightError):
            found = ratio(case)
            for key in keys_of(case) if found is not None else ():
                groups[key].append(found)  # type: ignore[arg-type]
    return {key: _of(values) for key, values in sorted(groups.items()) if len(values) > 1}


def highest(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the highest MFU by kind of device and of layout, and by precision, with how many runs there are."""
    groups: dict[str, list[float]] = defaultdict(list)
    for case in cases(files):
        known = mfu_of(case)
        for key in keys_of(case) if known is not None else ():
            groups[f"{key}/{case.run.dtype}"].append(known)  # type: ignore[arg-type]
    return {
        key: {"runs": len(values), "mfu": round(max(values), 3)}
        for key, values in sorted(groups.items())
        if not key.startswith(ANY)
    }


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
    known = {
        "step_time": intervals(options.files or [DATA / name for name in TABLES]),
        "highest_mfu": highest(options.files or [DATA / name for name in EVERY_TABLE]),
    }
    text = json.dumps(known, indent=1) + "\n"
    print(text)
    if options.write:
        RESIDUALS.write_text(text)


if __name__ == "__main__":
    main()
