"""What a run shows of itself: profiles, norms, determinism; and no words of other libraries before its own."""

import json
import subprocess
import sys

import pytest

from tests.cli.helpers import TIMEOUT_S, environment, losses, meshwright, project

PROFILE = "run.profile={steps=[3,4]}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A run on two ranks with everything: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("seen")
    changes = (PROFILE, "run.norms_every=2", "run.deterministic=true", "strategy.methods=fsdp")
    result = meshwright(
        "train", project(folder), "--nproc", 2, "--out", "run", *(word for each in changes for word in ("--set", each)),
        folder=folder,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return folder, result


def test_a_profile_lies_in_the_run_and_is_told(seen):
    folder, result = seen
    files = sorted(path.name for path in (folder / "run" / "profile").iterdir())
    assert files == ["summary.txt", "trace-rank0.json.gz", "trace-rank1.json.gz"]
    assert "Where the step went: steps 3 to 4" in result.stdout
    assert "ui.perfetto.dev" in result.stdout


def test_norms_are_recorded_by_layer(seen):
    lines = [json.loads(line) for line in (seen[0] / "run" / "norms.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[0]["weights"].keys() == {"embedding", "position", "mix", "head"}
    assert all(value > 0 for kind in ("weights", "gradients") for value in lines[0][kind].values())


def test_a_run_prints_nothing_foreign(seen):
    assert seen[1].stderr == ""


@pytest.mark.long
def test_a_resumed_run_whose_steps_are_over_says_so(seen):
    folder, _ = seen
    result = meshwright(
        "train", "tiny.toml", "--nproc", 1, "--out", "run", "--resume", "--steps", 7, "--set", PROFILE, folder=folder
    )
    assert result.returncode == 0, result.stderr
    assert "steps 3 to 4 are over: nothing is profiled" in result.stderr
    assert len(losses(folder / "run")) == 7


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("methods",), marks=pytest.mark.long),
        ("plan", "--model", "gpt:layers=2,hidden=64,heads=2,vocab=100", "--cluster", "h100x2", "--global-batch", 4,
         "--seq", 32, "--strategy", "fsdp.json"),
        pytest.param(("checkpoint", "list", "run"), marks=pytest.mark.long),
        pytest.param(("eval", "run", "--data", "corpus.txt", "--nproc", 1), marks=pytest.mark.long),
        pytest.param(("generate", "run", "--prompt", "bottles", "--nproc", 1), marks=pytest.mark.long),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_commands_print_nothing_foreign(seen, words):
    folder, _ = seen
    (folder / "fsdp.json").write_text('["fsdp"]')
    result = meshwright(*words, folder=folder)
    assert result.returncode == 0, result.stderr
    foreign = [line for line in result.stderr.splitlines() if not line.startswith("meshwright: ")]
    assert not foreign


@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path, both):
    """As under ``meshwright train … | head -3``, or ``2>&1 | head -3``."""
    words = (project(tmp_path), "--nproc", "1", "--out", "run", "--set", "run.log_every=1", "--set", "run.steps=40")
    with (tmp_path / "told").open("w+") as told:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshwright", "train", *map(str, words)], cwd=tmp_path, env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT if both else told,
        )  # fmt: skip
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 0
        told.seek(0)
        assert both or "nobody reads standard output any more; the run goes on" in told.read()
    assert len(losses(tmp_path / "run")) == 40
    assert (tmp_path / "run" / "checkpoints" / "step-00000039").is_dir()
    assert (tmp_path / "run" / "checkpoints" / "step-00000040").is_dir()
