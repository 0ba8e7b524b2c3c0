"""Fits the efficiencies that the package carries to published runs, and says how well rows do that were left out.

    python benchmarks/fit.py [FILE.csv] [--write] [--iterations N]

A handful of numbers per device family and a few that all share are fitted to the logarithm of the step time, by damped
Gauss-Newton steps with Huber's weights (an outlier counts linearly) and a prior: every number is drawn to a default,
the more the less its rows say. Cross-validation leaves out one source at a time (a table of a document), and one
project at a time (all tables of, say, llm-foundry: "never fitted").
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cost import Calibration, Constants, Efficiency, simulate, write_calibration
from meshwright.cost.calibration import fitted
from published_runs import Case, NotCovered, Row, Scores, case_of, merged, published_tokens_per_s, read_rows, score

HERE = Path(__file__).parent
TABLE = HERE / "data" / "published_runs.csv"
TARGET = HERE.parent / "src" / "meshwright" / "cost" / "efficiencies.json"
FAMILIES = ("default", "A100", "H100", "B200", "MI300X", "V100")
# How closely numbers are held to what was known before: a residual of this size in one row weighs as much as a factor
# of e in a number. Rows are off by some 3 % that no number explains, so 0.5 is to be known to 6 %. First of what all
# families have in common, then of what each has of its own.
STRENGTH = {"matmul": (0.6, 0.4), "fp8": (0.6, 0.4), "attention": (0.6, 0.3), "memory": (0.5, 0.15)}
STRENGTH |= {"flash2": (0.6, 0.3)}
STRENGTH |= {"intra": (0.4, 0.5), "inter": (0.4, 0.5)}
# Kernels that were measured by themselves: a handful of whole steps, each with causes of its own, must not move them.
MEASURED = {("H100", "attention"): 0.7}
MEASURED |= {(family, name): 0.7 for family in ("B200", "MI300X") for name in ("matmul", "fp8", "attention", "memory")}
# Four rows of one source take some 0.25 s a step longer than their kernels on every device. On B200 this number takes
# that up, which nothing else reads: torch takes cuDNN's attention there, and masked attention has the number that was
# measured.
MEASURED |= {("B200", "flash2"): 0.15}
SHARED_STRENGTH = 0.2  # of other constants
# What a table of whole steps can hardly tell from other terms keeps close to what others have measured. ``early`` keeps
# close to an assumption: only one project has it, and it trades against what its devices reach later.
KNOWN_NAMES, KNOWN_STRENGTH = ("host_s", "early"), 0.7
SPREAD = 0.01
HUBER = 0.03  # residuals beyond count linearly,
OUTLIER = 0.3  # and beyond this less and less: such a row has a cause of its own
# What is known of families before any run is looked at. Products: SemiAnalysis (December 2024) measured 720 TFLOP/s in
# bf16 on H100, 620 and 990 in bf16 and fp8 on MI300X; cuBLAS reaches 250 to 270 on A100 (from memory). Transformer
# Engine's documentation (gemm_profiling) times the same products in all precisions on B300 and H200: without what
# their bytes take, bf16 reaches 0.73 of the peak of a B300, fp8 0.716 and 4 bits 0.457, and fp8 0.97 of the fraction
# that bf16 reaches on H200. A B300 may draw a tenth more than a B200, which takes 4 % from these
# (``Device.power_fraction``, with the exponent that constants start from). Attention: Dao 2023 measured
# FlashAttention-2 at half of A100's peak and a third of H100's (forward and backward, causal); it does not use the
# matrix instructions that are new in Blackwell and gains little on it (333 TFLOP/s on B200: flash-attention, issue
# 1589). Attention that is written for its generation reaches some half of the peak on H100 (FlashAttention-3 and
# cuDNN: Shah et al. 2024, Fig. 5 and 6); cuDNN's on B200 is assumed to reach as much. torch's backward with grouped
# heads reaches 259 TFLOP/s, 0.104 of the peak, on MI355X (HipKittens, Hu et al. 2025), forward some 0.25 (from
# memory): 0.13 together. Memory: elementwise kernels reach 0.8 to 0.9 of what datasheets state (both from memory).
KNOWN = {
    "A100": Efficiency(matmul=0.84, attention=0.5, memory=0.85),
    "H100": Efficiency(matmul=0.73, fp8=0.71, attention=0.53, flash2=0.33, memory=0.85),
    "B200": Efficiency(matmul=0.70, fp8=0.69, fp4=0.44, attention=0.53, flash2=0.14, masked=0.14, memory=0.85),
    "MI300X": Efficiency(matmul=0.47, fp8=0.38, attention=0.13, memory=0.85),
}
DEFAULT = Calibration(
    {"default": Efficiency(memory=0.85), **KNOWN}, Constants(spread=SPREAD, misaligned=0.35, collective_host_s=7e-5)
)

# Those that a table of whole steps says something about; the others are measured on a machine (``calibrate``).
FRACTIONS = ("matmul", "fp8", "attention", "memory", "intra", "inter")
APART = [("H100", "flash2"), ("B200", "flash2")]  # where torch takes another attention by itself
CONSTANTS = (
    "gap_s", "interference", "power", "step_s", "call_s", "hop", "p2p_s", "narrow", "flash1", "host_s",
    "tile", "rowwise_bytes", "async_tensor", "spread", "early",
)  # fmt: skip

Key = tuple[str, str]


def parameters(cases: Sequence[Case]) -> list[Key]:
    """What is fitted: the efficiencies of families with runs, and the constants."""
    present = {case.cluster.device.efficiency for case in cases}
    keys = [(family, name) for family in FAMILIES if family in {"default", *present} for name in FRACTIONS]
    keys += [key for key in APART if key[0] in present]
    return keys + [("constants", name) for name in CONSTANTS]


def value_of(calibration: Calibration, key: Key) -> float:
    family, name = key
    return getattr(calibration.constants if family == "constants" else calibration.of(family), name)


def with_values(base: Calibration, keys: Sequence[Key], values: Sequence[float]) -> Calibration:
    devices = dict(base.devices)
    constants = base.constants
    for (family, name), value in zip(keys, values, strict=True):
        if family == "constants":
            constants = dataclasses.replace(constants, **{name: float(value)})
        else:
            devices[family] = dataclasses.replace(devices.get(family) or base.of(family), **{name: float(value)})
    return Calibration(devices, constants)


def residuals(cases: Sequence[Case], published: np.ndarray, calibration: Calibration) -> np.ndarray:
    """Logarithm of predicted over published step time."""
    seconds = [simulate(case.steps, case.cluster, calibration, in_turn=case.in_turn).step_time_s for case in cases]
    rate = np.array([case.tokens_per_step / case.cluster.num_devices for case in cases]) / np.array(seconds)
    return np.log(published / rate)


def affected(cases: Sequence[Case], key: Key) -> np.ndarray:
    family = key[0]
    if family == "default":  # acts through the families' deviations
        return np.zeros(len(cases), bool)
    return np.array([family == "constants" or case.cluster.device.efficiency == family for case in cases])


def jacobian(
    cases: Sequence[Case],
    published: np.ndarray,
    base: Calibration,
    keys: Sequence[Key],
    at: np.ndarray,
    now: np.ndarray,
) -> np.ndarray:
    columns = np.zeros((len(cases), len(keys)))
    for index, key in enumerate(keys):
        moved = at.copy()
        moved[index] += 0.02
        rows = affected(cases, key)
        if not rows.any():
            continue
        some = [case for case, use in zip(cases, rows, strict=True) if use]
        then = residuals(some, published[rows], with_values(base, keys, np.exp(moved)))
        columns[rows, index] = (then - now[rows]) / 0.02
    return columns


def penalty(keys: Sequence[Key], prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The prior as further rows: a matrix and what it should give."""
    rows, wanted = [], []
    for index, (family, name) in enumerate(keys):
        row = np.zeros(len(keys))
        if family == "constants":
            strength = KNOWN_STRENGTH if name in KNOWN_NAMES else SHARED_STRENGTH
        else:
            strength = MEASURED.get((family, name), STRENGTH[name][family != "default"])
        if family in ("default", "constants"):
            row[index] = strength
            wanted.append(strength * prior[index])
        else:
            # A family's own deviation from what all share, beside what is known of it.
            shared = keys.index(("default", "attention" if name == "flash2" else name))
            row[index], row[shared] = strength, -strength
            wanted.append(strength * (prior[index] - prior[shared]))
        rows.append(row)
    return np.array(rows), np.array(wanted)


