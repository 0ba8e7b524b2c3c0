"""Fine-tuning runs of others, predicted from the models themselves (``benchmarks/finetune.py``)."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "finetune.py"


@pytest.fixture(scope="module")
def finetune():
    spec = importlib.util.spec_from_file_location("finetune", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_rows_of_the_table_can_be_predicted(finetune):
    rows = finetune.read_rows(finetune.DEFAULT)
    assert len(rows) == 90
    assert {row["model"] for row in rows} <= set(finetune.MODELS)
    recomputes = next(row for row in rows if row["model"].startswith("BERT") and row["recompute"] == "model")
    assert abs(finetune.predicted(recomputes)["error"]) < 0.09
    adapters = next(row for row in rows if row["model"] == "Qwen-7B" and row["seq"] == "4096")
    assert abs(finetune.predicted(adapters)["error"]) < 0.05
