"""The small parts of a run: request, directory, metrics, sparkline, models from configurations."""

import errno
import fcntl
import io
import json
import math
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from meshwright.cli import session
from meshwright.cli.failures import exit_status, laid_out
from meshwright.cli.references import find_modules_beside
from meshwright.cli.run_display import duration, readable_count, sparkline, status_line
from meshwright.cli.run_files import MetricsFile, RunLock, check_not_running, check_run_dir, default_run_dir
from meshwright.cli.train_config import ModelTable
from meshwright.cli.train_model import model_source
from meshwright.cli.train_options import Options, prepare, unless_given
from meshwright.cost.cluster import half_peak_flops_per_s
from meshwright.errors import CheckpointError, ConfigError, DataError, MeshwrightError, ModelError, StrategyError
from meshwright.runtime import measured_flops_per_s
from meshwright.strategy import Strategy
from tests.cli.helpers import environment, project


def _prepare(tmp_path, *changes, world=2, **options):
    return prepare(Options(project(tmp_path), changes=changes, **options), world)


def test_a_request_finds_everything_relative_to_its_file(tmp_path):
    prepared = _prepare(tmp_path)
    assert prepared.strategy is None
    assert [file.name for part in prepared.corpus.parts for file in part.files] == ["corpus.txt"]
    assert prepared.corpus.cache_dir == tmp_path / "cache"
    model = prepared.model.build(257, 16)
    assert model(torch.zeros(2, 16, dtype=torch.long)).shape == (2, 16, 257)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        ("model.source=tiny:tiny", ConfigError, "did you mean 'Tiny'"),
        ("model.source=tinny:Tiny", ConfigError, "cannot be imported"),
        ("model.source=hf:nowhere", ConfigError, "names no transformers config"),
        ("model.loss=tiny:cubed", ConfigError, "model.loss"),
        ("data.source=*.md", DataError, "matches no file"),
        ("data.tokenizer=byte", ConfigError, "did you mean 'bytes'"),
        ("strategy.methods=zero5", StrategyError, "did you mean 'zero"),
        ("strategy.methods=parallel_mode([('zero', 3)])", StrategyError, "3"),
        ("strategy.file=absent.json", StrategyError, "absent.json"),
        ("run.batch_size=5", DataError, "use 4 or 6"),
        ("run.num_micro_batches=4", DataError, "multiple of 8 (2 replicas x 4 micro-batches)"),
        ("strategy.methods=gradient_accumulation(num_micro_batches=4)", DataError, "2 replicas x 4 micro-batches"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(tmp_path, change, kind, word):
    with pytest.raises(kind) as caught:
        _prepare(tmp_path, change)
    assert word in str(caught.value)


def test_what_a_strategy_says_comes_before_defaults_and_beside_what_is_written(tmp_path):
    said = Strategy(["grad_clip"])
    for change, expected in (("run.steps=3", None), ("optimizer.max_grad_norm=1.0", 1.0)):
        optimizer = _prepare(tmp_path, change).config.optimizer
        assert unless_given(said, "grad_clip", optimizer, "max_grad_norm") == expected
        assert unless_given(None, "grad_clip", optimizer, "max_grad_norm") == 1.0


def test_a_model_function_that_fails_says_where(tmp_path):
    prepared = _prepare(tmp_path, "model.args.dim=x")
    with pytest.raises(ModelError, match=r"TypeError: .*module\.py|sparse\.py|tiny\.py"):
        prepared.model.build(257, 16)


def test_resume_must_name_its_run(tmp_path):
    with pytest.raises(ConfigError, match="--out RUN_DIR"):
        _prepare(tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        _prepare(tmp_path, resume=True, out=tmp_path / "absent")


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints"])
def test_a_run_is_not_overwritten(tmp_path, name):
    check_run_dir(tmp_path / "new", resume=False)
    check_run_dir(tmp_path, resume=False)
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"nothing was overwritten.*{name}"):
        check_run_dir(tmp_path, resume=False)


def test_a_run_that_failed_before_its_first_checkpoint_is_not_sent_in_a_circle(tmp_path):
    """--resume finds no checkpoint, and without it the directory contains a run: both name what begins it anew."""
    (tmp_path / "config.json").write_text("{}")
    for resume in (True, False):
        with pytest.raises((CheckpointError, ConfigError), match="--resume auto"):
            check_run_dir(tmp_path, resume=resume)
    check_run_dir(tmp_path, resume=None)  # as --resume auto does it


def test_runs_that_start_in_one_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    first, second = (default_run_dir(tmp_path / "tiny.toml") for _ in range(2))
    assert first != second
    assert all(str(each).startswith("runs/tiny-now-") for each in (first, second))
    assert not (tmp_path / "runs").exists()


def test_metrics_drop_what_a_resumed_run_repeats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step, loss in ((1, 3.0), (2, math.nan), (3, 2.0)):
        file.append({"step": step, "loss": loss})
    file.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')
    resumed = MetricsFile(path, 2)
    assert [record["step"] for record in resumed.records] == [1, 2]
    resumed.append({"step": 3, "loss": 2.5})
    resumed.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 2.5}]


