"""Every pair of methods, trained or refused: writes docs/method_matrix.md.

python -m tests.methods.method_matrix             # what has no figure yet
python -m tests.methods.method_matrix fp8 outer   # every pair of these methods anew
python -m tests.methods.method_matrix --page      # the page alone, from the figures there are

Figures are kept beside the page after each pair, so that a run can be cut off and goes on where it was.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from meshwright.methods.composition import rules
from tests.methods.pair_runs import (
    FP32_LIMIT,
    OF_ONE_PROCESS,
    PAIRS,
    ROWS,
    STEPS,
    Case,
    case_of,
    refusal,
    train,
    worst_difference,
)
from tests.pool import Pool, RemoteFailure

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURES = DOCS / "method_matrix.md", DOCS / "method_matrix.json"

HEAD = f"""# Every pair of methods

Each cell is the smallest strategy with two methods (on the diagonal: with one), on 2 ranks, or on 4 where the two have
an axis each.

- ✓: it trained {STEPS} steps of SGD with momentum on the CPU. The figure is its largest relative difference from one
  plain process in fp32: of the final weights, as a part of the distance that they moved, or of a loss.
- Most allowed is {FP32_LIMIT:.0e} in fp32. Beside fp8, amp_native and half it is {OF_ONE_PROCESS:.0f} times the
  difference that one process has with the same of these methods alone; beside comm, 2 % more.
- [n]: the law refuses it, and the reason is below.

mixed_parallel, ds_3d_parallel and deepspeed_3d_parallel stand for tensor_parallel, pipeline_parallel and the mesh.
Written by `python -m tests.methods.method_matrix`; `meshwright methods` prints the law.
"""


def figures() -> dict[str, float | str]:
    """What was measured, by pair; text: why it failed."""
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {}


def key(first: str, second: str) -> str:
    return f"{first} + {second}"


def page(measured: dict[str, float | str]) -> str:
    """The page: a triangle of cells, the refusals, and what is refused under some keys."""
    names, notes = list(ROWS), []
    lines = [HEAD, "| | " + " | ".join(str(i + 1) for i in range(len(names))) + " |", "|---" * (len(names) + 1) + "|"]
    for row, second in enumerate(names):
        cells = [_cell(measured, first, second, notes) for first in names[: row + 1]]
        lines.append(f"| {row + 1} `{second}` | " + " | ".join([*cells, *[""] * (len(names) - row - 1)]) + " |")
    lines += ["", "## Refused", "", *(f"{number + 1}. {note}." for number, note in enumerate(notes))]
    lines += ["", "## Refused with some keys", "", *(f"- {rule.text}." for rule in rules() if not rule.always)]
    return "\n".join(lines) + "\n"


def _cell(measured: dict[str, float | str], first: str, second: str, notes: list[str]) -> str:
    why = refusal(case_of(first, second))
    if why is not None:
        if why not in notes:
            notes.append(why)
        return f"[{notes.index(why) + 1}]"
    found = measured.get(key(first, second))
    if found is None:
        return "not run"
    return f"✓ {found:.0e}" if isinstance(found, float) else "✗"


def measure(names: list[str]) -> None:
    """Trains pairs and keeps their figures."""
    pools: dict[int, Pool] = {}

    @functools.cache
    def run(case: Case) -> list[Any]:
        return pools.setdefault(case.world, Pool(case.world)).run(train, case)

    for first, second in PAIRS:
        case, known = case_of(first, second), figures()
        wanted = {first, second} & set(names) if names else not isinstance(known.get(key(first, second)), float)
        if not wanted or refusal(case) is not None:
            continue
        try:
            found: float | str = worst_difference(case, run(case))
            limit = case.limit(run)
            if found > limit:
                found = f"{found:.1e} is above {limit:.1e}"
        except (RemoteFailure, AssertionError) as error:
            found = str(error).strip().splitlines()[-1]  # of a worker's traceback
        print(key(first, second), found, flush=True)
        FIGURES.write_text(json.dumps({**known, key(first, second): found}, indent=1) + "\n")
    for pool in pools.values():
        pool.stop()


if __name__ == "__main__":
    if "--page" not in sys.argv:
        measure(sys.argv[1:])
    PAGE.write_text(page(figures()))
