"""``meshwright plan`` and ``compare``: what they print and write, and what they refuse."""

import json

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.strategy import Strategy

SMALL = "gpt:layers=4,hidden=64,heads=4,vocab=256,seq=32"
FOR = ("--model", SMALL, "--cluster", "cpu*2", "--global-batch", "8")


def run(*arguments, width=160):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": str(width)})


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """One search, with everything it can write."""
    folder = tmp_path_factory.mktemp("plan")
    files = {name: folder / name for name in ("page.html", "trace.json", "strategy.json")}
    writes = ("--html", files["page.html"], "--trace", files["trace.json"], "--save", files["strategy.json"])
    result = run("plan", *FOR, "--top", 3, "--json", *writes)
    assert result.exit_code == 0, result.stderr
    (folder / "plans.json").write_text(result.stdout)
    return folder, json.loads(result.stdout)


def test_json_alone_is_printed_and_the_page_holds_the_same(planned):
    folder, document = planned
    assert len(document["plans"]) == 3
    assert document["model"]["name"] == SMALL
    page = (folder / "page.html").read_text()
    held = page.partition('<script type="application/json" id="plans">')[2].partition("</script>")[0]
    assert json.loads(held) == document


def test_trace_and_strategy_are_those_of_the_first_plan(planned):
    folder, document = planned
    best = document["plans"][0]
    trace = json.loads((folder / "trace.json").read_text())
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(ends) == pytest.approx(best["time"]["step_time_s"] * 1e6)
    again = run("plan", *FOR, "--strategy", folder / "strategy.json", "--json")
    (only,) = json.loads(again.stdout)["plans"]
    assert only["time"] == best["time"]
    # A search leaves headroom; a strategy that is given is held against all that is usable.
    assert only["memory"].pop("limit_bytes") > best["memory"]["limit_bytes"]
    assert only["memory"] == {name: value for name, value in best["memory"].items() if name != "limit_bytes"}


def test_the_terminal_shows_table_and_reasons():
    result = run("plan", *FOR, "--top", 2, "--exclude", "pipeline_parallel")
    assert result.exit_code == 0, result.stderr
    for words in ("2 x CPU, 8 samples a step", "tokens/s", "Why this plan", "Why not the others", "What if"):
        assert words in result.stdout


def test_strategies_are_compared_for_a_model(planned, tmp_path):
    folder, _ = planned
    Strategy(["fsdp", "checkpoint"]).save(tmp_path / "other.json")
    result = run("compare", folder / "strategy.json", tmp_path / "other.json", *FOR)
    assert result.exit_code == 0, result.stderr
    assert "+ checkpoint" in result.stdout
    as_json = json.loads(run("compare", folder / "strategy.json", tmp_path / "other.json", *FOR, "--json").stdout)
    assert (as_json["format"], len(as_json["plans"]), len(as_json["differences"])) == ("meshwright.comparison", 2, 1)


def test_written_plans_are_compared_as_they_were(planned):
    folder, document = planned
    result = run("compare", folder / "plans.json", folder / "plans.json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count(document["plans"][0]["summary"]) >= 2
    assert "no difference" in result.stdout


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [("300B", 3e11), ("1.5T", 1.5e12), ("2e9", 2e9), ("20,000", 2e4), ("7k", 7e3), ("1_000 m", 1e9)],
)
def test_a_whole_run_is_asked_for_in_tokens(planned, asked, tokens):
    folder, _ = planned
    given = ("--strategy", folder / "strategy.json", "--tokens", asked, "--json")
    document = json.loads(run("plan", *FOR, *given).stdout)
    ran = document["plans"][0]["run"]
    assert ran["tokens"] - 8 * 32 < tokens <= ran["tokens"]
    assert any("The whole run" in line for line in document["why"])


