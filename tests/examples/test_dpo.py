"""The example of preference training: two models in one job, equal on any number of ranks."""

import contextlib
import importlib
import io
import json
import math
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("transformers")

from tests.cli.helpers import losses
from tests.examples.runs import EXAMPLES, _with_two_layers


def trained(folder, strategy=None):
    from meshwright.cli import train_loop as training
    from meshwright.cli.train_options import Options
    from meshwright.runtime.device import seed_everything

    sys.path.insert(0, str(EXAMPLES / "dpo"))
    try:
        config = _with_two_layers(EXAMPLES / "llama" / "config.json", folder)
        example = importlib.import_module("dpo")
        corpus = [Path(importlib.import_module("argparse").__file__)]
        seed_everything(0)
        with (
            mock.patch.dict(os.environ, HOME=str(folder)),
            mock.patch.object(example, "find_files", return_value=corpus),
            mock.patch.object(training, "shutdown_distributed"),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            every = (
                f"model.args.config={config}", "run.steps=8", "run.batch_size=8", "optimizer.warmup_steps=0",
                "optimizer.lr=2e-3", "run.trackers=[]", "run.device=cpu",
            )  # fmt: skip
            training.train(Options(EXAMPLES / "dpo" / "dpo.toml", out=folder / "run", changes=every, strategy=strategy))
    finally:
        sys.path.remove(str(EXAMPLES / "dpo"))
        sys.modules.pop("dpo", None)
    return losses(folder / "run")


def test_preferences_are_learned_alike_on_any_ranks_and_the_reference_stays(ranks, tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    found = ranks(2).run(trained, tmp_path / "two", "fsdp")[0]
    assert found[0] == pytest.approx(math.log(2), abs=1e-5)  # policy and reference are equal
    assert found[-1] < found[0] - 0.1
    assert found == pytest.approx(ranks(1).run(trained, tmp_path / "one")[0], rel=1e-4)
    (checkpoint,) = (tmp_path / "two" / "run" / "checkpoints").iterdir()
    stored = json.loads((checkpoint / "state.json").read_text())["tensors"]
    assert stored
    assert any("policy." in name for name in stored)
    assert not [name for name in stored if "reference." in name]
