"""A training step on CUDA waits for nothing: counted on a stand-in, for every method and optimizer.

The same runs are compared with one plain process, so that the branches that CUDA alone takes are right as well.
"""

import contextlib
import os
from collections import Counter
from unittest import mock

import pytest
import torch

import meshwright as mw
from meshwright.compat.bmtrain.optim_manager import OptimManager
from meshwright.nn.batches import resized
from meshwright.optim import guard_of
from meshwright.runtime import init_distributed, shutdown_distributed
from meshwright.training.accelerated import Accelerated
from tests import tiny
from tests.methods import pair_runs
from tests.methods.pair_runs import ROWS, Case
from tests.pool import free_port
from tests.stand_in_cuda import counted, on_host, stand_in_cuda

WORLD = 2
SHORT = ("fsdp", "loss_spike")
# Everything a step waits for, by the line that asks. Each has its reason in docs/cuda.md.
BEHIND_THE_UPDATE = {"meshwright/optim/guarded_step.py:_step_unless_nonfinite"}
REASONS = {
    "skip_nonfinite": BEHIND_THE_UPDATE,
    "loss_spike": BEHIND_THE_UPDATE | {"meshwright/optim/loss_spikes.py:<lambda>"},
    "expert_parallel": {
        "meshwright/methods/expert/listed_dispatch.py:_ask",
        # The model's own forward, which asks for the tokens of each expert.
        "meshwright/methods/expert/listed_dispatch.py:questions_of < pair_runs.py:forward",
        "meshwright/methods/expert/listed_dispatch.py:__call__ < pair_runs.py:forward",
    },
    "offload": {"meshwright/optim/visiting_states.py:step"},
    "outer": {
        "meshwright/optim/outer/synchronizer.py:_send",
        "meshwright/optim/outer/replica_averaging.py:finish",
    },
    "weight_vote": {
        "meshwright/runtime/agreement.py:bit_sums",
        "meshwright/methods/weight_vote.py:gather",
        "meshwright/methods/weight_vote.py:found",
    },
}
BAD = 3  # the step whose loss is not finite, and the one after it is a spike
STAGED = "late copy from memory that is not pinned"  # a few numbers that the driver copies on: nobody waits


@contextlib.contextmanager
def cuda_world(ports):
    """A world of ranks with stand-ins for GPUs, in place of the pool's own."""
    shutdown_distributed()
    os.environ["MASTER_PORT"] = str(ports[0])
    try:
        with stand_in_cuda(int(os.environ["LOCAL_RANK"])):
            init_distributed(backend="cpu:gloo,cuda:gloo", timeout_s=60.0)
            yield
            shutdown_distributed()
    finally:
        os.environ["MASTER_PORT"] = str(ports[1])


@contextlib.contextmanager
def counted_steps():
    """The lines of the package for which steps after the second one waited, as often as they did."""
    step, waits, steps = Accelerated.step, Counter(), []

    def counting(self, batch):
        with counted() as ledger:
            result = step(self, batch.pin_memory())
        steps.append(result)
        if len(steps) > 2:  # the first make states and buffers
            waits.update({place: times for (what, place), times in ledger.found.items() if what != STAGED})
        return result

    with mock.patch.object(Accelerated, "step", counting):
        yield waits


def train_and_count(cases, ports):
    """Outcomes of pair_runs.train on the stand-in, and what steps wait for."""
    found = {}
    with cuda_world(ports):
        for case in cases:
            with counted_steps() as waits:
                losses, weights = pair_runs.train(case)
            found[case] = (losses, {name: on_host(value) for name, value in weights.items()}), dict(waits)
    return found


def check(ranks, methods):
    cases = [Case((method,)) for method in methods]
    answers = ranks(WORLD).run(train_and_count, cases, (free_port(), free_port()))
    for method, case in zip(methods, cases, strict=True):
        off = pair_runs.worst_difference(case, [answer[case][0] for answer in answers])
        assert off < case.limit(lambda other: ranks(other.world).run(pair_runs.train, other)), method
        for answer in answers:
            assert answer[case][1].keys() <= REASONS.get(method, set()), (method, answer[case][1])


def test_methods_wait_for_nothing_and_are_right(ranks):
    check(ranks, SHORT)


