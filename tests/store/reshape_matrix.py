"""Every strategy's checkpoint loaded under every other strategy: writes docs/reshape_matrix.md.

python -m tests.store.reshape_matrix               # what has no figure yet
python -m tests.store.reshape_matrix 'fsdp 2'      # everything that is loaded into these anew
python -m tests.store.reshape_matrix --page        # the page alone, from the figures there are

Figures are kept beside the page after each strategy, so that a run can be cut off and goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import pool
from tests.pool import Pool, RemoteFailure
from tests.store import reshape_runs
from tests.store.reshape_runs import MORE, PAIRS, ROWS, STOP, Contents, check_equal, problem, reference, resaved, slug

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURES = DOCS / "reshape_matrix.md", DOCS / "reshape_matrix.json"
_SAVED_AT_ONCE, _LOADED_AT_ONCE = 6, 30  # in one call of a pool, which has three minutes

HEAD = f"""# Every checkpoint under every strategy

Each of {len(ROWS)} strategies trains {STOP} steps of a small GPT on the CPU and saves; each then loads the checkpoints
of the others, saves what it has loaded, and trains {MORE} steps more. Rows are what was saved, columns where it was
loaded, by the number of the row.

- ✓: what was saved again is what had been saved, to the bit: weights (fp32 masters where the model is in half
  precision), states, hyperparameters and schedule. The losses that follow are those of one process that loaded the same
  checkpoint, within the limit of the column; where a run loads its own checkpoint they are those that followed the
  save, to the bit. Replicas of outer steps are compared in their first step, before they go apart.
- [n]: refused, and the reason is below. Where it is another optimizer's, the weights alone were loaded, to the bit:
  `TrainingState(model)` without `optim`; states then start afresh.
- Blank: of another model; or of another optimizer, which one pair of each two shows.

Hyperparameters go on as they were saved, those of an outer step too: a rule that takes over another's checkpoint keeps
its rate and momentum. A loss moves by about 7e-3 of itself per step here.

Written by `python -m tests.store.reshape_matrix`; `make parity` tests every cell.
"""


class Saved:
    """The strategies' checkpoints, made when they are first asked for.

    Args:
        directory: Where they are saved; empty.
        ranks: Gives a pool of so many ranks.
    """

    def __init__(self, directory: Path, ranks: Callable[[int], Pool]) -> None:
        self.directory, self.ranks = directory, ranks
        self._losses: dict[str, Any] = {}
        self._contents: dict[str, Contents] = {}
        self._alone: dict[str, dict[str, Any]] = {}

    def losses(self, sources: list[str]) -> dict[str, Any]:
        """What followed each save; text: why it was refused."""
        for world in sorted({ROWS[name].world for name in sources}):
            absent = [name for name in sources if ROWS[name].world == world and name not in self._losses]
            for names in _parts(absent, _SAVED_AT_ONCE):
                self._losses |= self.ranks(world).run(reshape_runs.save_all, self.directory, names)[0]
        return self._losses

    def load(self, name: str, sources: list[str]) -> dict[str, Any]:
        """What follows each load."""
        found: dict[str, Any] = {}
        for names in _parts(sources, _LOADED_AT_ONCE):
            found |= self.ranks(ROWS[name].world).run(reshape_runs.load_all, self.directory, name, names)[0]
        return found

    def check(self, name: str, sources: list[str]) -> dict[str, float | str]:
        """By source how far apart the losses are that follow; text: why a checkpoint was refused.

        Raises:
            AssertionError: When anything is not as the page says.
        """
        losses = self.losses(sources)
        figures: dict[str, float | str] = {each: losses[each] for each in sources if isinstance(losses[each], str)}
        sources = [each for each in sources if each not in figures]
        found = self.load(name, sources)
        if name == reference(name):
            self._alone.setdefault(name, {}).update(found)
        alone = self._one_process(reference(name), sources)
        for source, after in found.items():
            again = resaved(self.directory, source, name)
            refused = isinstance(after, str)
            check_equal(self._read(source), Contents.of(again), with_states=not refused)
            shutil.rmtree(again)
            wrong = after if refused else problem(source, name, losses, after, alone[source])
            assert refused or isinstance(wrong, float), f"{source} into {name}: {wrong}"
            figures[source] = wrong
        return figures

    def _one_process(self, name: str, sources: list[str]) -> dict[str, Any]:
        known = self._alone.setdefault(name, {})
        absent = [source for source in sources if source not in known]
        if absent:
            known |= self.load(name, absent)
            for source in absent:
                shutil.rmtree(resaved(self.directory, source, name))
        return known

    def _read(self, source: str) -> Contents:
        if source not in self._contents:
            self._contents[source] = Contents.of(self.directory / slug(source))
        return self._contents[source]


def _parts(names: list[str], size: int) -> Iterator[list[str]]:
    return (names[start : start + size] for start in range(0, len(names), size))


def figures() -> dict[str, float | str]:
    """What was measured, by pair; text: why it was refused."""
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {}


def key(source: str, name: str) -> str:
    return f"{source} -> {name}"


def page(measured: dict[str, float | str]) -> str:
    """The page: strategies with the largest differences and limits, the cells, and why some are refused."""
    names, notes = list(ROWS), []
    strategies = ["| | strategy | ranks | optimizer | losses apart, at most | limit |", "|---" * 6 + "|"]
    for number, (name, row) in enumerate(ROWS.items()):
        values = [value for source in names if isinstance(value := measured.get(key(source, name)), float)]
        worst = f"{max(values):.0e}" if values else ""
        strategies.append(f"| {number + 1} | {name} | {row.world} | {row.optimizer} | {worst} | {row.tolerance:.0e} |")
    cells = ["| | " + " | ".join(str(i + 1) for i in range(len(names))) + " |", "|---" * (len(names) + 1) + "|"]
    for number, source in enumerate(names):
        row = " | ".join(_cell(measured, source, name, notes) for name in names)
        cells.append(f"| {number + 1} {source} | {row} |")
    refused = [f"{number + 1}. {note}." for number, note in enumerate(notes)]
    return "\n".join([HEAD, *strategies, "", *cells, "", "## Refused", "", *refused]) + "\n"


def _cell(measured: dict[str, float | str], source: str, name: str, notes: list[str]) -> str:
    if (source, name) not in PAIRS:
        return ""
    found = measured.get(key(source, name), "not run")
    if not isinstance(found, str):
        return "✓"
    what = found.partition(". Expected")[0]  # without the names of the two
    if what not in notes:
        notes.append(what)
    return f"[{notes.index(what) + 1}]"


def measure(wanted: list[str]) -> None:
    """Loads everything into each strategy and keeps the figures."""
    pool._CALL_TIMEOUT_S = 3600.0  # it may run behind everything else
    pools: dict[int, Pool] = {}
    with tempfile.TemporaryDirectory() as directory:
        saved = Saved(Path(directory), lambda world: pools.setdefault(world, Pool(world)))
        for name in ROWS:
            known = figures()
            sources = [source for source, into in PAIRS if into == name]
            if name not in wanted if wanted else all(key(source, name) in known for source in sources):
                continue
            try:
                found = saved.check(name, sources)
            except (RemoteFailure, AssertionError) as error:
                print(name, error, flush=True)
                continue
            print(name, found, flush=True)
            FIGURES.write_text(json.dumps(known | {key(s, name): found[s] for s in sources}, indent=1) + "\n")
    for each in pools.values():
        each.stop()


if __name__ == "__main__":
    if "--page" not in sys.argv:
        measure(sys.argv[1:])
    PAGE.write_text(page(figures()))
