"""MiniCPM, of which nothing runs on BMTrain today."""

from __future__ import annotations

from .suite import Case, Suite

SUITE = Suite(
    name="minicpm",
    title="MiniCPM",
    repository="OpenBMB/MiniCPM",
    files=("README.md",),
    imports=(),
    cases=(
        Case(
            "README.md",
            because="the repository holds no program that imports BMTrain; its schedule is lr_scheduler.WSD here",
        ),
    ),
)