@pytest.mark.long
@pytest.mark.parametrize("method", [method for method in ROWS if method not in SHORT])
def test_every_method_waits_for_nothing_and_is_right(ranks, method):
    check(ranks, [method])


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "AdamOptimizer": (mw.optim.AdamOptimizer, {}),
    "AdamOffloadOptimizer": (mw.optim.AdamOffloadOptimizer, {}),
    "Lamb": (mw.optim.Lamb, {}),
    "Adafactor": (mw.optim.Adafactor, {"relative_step": False, "scale_parameter": False}),
    "CAME": (mw.optim.CAME, {}),
    "GaLoreAdamW": (mw.optim.GaLoreAdamW, {}),
    "GaLoreAdafactor": (mw.optim.GaLoreAdafactor, {"relative_step": False, "scale_parameter": False}),
    "AdamW8bit": (mw.optim.AdamW8bit, {}),
    "GaLoreAdamW8bit": (mw.optim.GaLoreAdamW8bit, {}),
    "Muon": (mw.optim.Muon, {"ns_dtype": torch.float32}),  # left to itself, another one than on the CPU
}
OF_OPTIMIZER = {
    # States on the host are updated there: the host waits for the gradients of each bucket, and for weights to leave.
    "AdamOffloadOptimizer": {
        "meshwright/optim/adam/bucket_update.py:receive",
        "meshwright/optim/adam/bucket_update.py:send",
    },
    # torch's own chooses elements by a mask.
    "Rprop": {"meshwright/training/accelerated.py:_step < rprop.py:_single_tensor_rprop"},
}


def losses_of(func, args, strategy):
    """Losses of the first steps with an optimizer."""
    torch.manual_seed(0)
    model = tiny.plain()
    job = mw.accelerate(
        model, func, tiny.Tokens(), tiny.loss_func, strategy=strategy, optim_args={"lr": 1e-3, **args},
        dataloader_args={"batch_size": 8}, max_grad_norm=0.5,
        optim_param_func=mw.optim.muon_param_groups if func is mw.optim.Muon else None,
    )  # fmt: skip
    return [float(job.step(batch).loss) for _, batch in zip(range(4), job.dataloader, strict=False)]


def optimizers_and_counts(names, ports):
    """What steps under each optimizer wait for, on one rank, and the losses there and on the CPU."""
    plain = {name: losses_of(*one, []) for name, one in OPTIMIZERS.items() if name in names}
    found = {}
    with cuda_world(ports):
        for name in names:
            for strategy in ([], ["fsdp"]):
                with counted_steps() as waits:
                    losses = losses_of(*OPTIMIZERS[name], strategy)
                off = max(abs(a / b - 1) for a, b in zip(losses, plain[name], strict=True))
                found[name, *strategy] = off, set(waits)
    return found


def check_optimizers(ranks, names):
    for (name, *_), (off, waits) in ranks(1).run(optimizers_and_counts, names, (free_port(), free_port()))[0].items():
        assert off < 1e-5, name
        assert waits <= OF_OPTIMIZER.get(name, set()), (name, waits)


def test_optimizers_wait_for_nothing_and_are_right(ranks):
    check_optimizers(ranks, ["AdamW", "AdamOffloadOptimizer"])


@pytest.mark.long
def test_every_optimizer_waits_for_nothing_and_is_right(ranks):
    check_optimizers(ranks, list(OPTIMIZERS))


def managed_steps(ports=None):
    """Losses and the scale of an ``OptimManager`` over two optimizers, of which one takes the scale itself."""
    losses, waits = [], set()
    with cuda_world(ports) if ports else contextlib.nullcontext():
        torch.manual_seed(0)
        device = "cuda" if ports else "cpu"
        model = tiny.plain().to(device)
        first, *others = model.parameters()
        manager = OptimManager(loss_scale=2.0**10)
        manager.add_optimizer(torch.optim.AdamW(others[::2], lr=1e-2, fused=True))
        manager.add_optimizer(mw.optim.AdamOptimizer([first, *others[1::2]], lr=1e-2))
        for step, ids in zip(range(6), torch.utils.data.DataLoader(tiny.Tokens(), 8), strict=False):
            manager.zero_grad()
            ids = ids.to(device)
            loss = tiny.loss_func(ids, model(ids)) * (float("inf") if step == BAD else 1.0)
            manager.backward(loss)
            # What was measured is known to be finite, so both cases differ: with a norm and without.
            with counted() as clipping:
                if step % 2:
                    manager.clip_grad_norm(others[::2], 0.5)
            with counted() as stepping:
                manager.step()
            losses.append(float(on_host(loss)))
            if step > 1:
                waits |= {place for what, place in (*clipping.found, *stepping.found) if what != STAGED}
                assert sum(stepping.found.values()) <= 2, stepping.found  # the flags staged, and the answer
        return losses, manager.loss_scale, waits