def test_metrics_of_a_full_disk_are_written_when_there_is_room_again(tmp_path, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    on_disk = file._file
    file._file = FullDisk(on_disk)
    for step in (1, 2):
        file.append({"step": step})
    said = capsys.readouterr().err
    assert said.count("No space left") == 1
    assert "training goes on" in said
    file._file = on_disk
    file.append({"step": 3})
    file._file = FullDisk(on_disk)
    file.append({"step": 4})
    file.close()
    assert "1 lines are missing" in capsys.readouterr().err
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[:3]]
    assert steps == [1, 2, 3]


class FullDisk:
    """Has room for five more bytes."""

    def __init__(self, file):
        self.file, self.room, self.close = file, 5, file.close

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        data, self.room = data[: self.room], 0
        return self.file.write(data)


def test_numbers_for_people():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline(list(range(1000)), 10)[0] == "▁"
    assert len(sparkline(list(range(1000)), 10)) == 10
    assert sparkline([1.0, math.nan, 3.0], 9) == "▁ █"
    assert sparkline([2.0, 2.0], 9) == "▁▁"
    assert sparkline([math.nan], 9) == sparkline([], 9) == ""
    assert [duration(each) for each in (None, 5, 65.4, 3661)] == ["–", "0:05", "1:05", "1:01:01"]
    assert [readable_count(each) for each in (7, 1234, 5e6)] == ["7", "1.23k", "5M"]
    record = {"loss": 1.5, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 10.0, "peak_memory_bytes": 2**20}
    assert "skipped  " in status_line({**record, "skipped": True, "mfu": None}, None)
    usual = {"loss": 3.437, "lr": 2.9e-3, "grad_norm": 1.0, "tokens_per_s": 1340.0, "mfu": 0.25, "skipped": False}
    assert len(status_line({**usual, "peak_memory_bytes": 450741862}, None)) <= 80


def test_peaks():
    names = {"NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A10": 125e12}
    names |= {"NVIDIA L40": 181e12, "NVIDIA L4": 121e12, "Tesla V100-SXM2-16GB": 125e12, "NVIDIA GTX 1080": None}
    assert {name: half_peak_flops_per_s(name) for name in names} == names
    assert measured_flops_per_s(torch.device("cpu"), 0.01) > 1e8


def _gpt2_config(tmp_path, **changes):
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("path", ["hf:.", "hf:config.json"])
def test_models_from_a_transformers_config(tmp_path, path):
    _gpt2_config(tmp_path)
    source = model_source(ModelTable(source=path, args={"n_layer": 2}), tmp_path)
    model = source.build(257, 16)
    assert len(model.transformer.h) == 2
    assert model.config.use_cache is False
    inputs = source.prepare_input(torch.zeros(2, 16, dtype=torch.long), torch.device("cpu"))
    assert source.model_input_format == "unpack_dict"
    assert source.loss_func(inputs, model(**inputs)).item() > 0


@pytest.mark.parametrize(
    ("sizes", "args", "word"),
    [
        ((400, 16), {}, "vocab_size of 400 or more"),
        ((257, 64), {}, "max_position_embeddings of 64 or more"),
        ((257, 16), {"n_layerz": 2}, "n_layerz"),
    ],
)
def test_transformers_configs_that_do_not_fit(tmp_path, sizes, args, word):
    _gpt2_config(tmp_path)
    with pytest.raises(MeshwrightError, match=word):
        model_source(ModelTable(source="hf:.", args=args), tmp_path).build(*sizes)


