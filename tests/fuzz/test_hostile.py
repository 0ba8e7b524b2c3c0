"""What files from elsewhere try beside breaking parsers: to run code, to leave their folder, to steer a terminal."""

import ast
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.cli.plan_and_compare import CompareOptions, compare
from meshwright.errors import CheckpointError, MeshwrightError, ModelError, StrategyError
from meshwright.planner.config_models import transformers_model
from meshwright.planner.explain import page
from meshwright.runtime.terminal import PlainConsole
from meshwright.store import CheckpointStore
from meshwright.store.manifest import describe, read_record, write_manifest
from meshwright.store.scheduler_file import check_fit
from meshwright.strategy import Strategy
from tests.fuzz.parsers import GPT2, plans_document
from tests.store.runs import build, train

SOURCE = Path(__file__).parents[2] / "src" / "meshwright"
EVIL = "[red]a[/red] [link=https://example.org]b[/link] :skull: \x1b]0;owned\x07\x1b[2J\r\x9b31m \u202etxt.exe\udcff"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\udcff]")


@pytest.fixture
def checkpoint(tmp_path):
    state = build("plain")
    train(state, 1)
    state.strategy = json.dumps({"methods": [[EVIL]]})
    return CheckpointStore(tmp_path).save(state)


def test_a_console_shows_what_names_would_do():
    file = io.StringIO()
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    console = PlainConsole(file=file, force_terminal=True, width=200, highlight=False)
    for each in (EVIL, table, Text(EVIL)):
        console.print(each)
    console.print(Text("ours", style="bold"))
    shown = file.getvalue()
    assert shown.count("[red]a[/red] [link=https://example.org]b[/link] :skull:") == 5
    assert r"\x1b]0;owned\x1b[2J\x9b31m \u202etxt.exe\udcff" in shown  # rich itself drops bells and returns
    assert OBEYED.search(re.sub(r"\x1b\[[\d;]*m", "", shown)) is None  # what is left is rich's own styles
    assert "\x1b[1mours\x1b[0m" in shown


def test_an_error_shows_what_names_would_do():
    error = MeshwrightError(f"The file {EVIL} is not one", got=EVIL)
    assert OBEYED.search(str(error)) is None
    assert r"\x1b]0;owned\x07" in str(error)
    assert str(MeshwrightError("two\nlines\tand é 漢 🙂")) == "two\nlines\tand é 漢 🙂."


def test_commands_show_names_in_files_as_they_are(checkpoint, tmp_path, capsys):
    listed = CliRunner().invoke(app, ["checkpoint", "list", str(checkpoint)])
    (checkpoint / "tensors" / "a\x1b[2J").write_text("")
    verified = CliRunner().invoke(app, ["checkpoint", "verify", str(checkpoint)])
    document = plans_document()
    document["plans"][0]["summary"] = EVIL
    (tmp_path / "plans.json").write_text(json.dumps(document))
    compare(CompareOptions((tmp_path / "plans.json",) * 2))
    printed = capsys.readouterr().out
    assert (listed.exit_code, verified.exit_code) == (0, 1)
    assert "tensors/a\\x1b[2J" in verified.stdout
    for text in (listed.stdout, verified.stdout, printed):
        assert OBEYED.search(text) is None
    assert "[red]" in listed.stdout
    assert "[red]" in printed


def test_a_page_can_load_and_send_nothing_and_shows_tags_as_text():
    pytest.importorskip("plotly")
    document = plans_document()
    document["model"]["name"] = document["plans"][0]["summary"] = "</script><script>alert(1)</script><img src=x>"
    shown = page(document)
    assert "default-src 'none'" in shown
    assert "alert(1)</script>" not in shown
    assert "<img" not in shown.replace("<img>", "")[: shown.index("<style>")]


def test_a_config_runs_no_code_that_lies_beside_it(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))  # transformers would ask
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ModelError):
        transformers_model(tmp_path, 8)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pipeline", "GPT2Config"])
def test_a_config_names_models_only(name, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": [name], "n_layer": 1}))
    planned = transformers_model(tmp_path, 8)
    assert type(planned.module).__name__ == "GPT2LMHeadModel"
    assert os.listdir(tmp_path) == ["config.json"]


REPO = "owner/repo"


@pytest.mark.parametrize(
    "keys",
    [
        {"attn_implementation": REPO},
        {"_attn_implementation": REPO},
        {"_attn_implementation_internal": REPO},
        {"attn_implementation": f"paged|{REPO}"},
        {"attn_implementation": {"": REPO}},
        {"attn_implementation": {"text_config": [REPO]}},
        {"attribute_map": {"harmless": "_attn_implementation"}, "harmless": REPO},
        {"text_config": {"attn_implementation": REPO}},
        {"experts_implementation": "deepgemm"},
        {"attn_implementation": "flash_attention_3"},  # not installed: transformers would take a kernel of its hub
        {"attn_implementation": REPO, "model_type": "llava", "text_config": {"model_type": "llama"}},
    ],
)
def test_a_config_brings_no_kernels_from_elsewhere(keys, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from transformers.integrations import hub_kernels

    loaded = []
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: loaded.append(name))
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | keys))
    with pytest.raises(ModelError, match=r"implementation = .*may be downloaded and run"):
        transformers_model(tmp_path, 8)
    assert loaded == []