def test_the_table_and_a_comparison_have_the_time_of_a_whole_run(planned, tmp_path):
    folder, _ = planned
    given = ("--strategy", folder / "strategy.json", "--steps", 10**6)
    shown = run("plan", *FOR, *given)
    assert shown.exit_code == 0, shown.stderr
    assert "whole run" in shown.stdout
    (tmp_path / "plans.json").write_text(run("plan", *FOR, *given, "--json").stdout)
    assert "whole run" in run("compare", tmp_path / "plans.json", folder / "plans.json").stdout
    broken = json.loads((tmp_path / "plans.json").read_text())
    broken["plans"][0]["run"] = {"seconds": "soon"}
    (tmp_path / "plans.json").write_text(json.dumps(broken))
    assert run("compare", tmp_path / "plans.json", folder / "plans.json").exit_code == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--tokens", "many"), "--tokens is no number"), (("--tokens", "0"), "tokens of a run"),
        (("--tokens", "1T", "--steps", "5"), "one length"), (("--tokens", "1e999"), "tokens of a run"),
        (("--tokens", "-5"), "--tokens is no number"),
    ],
)  # fmt: skip
def test_what_is_no_length_of_a_run_is_refused(given, words):
    result = run("plan", *FOR, *given)
    assert result.exit_code == 1
    assert words in " ".join(result.stderr.split())


MODULE = """
from torch import nn

class Model(nn.Module):
    def __init__(self, seq_len):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, ids):
        return self.head(self.embedding(ids))

def broken():
    raise OSError("no disk")

def text():
    return "a model"

def leaves():
    raise SystemExit(0)

def talks():
    print("building")
    model = Model(16)
    model.register_forward_pre_hook(lambda module, inputs: print("running"))
    return model

def ends():
    model = Model(16)
    model.register_forward_pre_hook(lambda module, inputs: leaves())
    return model
"""


