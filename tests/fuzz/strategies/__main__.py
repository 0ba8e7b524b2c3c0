"""Random strategies against one process: ``python -m tests.fuzz.strategies [--cases 500] [--first N] [--out FOLDER]``.

Every case is drawn from its number; refused ones are drawn again, and counted. Findings go to ``FOLDER/findings.jsonl``
with their cases. One worth keeping goes into ``tests/fuzz/regressions/strategies/``: ``make test`` runs it again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.strategies import running
from tests.fuzz.strategies.drawing import MOST_DRAWS, Case, draw
from tests.pool import Pool, RemoteFailure

CALL_TIMEOUT_S = 900.0  # 8 ranks on 2 cores that others use, too, took 300


class Fuzzer:
    """Runs cases on pools that live on between them, and counts what came of them."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.pools: dict[int, Pool] = {}
        out.mkdir(parents=True, exist_ok=True)

    def try_number(self, number: int) -> None:
        """Draw until a case is taken, and run it."""
        for again in range(MOST_DRAWS):
            case = draw(f"{number}.{again}")
            found = self.run(case)
            if found is not None:
                break
        else:
            self.counts["all draws refused"] += 1
            return
        self.counts["cases"] += 1
        if found:
            self.counts["cases with findings"] += 1
            with (self.out / "findings.jsonl").open("a") as stream:
                stream.write(json.dumps({"case": case.record(), "findings": found}) + "\n")
            print(f"{case.seed}: {case.model}, {case.world} ranks, {case.strategy}", *found, sep="\n    ", flush=True)

    def run(self, case: Case) -> list[str] | None:
        """Return the findings of one case; None where our own error refuses it on every rank alike."""
        pool = self.pools.setdefault(case.world, Pool(case.world, CALL_TIMEOUT_S))
        begun = time.monotonic()
        try:
            ranks: list[Any] = pool.run(running.train, case)
        except RemoteFailure as failure:
            pool.stop()
            lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
            said = [line for line in lines if "Error" in line.split(":")[0]] or lines[:1]
            (self.out / f"{case.seed}.txt").write_text(str(failure))
            silent = "did not answer" in str(failure)
            return [f"{'hang, or ' if silent else ''}foreign exception: {said[0][:300]}"]
        refusals = {each.refused for each in ranks}
        if refusals != {""}:
            if "" in refusals:
                return [f"refused on some ranks alone: {sorted(refusals)}"]
            self.refusals[ranks[0].refused.split("\n")[0][:100]] += 1
            self.counts["refused draws"] += 1
            return None
        self.counts["seconds"] += round(time.monotonic() - begun)
        found = running.findings(case, ranks)
        off = [each for each in found if each.startswith(("loss off", "norm off"))]
        if not off or case.optimizer != "adamw":
            return found
        if not running.is_rounding(case, pool.run(running.train_in_float64, case)):
            return found
        self.counts["apart by rounding alone"] += 1
        return [each for each in found if each not in off]

    def stop(self) -> None:
        """End the pools."""
        for pool in self.pools.values():
            pool.stop()


def main() -> int:
    """Run what was asked for, and print what was counted."""
    arguments = argparse.ArgumentParser(prog="python -m tests.fuzz.strategies")
    arguments.add_argument("--cases", type=int, default=500)
    arguments.add_argument("--first", type=int, default=0, help="number of the first case")
    arguments.add_argument("--out", type=Path, default=Path("runs/fuzz-strategies"))
    arguments.add_argument("--seed", action="append", default=[], help="these cases alone, such as 17.2")
    options = arguments.parse_args()
    fuzzer = Fuzzer(options.out)
    try:
        if options.seed:
            for seed in options.seed:
                print(seed, draw(seed), fuzzer.run(draw(seed)), sep="\n    ")
        else:
            for number in range(options.first, options.first + options.cases):
                fuzzer.try_number(number)
                if number % 10 == 9:
                    print(f"[{number + 1 - options.first}/{options.cases}] {dict(fuzzer.counts)}", flush=True)
    finally:
        fuzzer.stop()
    print(*(f"{count:5} × {text}" for text, count in fuzzer.refusals.most_common()), sep="\n")
    print(dict(fuzzer.counts))
    return 1 if fuzzer.counts["cases with findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
