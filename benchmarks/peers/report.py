"""What the systems measured, as ratios, a table, JSON and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from peers.case import Case
from peers.conductor import Measured
from peers.systems import ACCELERATE, AUTO, FSDP, FSDP2, SYSTEMS

_AGREES = {"fp32": 1e-3, "bf16": 2e-2}  # of the loss; more is printed


def by_name(results: Sequence[Measured]) -> dict[str, Measured]:
    return {each.system: each for each in results if each.failure is None}


def ratio(slower: Measured | None, own: Measured | None, what: str = "turns_s") -> float | None:
    """Median over turns of (``slower`` / ``own``): above 1, ``own`` is faster; None where one is missing."""
    if slower is None or own is None:
        return None
    return statistics.median(a / b for a, b in zip(getattr(slower, what), getattr(own, what), strict=True))


def best_peer(results: Sequence[Measured], what: str = "turns_s") -> Measured | None:
    peers = [each for name, each in by_name(results).items() if not SYSTEMS[name].ours]
    return min(peers, key=lambda each: statistics.median(getattr(each, what)), default=None)


def ratios(results: Sequence[Measured]) -> dict[str, float | None]:
    """The four that count; above 1 ours is faster. ``_cpu`` are of CPU time, which other programs disturb less."""
    found = by_name(results)
    auto, fsdp = found.get(AUTO), found.get(FSDP)
    return {
        "best_peer": ratio(best_peer(results), auto),
        "best_peer_cpu": ratio(best_peer(results, "turns_cpu_s"), auto, "turns_cpu_s"),
        "fsdp": ratio(found.get(FSDP2), fsdp),
        "fsdp_cpu": ratio(found.get(FSDP2), fsdp, "turns_cpu_s"),
        "startup": ratio(found.get(ACCELERATE), auto, "startup_s"),
        "startup_cpu": ratio(found.get(ACCELERATE), auto, "startup_cpu_s"),
    }


def deviations(case: Case, results: Sequence[Measured]) -> dict[str, float]:
    """How far the losses of each lie from those of the first system, at most, over the steps that both took."""
    found = list(by_name(results).values())
    return {each.system: max(abs(a - b) for a, b in zip(each.losses, found[0].losses, strict=False)) for each in found}


def entry(case: Case, measured: Measured, deviation: float | None, world: int) -> dict[str, Any]:
    """One system in one case; a system that failed has its last words alone."""
    system = SYSTEMS[measured.system]
    if measured.failure is not None:
        return {"case": case.name, "system": system.name, "failure": measured.failure}
    return {
        "case": case.name,
        "system": system.name,
        "step_time_s": measured.step_time_s,
        "peak_memory_bytes": measured.peak_memory_bytes,
        "startup_s": statistics.median(measured.startup_s),
        "startup_cpu_s": statistics.median(measured.startup_cpu_s),
        "step_cpu_s": statistics.median(measured.turns_cpu_s),
        "tokens_per_s": world * case.batch * case.seq_len / measured.step_time_s,
        "resident_bytes": measured.resident_bytes,
        "user_lines": system.user_lines,
        "strategy": measured.strategy,
        "losses": measured.losses,
        "loss_deviation": deviation,
        "turns_s": measured.turns_s,
    }


def show(case: Case, results: Sequence[Measured], world: int) -> None:
    """Prints a table, the ratios and every deviation of a loss."""
    best, off = best_peer(results), deviations(case, results)
    table = Table(title=f"{case.name}, {world} ranks", box=box.MARKDOWN, title_justify="left")
    for column in ("system", "step", "tokens/s", "/ best peer", "CPU time of a step", "peak of tensors", "start-up",
                   "lines", "loss after all steps"):  # fmt: skip
        table.add_column(column, justify="left" if column == "system" else "right", no_wrap=True)
    for each in by_name(results).values():
        told = entry(case, each, off[each.system], world)
        against = ratio(each, best)
        table.add_row(
            each.system, f"{1e3 * told['step_time_s']:.1f} ms", f"{told['tokens_per_s']:.0f}",
            f"{against:.3f}" if against is not None else "", f"{1e3 * told['step_cpu_s']:.1f} ms",
            f"{told['peak_memory_bytes'] / 2**20:.1f} MiB", f"{told['startup_s']:.1f} s", str(told["user_lines"]),
            f"{each.losses[-1]:.4f}",
        )  # fmt: skip
    console = Console(width=160)
    console.print(table)
    for name, value in ratios(results).items():
        console.print(f"{name} / ours: " + ("not measured" if value is None else f"{value:.3f}"))
    for each in by_name(results).values():
        if each.strategy is not None:
            console.print(f"{each.system}: {each.strategy}")
        if off[each.system] > _AGREES[case.precision]:
            console.print(f"{each.system}: its loss lies up to {off[each.system]:.2g} from that of {results[0].system}")


def plot(everything: dict[str, Sequence[Measured]], cases: Sequence[Case], file: Path) -> None:
    """Time of a step over the best peer's, and peak bytes, of every system."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(len(cases), 2, figsize=(11, 0.5 + 3.6 * len(cases)), squeeze=False)
    for (times, bytes_), case in zip(rows, cases, strict=True):
        found, best = list(by_name(everything[case.name]).values())[::-1], best_peer(everything[case.name])
        names = [each.system for each in found]
        colors = ["C1" if SYSTEMS[name].ours else "C0" for name in names]
        times.barh(names, [ratio(each, best) or 0.0 for each in found], color=colors)
        times.axvline(1.0, color="black", lw=0.8)
        times.set(title=f"{case.name}: step time over {best.system if best else 'nothing'}'s")
        bytes_.barh(names, [each.peak_memory_bytes / 2**20 for each in found], color=colors)
        bytes_.set(title=f"{case.name}: peak of a rank (MiB)", yticklabels=[])
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