def test_a_manager_waits_once_for_its_decision_and_is_right(ranks):
    losses, scale, waits = ranks(1).run(managed_steps, (free_port(), free_port()))[0]
    expected, scale_on_host, _ = ranks(1).run(managed_steps)[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert scale == scale_on_host == 2.0**9
    assert waits == {"meshwright/compat/bmtrain/overflow.py:on_any_rank"}


def resized_batch(ports):
    with cuda_world(ports):
        rows = torch.arange(6).view(3, 2).pin_memory().to("cuda", non_blocking=True)
        with counted() as ledger:
            found = resized({"rows": rows, "names": ["a", "b", "c"]}, 5)
        return on_host(found["rows"])[:, 0].tolist(), found["names"], {what for what, _ in ledger.found}


def test_a_batch_is_resized_without_waiting(ranks):
    found = ranks(1).run(resized_batch, (free_port(), free_port()))[0]
    assert found == ([0, 2, 4, 0, 2], ["a", "b", "c", "a", "b"], {STAGED})


def notices_of_fp8(ports):
    with cuda_world(ports):
        found = {}
        for extra in ((), (("compile", {"backend": "aot_eager"}),)):
            with mock.patch("builtins.print") as told:
                mw.accelerate(
                    pair_runs.build("dense"), torch.optim.AdamW, loss_func=tiny.loss_func,
                    strategy=[("fp8", {"emulate": True, "exclude": ("head",)}), *extra],
                    sample_batch=tiny.Tokens().ids[:2],
                )  # fmt: skip
            found[len(extra)] = "29 bytes" in str(told.mock_calls)
        return found


def test_delayed_scaling_without_compile_is_told_of(ranks):
    assert ranks(1).run(notices_of_fp8, (free_port(), free_port()))[0] == {0: True, 1: False}


def note_mean(module, args, out):
    module.running.add_(out.detach().mean())


def unsound_steps(strategy, ports=None):
    """Losses, skipped steps, spikes and learning rates of a run that meets inf and a spike."""

    def loss_func(ids, logits):
        seen.append(None)
        at = len(seen) - 1
        return tiny.loss_func(ids, logits) * (float("inf") if at == BAD else 50.0 if at == BAD + 1 else 1.0)

    seen, found = [], []
    with cuda_world(ports) if ports else contextlib.nullcontext():
        torch.manual_seed(0)
        model = tiny.plain()
        model.register_buffer("running", torch.zeros(()))
        model.register_forward_hook(note_mean)
        job = mw.accelerate(
            model, torch.optim.AdamW, tiny.Tokens(), loss_func, strategy=strategy, optim_args={"lr": 1e-2},
            dataloader_args={"batch_size": 8}, lr_scheduler_cls=torch.optim.lr_scheduler.StepLR,
            lr_scheduler_args={"step_size": 1, "gamma": 0.9}, max_grad_norm=1.0, sample_batch=tiny.Tokens().ids[:8],
        )  # fmt: skip
        seen.clear()
        for _, batch in zip(range(8), job.dataloader, strict=False):
            result = job.step(batch)
            rate = job.lr_scheduler.get_last_lr()[0]
            running = float(on_host(dict(job.model.named_buffers()).get("running", torch.zeros(()))))
            found.append((float(result.loss), float(result.grad_norm), result.skipped, result.spike, rate, running))
        assert guard_of(job.optim).skips_on_device() == (job.device.type == "cuda")
        scale = float(job.optim.scaler.get_scale()) if job.optim.scaler is not None else 1.0
        return found, job.num_skipped_steps, scale


@pytest.mark.parametrize(
    "strategy",
    [
        ["skip_nonfinite"],
        [("loss_spike", {"window": 4, "threshold": 20.0})],
        [("loss_spike", {"window": 4, "threshold": 20.0, "action": "warn"}), "skip_nonfinite"],
        [("half", {"dtype": "fp16"}), "fsdp"],
    ],
)
def test_what_the_device_decides_is_what_the_host_would(ranks, strategy):
    host = ranks(1).run(unsound_steps, strategy)[0]
    device = ranks(1).run(unsound_steps, strategy, (free_port(), free_port()))[0]
    assert device[1:] == host[1:]
    assert host[1] >= 1
    for own, other in zip(device[0], host[0], strict=True):
        assert own[2:4] == other[2:4]
        assert own[4] == other[4]
        assert own[0] == pytest.approx(other[0], rel=2e-5, nan_ok=True)
        assert own[1] == pytest.approx(other[1], rel=2e-4, nan_ok=True)
