"""How a quantity grows with ranks: the slowest growth that describes what was measured, as a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

GROWTHS: dict[str, tuple[Callable[[float], float], ...]] = {
    "constant": (),
    "log n": (math.log2,),
    "n": (lambda ranks: ranks,),
    "n log n": (lambda ranks: ranks * math.log2(ranks),),
    "n²": (lambda ranks: ranks, lambda ranks: ranks**2),
}
"""Terms beside a constant; slowest growth first."""
CLOSE = 0.025  # of the largest figure: a growth that errs less than this more than the best is as good
FAR = (1024, 16384)
TICKS = (2, 16, 128, 1024, 16384)
DRAWN = (
    "start: peers", "start: store bytes read", "start: bytes of objects", "save: bytes of objects",
    "load: bytes of objects", "load: files opened", "save: files", "hang: store bytes read, all ranks",
)  # fmt: skip


def fitted(points: Mapping[int, float]) -> dict[str, Any]:
    """Fit every growth by least squares; return the slowest whose worst error is close to the least."""
    ranks, values = list(points), np.array(list(points.values()))
    fits = {name: _least_squares(terms, ranks, values) for name, terms in GROWTHS.items() if len(terms) < len(ranks)}
    enough = min(error for _, error in fits.values()) + CLOSE
    name = next(name for name, (_, error) in fits.items() if error <= enough)
    factors, error = fits[name]
    far = {number: float(_row(GROWTHS[name], number) @ factors) for number in FAR}
    return {"growth": name, "factors": factors.tolist(), "worst error": error, "extrapolated": far}


def _row(terms: Sequence[Callable[[float], float]], ranks: float) -> np.ndarray:
    return np.array([1.0, *(term(ranks) for term in terms)])


def _least_squares(
    terms: Sequence[Callable[[float], float]], ranks: Sequence[int], values: np.ndarray
) -> tuple[np.ndarray, float]:
    """Return the factors, and the worst error as a share of the largest value; growth that falls does not count."""
    rows = np.stack([_row(terms, number) for number in ranks])
    factors = np.linalg.lstsq(rows, values, rcond=None)[0]
    if terms and factors[-1] < 0:
        return factors, math.inf
    worst = float(np.abs(rows @ factors - values).max())
    return factors, worst / max(float(np.abs(values).max()), 1e-12)


def table(measured: Mapping[int, Mapping[str, float]], fits: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table; extrapolated figures are in italics."""
    head = ["per rank", *(str(number) for number in measured), "grows", *(f"*{number:,}*" for number in FAR)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, fit in fits.items():
        known = [_text(found[name]) if name in found else "" for found in measured.values()]
        far = [f"*{_text(fit['extrapolated'][number])}*" for number in FAR]
        lines.append("| " + " | ".join([name, *known, fit["growth"], *far]) + " |")
    return "\n".join(lines)


def _text(value: float) -> str:
    if value and abs(value) < 10 and value != int(value):
        return f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.2g}"


def draw(measured: Mapping[int, Mapping[str, float]], fits: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Draw the quantities that may grow: what was measured as points, what is extrapolated as a broken line."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "scale"  # equal files from equal figures
    plt.rcParams["svg.fonttype"] = "none"  # text as text: a quarter of the size
    figure, all_axes = plt.subplots(2, 4, figsize=(12.8, 4.8))
    for axes, name in zip(all_axes.flat, DRAWN, strict=True):
        _draw_one(axes, name, {number: found[name] for number, found in measured.items() if name in found}, fits[name])
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def _draw_one(axes: Any, name: str, points: Mapping[int, float], fit: Mapping[str, Any]) -> None:
    line = [2**power for power in range(1, 15)]
    values = [float(_row(GROWTHS[fit["growth"]], each) @ np.array(fit["factors"])) for each in line]
    known = sum(each <= max(points) for each in line)
    axes.plot(line[:known], values[:known], color="#4878a8", linewidth=1)
    axes.plot(line[known - 1 :], values[known - 1 :], color="#4878a8", linewidth=1, linestyle="--")
    axes.plot(list(points), list(points.values()), "o", color="#c44e52", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, [f"{number:,}" for number in TICKS])
    axes.minorticks_off()
    axes.set_title(f"{name}\n{fit['growth']}", fontsize=7)
    axes.tick_params(labelsize=6)
    axes.set_ylim(bottom=0)
