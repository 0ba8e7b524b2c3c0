"""Steps that end a run or take it back: what is saved, what is written down, and what comes after."""

import contextlib
import io
import itertools
import json
import sys
from unittest import mock

from meshwright.cli import train_loop as training
from meshwright.cli.train_options import Options
from meshwright.data import GlobalOrder
from meshwright.errors import NonFiniteError
from meshwright.runtime import seed_everything
from tests.cli.helpers import losses, metrics, project


def _train(file, out, strategy, resume=False, **args):
    """A run on the ranks of a pool, which forget what its file imported: what it said, and what ended it."""
    path, said, raised = list(sys.path), io.StringIO(), ""
    changes = [f"model.args.{name}={value}" for name, value in {"dropout": 0.1, **args}.items()]
    seed_everything(0)  # as a new process would be
    try:
        with mock.patch.object(training, "shutdown_distributed"), contextlib.redirect_stderr(said):
            training.train(Options(file, out=out, resume=resume, changes=(strategy, *changes)))
    except NonFiniteError as error:
        raised = " ".join([str(error), *error.__notes__])
    finally:
        sys.path[:] = path
        sys.modules.pop("tiny", None)
    return said.getvalue(), raised


STOP = 'strategy.methods=[["skip_nonfinite", "stop"]]'
BACK = 'strategy.methods=[["loss_spike", {action = "rollback", window = 4, threshold = 60.0}]]'


def _runs(file, folder):
    """A run that nothing happens to; one that a nan ends, resumed; and one that goes back behind a spike."""
    _train(file, folder / "whole", STOP)
    stopped = _train(file, folder / "stopped", STOP, nan_at_step=5)
    resumed = _train(file, folder / "stopped", STOP, resume=True)
    return stopped, resumed, _train(file, folder / "back", BACK, spike_at_step=5)


def test_a_nan_ends_a_run_behind_its_last_good_step_and_a_spike_takes_it_back(tmp_path, ranks):
    answers = ranks(2).run(_runs, project(tmp_path), tmp_path)
    (_, raised), resumed, back = answers[0]
    assert answers[1][0][1].startswith("The gradients of a step hold inf or nan")
    # Ended cleanly: the state before the bad step is saved, with the random numbers that it had.
    assert "The state after step 4 is in" in raised
    assert "step-00000004" in raised
    line = json.loads((tmp_path / "stopped" / "anomalies.jsonl").read_text())
    assert (line["step"], line["what"], line["done"], line["first_sample"]) == (5, "not finite", "stopped", 16)
    assert "resuming after step 4" in resumed[0]
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert len(set(line["samples"])) == 4
    assert "back from step 5 to step 3" in back[0]
    line = json.loads((tmp_path / "back" / "anomalies.jsonl").read_text())
    assert (line["step"], line["what"], line["done"], line["first_sample"]) == (5, "loss spike", "rolled back", 16)
    assert [record["step"] for record in metrics(tmp_path / "back")] == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "back")[:3] == losses(tmp_path / "whole")[:3]
    assert max(losses(tmp_path / "back")) < 10  # the spike is forgotten
    record = json.loads((tmp_path / "back" / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert record["samples_seen"] == 4 * (5 + 3)  # the batches in between are left out
    assert len(record["spikes"]["losses"]) == 4


def test_samples_of_a_batch():
    order = GlobalOrder(10, seed=3)
    assert order.samples(7, 15) == list(itertools.islice(GlobalOrder(10, seed=3, start=7), 15))
