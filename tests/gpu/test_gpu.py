"""``make gpu``: what it tells, that it goes on where it was cut off, and all of its cases on a stand-in for CUDA."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from gpu.cases import CASES, GIB, Case
from gpu.machine import Machine, environment
from gpu.table import markdown

from gpu import conductor

H100 = Machine(torch="2.13.0", gpus=1, name="H100", capability=(9, 0), memory_bytes=80 * GIB, free_bytes=79 * GIB,
               host_free_bytes=200 * GIB, packages=("transformers",))  # fmt: skip
ROOT = Path(__file__).parents[2]

# A worker without torch: "good" is right, "bad" is wrong, "deadly" ends the process the first time, "slow" hangs.
WORKER = """
import json, os, sys, time
told = json.loads(sys.argv[1])
def tell(**line):
    with open(told["lines"], "a") as file:
        file.write(json.dumps(line) + "\\n")
for item in told["case"].split("+"):
    if item in told["done"]:
        continue
    tell(item=item)
    if item == "deadly":
        print("struck", flush=True)
        os._exit(7)
    if item == "slow":
        time.sleep(60)
    tell(item=item, **({"ok": False, "why": "wrong"} if item == "bad" else {"ok": True, "figures": {"step_s": 0.5}}))
"""


def case(name, **changes):
    return Case(name, "right", "checks:none", "tries it", **changes)


@pytest.fixture
def play(tmp_path):
    """Run cases with the worker above; returns the exit code and what was found."""
    (tmp_path / "worker.py").write_text(WORKER)

    def run(*cases, machine=H100, budget_s=60.0, **changes):
        folder = tmp_path / "out"
        with mock.patch.object(conductor, "WORKER", [sys.executable, str(tmp_path / "worker.py")]):
            code = conductor.Conductor(machine, folder, budget_s, tiny=False, **changes).run(cases)
        assert "| what is right |" in (folder / "gpu.md").read_text()
        return code, json.loads((folder / "gpu.json").read_text())["cases"]

    return run


def test_items_are_told_one_by_one_and_a_death_stops_one_of_them(play, capsys):
    code, found = play(case("good+deadly+bad+fine"), case("good"))
    assert code == 1
    states = {name: item["ok"] for name, item in found["good+deadly+bad+fine"]["items"].items()}
    assert states == {"good": True, "deadly": False, "bad": False, "fine": True}
    assert "exit code 7: struck" in found["good+deadly+bad+fine"]["items"]["deadly"]["why"]
    assert found["good"]["state"] == "ok"
    assert "bad: wrong" in capsys.readouterr().out


def test_a_limit_ends_one_case_and_the_next_one_goes_on(play):
    code, found = play(case("good+slow", limit_s=1.0), case("fine"))
    assert (code, found["good+slow"]["state"], found["fine"]["state"]) == (1, "failed", "ok")
    assert found["good+slow"]["items"].keys() == {"good"}


def test_a_run_that_was_cut_off_goes_on_where_it_stood(play):
    with mock.patch.object(conductor, "_LEAST_S", 0.5):
        code, found = play(case("good+slow"), case("fine"), budget_s=1.5)
    assert (found["good+slow"]["state"], found["fine"]["state"]) == ("cut off", "not begun")
    with mock.patch.object(conductor, "_read", wraps=conductor._read) as read:
        code, found = play(case("good+slow", limit_s=1.0), case("fine"))
    assert code == 1
    assert found["fine"]["state"] == "ok"
    assert read.call_args_list[0].args[1].keys() == {"good"}  # it was not run again
    known = found["fine"]["wall_s"]
    assert play(case("fine"))[1]["fine"]["wall_s"] == known


def test_what_cannot_run_is_told_in_a_line_each(play, capsys):
    cases = (
        case("old", capability=(10, 0)), case("two", gpus=2), case("large", memory_bytes=90 * GIB),
        case("host", host_bytes=400 * GIB), case("peer", package="deepspeed"), case("good"),
    )  # fmt: skip
    code, _ = play(*cases)
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "left out" in line)
    assert lines == {
        "old": "left out            needs compute capability 10.0, and H100 has 9.0",
        "two": "left out            needs 2 GPUs, and there is 1",
        "large": "left out            needs 90 GiB of GPU memory, and 79 GiB are free",
        "host": "left out            needs 400 GiB of host memory, and 200 GiB are free",
        "peer": "left out            needs deepspeed, which is not installed",
    }
    two = Machine(**{**vars(H100), "gpus": 2})
    assert case("two", gpus=2).why_not(two) == "needs NCCL, without which this torch was built"


def test_without_a_gpu_nothing_is_proven(play, capsys):
    nothing = Machine(torch="2.13.0", why_not="torch sees no GPU (it was built without CUDA)")
    code, found = play(case("good"), machine=nothing)
    assert code == 1
    assert found["good"]["why"] == nothing.why_not


def test_a_gpu_that_others_use_is_told_of(play, capsys):
    play(case("good"), machine=Machine(**{**vars(H100), "free_bytes": 70 * GIB}))
    assert "10.0 GiB of the GPU are held by others" in capsys.readouterr().out


def test_figures_of_another_machine_are_left_out(play):
    play(case("good+bad"))
    _, found = play(case("good"), machine=Machine(**{**vars(H100), "name": "A100"}))
    assert found.keys() == {"good"}


def test_a_script_hands_over_its_figures(play, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text('{\"step_time_s\": 0.25}')")
    found = play(Case("script", "fast", str(script), "tries it"))[1]["script"]
    assert (found["state"], found["items"]["figures"]["figures"]) == ("ok", {"step_time_s": 0.25})
    assert "| `script` | step time 250 ms |" in (tmp_path / "out" / "gpu.md").read_text()


def test_names_are_unique_and_functions_exist():
    assert len({each.name for each in CASES}) == len(CASES)
    assert {each.part for each in CASES} == {"right", "fast"}
    assert markdown({"machine": {**vars(H100), "shared": None}, "cases": {}, "tiny": True}).count("\n") > 3
    for each in CASES:
        module, _, function = each.run.partition(":")
        where = ROOT / "benchmarks" / (each.run if each.is_script else f"gpu/{module}.py")
        assert each.is_script or f"\ndef {function}(" in where.read_text(), each.name
        assert where.exists()


def kernels(folder):
    from gpu.worker import Session

    from gpu import checks

    lines = Path(folder) / "lines"
    checks.attention(Session(lines, True))
    checks.fp8_kernels(Session(lines, True))
    return [json.loads(line) for line in lines.read_text().splitlines()]


def test_kernels_on_the_stand_in(ranks, tmp_path):
    told = ranks(1).run(kernels, str(tmp_path))[0]
    assert [each for each in told if "ok" in each and not each["ok"]] == []
    assert sum(each.get("ok", False) for each in told) == 4


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_of_it_on_the_stand_in(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--minutes", "25", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    document = json.loads((tmp_path / "gpu.json").read_text())
    wrong = {name: each for name, each in document["cases"].items() if each["state"] != "ok"}
    missing = {"nccl"} | {
        each.name for each in CASES if each.package and each.package not in document["machine"]["packages"]
    }
    assert wrong.keys() <= missing, (wrong, done.stdout)
    assert done.returncode == 0
