"""``examples/gpt2/train.py`` as a user starts it, and what it leaves behind."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import gpt2
import pytest
import torch
import train
from models import GPT
from sizes import SIZES

import meshwright as bmt
from tests.cli.helpers import ROOT, environment
from tests.examples.blocks import plain, positions
from tests.pool import free_port

SCRIPT = Path(train.__file__)
ARGUMENTS = ["--batch-size", "4", "--seq-len", "64", "--log-every", "1"]
LAUNCH_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two ranks, started by the older of the two commands in BMTrain's README: their folder and their log."""
    folder = tmp_path_factory.mktemp("gpt2")
    options = f"--master_addr localhost --master_port {free_port()} --nproc_per_node 2 --nnodes 1 --node_rank 0"
    command = [sys.executable, "-m", "torch.distributed.launch", *options.split(), str(SCRIPT), *ARGUMENTS]
    command += ["--steps", "8", "--inspect-every", "8", "--save", str(folder / "weights" / "gpt.pt")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment(), "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=LAUNCH_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def losses(log):
    return [float(loss) for loss in re.findall(r"^step .* loss (\d+\.\d+)", log, re.MULTILINE)]


def _text(num_sequences=8):
    """Bytes like those it was trained on."""
    source = Path(argparse.__file__).read_bytes()[: num_sequences * 64]
    return torch.tensor(list(source)).view(num_sequences, 64)


def test_the_loss_falls_and_rank_0_alone_tells_of_it(run):
    _, log = run
    found = losses(log)
    assert len(found) == 8
    assert found[0] == pytest.approx(5.5, abs=0.3)  # log(257) = 5.55
    assert found[-1] < 4.4
    assert re.search(r"^blocks\.3\.feedforward\.down\.weight +\(128, 512\)", log, re.MULTILINE)


def _one_rank(file, ids):
    model = GPT(**SIZES["tiny"], bias=True, dtype=torch.float32)
    bmt.load(model, file)
    with torch.no_grad():
        return model(ids, positions(ids))


def test_what_it_saves_is_the_trained_model_in_plain_torch_and_on_one_rank(run, ranks):
    file = run[0] / "weights" / "gpt.pt"
    reference, ids = plain(torch.load(file, weights_only=True)), _text()
    with torch.no_grad():
        expected = reference(ids)
    assert gpt2.next_token_loss(ids, expected).item() < 4.4
    torch.testing.assert_close(ranks(1).run(_one_rank, file, ids)[0], expected, rtol=1e-5, atol=1e-5)


def test_one_process_goes_on_from_its_weights_in_half_precision(run, monkeypatch, capsys):
    folder, log = run
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    options = [
        "--load",
        str(folder / "weights" / "gpt.pt"),
        "--steps",
        "2",
        "--dtype",
        "bf16",
        "--optimizer",
        "offload",
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *ARGUMENTS, *options])
    train.main()
    found = losses(capsys.readouterr().out)
    assert len(found) == 2
    assert found[0] < losses(log)[0] - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "13b", "--seq-len", "1024"], "13b has 512 positions"),
        (["--optimizer", "torch", "--dtype", "fp16"], "use adam"),
        (["--steps", "0"], "invalid count value"),
    ],
)
def test_options_that_make_no_sense_are_refused(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit):
        train.parse_options()
    assert message in capsys.readouterr().err
