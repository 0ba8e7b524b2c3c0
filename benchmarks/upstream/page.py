"""Write an upstream suite's outcomes as a page of the manual."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from .suite import Outcome, Suite

_MEANINGS = {
    "as it is": "passes as it is (the import renamed)",
    "with a change": "passes with this mechanical change",
    "does not apply": "does not apply, because",
    "fails": "fails",
}


def results_path(name: str) -> Path:
    """Return where the outcomes of the suite ``name`` are kept."""
    return Path(__file__).parent / "results" / f"{name}.json"


def page_path(name: str) -> Path:
    """Return where the page of the suite ``name`` is."""
    return Path(__file__).parents[2] / "docs" / f"upstream_{name}.md"


def read_results(name: str) -> dict[str, Any]:
    """Read the outcomes of the suite ``name``; empty ones if it never ran."""
    path = results_path(name)
    return json.loads(path.read_text()) if path.exists() else {"commit": "", "files": []}


def page(suite: Suite, results: dict[str, Any]) -> str:
    """Return the page's text: how many files fare how, then every file by name, projects with their losses last."""
    outcomes = [Outcome.read(record) for record in results["files"]]
    tests = [outcome for outcome in outcomes if not suite.case(outcome.file).project]
    projects = [outcome for outcome in outcomes if suite.case(outcome.file).project]
    lines = [
        f"# {suite.title}'s own tests",
        "",
        f"Every file of the public test suite of [{suite.repository}](https://github.com/{suite.repository}) at commit"
        f" `{results['commit'][:12]}`, run on Meshwright with only the import renamed, and where that is not"
        " enough with the mechanical change that is told. Ranks are gloo processes on one machine without a GPU, on"
        f" which `cuda` stands for the CPU. This page is written by `python -m benchmarks.upstream {suite.name}"
        " --source DIR`, where `DIR` is a clone of that repository.",
        "",
        *_untried(results),
        *_counted(tests),
        "",
        *_files(tests),
    ]
    if projects:
        lines += ["", "## Programs", "", *_files(projects), *_losses(projects)]
    return "\n".join(lines) + "\n"


def _untried(results: dict[str, Any]) -> list[str]:
    left = results.get("listed", 0) - len(results["files"])
    return [f"**{left} of the suite's {results['listed']} files have no result yet.**", ""] if left > 0 else []


def _counted(outcomes: list[Outcome]) -> list[str]:
    counts: Counter[str] = Counter(outcome.verdict for outcome in outcomes)
    rows = [f"| {meaning} | {counts[verdict]} |" for verdict, meaning in _MEANINGS.items()]
    return ["| outcome | files |", "|---|---|", *rows]


def _files(outcomes: list[Outcome]) -> list[str]:
    rows = []
    for outcome in outcomes:
        bad = {label: result for label, result in outcome.ranks.items() if result != "passed"}
        ranks = ", ".join(outcome.ranks) if not bad else ", ".join(f"{label}: {said}" for label, said in bad.items())
        rows.append(f"| `{outcome.file}` | {outcome.verdict} | {_cell(ranks)} | {_cell(outcome.why)} |")
    return ["| file | outcome | ranks | change or reason |", "|---|---|---|---|", *rows]


def _losses(outcomes: list[Outcome]) -> list[str]:
    rows = [
        f"| `{outcome.file}` | {label} | {' '.join(f'{value:.4g}' for value in values)} |"
        for outcome in outcomes
        for label, values in outcome.losses.items()
        if values
    ]
    return ["", "| program | ranks | its first losses |", "|---|---|---|", *rows] if rows else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
