"""Write what was found as a page of Markdown."""

from __future__ import annotations

from typing import Any

_WORDS = {"case", "dtype", "optimizer", "sizes", "variant", "name"}  # keys of what a row is about, and not of a figure
_UNITS = {"_bytes": (2**30, "GiB"), "_s": (1e-3, "ms")}


def markdown(document: dict[str, Any]) -> str:
    """Return a table of checks, one of figures, and what could not run."""
    machine, cases = document["machine"], document["cases"]
    name = f"{machine['gpus']} × {machine['name']}" if machine["gpus"] else "no GPU"
    lines = [f"torch {machine['torch']}, CUDA {machine['cuda']}, {name}, {machine['cores']} cores of the host."]
    if document["tiny"]:
        lines.append("Tiny sizes on a stand-in for CUDA: no time here means anything.")
    lines += [f"**{each}.**" for each in (machine["why_not"], machine["shared"]) if each]
    checks = {name: case for name, case in cases.items() if case["part"] == "right" and case["items"]}
    lines += ["", "| what is right | state | items | what is wrong |", "|---|---|---|---|"]
    for name, case in checks.items():
        items = case["items"]
        wrong = [f"{each}: {item['why']}" for each, item in items.items() if not item["ok"]]
        good = f"{len(items) - len(wrong)} of {len(items)}"
        what = "; ".join([*wrong, *([case["why"]] if "why" in case else [])])
        lines.append(f"| `{name}`: {case['about']} | {case['state']} | {good} | {_cell(what)} |")
    lines += ["", "| figures | |", "|---|---|"]
    for name, case in cases.items():
        for item, told in case["items"].items() if case["part"] == "fast" else ():
            whose = f"`{name}`{'' if item == 'figures' else f' {item}'}"
            rows = _rows(told["figures"]) if told["ok"] else [("", told["why"])]
            lines += [f"| {whose}{_cell(words)} | {_cell(what)} |" for words, what in rows]
    missing = {name: case for name, case in cases.items() if case["state"] not in ("ok", "failed")}
    lines += ["", *(f"- `{name}`: {case['state']}, {case['why']}" for name, case in missing.items())]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _rows(figures: dict[str, Any], words: str = "") -> list[tuple[str, str]]:
    """Return a row of all numbers, and one for each entry of a list of cases, which is told by its words."""
    own: list[str] = []
    below: list[tuple[str, str]] = []
    for key, value in figures.items():
        if isinstance(value, dict):
            below += _rows(value, f"{words} {key}")
        elif isinstance(value, list):
            below += [row for each in value if isinstance(each, dict) for row in _rows(each, words)]
        elif isinstance(value, str) and key in _WORDS:
            words = f"{words} {value}"
        else:
            own.append(_named(key, value))
    return [*([(words, ", ".join(own))] if own else []), *below]


def _named(key: str, value: Any) -> str:
    for ending, (unit, name) in _UNITS.items():
        if key.endswith(ending) and not key.endswith("_per_s") and isinstance(value, int | float):
            return f"{key.removesuffix(ending).replace('_', ' ')} {value / unit:.4g} {name}"
    return f"{key.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{key.replace('_', ' ')} {value}"
