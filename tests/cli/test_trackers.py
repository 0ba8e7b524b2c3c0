"""Trackers and callbacks: what they are given, and what becomes of a run when they fail."""

import json
import math
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from meshwright.cli import app, trackers
from meshwright.cli.adapters import check_packages
from meshwright.cli.references import Callbacks
from meshwright.cli.trackers import RunInfo, Trackers, check_trackers
from meshwright.cli.train_config import AdapterTable
from meshwright.errors import ConfigError
from tests.cli.helpers import metrics, project, train_as_rank
from tests.pool import RemoteFailure

CALLBACKS = """
import gc
import json
import os


class Log:
    def __init__(self, job):
        self.job = job

    def on_step(self, step, result):
        assert gc.get_freeze_count() > 0  # what the first step left behind is looked at no more
        self._write("step", step, float(result.loss))

    def on_eval(self, step, figures):
        self._write("eval", step, figures["loss"])

    def on_checkpoint(self, step, path):
        self._write("checkpoint", step, path.name)

    def on_stop(self, step):
        self._write("stop", step, self.job.num_replicas)

    def _write(self, *what):
        with open(f"log.{os.environ.get('RANK', 0)}", "a") as file:
            file.write(json.dumps(what) + "\\n")


class Fails:
    def on_step(self, step, result):
        if step == 4:
            raise ValueError("a bad idea")


def nothing():
    return object()
"""


def _project(folder):
    file = project(folder)
    (folder / "mine.py").write_text(CALLBACKS)
    return file


def _board(folder):
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_a_run_with_callbacks_and_a_board(ranks, tmp_path):
    changes = ['run.trackers=["tensorboard"]', 'run.callbacks=["mine:Log"]']
    changes += ["eval.holdout=0.1", "eval.every=3", "eval.batch_size=2"]
    ranks(2).run(train_as_rank, _project(tmp_path), *changes, out=tmp_path / "out")
    logs = [[json.loads(line) for line in (tmp_path / f"log.{rank}").read_text().splitlines()] for rank in range(2)]
    assert logs[0] == logs[1]
    assert [(what, step) for what, step, _ in logs[0]] == [
        *(("step", 1), ("step", 2), ("step", 3), ("eval", 3), ("checkpoint", 3)),
        *(("step", 4), ("step", 5), ("step", 6), ("eval", 6), ("checkpoint", 6), ("stop", 6)),
    ]
    losses = [record["loss"] for record in metrics(tmp_path / "out")]
    assert [value for what, _, value in logs[0] if what == "step"] == pytest.approx(losses)
    board = _board(tmp_path / "out")
    assert board["loss"] == [(step, pytest.approx(loss)) for step, loss in enumerate(losses, start=1)]
    assert [step for step, _ in board["eval/loss"]] == [3, 6]
    assert "Plan" in (tmp_path / "out" / "plan.txt").read_text()


def test_a_callback_that_fails_ends_the_run_and_leaves_its_checkpoints(ranks, tmp_path):
    with pytest.raises(RemoteFailure, match=r"(?s)a bad idea.*on_step of the callback mine:Fails"):
        ranks(2).run(train_as_rank, _project(tmp_path), 'run.callbacks=["mine:Fails"]', out=tmp_path / "out")
    verified = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "out" / "checkpoints")])
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize(
    ("name", "words"), [("mine:nothing", "is never called"), ("mine:Gone", "Gone"), ("gone:Log", "gone")]
)
def test_callbacks_that_are_none(tmp_path, monkeypatch, name, words):
    (tmp_path / "mine.py").write_text(CALLBACKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=words):
        Callbacks([name], job=None)


class Broken:
    """A tracker that fails at its second call."""

    def __init__(self, info):
        self.calls = 0

    def log(self, figures, step):
        self.calls += 1
        if self.calls == 2:
            raise ConnectionError("no network")

    def file(self, path):
        raise AssertionError("it has been left alone")

    def close(self):
        raise AssertionError("it has been left alone")


def test_a_tracker_that_fails_is_told_once_and_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(trackers._TRACKERS, "broken", Broken)
    every = Trackers(["broken", "tensorboard"], RunInfo(tmp_path, {}, 0))
    for step in (1, 2, 3):
        every.log({"loss": 1.0 / step, "mfu": None, "skipped": False, "grad_norm": math.inf}, step)
    (tmp_path / "plan.txt").write_text("a plan")
    every.file(tmp_path / "plan.txt")
    every.texts([("one?", "two"), ("three?", "four")], 2)
    every.close()
    assert capsys.readouterr().err.count("the tracker broken has failed (ConnectionError: no network)") == 1
    assert list(_board(tmp_path)) == ["loss"]
    texts = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("samples/text_summary")
    assert [(each.step, each.tensor_proto.string_val[0].decode()) for each in texts] == [
        (2, "```\n> one?\ntwo\n\n> three?\nfour\n```")
    ]
    assert len(_board(tmp_path)["loss"]) == 3


class Trackio:
    """Note what trackio 0.43 would be called with, and greet as that does."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            if name in ("init", "finish"):
                print(f"* {name}")
            self.calls.append((name, args, kwargs))
            return args[0] if name == "Markdown" else None

        return call


def test_trackio_has_texts_and_the_plan_of_its_own_run_and_is_quiet(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", recorded := Trackio())
    for folder, first_step in (("a", 0), ("b", 0), ("b", 2)):
        info = RunInfo(tmp_path / folder / "out", {"run": {"steps": 3}}, first_step)
        every = Trackers(["trackio"], info)
        every.log({"loss": 0.5}, 1)
        every.file(tmp_path / "plan.txt")
        every.texts([("one?", "two")], 1)
        every.close()
    assert capsys.readouterr() == ("", "")
    started = [kwargs for name, _, kwargs in recorded.calls if name == "init"]
    assert [each["resume"] for each in started] == ["never", "never", "allow"]
    names = [each["name"] for each in started]
    assert names[0] != names[1] == names[2]  # two runs into folders of one name are two
    told = [(name, args) for name, args, _ in recorded.calls if name == "log"]
    assert told[:2] == [("log", ({"loss": 0.5},)), ("log", ({"samples": "```\n> one?\ntwo\n```"},))]
    plans = [(args[0].name, kwargs["name"]) for name, args, kwargs in recorded.calls if name == "log_artifact"]
    assert plans == [("plan.txt", f"{name}-plan.txt") for name in names]


def test_mlflow_without_databases_keeps_files(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    found = {"sqlalchemy": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found[name])
    assert trackers._mlflow_store(tmp_path) == (tmp_path / "mlruns").as_uri()
    found["sqlalchemy"] = object()
    assert trackers._mlflow_store(tmp_path) == f"sqlite:///{tmp_path / 'mlflow.db'}"


def test_trackers_that_are_not_there(monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        check_trackers(["wanb"], are_defaults=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert check_trackers(["tensorboard"], are_defaults=True) == []
    with pytest.raises(ConfigError, match=r"\[adapter\]: bits = 4 needs bitsandbytes.*meshwright\[adapters\]"):
        check_packages(AdapterTable.model_construct(bits=4))
    with pytest.raises(ConfigError, match=r"\[adapter\] needs peft, which is not installed"):
        check_packages(AdapterTable(r=4))
    with pytest.raises(ConfigError, match=r"tracker mlflow is not installed.*pip install mlflow"):
        check_trackers(["mlflow"], are_defaults=False)
