"""Examples that are training files alone: a few steps of each on two ranks, and the same on one."""

import contextlib
import importlib
import io
import json
import os
import sys
from unittest import mock

import pytest

pytest.importorskip("transformers")

from tests.cli.helpers import losses
from tests.examples.runs import EXAMPLES

SMALL = {
    "moe": ('data.source=["../gpt2/*.py"]',),
    "pretrain_mixture": (
        'data.mixture=[{source = "../gpt2/*.py", weight = 3, name = "library"}, '
        '{source = "../*/README.md", name = "texts"}]',
        "eval.batches=1",
    ),
    "qlora": ("eval.batches=1", "data.seq_len=96"),
    "sft": ("eval.batches=1", "data.seq_len=96"),
}


def trained(name, folder, strategy=None, changes=()):
    from meshwright.cli import train_loop as training
    from meshwright.cli.train_options import Options
    from meshwright.runtime.device import seed_everything

    seed_everything(0)
    changes = (
        *changes, "run.steps=6", "run.batch_size=8", "data.seq_len=32", "optimizer.warmup_steps=0", "run.trackers=[]",
        "run.device=cpu", *SMALL[name],
    )  # fmt: skip
    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder)),
        mock.patch.object(training, "shutdown_distributed"),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        training.train(
            Options(EXAMPLES / name / f"{name}.toml", out=folder / "run", changes=changes, strategy=strategy)
        )
    return losses(folder / "run")


def two_and_one(ranks, folder, name, changes=()):
    (folder / "two").mkdir()
    (folder / "one").mkdir()
    found = ranks(2).run(trained, name, folder / "two", None, changes)[0]
    assert found[-1] < found[0] - 0.3
    assert found == pytest.approx(ranks(1).run(trained, name, folder / "one", "zero1", changes)[0], rel=1e-3)


def test_the_mixture_of_experts_trains_with_its_experts_divided(ranks, tmp_path):
    two_and_one(ranks, tmp_path, "moe")


def test_the_mixture_of_sources_tells_the_loss_of_each(ranks, tmp_path):
    two_and_one(ranks, tmp_path, "pretrain_mixture")
    told = [json.loads(line) for line in (tmp_path / "two" / "run" / "eval.jsonl").read_text().splitlines()]
    assert {"library", "texts"} <= set(json.dumps(told).replace('"', " ").replace(".", " ").replace("/", " ").split())


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A folder of weights and conversations that the example makes, as changes of a training file."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "sft"))
    importlib.import_module("sft").make(tmp_path / "base", num_chats=60)
    sys.modules.pop("sft")
    return f"model.source=hf:{tmp_path / 'base'}", f"data.source={tmp_path / 'base' / 'chats.jsonl'}"


def test_conversations_are_trained_from_a_folder_and_a_file(ranks, tmp_path, base):
    two_and_one(ranks, tmp_path, "sft", base)
    told = (tmp_path / "two" / "run" / "eval.jsonl").read_text().splitlines()
    assert json.loads(told[-1])


def test_adapters_are_trained_around_a_base_in_4_bits(ranks, tmp_path, base):
    pytest.importorskip("bitsandbytes")
    two_and_one(ranks, tmp_path, "qlora", base)