def test_a_folder_of_weights_is_where_a_model_starts(tmp_path):
    (tmp_path / "folder").mkdir()
    _gpt2_config(tmp_path / "folder")
    folder, file = tmp_path / "folder", tmp_path / "folder" / "model.safetensors"

    def found(source="hf:folder/", weights="auto", **options):
        source = model_source(ModelTable(source=source, weights=weights), tmp_path, **options)
        return source.weights, source.notice

    assert found()[0] is None
    assert re.search(r"no weights in .*folder: the model is initialised from run\.seed", found()[1])
    assert found(reads_weights=False) == found(weights="random") == (None, None)
    with pytest.raises(CheckpointError, match=r"folder holds no weights.*config\.json"):
        found(weights="folder")
    with pytest.raises(CheckpointError, match=r"no weights at .*nowhere"):
        found(weights="nowhere")
    save_file({"a": torch.ones(2)}, file)
    assert found() == (folder, None)
    assert found(weights="folder/model.safetensors") == (file, None)
    assert found("hf:folder/config.json")[0] is None
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        found()
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*convert it once"):
        found()
    assert found(reads_weights=False) == (None, None)  # a run that is resumed


@pytest.mark.parametrize(("given", "dtype"), [(None, torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_type_that_is_trained_in(tmp_path, given, dtype):
    _gpt2_config(tmp_path, dtype="float16")
    for architectures in (None, ["GPT2LMHeadModel"]):
        _gpt2_config(tmp_path, dtype="float16", architectures=architectures)
        model = model_source(ModelTable(source="hf:.", dtype=given), tmp_path).build(257, 16)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model.config.dtype == dtype
    assert torch.get_default_dtype() == torch.float32
    project(tmp_path)
    model = _prepare(tmp_path, f"model.dtype={given or 'fp32'}").model.build(257, 16)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


HOLDS = """
import sys, time
from pathlib import Path
from meshwright.cli.run_files import RunLock
lock = RunLock(Path(sys.argv[1]))
print(flush=True)
input()
"""


def test_a_directory_into_which_another_run_writes_is_refused(tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    ) as other:
        other.stdout.readline()
        for look in (RunLock, check_not_running):
            with pytest.raises(ConfigError, match=rf"process {other.pid} on {socket.gethostname()}, since 20"):
                look(run)
        other.kill()  # however it ends, its lock ends
    check_not_running(run)
    first = RunLock(run)
    first.release()
    first.release()
    assert str(os.getpid()) in (run / ".lock").read_text()


def test_a_run_that_has_come_and_gone_meanwhile_is_found_under_the_lock(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="contains a run already"):
        session.lock_run(tmp_path, is_new=True)
    session.lock_run(tmp_path, is_new=False).release()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    RunLock(tmp_path).release()
    assert "cannot be locked (no locks): let no other run write there" in capsys.readouterr().err


def test_modules_beside_the_file_come_first(tmp_path):
    before = list(sys.path)
    find_modules_beside(tmp_path)
    find_modules_beside(tmp_path)
    assert sys.path == [str(tmp_path), *before]


def test_an_error_at_a_terminal_is_laid_out_and_told_once():
    error = ConfigError(
        "'h100' names no cluster", expected="DEVICExNUMBER, such as h100x64", got="'h100'", fix="correct it"
    )
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    console.print(laid_out(error, ["Epoch 3."], "rank 1 "))
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [
        "meshwright: rank 1 error: 'h100' names",
        "no cluster",
        "  expected    DEVICExNUMBER, such as",
        "              h100x64",
        "  what to do  correct it",
        "Epoch 3.",
    ]


def test_a_store_that_has_ended_is_told_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")

    def lose():
        raise torch.distributed.DistNetworkError("Did the remote server shutdown or crash?\nframe #1: c10d")

    assert exit_status(lose) != 0
    told = "rank 3 lost the store of the ranks, which rank 0 or the launcher keeps: Did the remote server shutdown"
    assert capsys.readouterr().err.startswith(f"meshwright: {told}")