def solve(columns: np.ndarray, now: np.ndarray, at: np.ndarray, weight: np.ndarray, prior: tuple) -> np.ndarray:
    """One damped step of Gauss-Newton towards the least weighted squares and the prior."""
    size = np.maximum(np.abs(now), 1e-9)
    huber = weight * np.minimum(1.0, HUBER / size) / np.maximum(1.0, size / OUTLIER) ** 2
    rows, wanted = prior
    left = columns.T @ (huber[:, None] * columns) + rows.T @ rows
    right = -columns.T @ (huber * now) - rows.T @ (rows @ at - wanted)
    return np.clip(np.linalg.solve(left, right), -0.3, 0.3)


def fit(
    cases: Sequence[Case],
    published: np.ndarray,
    keys: Sequence[Key],
    start: np.ndarray,
    weight: np.ndarray,
    iterations: int,
    columns: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Fitted logarithms of the parameters, and the last derivative; a given one is kept."""
    prior = penalty(keys, np.log([value_of(DEFAULT, key) for key in keys]))
    at, fixed = start.copy(), columns is not None
    for _ in range(iterations):
        now = residuals(cases, published, with_values(DEFAULT, keys, np.exp(at)))
        if not fixed:
            columns = jacobian(cases, published, DEFAULT, keys, at, now)
        assert columns is not None
        at = at + solve(columns, now, at, weight, prior)
        at = np.minimum(at, [math.log(_limit(key)) for key in keys])
    assert columns is not None
    return at, columns


def _limit(key: Key) -> float:
    """Fractions of a peak end at 1, of a link at what NCCL reaches at best."""
    if key[1] in ("intra", "inter"):
        return 0.9
    return {"hop": 5.0, "rowwise_bytes": 40.0, "tile": 5.0}.get(key[1], 1.0)


def starting(keys: Sequence[Key]) -> np.ndarray:
    """Logarithms of the numbers that the package carries: the least squares do not depend on the start, seconds do."""
    return np.log([value_of(fitted(), key) or value_of(DEFAULT, key) for key in keys])


def usable(rows: Sequence[Row]) -> tuple[list[Case], np.ndarray]:
    """The rows that can be predicted and have a published speed, and these speeds."""
    cases = []
    for row in rows:
        try:
            case = case_of(row)
        except NotCovered:
            continue
        if published_tokens_per_s(case):
            cases.append(case)
    return cases, np.array([published_tokens_per_s(case) for case in cases])


def project_of(case: Case) -> str:
    return case.row.source.split()[0]


def left_out(
    cases: list[Case],
    published: np.ndarray,
    keys: list[Key],
    start: np.ndarray,
    columns: np.ndarray,
    group_of: Callable[[Case], str],
) -> np.ndarray:
    """Residuals of every row under a fit that has not seen its group."""
    groups = np.array([group_of(case) for case in cases])
    found = np.zeros(len(cases))
    for name in dict.fromkeys(groups):
        weight = (groups != name).astype(float)
        at, _ = fit(cases, published, keys, start, weight, 6, columns)
        own = [case for case, group in zip(cases, groups, strict=True) if group == name]
        found[groups == name] = residuals(own, published[groups == name], with_values(DEFAULT, keys, np.exp(at)))
    return found


def cross_validated(rows: Sequence[Row], iterations: int = 3) -> Scores:
    """Predicts the rows of every source by a fit to all other rows of the table."""
    cases, published = usable(rows)
    keys = parameters(cases)
    start = starting(keys)
    at, columns = fit(cases, published, keys, start, np.ones(len(cases)), iterations)
    sources = np.array([case.row.source for case in cases])
    parts = []
    for source in dict.fromkeys(row.source for row in rows):
        known = (sources != source).astype(float)
        values, _ = fit(cases, published, keys, at, known, iterations, columns) if known.any() else (start, columns)
        calibration = with_values(DEFAULT, keys, np.exp(values))
        parts.append(score([row for row in rows if row.source == source], calibration))
    return merged(parts)


def report(title: str, cases: list[Case], found: np.ndarray) -> float:
    errors = np.abs(np.exp(found) - 1)
    sources = np.array([case.row.source for case in cases])
    print(f"{title}: MAPE {errors.mean():.2%}, median {np.median(errors):.2%}")
    for name in dict.fromkeys(sources):
        own = errors[sources == name]
        print(f"  {own.mean():7.2%} of {len(own):3d}  {name[:90]}")
    return float(errors.mean())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=TABLE)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--no-validation", action="store_true")
    options = parser.parse_args(arguments)
    cases, published = usable(read_rows(options.file))
    keys = parameters(cases)
    start = starting(keys)
    at, columns = fit(cases, published, keys, start, np.ones(len(cases)), options.iterations)
    found = with_values(DEFAULT, keys, np.exp(at))
    now = residuals(cases, published, found)
    for key, value in zip(keys, np.exp(at), strict=True):
        print(f"{key[0]:10s} {key[1]:14s} {value:.4g}")
    report("fitted", cases, now)
    if not options.no_validation:
        report("left out by source", cases, left_out(cases, published, keys, at, columns, lambda c: c.row.source))
        report("left out by project", cases, left_out(cases, published, keys, at, columns, project_of))
    if options.write:
        TARGET.write_text(write_calibration(found, **provenance(cases, now)))


def provenance(cases: Sequence[Case], now: np.ndarray) -> dict[str, Any]:
    """Where the numbers come from, and what error is left on the rows they were fitted to."""
    errors = np.abs(np.expm1(now))
    families = np.array([case.cluster.device.efficiency for case in cases])
    return {
        "source": "benchmarks/fit.py on benchmarks/data/published_runs.csv, error of the step time",
        "residual": {
            family: {
                "rows": int((families == family).sum()),
                "mape": round(float(errors[families == family].mean()), 4),
                "median": round(float(np.median(errors[families == family])), 4),
            }
            for family in dict.fromkeys(families.tolist())
        },
        "not_fitted": "families without rows (V100, CPU) take the default",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
