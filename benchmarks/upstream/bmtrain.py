"""BMTrain's test suite, and the projects that live on BMTrain."""

from __future__ import annotations

from .suite import Case, Change, Suite

SUITE = Suite(
    name="bmtrain",
    title="BMTrain",
    repository="OpenBMB/BMTrain",
    files=("tests/test_*.py",),
    imports=(
        Change(r"^import bmtrain as bmt$", "import meshwright as bmt", "the import"),
        Change(r"\bfrom bmtrain\b", "from meshwright", "the import"),
    ),
    cases=(Case("tests/test_all.py", because="starts the other files, by name and number of GPUs"),),
    python_path=("tests",),
)
