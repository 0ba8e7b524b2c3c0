"""The code of BMTrain's README and of its 0.2.0 update log runs with another import, and does what it says.

Each file in ``bmtrain/`` is a code block of one of the two as it stands there: ``import bmtrain`` became
``import meshwright``, sizes are small, and lines under "supplied" fill in what the document leaves open.
"""

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import meshwright as bmt
from tests.cli.helpers import ROOT, environment
from tests.compat.bmtrain.tensor_models import tensor_groups
from tests.pool import free_port
from tests.seeds.supplied import DIM, DistributedTransformerBlock, PlainTransformerBlock

FOLDER = Path(__file__).parent / "bmtrain"
LAUNCH_TIMEOUT_S = 120


def run(file, **given):
    """Runs a file as a program; returns its names. The ranks of the pool compute on the CPU."""
    with mock.patch("torch.cuda.is_available", return_value=False):
        return runpy.run_path(str(FOLDER / file), init_globals=given)


def randomised(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return module


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same(model, plain, what):
    """Compares ``what(parameter)`` of every parameter, whole."""
    wanted = {name: what(parameter) for name, parameter in plain.named_parameters()}
    found = {name: what(parameter).full_tensor() for name, parameter in model.named_parameters()}
    assert list(found) == list(wanted)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)
        assert value.abs().max() > 1e-3, name


def gradient(parameter):
    return parameter.grad


def _init():
    run("readme_init.py")
    assert bmt.nn.TransformerBlockList([DistributedTransformerBlock()])[0]._state.zero_level == 3


def _my_module(file):
    plain = randomised(run("readme_original.py")["MyModule"]())
    model = run(file)["MyModule"]()
    model.load_state_dict(plain.state_dict())
    output, expected = model(), plain()
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    # Each rank has a loss of its own, and the gradient is the mean over the ranks.
    each = random(bmt.world_size(), DIM)
    (output * each[bmt.rank()]).sum().backward()
    (expected * each.mean(0)).sum().backward()
    assert_same(model, plain, gradient)


def _gpt2():
    found = run("readme_gpt2.py")
    losses = found["losses"]
    assert losses[0] == pytest.approx(4.11, abs=0.2)  # log(61)
    assert losses[-1] < losses[0] - 0.7
    assert found["optim_manager"].loss_scale == 1024
    assert all(0.1 < norm < 10 for norm in found["grad_norms"])
    assert all(parameter.dtype == torch.half for parameter in found["model"].parameters())
    return losses, found["tokens"].tolist()


def _optim_manager():
    plain = torch.nn.ModuleList(randomised(PlainTransformerBlock(), seed) for seed in range(2))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    inputs, targets = random(2, bmt.world_size(), 4, DIM)
    own = {"inputs": inputs[bmt.rank()], "targets": targets[bmt.rank()]}
    found = run("update_optim_manager.py", weights=plain.state_dict(), **own)
    losses = _trained_in_plain_torch(plain, inputs.flatten(0, 1), targets.flatten(0, 1))
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    assert_same(found["model"], plain, lambda parameter: parameter.detach())
    assert all((plain.state_dict()[name] - value).abs().max() > 1e-2 for name, value in before.items())


def _trained_in_plain_torch(blocks, inputs, targets):
    adam = torch.optim.AdamW(blocks[0].parameters(), lr=1e-2, weight_decay=1e-2)
    schedule = bmt.lr_scheduler.Noam(adam, start_lr=1e-1, warmup_iter=2, end_iter=1000)
    sgd = torch.optim.SGD(blocks[1].parameters(), lr=1e-1, momentum=0.9)
    losses = []
    for _ in range(10):
        loss = (blocks[1](blocks[0](inputs, 1, 2, 3), 1, 2, 3) - targets).square().mean()
        losses.append(loss.item())
        for optimizer in (adam, sgd):
            optimizer.zero_grad()
        loss.backward()
        for each in (adam, sgd, schedule):
            each.step()
    return losses


def _pipeline():
    plain = torch.nn.ModuleList(randomised(PlainTransformerBlock(), seed) for seed in range(3))
    found = run("update_pipeline.py")
    assert isinstance(found["layers"], bmt.PipelineTransformerBlockList)
    x = random(4, DIM)
    expected = x
    for block in plain:
        expected = block(expected, 1, 2, 3)
    expected.square().mean().backward()
    for layers in (found["zero_layers"], found["layers"]):
        layers.load_state_dict(plain.state_dict())
        output = layers(x, 1, 2, 3)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        output.square().mean().backward()
        assert_same(layers, plain, gradient)


@pytest.mark.parametrize("world", [1, 2])
def test_modules_are_those_of_plain_torch(ranks, world):
    ranks(world).run(_init)
    ranks(world).run(_my_module, "readme_module.py")
    ranks(world).run(_my_module, "readme_block_list.py")


@pytest.mark.parametrize("world", [1, 2])
def test_the_gpt2_of_the_readme_learns(ranks, world):
    results = ranks(world).run(_gpt2)
    assert all(losses == results[0][0] for losses, _ in results)
    assert len({str(tokens) for _, tokens in results}) == world  # its own data for each rank


@pytest.mark.parametrize("world", [1, 2])
def test_the_update_log_is_as_in_plain_torch(ranks, world):
    ranks(world).run(_optim_manager)
    ranks(world).run(_pipeline)


def _parallel_layers(code):
    printed = io.StringIO()
    with (
        tensor_groups(2),
        mock.patch("torch.cuda.is_available", return_value=False),
        contextlib.redirect_stdout(printed),
    ):
        exec(code, {})
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed.getvalue())]


def test_the_parallel_layers_of_the_documentation_learn(ranks):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "bmtrain.md").read_text(), re.DOTALL)
    losses, silent = ranks(2).run(_parallel_layers, code)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.0
    assert silent == []


@pytest.mark.long
def test_the_launch_command_starts_it():
    """``torchrun`` as the README has it; its other command starts ``examples/gpt2/train.py``, in the tests of that.

    That one is part of every run, and the file itself has run on two ranks above.
    """
    options = f"--nnodes=1 --nproc_per_node=2 --rdzv_id=1 --rdzv_backend=c10d --rdzv_endpoint=localhost:{free_port()}"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), str(FOLDER / "readme_gpt2.py")]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LAUNCH_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"of 2 ranks: loss (\S+)", done.stdout)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.7
