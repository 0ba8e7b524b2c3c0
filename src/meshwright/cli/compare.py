"""``meshwright compare``: strategies, or plans that were written before, beside each other."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cli.plan_options import Subjects
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.planner.explain import (
    Difference,
    comparison_document,
    diff,
    difference_table,
    entries_diff,
    entries_table,
    plan_entry,
    read_document,
)
from meshwright.planner.plan import Plan
from meshwright.strategy import Strategy
from meshwright.utils.terminal import PlainConsole


@dataclass(frozen=True)
class CompareOptions:
    """The command line; without subjects the figures of written plans are compared."""

    files: tuple[Path, ...]
    subjects: Subjects | None = None
    as_json: bool = False


def compare(options: CompareOptions) -> int:
    """Shows plans beside each other, and what leads from the first to each other.

    Raises:
        MeshwrightError: When a file cannot be read, or a strategy cannot be.
    """
    if len(options.files) < 2:
        raise ConfigError(
            "There is nothing to compare with",
            expected="two files or more",
            got=str(len(options.files)),
            fix="name another strategy, or another file of meshwright plan --json",
        )
    documents: list[Mapping[str, Any] | None] = []
    strategies = []
    for path in options.files:
        with _naming(path):
            text = _read(path)
            documents.append(read_document(text, str(path)))
            strategies.append(_strategy(text, documents[-1]))
    if options.subjects is None:
        entries, differences = _written(options.files, documents)
    else:
        with redirect_stdout(sys.stderr):  # what a model prints is no part of the result
            entries, differences = _planned(options.files, strategies, options.subjects)
    if options.as_json:
        print(json.dumps(comparison_document(entries, differences), indent=2))
        return 0
    console = PlainConsole()
    console.print(entries_table(entries, "Plans: " + ", ".join(path.name for path in options.files), console.width))
    for difference in differences:
        console.print(difference_table(difference))
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read",
            expected="a strategy file, or a file of meshwright plan --json",
            got=f"{type(error).__name__}: {error}",
            fix="correct the path",
        ) from None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Says which of the files an error is about."""
    try:
        yield
    except MeshwrightError as error:
        if str(path) in str(error):
            raise
        what = f"{path}: {error.what}"
        raise type(error)(what, expected=error.expected, got=error.got, fix=error.fix) from error


def _strategy(text: str, document: Mapping[str, Any] | None) -> tuple[Strategy, int | None]:
    """With the number of micro-batches that a written plan was made for."""
    if document is not None:
        first = document["plans"][0]
        return Strategy(json.dumps(first["strategy"])), first["num_micro_batches"]
    if not text.strip():
        raise ConfigError(
            "The file is empty",
            expected="a strategy as Strategy.save writes it; [] is plain data parallelism",
            got="nothing",
            fix="write it with meshwright plan --save",
        )
    return Strategy(text), None


def _planned(
    files: Sequence[Path], strategies: Sequence[tuple[Strategy, int | None]], subjects: Subjects
) -> tuple[list[dict[str, Any]], list[Difference]]:
    request = subjects.request()
    plans: list[Plan] = []
    for path, (strategy, num_micro_batches) in zip(files, strategies, strict=True):
        with _naming(path):
            asked = dataclasses.replace(request, strategy=strategy, num_micro_batches=num_micro_batches)
            plans += asked.planned([strategy]).plans
    subject = request.subject
    return [plan_entry(plan) for plan in plans], [diff(plans[0], plan, subject) for plan in plans[1:]]


def _written(
    files: Sequence[Path], documents: Sequence[Mapping[str, Any] | None]
) -> tuple[list[dict[str, Any]], list[Difference]]:
    """The first plan of every document, as it was predicted then."""
    strategies = [str(path) for path, document in zip(files, documents, strict=True) if document is None]
    if strategies:
        raise ConfigError(
            "Strategies can be compared for a model on a cluster",
            expected="--model, --cluster and --global-batch, or files of meshwright plan --json",
            got=f"neither, and the strategies {', '.join(strategies)}",
            fix="say what they are for",
        )
    known = [document for document in documents if document is not None]
    models = [each["model"] for each in known]
    if any(model != models[0] for model in models):
        names = "; ".join(f"{model.get('name')}, batch {model.get('global_batch')}" for model in models)
        raise ConfigError(
            "The plans are for different models or batches",
            expected="one model, with one batch and length of samples",
            got=names,
            fix="plan them for the same, or compare their strategies with --model, --cluster and --global-batch",
        )
    entries = [dict(each["plans"][0]) for each in known]
    clusters = [each.get("cluster") for each in known]
    differences = [entries_diff(entries[0], entry) for entry in entries[1:]]
    return entries, [
        _elsewhere(each, clusters[0], cluster) for each, cluster in zip(differences, clusters[1:], strict=True)
    ]


def _elsewhere(difference: Difference, here: Any, there: Any) -> Difference:
    """Another cluster is a change, too."""
    if here == there:
        return difference
    before, after = _where(here), _where(there)
    change = f"~ {before} -> {after}" if before != after else f"~ {before} -> the same devices with other figures"
    return dataclasses.replace(difference, changes=(change, *difference.changes))


def _where(cluster: Any) -> str:
    known = cluster if isinstance(cluster, Mapping) else {}
    return f"{known.get('num_devices', 'unknown')} x {known.get('device', 'devices')}"
