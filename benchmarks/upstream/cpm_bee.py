"""CPM-Bee: its pre-training program."""

from __future__ import annotations

from pathlib import Path

from .suite import Case, Change, Suite

_DRIVER = Path(__file__).parent / "drivers" / "cpm_bee.py"
_PORT = Change(
    r"^ +os\.environ\[\"MASTER_PORT\"\] = .*\n",
    "",
    "without the line that moves MASTER_PORT, where no torchrun listens",
)

SUITE = Suite(
    name="cpm_bee",
    title="CPM-Bee",
    repository="OpenBMB/CPM-Bee",
    files=("src/pretrain_cpm_bee.py", "src/finetune_cpm_bee.py", "src/text_generation*.py"),
    imports=(
        Change(r"^import bmtrain as bmt$", "import meshwright as bmt", "the import"),
        Change(
            r"^import pkg_resources$", "import importlib.resources as pkg_resources", "setuptools lost pkg_resources"
        ),
        Change(
            r"pkg_resources\.resource_stream\(\"cpm_live\", (\"[^\"]+\")\)",
            r'(pkg_resources.files("cpm_live") / \1).open("rb")',
            "setuptools lost pkg_resources",
        ),
    ),
    cases=(
        Case("src/pretrain_cpm_bee.py", changes=(_PORT,), run=f"{_DRIVER} {{file}}", project=True),
        Case("src/finetune_cpm_bee.py", because="needs OpenDelta and published weights; its loop is pre-training's"),
        Case("src/text_generation*.py", because="generates with published weights, in plain PyTorch"),
    ),
    losses=r"Iter: .*?loss: ([0-9.]+)",
    python_path=("src",),
)
