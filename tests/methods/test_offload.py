"""What is offloaded changes where bytes are and nothing else: weights to the bit, and every class as the twin says."""

import errno
import os

import pytest
import torch

import meshwright as mw
from meshwright.cost import copies, memory
from meshwright.methods import Offload
from meshwright.store import CheckpointStore, TrainingState
from tests import tiny

STEPS = 10
ADAMW = (torch.optim.AdamW, {"lr": 1e-3, "fused": True})
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False})  # a choice, and so kept on the host


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randn(80, 7, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def loss_func(inputs, output):
    return (output - inputs[:, :3]).square().mean()


def accelerate(strategy, optimizer=ADAMW, micro=1, **changes):
    optim_func, args = optimizer
    torch.manual_seed(3)
    return mw.accelerate(
        tiny.Mlp(), optim_func, Rows(), loss_func, strategy=strategy, optim_args=args,
        dataloader_args={"batch_size": 8}, max_grad_norm=0.5, num_micro_batches=micro, **changes,
    )  # fmt: skip


def full_weights(model):
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def train(strategy, optimizer=ADAMW, micro=1, compared=()):
    """Ten steps; returns losses, norms and weights, and what a rank holds after the twin was held against it."""
    result = accelerate(strategy, optimizer, micro)
    batches = iter(result.dataloader)
    done = [result.step(next(batches)) for _ in range(STEPS - 1)]
    last, measured = result.measured_step(next(batches))
    predicted = memory(result.plan.step, result._job.coordinate)
    for kind, size in measured.items():
        # Labels that the loss casts or copies are saved too, and not predicted.
        if kind != "activations" or (micro == 1 and "half" not in str(strategy)):
            assert getattr(predicted, kind) == size, (kind, getattr(predicted, kind), size, strategy)
    moved = {(copy.source, copy.target, copy.moment): copy.bytes_per_step for copy in copies(result.plan.step)}
    seen = [(step.loss.item(), step.grad_norm.item(), step.skipped) for step in (*done, last)]
    return seen, full_weights(result.model), measured, moved


def compared(base, configs, optimizer=ADAMW, micro=1):
    """Trains without offload, and with each config on top; returns what each held and moved."""
    seen, weights, plain, _ = train(base, optimizer, micro)
    assert not any(size for kind, size in plain.items() if kind.startswith(("host", "disk")))
    held = []
    for config in configs:
        now, moved_to, measured, moved = train([*base, ("offload", config)], optimizer, micro)
        assert repr(now) == repr(seen), (base, config)  # a skipped step's norm may be nan
        assert all(torch.equal(weights[name], moved_to[name]) for name in weights), (base, config)
        held.append((measured, moved, plain))
    return held


def one_rank_states(folder):
    every, part, late, none = compared(
        [], [None, {"optimizer": 0.5, "gradients": 0.25}, {"optimizer": 1.0, "gradients": 0.0}, {"optimizer": 0.0}]
    )
    numel = every[2]["parameters"] // 4
    measured, moved, plain = every
    assert plain["gradients"] == numel * 4
    assert (measured["gradients"], measured["optimizer"], measured["host_gradients"]) == (0, 0, numel * 4)
    assert measured["host_optimizer"] == plain["optimizer"]
    assert moved == {("device", "host", "backward"): numel * 4, ("host", "device", "update"): numel * 4}
    measured, moved, _ = part
    assert 0.45 < measured["host_master"] / (numel * 4) <= 0.5
    assert 0.75 <= measured["gradients"] / (numel * 4) < 0.8
    assert measured["host_optimizer"] + measured["optimizer"] == plain["optimizer"]
    assert moved["device", "host", "update"] + moved["device", "host", "backward"] == measured["host_master"]
    assert late[0]["gradients"] == late[0]["host_gradients"] == numel * 4
    assert none[0] == none[2]


def one_rank_activations(folder):
    half, activations = compared([], [{"activations": 0.4}, {"activations": 1.0, "prefetch": 0}], SGD)
    assert 3 * half[0]["host_activations"] == activations[0]["host_activations"]
    assert activations[0]["activations"] < half[0]["activations"] < half[2]["activations"]
    assert activations[1]["host", "device", "backward"] == activations[0]["host_activations"]
    (recomputed,) = compared(["checkpoint"], [{"activations": 0.4, "optimizer": 0.5}], SGD)
    assert 0 < recomputed[0]["host_activations"] < half[0]["host_activations"]
    # What recomputation keeps for itself is not autograd's, and stays on the device.
    (selective,) = compared([("checkpoint", {"policy": "selective", "every": 2})], [{"activations": 1.0}], SGD)
    assert selective[0]["host_activations"] < activations[0]["host_activations"]
    assert selective[0]["activations"] > activations[0]["activations"]


def one_rank_disk(folder):
    ((measured, moved, _),) = compared([], [{"disk": folder, "bucket_bytes": 700}])
    numel = measured["parameters"] // 4
    assert (measured["host_master"], measured["disk_master"]) == (0, numel * 4)
    assert measured["disk_optimizer"] == 2 * numel * 4
    assert moved["disk", "host", "update"] == moved["host", "disk", "update"] == 3 * numel * 4
    assert not list(os.scandir(folder))


def one_rank_precision(folder):
    for master in (True, False):
        half = ("half", {"dtype": "bf16", "master_weights": master})
        ((measured, _, _),) = compared([half], [{"gradients": 0.0, "optimizer": 1.0}], SGD, micro=2)
        numel = measured["parameters"] // 2
        assert measured["host_master"] == numel * (4 if master else 2)
        assert (measured["master"], measured["gradients"]) == (0, numel * 2)
    scale = {"initial_scale": 2.0**21, "hysteresis": 1}
    compared([("half", {"dtype": "fp16", "loss_scale": scale})], [{"optimizer": 0.5}])
    compared(["fsdp"], ["all"], SGD)


def one_rank_visits(folder):
    on_device = {"update_on": "device", "bucket_bytes": 4096 + 700}  # larger layers are cut in the middle
    every, part, mixed = compared(
        [], [on_device, {**on_device, "optimizer": 0.5}, {**on_device, "optimizer": 1.0, "gradients": 0.25}]
    )
    measured, moved, plain = every
    numel = measured["parameters"] // 4
    assert measured["gradients"] == plain["gradients"] == numel * 4
    assert (measured["host_gradients"], measured["host_master"]) == (0, numel * 4)
    assert measured["host_optimizer"] == 2 * numel * 4
    assert moved == {("device", "host", "update"): 3 * numel * 4, ("host", "device", "update"): 2 * numel * 4}
    assert 0 < part[0]["host_optimizer"] < every[0]["host_optimizer"]
    assert 0 < mixed[0]["host_gradients"] == numel * 4 - mixed[0]["gradients"]
    ((kept, _, _),) = compared([], [on_device], SGD, micro=2)
    assert kept["host_optimizer"] == numel * 4  # momentum
    for master in (True, False):
        half = ("half", {"dtype": "bf16", "master_weights": master})
        ((measured, moved, _),) = compared([half], [on_device], SGD, micro=2)
        assert measured["host_master"] == numel * (4 if master else 2)
        assert measured["gradients"] == numel * (4 if master else 2)
        assert moved["host", "device", "update"] == numel * (8 if master else 2)
    scale = {"initial_scale": 2.0**21, "hysteresis": 1}
    compared([("half", {"dtype": "fp16", "loss_scale": scale})], [on_device, {**on_device, "optimizer": 0.5}])


@pytest.mark.parametrize(
    "run", [one_rank_states, one_rank_activations, one_rank_disk, one_rank_precision, one_rank_visits]
)
def test_one_rank(ranks, tmp_path, run):
    ranks(1).run(run, str(tmp_path / "states"))


def two_ranks_replicated(folder):
    ((replicated, _, _),) = compared([], [None], SGD)
    assert replicated["gradients"] > 0  # averaged after backward, so they stay until then
    (zero1,) = compared(["zero1"], [{"optimizer": 0.7, "activations": 0.4}], micro=2)
    assert 0 < zero1[0]["gradients"] < zero1[2]["gradients"]


def two_ranks_sharded(folder):
    states, parameters = compared(["zero2"], [None, {"parameters": 0.5, "disk": folder, "bucket_bytes": 900}], SGD)
    assert states[0]["gradients"] == 0
    assert parameters[0]["host_parameters"] > 0
    assert parameters[0]["disk_optimizer"] > parameters[0]["disk_master"] > 0
    (everything,) = compared(["fsdp", "checkpoint", ("amp_native", "bf16")], ["all"], micro=2)
    measured, moved, plain = everything
    assert (measured["parameters"], measured["optimizer"], measured["gradients"]) == (0, 0, 0)
    assert measured["host_parameters"] == plain["parameters"]
    if mw.rank() == 0:  # whose step the plan tells
        assert moved["host", "device", "forward"] == 2 * plain["parameters"]


def two_ranks_visits(folder):
    on_device = {"update_on": "device", "bucket_bytes": 900}
    (replicated,) = compared([], [on_device], micro=2)
    assert replicated[0]["gradients"] == replicated[2]["gradients"]
    compared(["zero2"], [{**on_device, "parameters": 0.5}], SGD)
    (sharded,) = compared(["fsdp", "checkpoint", ("amp_native", "bf16")], [on_device], micro=2)
    assert sharded[0]["host_optimizer"] == 2 * sharded[0]["host_master"] > 0


def two_ranks_more_visits(folder):
    """Beside those above; one rank alone visits in fp16, too."""
    on_device = {"update_on": "device", "bucket_bytes": 900}
    compared(["zero1"], [{**on_device, "optimizer": 0.7, "activations": 0.4}], micro=2)
    compared(["fsdp", ("half", {"dtype": "fp16", "loss_scale": {"initial_scale": 2.0**21}})], [on_device])


@pytest.mark.parametrize(
    "run",
    [two_ranks_replicated, two_ranks_sharded, two_ranks_visits,
     pytest.param(two_ranks_more_visits, marks=pytest.mark.long)],
)  # fmt: skip
def test_two_ranks(ranks, tmp_path, run):
    ranks(2).run(run, str(tmp_path / "states"))


def stop_and_go(directory, strategy, first, last):
    result = accelerate(strategy)
    state = TrainingState(result.model, result.optim)
    store = CheckpointStore(directory)
    if first:
        store.load(state)
        on_disk = [config for config in strategy if "disk" in str(config)]
        assert not on_disk or result.optim.inner.is_stored(*_one_state(result.optim.inner)), "loaded into its file"
    losses = [result.step(batch).loss.item() for batch in list(result.dataloader)[first:last]]
    state.step = last
    path = store.save(state)
    tensors = store.load(TrainingState(accelerate([]).model)) and path
    return losses, tensors.name


def _one_state(optimizer):
    parameter = optimizer.param_groups[0]["params"][0]
    return parameter, "exp_avg"


def test_resume_with_and_without_offload_in_any_layout(ranks, tmp_path):
    files = ("offload", {"disk": str(tmp_path / "states"), "bucket_bytes": 700})
    whole, _ = ranks(2).run(stop_and_go, tmp_path / "whole", ["zero2"], 0, 8)[0]
    first, _ = ranks(1).run(stop_and_go, tmp_path / "run", [("offload", {"optimizer": 0.5})], 0, 3)[0]
    then, _ = ranks(2).run(stop_and_go, tmp_path / "run", ["fsdp", files], 3, 6)[0]
    last, _ = ranks(2).run(stop_and_go, tmp_path / "run", ["zero2"], 6, 8)[0]
    assert [*first, *then, *last] == pytest.approx(whole, rel=1e-6)


def fail(folder, calls_before):
    """Rank 1's disk is full from some call on; what does every rank say?"""
    reserve, calls = os.posix_fallocate, []

    def full(descriptor, start, size):
        calls.append(size)
        if mw.rank() == 1 and len(calls) > calls_before:
            raise OSError(errno.ENOSPC, "No space left on device")
        return reserve(descriptor, start, size)

    os.posix_fallocate = full
    try:
        result = accelerate(["zero2", ("offload", {"disk": folder, "bucket_bytes": 900})])
        before = full_weights(result.model)
        with pytest.raises(mw.errors.ConfigError, match="No space left"):
            result.step(next(iter(result.dataloader)))
        assert any(not torch.equal(before[name], now) for name, now in full_weights(result.model).items())
        return "in the first step"
    except mw.errors.ConfigError as error:
        return str(error)
    finally:
        os.posix_fallocate = reserve


def test_a_full_disk_is_told_to_every_rank(ranks, tmp_path):
    for calls_before in (0, 2):  # in check; when the copies are made
        answers = ranks(2).run(fail, str(tmp_path), calls_before)
        assert "No space left" in answers[0]
        assert answers[0] == answers[1]
    assert ranks(2).run(fail, str(tmp_path), 6) == ["in the first step"] * 2
    assert not list(tmp_path.iterdir())


REFUSED = [
    (1, [("offload", {"parameters": 1.0})], "add fsdp"),
    (2, [("offload", {"gradients": 0.5})], "averaged or reduced"),
    (1, [("fsdp", {"atorch_wrap_cls": ("Linear",)}), ("offload", {"parameters": 0.5})], "gathers other units"),
    (1, [("offload", {"disk": __file__})], "cannot hold them"),
]


def refused(world):
    for ranks_needed, strategy, text in REFUSED:
        if ranks_needed == world:
            with pytest.raises((mw.errors.StrategyError, mw.errors.ConfigError), match=text):
                accelerate(strategy)
    if world == 1:
        with pytest.raises(mw.errors.StrategyError, match="no optimizer"):
            mw.accelerate(tiny.Mlp(), strategy=["offload"], loss_func=loss_func)
        with pytest.raises(mw.errors.ModelError, match="no repeated blocks"):
            mw.accelerate(torch.nn.Linear(2, 2), strategy=[("offload", "activation")])
        own = tiny.Mlp()
        own.gradient_checkpointing = True  # as transformers marks its models
        with pytest.raises(mw.errors.StrategyError, match="recomputes by itself"):
            mw.accelerate(own, strategy=[("offload", "activation")])


def test_what_cannot_be_offloaded_is_refused(ranks):
    ranks(1).run(refused, 1)
    ranks(2).run(refused, 2)


def test_config():
    assert Offload.parse(None).optimizer == 1.0
    assert Offload.parse("activation") == Offload.parse({"activations": 1.0, "optimizer": 0.0})
    assert Offload.parse({"parameters": 0.5, "gradients": 0.75}).optimizer == 0.75
    assert str(mw.Strategy([("offload", "all")])) == str(mw.Strategy(str(mw.Strategy([("offload", "all")]))))
    for wrong in ("everything", {"optimizer": 1.5}, {"optimizer": 0.2, "gradients": 0.5}, {"optimiser": 1.0}):
        with pytest.raises(mw.errors.StrategyError):
            Offload.parse(wrong)
