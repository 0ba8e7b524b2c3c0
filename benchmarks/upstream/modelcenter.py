"""ModelCenter: its models train, save and load; its tests compare with published weights, which they download."""

from __future__ import annotations

from pathlib import Path

from .suite import Case, Change, Suite

_DRIVER = Path(__file__).parent / "drivers" / "modelcenter.py"

_MODELS = (
    "bert", "cpm1", "cpm2", "cpm3", "glm", "gpt2", "gptj", "llama", "longformer", "opt", "roberta", "t5", "vit",
)  # fmt: skip

SUITE = Suite(
    name="modelcenter",
    title="ModelCenter",
    repository="OpenBMB/ModelCenter",
    files=(*(f"model_center/model/{name}.py" for name in _MODELS), "tests/test_*.py"),
    imports=(Change(r"^import bmtrain as bmt$", "import meshwright as bmt", "the import"),),
    cases=(
        Case("model_center/model/*.py", run=f"{_DRIVER} {{file}}", project=True),
        Case("tests/test_*.py", because="compares with published weights, which it downloads"),
    ),
)
