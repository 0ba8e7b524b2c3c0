"""The page of a run, and what it counts as useful."""

import json
import re

from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.cli.run_failures import RunFailures, read_failures, teller
from meshwright.cli.run_report import goodput, page
from meshwright.runtime.launch import HUNG, Failure

RECORDS = [
    {"step": step, "time_s": 100.0 + step + (5 if step > 3 else 0), "step_time_s": 1.0, "loss": 1 / step}
    for step in range(1, 11)
]


def test_goodput_is_the_time_of_steps_that_count(tmp_path):
    assert goodput(RECORDS) == (10.0, 15.0)
    assert goodput([{"step": 1, "loss": 1.0}]) is None
    events = [{"what": "killed", "time_s": 104.0, "text": "rank 1 <was> ended"},
              {"what": "went on", "step": 3, "lost_s": 5.0, "lost_steps": 1, "source": "a snapshot"}]  # fmt: skip
    text = page("runs/a", RECORDS, events)
    assert "<td>67 %</td>" in text
    assert "rank 1 &lt;was&gt; ended" in text
    assert text.count('class="failure"') == 2
    assert not re.search(r"(src|href)=\"http", text)
    assert page("runs/b", [{"step": 1, "loss": None}], []).count("No finite figures") == 2


def test_the_command_writes_a_page_and_refuses_what_is_no_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "goodput" in (tmp_path / "report.html").read_text()
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "absent")])
    assert refused.exit_code == 1
    assert "no metrics.jsonl" in refused.stderr


def test_failures_are_classified(tmp_path, monkeypatch):
    tell = teller(tmp_path)
    tell(Failure(0, 1, -9, 50.0, True))
    tell(Failure(0, 0, -11, 51.0, False))
    tell(Failure(1, 0, 1, 52.0, False))
    tell(Failure(1, 0, HUNG, 53.0, False))  # the rank has told it
    assert [each["what"] for each in read_failures(tmp_path)] == ["out of memory", "killed", "error"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    RunFailures(tmp_path, 3, RECORDS[3:4], RECORDS[2]).went_on({**RECORDS[4], "time_s": 120.0}, "a snapshot")
    cost = read_failures(tmp_path)[-1]
    assert (cost["what"], cost["lost_steps"], cost["lost_s"]) == ("went on", 1, 120.0 - 109.0 - 1.0 + 1.0)
    (tmp_path / "failures.jsonl").write_text('{"what": "killed"}\nno json\n[1]\n')
    assert len(read_failures(tmp_path)) == 1
