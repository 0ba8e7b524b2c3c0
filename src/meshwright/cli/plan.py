"""``meshwright plan``: strategies for a model on a cluster, predicted, ranked and explained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cli.files import check_writable, write
from meshwright.cli.plan_options import Subjects
from meshwright.planner.explain import page, ranked_table, reasons, trace, why
from meshwright.planner.search import Found
from meshwright.planning import PlanRequest
from meshwright.strategy import Strategy
from meshwright.utils.terminal import PlainConsole


@dataclass(frozen=True)
class PlanOptions:
    """The command line."""

    subjects: Subjects
    strategy: Path | None = None
    num_micro_batches: int | None = None
    objective: str = "tokens_per_s"
    excluded: tuple[str, ...] = ()
    included: tuple[str, ...] = ()
    top: int = 10
    as_json: bool = False
    html: Path | None = None
    trace: Path | None = None
    save: Path | None = None

    def request(self) -> PlanRequest:
        """The request.

        Raises:
            MeshwrightError: Naming what is wrong.
        """
        for option, path in (("--html", self.html), ("--trace", self.trace), ("--save", self.save)):
            check_writable(option, path)
        return self.subjects.request(
            strategy=None if self.strategy is None else Strategy(self.strategy),
            num_micro_batches=self.num_micro_batches,
            objective=self.objective,
            excluded=self.excluded,
            included=[each for text in self.included for each in _wishes(text)],
            top=self.top,
        )


def _wishes(text: str) -> tuple[Any, ...]:
    """A method's name, or with keys as in the text of a strategy."""
    return Strategy(text).methods if "(" in text else (text,)


def plan(options: PlanOptions) -> int:
    """Plans, shows and writes what was asked for.

    Raises:
        MeshwrightError: When there is no plan, saying why.
    """
    with redirect_stdout(sys.stderr):  # what a model prints is no part of the result
        request = options.request()
        with _progress() as progress:
            found = request.found(progress)
            what_ifs = request.what_ifs(found)
        document = request.document(found, what_ifs) if options.as_json or options.html is not None else {}
    if options.as_json:
        print(json.dumps(document, indent=2))
    else:
        console = PlainConsole()
        console.print(ranked_table(found.plans, _title(request, found), console.width))
        console.print(reasons(why(found), what_ifs))
        if told := _told_measured(request):
            console.print(told, markup=False, highlight=False)
        for gap in found.plans[0].gaps:
            console.print(f"Not predicted: {gap}", markup=False, highlight=False)
    if options.html is not None:
        write("--html", options.html, page(document))
    if options.trace is not None:
        write("--trace", options.trace, json.dumps(trace(found.plans[0])))
    if options.save is not None:
        write("--save", options.save, found.plans[0].complete_strategy.to_json() + "\n")
    return 0


def _title(request: PlanRequest, found: Found) -> str:
    cluster = request.cluster
    where = f"{cluster.num_devices} x {cluster.device.name}"
    return f"{request.model.name} on {where}, {request.global_batch} samples a step, in {found.seconds:.1f} s"


def _told_measured(request: PlanRequest) -> str:
    """Whose seconds they are, where they are no preset's."""
    known = request.cluster.calibration
    if known is None or known.machine is None:
        return ""
    runs = f", and corrected by {known.num_runs} dry runs there" if known.num_runs else ""
    return f"Seconds are those of a machine that was measured, {known.machine}{runs}."


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A line on the terminal's standard error while a search goes on; it never mixes with the result."""
    console = PlainConsole(file=sys.stderr)
    if not console.is_terminal:
        yield None
        return
    with console.status("planning") as status:
        yield lambda done, most: status.update(f"planning, strategies simulated: {done:,}")
