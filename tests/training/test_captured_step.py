"""A step that is recorded as a graph and replayed does what ordinary steps do; on the stand-in, which replays it."""

import copy

import pytest
import torch

import meshwright as mw
from meshwright.errors import MeshwrightError
from tests import tiny
from tests.pool import free_port
from tests.stand_in_cuda import Graph, on_host
from tests.training.test_host_reads import cuda_world

STEPS = 10


def made(strategy=(), optim=torch.optim.AdamW, loss_func=tiny.loss_func, micro=1):
    torch.manual_seed(0)
    return mw.accelerate(
        tiny.plain(), optim, tiny.Tokens(), loss_func, strategy=list(strategy), optim_args={"lr": 1e-2},
        dataloader_args={"batch_size": 8}, max_grad_norm=0.5, num_micro_batches=micro,
        lr_scheduler_cls=torch.optim.lr_scheduler.LambdaLR, lr_scheduler_args={"lr_lambda": lambda at: 1 / (1 + at)},
    )  # fmt: skip


def batches(count=STEPS):
    return list(tiny.Tokens(8 * count).ids.chunk(count))


def told_by(step, given):
    return [[float(on_host(each)) for each in (result.loss, result.grad_norm)] for result in map(step, given)]


def weights_of(job):
    return {name: on_host(value).float() for name, value in job.model.state_dict().items()}


def assert_alike(found, expected):
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-5, atol=1e-6)
    for name, value in expected[1].items():
        # Adam makes steps of any size of the rounding in gradients of keys' biases, which are 0.
        torch.testing.assert_close(found[1][name], value, rtol=0.0, atol=1e-5)


def trained(strategy, micro, ports):
    replays = []
    replay = Graph.replay
    with cuda_world(ports), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "replay", lambda graph: (replays.append(graph), replay(graph)))
        results = []
        for recorded in (False, True):
            job = made(strategy, micro=micro)
            before = weights_of(job)
            told = told_by(mw.CapturedStep(job) if recorded else job.step, batches())
            results.append((told, weights_of(job)))
    moved = max((results[0][1][name] - value).abs().max().item() for name, value in before.items())
    return results, moved, len(replays), len(set(replays))


CASES = {"plain": ([], 1), "half": ([("half", "bf16")], 1), "amp": ([("amp_native", "bf16")], 1), "parts": ([], 2)}


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_are_ordinary_ones(ranks, name):
    (expected, found), moved, replays, graphs = ranks(1).run(trained, *CASES[name], (free_port(), free_port()))[0]
    assert_alike(found, expected)
    assert moved > 0.01
    assert (replays, graphs) == (STEPS - 3, 1)


def changed_underway(ports):
    results = []
    with cuda_world(ports):
        for recorded in (True, False):
            job = made()
            step, given = mw.CapturedStep(job) if recorded else job.step, batches()
            told = told_by(step, given[:5])
            saved = copy.deepcopy(job.optim.state_dict())
            told += told_by(step, [given[5][:3], given[6]])
            for group in job.optim.param_groups:
                group["lr"] = 3e-3
            job.lr_scheduler = None
            told += told_by(step, [given[7]])
            job.optim.load_state_dict(saved)
            told += told_by(step, given)
            results.append((told, weights_of(job)))
    return results


def test_a_smaller_batch_a_new_rate_and_loaded_states_are_heeded(ranks):
    assert_alike(*ranks(1).run(changed_underway, (free_port(), free_port()))[0])


def refusals(ports):
    graphs = [("compile", {"backend": "cudagraphs"})]
    with cuda_world(ports):
        found = [_refusal(strategy, torch.optim.AdamW) for strategy in (["fsdp"], [("half", "fp16")], graphs)]
        return [_refusal([], torch.optim.SGD), *found]


def refusal_on_a_cpu():
    return _refusal([], torch.optim.AdamW)


def _refusal(strategy, optim):
    try:
        mw.CapturedStep(made(strategy, optim))
    except MeshwrightError as error:
        return error.what
    return ""


def test_what_cannot_be_recorded_is_refused(ranks):
    found = ranks(1).run(refusals, (free_port(), free_port()))[0]
    reasons = ("SGD may count", "fsdp cannot be recorded", "the host reads numbers", "graphs of its own")
    assert all(reason in told for reason, told in zip(reasons, found, strict=True))
    assert "this is cpu" in ranks(1).run(refusal_on_a_cpu)[0]


def waits(ids, logits):
    loss = tiny.loss_func(ids, logits)
    return loss if float(loss) > 0 else -loss


def after_a_wait(ports):
    given = batches(8)
    with cuda_world(ports):
        job = made(loss_func=waits)
        expected = told_by(job.step, given), weights_of(job)
        job = made(loss_func=waits)
        step = mw.CapturedStep(job)
        told = told_by(step, given[:3])
        try:
            step(given[3])
        except MeshwrightError as error:
            what = error.what
        told += told_by(job.step, given[3:])
        return what, (told, weights_of(job)), expected


def test_a_loss_that_waits_is_told_and_training_goes_on(ranks):
    what, *results = ranks(1).run(after_a_wait, (free_port(), free_port()))[0]
    assert "something in it waits" in what
    assert_alike(*results)
