"""Run CPM-Bee's own ``pretrain_cpm_bee.py`` for twelve iterations: ``cpm_bee.py pretrain_cpm_bee.py``.

The model is tiny; the data are 64 lines, written here as its ``DistributedDataset`` in many small blocks, so that every
rank gets some.
"""

from __future__ import annotations

import itertools
import json
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS = 12
MODEL = {
    "dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 64, "num_layers": 3, "dropout_p": 0.0,
    "position_bias_num_buckets": 16, "position_bias_num_segment_buckets": 128, "position_bias_max_distance": 64,
    "vocab_size": 86592, "half": True,
}  # fmt: skip


def main() -> None:
    """Write data and configuration, and run the program."""
    from cpm_live.dataset import build_dataset
    from cpm_live.training_tasks.bee import MixedDataset

    program = sys.argv[1]
    endless = MixedDataset.__iter__

    def some(self: Any) -> Iterator[Any]:
        return itertools.islice(endless(self), STEPS)

    MixedDataset.__iter__ = some  # it has no end, and the program does not look at --train-iters
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with build_dataset(str(folder / "data"), "data", block_size=1024) as dataset:
            for line in range(64):
                dataset.write({"source": f"the line {line} of the data " * 3, "answer": f"it was {line}"})
        (folder / "model.json").write_text(json.dumps(MODEL))
        transforms = [{"<ans>": "$answer", "document": "$source"}, {"<ans>": "$answer", "query": "$source"}]
        entry = {"dataset_name": "lines", "task_name": "mlm", "weight": 1.0, "path": str(folder / "data")}
        (folder / "datasets.json").write_text(json.dumps([{**entry, "transforms": transforms}]))
        (Path.cwd() / "debug").mkdir(exist_ok=True)
        given = {
            "model-config": folder / "model.json", "dataset": folder / "datasets.json", "save": folder / "saved",
            "save-name": "bee", "batch-size": 2, "max-length": 64, "lr": 1e-2, "warmup-iters": 4, "loss-scale": 1024,
            "save-iters": 6, "inspect-iters": 6, "weight-decay": 1e-2, "log-dir": folder / "logs", "seed": 1,
        }  # fmt: skip
        sys.argv = [program, *(str(word) for key, value in given.items() for word in (f"--{key}", value))]
        runpy.run_path(program, run_name="__main__")
        assert (folder / "saved" / f"bee.rank-{_rank()}.opt").exists()
        assert _rank() or {"bee.pt", "bee-6.pt", "bee-12.pt"} <= {each.name for each in (folder / "saved").iterdir()}


def _rank() -> int:
    import meshwright as bmt

    return bmt.rank()


if __name__ == "__main__":
    main()