def test_a_function_of_the_users_builds_the_model(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    on = ("--cluster", "cpu*2", "--global-batch", 8, "--seq", 16)
    Strategy(["zero1"]).save(tmp_path / "zero1.json")
    result = run("plan", "--model", "tiny:Model", *on, "--strategy", "zero1.json", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["model"] == {"name": "tiny:Model", "class": "Model", "num_parameters": 64 * 16 * 2 + 64, "seq": 16,
                                 "global_batch": 8}  # fmt: skip
    assert document["plans"][0]["memory"]["ranks"][0]["moments"]["loss"]["activations"] > 0
    for model, words in (
        ("tiny:broken", "OSError: no disk"),
        ("tiny:leaves", "SystemExit: 0"),
        ("tiny:ends", "SystemExit while tracing (0)"),
        ("tiny:text", "returned no model"),
        ("tiny:Modle", "did you mean 'Model'"),
        ("absent_module:f", "cannot be imported"),
    ):
        refused = run("plan", "--model", model, *on)
        assert refused.exit_code == 1
        assert words in refused.stderr
    talking = run("plan", "--model", "tiny:talks", *on, "--strategy", "zero1.json", "--json")
    assert json.loads(talking.stdout)["model"]["name"] == "tiny:talks"
    assert talking.stderr.startswith("building\nrunning\n")
    talking = run("compare", "zero1.json", "zero1.json", "--model", "tiny:talks", *on, "--json")
    assert len(json.loads(talking.stdout)["plans"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cluster", "h100x8x8"), "write h100x64 for 8 x 8 devices"),
        (("--memory-limit", "17 GiB"), "memory_limit is more than a device has"),
        (("--cluster", "h10x8"), "Unknown device 'h10' (did you mean"),
        (("--model", "gtp2"), "did you mean 'gpt2'"),
        (("--html", "/absent/page.html"), "--html names no file that can be written"),
        (("--trace", "/"), "--trace names no file that can be written"),
        (("--micro-batches", "2"), "num_micro_batches without a strategy"),
        (("--memory-limit", "much"), "--memory-limit is no size"),
        pytest.param(("--memory-limit", "1 KiB"), "fit", marks=pytest.mark.long),
        (("--sample", "a:b"), "--sample and --loss beside"),
        (("--strategy", "absent.json"), "absent.json"),
        (("--include", "fsdpp"), "did you mean 'fsdp'"),
        (("--include", "checkpoint(evry=2)"), "evry"),
        (("--include", "checkpoint evry=2"), "evry"),
    ],
)
def test_a_refusal_is_one_paragraph(arguments, words):
    changed = [*FOR]
    for option, value in zip(arguments[::2], arguments[1::2], strict=True):
        if option in changed:
            changed[changed.index(option) + 1] = value
        else:
            changed += [option, value]
    result = run("plan", *changed)
    assert result.exit_code == 1
    assert result.stderr.startswith("meshwright: error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_method_is_included_with_keys():
    result = run("plan", *FOR, "--top", 3, "--include", "checkpoint(every=2)", "--json")
    assert result.exit_code == 0, result.stderr
    for plan in json.loads(result.stdout)["plans"]:
        assert Strategy(json.dumps(plan["strategy"])).get("checkpoint").every == 2


def test_a_strategy_in_a_file_of_plans_is_told_how_to_be_written(planned):
    refused = run("plan", *FOR, "--strategy", planned[0] / "plans.json")
    assert refused.exit_code == 1
    assert "plans that meshwright plan --json has printed" in refused.stderr
    assert "meshwright plan --save" in refused.stderr


def test_compare_keeps_the_micro_batches_of_written_plans(planned, tmp_path):
    folder, document = planned
    first = document["plans"][0]
    other = {**document, "plans": [{**first, "num_micro_batches": 2 * first["num_micro_batches"]}]}
    (tmp_path / "cut.json").write_text(json.dumps(other))
    result = run("compare", folder / "plans.json", tmp_path / "cut.json", *FOR, "--json")
    assert result.exit_code == 0, result.stderr
    cuts = [plan["num_micro_batches"] for plan in json.loads(result.stdout)["plans"]]
    assert cuts == [first["num_micro_batches"], 2 * first["num_micro_batches"]]


def test_compare_tells_other_clusters_apart_and_names_the_file_that_is_wrong(planned, tmp_path):
    folder, document = planned
    slower = {**document["plans"][0], "time": {**document["plans"][0]["time"], "parts_s": {"compute_s": 1e3}}}
    cluster = {**document["cluster"], "num_devices": 4}
    (tmp_path / "four.json").write_text(json.dumps({**document, "plans": [slower], "cluster": cluster}))
    result = run("compare", folder / "plans.json", tmp_path / "four.json")
    assert "~ 2 x CPU -> 4 x CPU" in result.stdout
    assert "no difference" not in result.stdout
    assert "computing" in result.stdout
    for name, text, words in (
        ("typo.json", '["fsdpp"]', "did you mean 'fsdp'"),
        ("none.json", "", "The file is empty"),
    ):
        (tmp_path / name).write_text(text)
        refused = run("compare", folder / "strategy.json", tmp_path / name, *FOR)
        assert refused.exit_code == 1
        assert name in refused.stderr
        assert words in refused.stderr


def test_compare_refuses_what_has_no_common_ground(planned, tmp_path):
    folder, document = planned
    Strategy(["fsdp"]).save(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(json.dumps(document | {"model": {"name": "other"}}))
    (tmp_path / "c.json").write_text(json.dumps(document | {"schema_version": 99}))
    for arguments, words in (
        ((tmp_path / "a.json",), "nothing to compare with"),
        ((tmp_path / "a.json", folder / "plans.json"), "Strategies can be compared for a model on a cluster"),
        ((tmp_path / "b.json", folder / "plans.json"), "different models or batches"),
        ((tmp_path / "c.json", folder / "plans.json"), "schema_version 99"),
        ((tmp_path / "absent", folder / "plans.json"), "cannot be read"),
        ((tmp_path / "a.json", tmp_path / "a.json", "--model", SMALL), "only in part"),
    ):
        result = run("compare", *arguments)
        assert result.exit_code == 1, arguments
        assert words in result.stderr
