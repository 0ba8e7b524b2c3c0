"""Prints what the parity matrix has measured: model x layout -> the largest difference."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.models import MODELS


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    found: dict[str, dict[str, str]] = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        if report.when != "call" or "parity/test_matrix.py" not in report.nodeid:
            continue
        layout, _, name = report.nodeid.partition("[")[2].removesuffix("]").rpartition("-")
        value = dict(report.user_properties).get("apart")
        found.setdefault(layout, {})[name] = "failed" if value is None else f"{value:.1e}"
    if not found:
        return
    terminalreporter.section("weights apart, as a part of the distance moved")
    terminalreporter.line("| layout | " + " | ".join(MODELS) + " |")
    terminalreporter.line("|---" * (len(MODELS) + 1) + "|")
    for layout, row in found.items():
        terminalreporter.line(f"| {layout} | " + " | ".join(row.get(name, "") for name in MODELS) + " |")
