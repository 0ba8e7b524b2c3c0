"""Predicts every row of a table of published runs and says how far off the predictions are.

    python benchmarks/published.py [FILE.csv …] [--sources REGEX] [--as-user] [--kernels own|attention|source] [--json]
                                   [--cross-validate] [--rows] [--picture FILE.svg]

The columns are those of ``benchmarks/data/published_runs.csv``; unknown cells are empty. Rows of several files count as
those of one; ``--sources`` keeps those alone in whose source the expression is found. Per source and in total: rows
covered, error of tokens per second (from MFU or TFLOPS where only they are printed), of the step time and of peak
memory, out-of-memory verdicts, and the rank correlation of strategies within one model and cluster. Rows that cannot
be predicted are listed with the reason. ``--as-user`` adds how far off predictions are without the sources'
conventions: of the strategy in our own methods, as ``mw.plan`` predicts it for anybody (in JSON the same keys under
``as_user``); with ``--kernels`` the same strategies run on the source's attention and dropout, or on all its kernels,
which tells what the difference consists of. ``--cross-validate`` fits the efficiencies anew for every source of the
table, without its rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.table import Table

from meshwright.errors import MeshwrightError
from published_runs import Kernels, Row, Scores, read_rows, score

DEFAULT = Path(__file__).parent / "data" / "published_runs.csv"
AS_USER = {
    "own": "As a user plans them: our own methods and what our engine runs by itself.",
    "attention": "As a user plans them, with attention and dropout of the source.",
    "source": "As a user plans them, with all kernels of the source.",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", default=[DEFAULT], help="tables of published runs")
    parser.add_argument("--sources", type=_expression, metavar="REGEX", help="only rows of sources that have this")
    parser.add_argument("--as-user", action="store_true", help="predict every row as a user would, too")
    parser.add_argument("--kernels", choices=get_args(Kernels), help="whose run what is planned as a user (own)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--cross-validate", action="store_true", help="predict each source by a fit without it")
    parser.add_argument("--rows", action="store_true", help="print every row's prediction, too")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw predicted over published speed")
    options = parser.parse_args(arguments)
    if options.kernels and not options.as_user:
        parser.error("--kernels needs --as-user: other predictions have the source's")
    kernels: Kernels = options.kernels or "own"
    try:
        rows = _read(options.files, options.sources)
        scores = _cross_validated(rows) if options.cross_validate else score(rows)
        users = score(rows, as_user=True, kernels=kernels) if options.as_user else None
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return 1
    if options.picture:
        _draw(scores, options.picture)
    if options.json:
        figures = scores.as_json() | ({} if users is None else {"as_user": users.as_json()})
        print(json.dumps(figures, indent=2, allow_nan=False))
        for row, why in scores.not_covered:
            print(f"not covered, row {row.index}: {why}", file=sys.stderr)
        return 0
    _show(scores, every_row=options.rows)
    if users is not None:
        print(AS_USER[kernels])
        _show(users, every_row=options.rows)
    return 0


def _expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"no regular expression: {error}") from None


def _read(files: list[Path], sources: re.Pattern[str] | None) -> list[Row]:
    every = [row for file in files for row in read_rows(file)]
    counted = [dataclasses.replace(row, index=index) for index, row in enumerate(every)]
    return [row for row in counted if sources is None or sources.search(row.source)]


def _cross_validated(rows: list[Row]) -> Scores:
    from fit import cross_validated

    return cross_validated(rows)


def _show(scores: Scores, *, every_row: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    figures = scores.as_json()
    if every_row:
        console.print(_rows_table(scores))
    console.print(_sources_table(figures))
    oom, tau = figures["oom"], figures["kendall_tau"]
    console.print(
        f"Out of memory: {oom['tp']} rightly predicted, {oom['fn']} falsely said to fit, {oom['fp']} falsely said not "
        f"to, {oom['tn']} rightly said to fit. Rank correlation of strategies: {_number(tau)}."
    )
    cells = figures["cells"]
    if cells["cells"]:
        console.print(
            f"{cells['cells']} cells of one model, batch and cluster: fastest quarter, step time "
            f"{cells['fastest_step_time_mape']:.1%} ({cells['fastest_step_time_median']:.1%}); rank correlation "
            f"{_number(cells['kendall_tau'])}; the choice loses {cells['regret_median']:.1%} (median; mean "
            f"{cells['regret_mean']:.1%}), in {cells['regret_within_5_percent']:.0%} of the cells at most 5 %."
        )
    rows = {p.row.index: p.row for p in scores.predictions}
    for each in figures["worst"]:
        row, off = rows[each["row"]], each["predicted"] / each["published"] - 1
        console.print(
            f"  row {row.index:>4}: {each['predicted']:.4g} tokens/s/GPU, published {each['published']:.4g} "
            f"({off:+.0%})  {row.text('model')}, {row.source[:70]}",
            markup=False,
        )
    for row, why in scores.not_covered:
        console.print(f"  not covered, row {row.index}: {why}", markup=False)


def _sources_table(figures: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("source", max_width=50)
    for name in ("rows", "covered", "tokens/s MAPE", "median", "step time MAPE", "median", "memory MAPE", "median"):
        table.add_column(name, justify="right")
    for source, own in figures["per_source"].items():
        table.add_row(source, *_cells(own))
    table.add_section()
    table.add_row("all", *_cells(figures))
    return table


def _cells(own: dict[str, Any]) -> list[str]:
    errors = [own[f"{of}_{name}"] for of in ("time", "step_time", "memory") for name in ("mape", "median")]
    return [str(own["rows"]), str(own["covered"]), *("" if each is None else f"{each:.2%}" for each in errors)]


def _number(value: float | None) -> str:
    return "no pairs" if value is None else f"{value:.2f}"


def _known(value: float | None, unit: float, form: str) -> str:
    return "" if value is None else f"{value / unit:{form}}"


def _draw(scores: Scores, path: Path) -> None:
    from matplotlib import pyplot as plt  # of the extra "bench"

    plt.rcParams["svg.hashsalt"] = "predictions"  # equal files from equal figures
    figure, axes = plt.subplots(figsize=(7, 5))
    timed = [p for p in scores.predictions if p.published_tokens_per_s_per_gpu]
    for project in dict.fromkeys(p.row.source.split()[0] for p in timed):
        own = [p for p in timed if p.row.source.split()[0] == project]
        published = [p.published_tokens_per_s_per_gpu for p in own]
        axes.scatter(published, [p.tokens_per_s_per_gpu for p in own], s=14, alpha=0.8, label=project)
    ends = [min(p.tokens_per_s_per_gpu for p in timed) / 2, max(p.tokens_per_s_per_gpu for p in timed) * 2]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.9, 1.1):
        axes.plot(ends, [factor * end for end in ends], color="grey", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="published tokens per second and GPU", ylabel="predicted (dashed: 10 % off)")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def _rows_table(scores: Scores) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("row", "model", "gpu", "GPUs", "tokens/s/GPU", "published", "GiB", "published", "fits", "assumed"):
        table.add_column(name)
    for p in scores.predictions:
        table.add_row(
            str(p.row.index), p.row.text("model"), p.row.text("gpu"), str(p.case.cluster.num_devices),
            f"{p.tokens_per_s_per_gpu:.5g}", _known(p.published_tokens_per_s_per_gpu, 1, ".5g"),
            f"{p.memory.counted_bytes / 2**30:.1f}", _known(p.published_peak_bytes, 2**30, ".1f"),
            "no" if p.out_of_memory else "yes", "; ".join(p.case.assumed),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
