"""Run an upstream suite and write its results and its page; see :mod:`benchmarks.upstream`."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import importlib
import json
import subprocess
from pathlib import Path

import torch

from .page import page, page_path, read_results, results_path
from .running import run_file
from .suite import Outcome, Suite

# One suite a repository: the four systems, and the projects on them.
SUITES = ("bmtrain", "colossalai", "atorch", "fairseq", "modelcenter", "cpm_bee", "minicpm")


def suite_named(name: str) -> Suite:
    """Import the suite ``name``."""
    found = importlib.import_module(f"{__package__}.{name}").SUITE
    assert isinstance(found, Suite)
    return found


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upstream", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--source", type=Path, help="a clone of the upstream repository; without it the page alone")
    parser.add_argument("--only", default="*", help="shell pattern of the files to run; the others' results stay")
    parser.add_argument("--logs", type=Path, default=Path("runs/upstream"), help="where each file's output goes")
    options = parser.parse_args()
    suite = suite_named(options.suite)
    if options.source is not None:
        _run(suite, options.source.resolve(), options.only, options.logs / suite.name)
    page_path(suite.name).write_text(page(suite, read_results(suite.name)))
    print(f"wrote {page_path(suite.name)}")


def _run(suite: Suite, source: Path, only: str, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    before = {record["file"]: record for record in read_results(suite.name)["files"]}
    names = suite.listed(source)
    if not names:
        raise SystemExit(f"no file of {suite.title} in {source}: expected a clone of {suite.repository}")
    outcomes: dict[str, Outcome] = {}
    for number, name in enumerate(names, 1):
        if not fnmatch.fnmatch(name, only):
            continue  # what is known of it stays
        outcomes[name] = outcome = run_file(suite, source, name, logs)
        print(f"{number:4}/{len(names)} {name}: {outcome.verdict} {outcome.ranks or ''}", flush=True)
        files = {**before, **{known: dataclasses.asdict(each) for known, each in outcomes.items()}}
        results = {
            "commit": _commit(source),
            "torch": torch.__version__,
            "listed": len(names),
            "files": [files[known] for known in names if known in files],
        }
        results_path(suite.name).parent.mkdir(exist_ok=True)
        results_path(suite.name).write_text(json.dumps(results, indent=1) + "\n")


def _commit(source: Path) -> str:
    asked = subprocess.run(["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or (source / "COMMIT").read_text().strip()


if __name__ == "__main__":
    main()
