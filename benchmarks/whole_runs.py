"""Set device-hours of whole runs that others have published beside what the planner predicts for its choice.

    python benchmarks/whole_runs.py [--run NAME …] [--write]              about 3 minutes

``--write`` puts the table into docs/practice.md. Published hours count everything that a run did, with the engine of
its year; a prediction counts the steps of our own engine. So the quotient says what a user would take today, and not
how far off a step is predicted: docs/predictions.md has that.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.cost import find_cluster
from meshwright.planner import Plan, PlanRequest
from meshwright.planner.explain import RunLength, WholeRun, mfu, short, whole_run
from meshwright.planner.explain.plan_figures import published_mfu
from meshwright.planner.plan_request import named_model

_TABLE = "<!-- whole runs -->.*<!-- end of whole runs -->"
PAGE = Path(__file__).parent.parent / "docs" / "practice.md"


@dataclass(frozen=True)
class Run:
    """A run whose device-hours are known.

    Args:
        model: As ``meshwright plan --model`` takes it.
        cluster: As ``--cluster`` takes it.
        batch: Samples of a step.
        tokens: Of the whole run.
        hours: Device-hours that the source gives.
        source: Where.
        is_assumed: Whether the number of devices is ours, as none is published.
    """

    model: str
    cluster: str
    batch: int
    tokens: float
    hours: float
    source: str
    is_assumed: bool = False


_LLAMA_1 = "LLaMA (Touvron et al. 2023, table 15), 4M tokens a step"
_LLAMA_2 = "Llama 2 (Touvron et al. 2023, table 2), 4M tokens a step"
_LLAMA_3 = "model card of Llama 3.1: all training stages"
_PYTHIA = "Pythia (Biderman et al. 2023, appendix), 2M tokens a step"


def _pythia(layers: int, hidden: int, heads: int, devices: int, hours: float) -> Run:
    dims = f"gpt:layers={layers},hidden={hidden},heads={heads},vocab=50304,seq=2048,positions=2048"
    return Run(dims, f"a100-40x{devices}", 1024, 299.9e9, hours, _PYTHIA)


RUNS = {
    "Pythia 70M": _pythia(6, 512, 8, 32, 510),
    "Pythia 410M": _pythia(24, 1024, 16, 32, 2_540),
    "Pythia 1B": _pythia(16, 2048, 8, 64, 4_830),
    "Pythia 1.4B": _pythia(24, 2048, 16, 64, 7_120),
    "Pythia 2.8B": _pythia(32, 2560, 32, 64, 14_240),
    "Pythia 6.9B": _pythia(32, 4096, 32, 128, 33_500),
    "Pythia 12B": _pythia(36, 5120, 40, 256, 72_300),
    "StarCoderBase 15.5B": Run(
        "gpt:layers=40,hidden=6144,heads=48,kv_heads=1,vocab=49152,seq=8192,positions=8192", "a100-80x512", 512, 1e12,
        320_256, "StarCoder (Li et al. 2023), 4M tokens a step",
    ),
    "LLaMA 13B": Run("llama-2-13b:seq=2048", "a100-80x1024", 2048, 1e12, 135_168, _LLAMA_1, is_assumed=True),
    "LLaMA 65B": Run("llama-1-65b", "a100-80x2048", 2048, 1.4e12, 1_022_362, _LLAMA_1),
    "Llama 2 7B": Run("llama-2-7b", "a100-80x512", 1024, 2e12, 184_320, _LLAMA_2, is_assumed=True),
    "Llama 2 70B": Run("llama-2-70b", "a100-80x1024", 1024, 2e12, 1_720_320, _LLAMA_2, is_assumed=True),
    "BLOOM 176B": Run(
        "gpt:layers=70,hidden=14336,heads=112,vocab=250880,seq=2048,positions=2048", "a100-80x384", 2304, 366e9,
        1_082_990, "BLOOM (Luccioni et al. 2023); it had 2,048 samples a step",
    ),
    "Llama 3.1 8B": Run("llama-3.1-8b", "h100x1024", 1024, 15e12, 1_460_000, _LLAMA_3, is_assumed=True),
    "Llama 3.1 70B": Run("llama-3.1-70b", "h100x2048", 2048, 15e12, 7_000_000, _LLAMA_3, is_assumed=True),
    "Llama 3.1 405B": Run("llama-3.1-405b", "h100x16384", 2048, 15.6e12, 30_840_000, _LLAMA_3),
}  # fmt: skip


def predicted(run: Run) -> tuple[Plan, WholeRun]:
    """Return the planner's choice for a run, and what the run takes by it."""
    cluster = find_cluster(run.cluster)
    length = RunLength(tokens=run.tokens)
    request = PlanRequest(named_model(run.model), cluster, run.batch, top=1, length=length)
    plan = request.found().plans[0]
    taken = whole_run(plan, length)
    assert taken is not None
    return plan, taken


def row(name: str, run: Run, plan: Plan, taken: WholeRun) -> str:
    """Return the table's row of a run."""
    assert plan.forecast is not None
    cluster, hours = plan.forecast.cluster, _hours(taken.device_hours)
    devices = f"{cluster.num_devices:,} {cluster.device.name}{'*' if run.is_assumed else ''}"
    used, known = mfu(plan) or 0.0, published_mfu(plan)
    above = "†" if known is not None and used > known[0] else ""
    if taken.interval_s is not None:
        low, high = (_hours(each / taken.seconds * taken.device_hours) for each in taken.interval_s)
        hours += f" ({low} to {high})"
    layout = f"{short(plan)}; {plan.step.num_micro_batches} x {plan.micro_batch}"
    share = taken.device_hours / run.hours
    cells = (name, f"{run.tokens / 1e12:g} T", devices, _hours(run.hours), f"{100 * used * share:.0f} %", layout,
             f"{100 * used:.0f} %{above}",
             f"{taken.seconds / 86_400:,.1f}", hours, f"{share:.2f}")  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _hours(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,.0f}"


def table(rows: Sequence[str]) -> str:
    """Return the table and its sources."""
    titles = ("model", "tokens", "devices", "published device-hours", "their MFU", "the planner's choice", "MFU",
              "days",
              "device-hours (four of five cases)", "of the published")  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles), *rows]
    sources = dict.fromkeys(run.source for run in RUNS.values())
    return "\n".join([*lines, "", "Sources: " + "; ".join(sources) + "."])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", choices=RUNS, help="only this one; repeatable")
    parser.add_argument("--write", action="store_true", help="write the table into docs/practice.md")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.run or RUNS:
        rows.append(row(name, RUNS[name], *predicted(RUNS[name])))
        print(rows[-1], flush=True)
    if options.write:
        text = PAGE.read_text()
        between = f"<!-- whole runs -->\n\n{table(rows)}\n\n<!-- end of whole runs -->"
        PAGE.write_text(re.sub(_TABLE, lambda _: between, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
