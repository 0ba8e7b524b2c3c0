"""Draw the picture of the house from the floors in ``tests/house.py``, which a test enforces."""

from __future__ import annotations

import ast
import html
from pathlib import Path

ROOT = Path(__file__).parents[2]

_WIDTH, _ROW, _GAP, _LEFT = 920, 46, 8, 250
_TITLES = {
    "errors": "ground",
    "runtime": "processes, mesh",
    "cost": "plain data",
    "comm": "exchange",
    "optim": "parts",
    "nn": "modules",
    "store": "what was saved",
    "methods": "how it is done",
    "planner": "which strategy",
    "training": "the journey",
    "compat": "doors",
}


def floors() -> list[list[str]]:
    """Return the rooms by floor, the ground floor first, as the test lists them."""
    tree = ast.parse((ROOT / "tests" / "house.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FLOORS":
            return [sorted(rooms) for rooms in ast.literal_eval(node.value)]
    raise ValueError("tests/house.py has no FLOORS")


def picture() -> str:
    """Return the house as SVG: one row per floor, the ground floor at the bottom, under a roof."""
    rows = list(reversed(floors()))
    top = 70
    height = top + len(rows) * (_ROW + _GAP) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-label="The house: floors of rooms, each importing only from floors below" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="15">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fbfaf7" rx="10"/>',
        f'<path d="M20 {top - 6} L{_WIDTH / 2} 12 L{_WIDTH - 20} {top - 6} Z" fill="#00796b"/>',
        f'<text x="{_WIDTH / 2}" y="54" text-anchor="middle" fill="#ffffff" font-weight="600">Meshwright</text>',
    ]
    for number, rooms in enumerate(rows):
        parts += _floor(rooms, top + number * (_ROW + _GAP))
    return "\n".join([*parts, "</svg>", ""])


def _floor(rooms: list[str], y: int) -> list[str]:
    title = next((_TITLES[room] for room in rooms if room in _TITLES), "")
    inner = _WIDTH - _LEFT - 30
    width = (inner - _GAP * (len(rooms) - 1)) / len(rooms)
    parts = [f'<text x="36" y="{y + _ROW / 2 + 5}" fill="#51606b" font-size="14">{html.escape(title)}</text>']
    for place, room in enumerate(rooms):
        x = _LEFT + place * (width + _GAP)
        parts += [
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW}" rx="5" fill="#e0f2ef" stroke="#00796b"/>',
            f'<text x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 5}" text-anchor="middle" fill="#123b36" '
            f'font-family="ui-monospace, monospace" font-size="14">{html.escape(room)}</text>',
        ]
    return parts
