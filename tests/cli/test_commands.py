"""Commands that start no ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import meshwright
from meshwright.cli import app, bench_comm, checkpoint_tools as checkpoint, methods as cli_methods, run_files as files
from meshwright.comm import BENCHMARK_OPS
from meshwright.errors import ConfigError
from meshwright.methods import rules
from meshwright.strategy.value import METHOD_CONFIGS
from tests.cli.helpers import meshwright as run_program, project


def _run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_version_and_help():
    assert _run("--version").stdout.strip() == meshwright.__version__
    assert "[optimizer]" in _run("train", "--help-config").stdout


def test_help_names_what_its_commands_know_and_imports_little(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert ", ".join(BENCHMARK_OPS) in _run("bench-comm", "--help").stdout
    assert "|".join(bench_comm.DTYPES) in _run("bench-comm", "--help").stdout
    assert "|".join(checkpoint._DTYPES) in _run("checkpoint", "export", "--help").stdout
    program = "import sys; from meshwright.cli import app; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_ctrl_c_is_told_in_a_line_however_early_it_comes(monkeypatch):
    monkeypatch.setattr(cli_methods, "print_methods", _interrupted)  # before a command tells its own failures
    stopped = _run("methods")
    assert (stopped.exit_code, stopped.stderr) == (130, "meshwright: interrupted\n")


def _interrupted(*_, **__):
    raise KeyboardInterrupt


def test_files_are_written_whole_or_not_at_all(monkeypatch, tmp_path):
    file, link = tmp_path / "plan.json", tmp_path / "link.json"
    link.symlink_to(file)
    files.write("--save", link, "first")
    assert (file.read_text(), link.is_symlink()) == ("first", True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.write("--save", link, "second")
    assert file.read_text() == "first"
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "link.json"}
    with pytest.raises(ConfigError, match="nothing can be written"):
        files.check_writable("--save", Path("/proc/plan.json"))
    files.check_writable("--save", Path("/dev/null"))


@pytest.mark.parametrize("columns", ["60", "160"])
def test_methods_are_shown_on_any_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    shown = _run("methods").stdout
    assert all(name in shown for name in METHOD_CONFIGS)
    assert max(map(len, shown.splitlines())) <= int(columns)
    assert "(checkpoint)" in shown  # beside pipeline_parallel, with some keys


def test_methods_as_json():
    law = json.loads(_run("methods", "--json").stdout)
    by_name = {method["name"]: method for method in law["methods"]}
    assert {*by_name, *law["stand_for_others"]} == set(METHOD_CONFIGS)
    assert by_name["fsdp"]["conflicts"]["zero1"] == [
        "zero1 does not go together with fsdp: each decides how parameters are sharded"
    ]
    assert by_name["fsdp"]["needs"] == ["an axis of zero, data, sequence, context, expert"]
    assert by_name["outer"] | {"axis": "replica", "seed_name": "fairseq: BMUF"} == by_name["outer"]
    assert len(law["conflicts"]) == len(rules())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "name a training file"),
        (("absent.toml",), "absent.toml cannot be read"),
        (("FILE", "--set", "run.stepz=3"), "Did you mean `run.steps`?"),
        (("FILE", "--resume"), "--out RUN_DIR"),
        (("FILE", "--resume", "--out", "absent"), "no checkpoint to resume from"),
        (("FILE", "--nproc", "3"), "run.batch_size does not divide"),
    ],
)
def test_a_refusal_is_one_paragraph(tmp_path, arguments, word):
    file = project(tmp_path)
    result = _run("train", "--nproc", 2, *(file if each == "FILE" else each for each in arguments))
    assert result.exit_code == 1
    assert result.stderr.startswith("meshwright: error: ")
    assert word in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "corpus.txt",
        "tiny.py",
        "tiny.toml",
    ]


def test_options_have_one_name_in_all_commands_and_earlier_ones_stay():
    import typer

    commands = typer.main.get_command(app).commands
    names = {("--nproc", "--processes"): ("train", "eval", "generate", "calibrate", "bench-comm"),
             ("--batch-size", "--global-batch"): ("train", "plan", "compare"),
             ("--seq-len", "--seq"): ("train", "plan", "compare", "eval"),
             ("--num-micro-batches", "--micro-batches"): ("train", "plan"),
             ("--strategy",): ("train", "plan", "eval", "generate")}  # fmt: skip
    for opts, known in names.items():
        for name in known:
            assert any(tuple(param.opts) == opts for param in commands[name].params), (name, opts)


@pytest.mark.long
def test_words_of_the_command_line_reach_every_rank(tmp_path):
    options = ("--batch-size", 6, "--seq-len", 8, "--num-micro-batches", 3, "--strategy", "zero2", "--steps", 2)
    result = run_program("train", project(tmp_path), "--nproc", 2, "--out", "run", *options, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["run"]["batch_size"], config["data"]["seq_len"], config["run"]["num_micro_batches"]) == (6, 8, 3)
    assert config["strategy"]["methods"] == "zero2"
    assert "--strategy zero2 --set run.batch_size=6" in result.stdout


def test_traceback_shows_where(tmp_path):
    result = _run("train", project(tmp_path), "--traceback", "--set", "x=1")
    assert "Traceback" in result.stderr
    assert "meshwright: error: " in result.stderr
