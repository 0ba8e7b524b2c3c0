"""Run ``meshwright methods``: print the composition law as a table, a list or JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.methods import Method, known_methods, rules
from meshwright.methods.base import SHARD_AXES
from meshwright.runtime.terminal import PlainConsole
from meshwright.strategy.value import METHOD_CONFIGS

_WIDE = 120
"""Characters per line from which on the table is readable."""


def law() -> dict[str, Any]:
    """Return the law as plain values: methods in the order of their application, and every conflict."""
    return {
        "methods": [_described(method) for method in known_methods()],
        "stand_for_others": _short_names(),
        "conflicts": [
            {"methods": [rule.first, rule.second], "always": rule.always, "reason": rule.text} for rule in rules()
        ],
    }


def _described(method: type[Method]) -> dict[str, Any]:
    return {
        "name": method.method_name,
        "phase": method.phase.name.lower(),
        "seed_name": method.seed_name,
        "axis": method.axis,
        "needs": _needs(method),
        "conflicts": _conflicts(method.method_name),
        "summary": method.summary,
        "effect": method.effect,
    }


def _short_names() -> list[str]:
    return [name for name, config in METHOD_CONFIGS.items() if not issubclass(config, Method)]


def _needs(method: type[Method]) -> list[str]:
    needs = []
    if method.shards:
        needs.append(f"an axis of {', '.join(SHARD_AXES)}")
    for need in method.needs:
        beside = f" with {need.own_keys}" if need.own_keys else ""
        needs.append(f"{' or '.join(need.any_of)}{beside}")
    return needs


def _conflicts(name: str) -> dict[str, list[str]]:
    """Return the other method of each conflict, and its reasons."""
    found: dict[str, list[str]] = {}
    for rule in rules():
        if name in (rule.first, rule.second):
            other = rule.second if rule.first == name else rule.first
            found.setdefault(other, []).append(rule.text)
    return found


def _names(name: str) -> str:
    """Return the methods that this one conflicts with, in brackets where only some keys conflict."""
    always = [rule for rule in rules() if rule.always and name in (rule.first, rule.second)]
    never = {rule.second if rule.first == name else rule.first for rule in always}
    return ", ".join(other if other in never else f"({other})" for other in _conflicts(name))


def print_methods(*, as_json: bool, console: Console | None = None) -> None:
    """Print the law: a table on wide terminals, a paragraph per method on narrow ones.

    Args:
        as_json: Print :func:`law` as JSON instead.
        console: Where to print; None: standard output.
    """
    console = console or PlainConsole()
    if as_json:
        console.print(json.dumps(law(), indent=2), soft_wrap=True, highlight=False, markup=False)
        return
    console.print(_table() if console.width >= _WIDE else _list())
    console.print(
        f"{', '.join(_short_names())} stand for the mesh and the methods of its axes.\n"
        "Conflicts in brackets hold with some keys; meshwright methods --json gives every reason.",
        markup=False,
        highlight=False,
    )


def _table() -> Table:
    table = Table(
        title="Methods, in the order of their application", title_justify="left", show_lines=True, expand=True
    )
    table.add_column("method", no_wrap=True)
    for column, ratio in (("seed", 3), ("axis", 2), ("needs", 3), ("conflicts with", 4), ("effect", 7)):
        table.add_column(column, overflow="fold", ratio=ratio)
    for method in known_methods():
        needs = "; ".join(_needs(method))
        table.add_row(
            method.method_name, method.seed_name or "", method.axis or "", needs, _names(method.method_name),
            f"{method.summary}\n{method.effect}",
        )  # fmt: skip
    return table


def _list() -> Group:
    parts: list[RenderableType] = [Text("Methods, in the order of their application\n", style="italic")]
    for method in known_methods():
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in {
            "": method.summary,
            "seed": method.seed_name,
            "axis": method.axis,
            "needs": "; ".join(_needs(method)),
            "conflicts": _names(method.method_name),
            "effect": method.effect,
        }.items():
            if text:
                grid.add_row(Text(label, style="dim"), Text(text))
        parts += [Text(method.method_name, style="bold"), Padding(grid, (0, 0, 1, 2))]
    return Group(*parts)