def test_kernels_that_are_here_already_may_be_named(tmp_path):
    pytest.importorskip("transformers")
    for name in ("eager", "sdpa", None):
        (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"attn_implementation": name}))
        planned = transformers_model(tmp_path, 8)
        assert planned.module.config._attn_implementation == (name or "sdpa")


def test_nothing_is_downloaded_while_a_config_becomes_a_model(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled

    before, tried = constants.is_offline_mode(), []

    def downloads(self, config):
        with pytest.raises(OfflineModeIsEnabled):
            get_session().get("https://huggingface.co/owner/repo")
        tried.append(config.model_type)
        raise ValueError("nothing came")

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "__init__", downloads)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    with pytest.raises(ModelError, match="nothing came"):
        transformers_model(tmp_path, 8)
    assert tried == ["gpt2"]
    assert constants.is_offline_mode() == before


@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/zero")])
def test_a_record_that_is_no_file_is_refused_at_once(checkpoint, make):
    (checkpoint / "state.json").unlink()
    make(checkpoint / "state.json")
    with pytest.raises(CheckpointError):
        read_record(checkpoint)


def test_a_record_outside_of_the_checkpoint_is_not_read(checkpoint):
    outside = checkpoint.parent / "state.json"
    (checkpoint / "state.json").rename(outside)
    (checkpoint / "state.json").symlink_to(outside)
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        read_record(checkpoint)


def test_a_manifest_does_not_read_through_links_to_folders(checkpoint):
    (checkpoint / "tensors").rename(checkpoint.parent / "elsewhere")
    (checkpoint / "tensors").symlink_to(checkpoint.parent / "elsewhere")
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        CheckpointStore(checkpoint.parent).load(build("plain"), checkpoint)


def test_a_schedule_does_not_replace_methods(tmp_path):
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 3)
    state = scheduler.state_dict()
    check_fit(scheduler, "StepLR", state, tmp_path)
    for wrong in (
        {**state, "step": 3},
        {**state, "optimizer": None},
        {**state, "gamma": "x"},
        {**state, "base_lrs": 1},
    ):
        with pytest.raises(CheckpointError, match="does not fit"):
            check_fit(scheduler, "StepLR", state | wrong, tmp_path)


@pytest.mark.parametrize(
    "text", ["fsdp({[]: 1})", "checkpoint(each=1)", "fsdp(*[1])", "a\x00b", "(" * 9999, "zero2(__import__('os'))"]
)
def test_text_is_parsed_and_never_evaluated(text):
    with pytest.raises(StrategyError):
        Strategy(text)


def test_the_manifest_vouches_for_what_is_there(checkpoint):
    (checkpoint / "manifest.json").unlink()
    names = [path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()]
    write_manifest(checkpoint, {name: describe(checkpoint / name) for name in names})
    CheckpointStore(checkpoint.parent).load(build("plain"), checkpoint)


# Its own error, there and back; and batches of a rank of the same job, host and user, whom the kernel vouches for.
PICKLES = {("runtime/agreement.py", "pickle.loads"), ("data/host_reader.py", "pickle.loads")}
NEVER = {"eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler", "yaml.load",
         "marshal.loads", "shelve.open", "joblib.load", "numpy.fromfile"}  # fmt: skip
WORDS = re.compile(r"\b(eval|exec|system|popen|load|loads|open|Unpickler|fromfile|shell|from_pretrained)\(|shell ?=")


def _calls(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}


def test_nothing_that_is_read_becomes_code():
    files = [path for path in SOURCE.rglob("*.py") if WORDS.search(path.read_text())]  # parsing all takes seconds
    every = [(path.relative_to(SOURCE).as_posix(), *call) for path in files for call in _calls(path)]
    assert len(files) > 10
    for where, name, keywords in every:
        assert name not in NEVER or (where, name) in PICKLES, f"{where}: {name}"
        assert keywords.get("shell") in (None, "False"), f"{where}: a shell"
        if name == "torch.load":
            assert keywords["weights_only"] == "True", where
        if name in ("np.load", "numpy.load"):
            assert keywords["allow_pickle"] == "False", where
        if name.endswith("AutoConfig.from_pretrained"):
            assert "trust_remote_code" in str(keywords), where
