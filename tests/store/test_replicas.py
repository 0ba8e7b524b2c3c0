"""Checkpoints of replicas: resumed in mid-block bit for bit, by other numbers of replicas, and without any."""

import copy

import pytest
import torch

import meshwright as mw
from meshwright import runtime
from meshwright.errors import CheckpointError
from meshwright.optim import BMUF, DiLoCo, GuardedOptimizer, LossScaler, MasterWeights, SlowMo, StreamingDiLoCo
from meshwright.optim.dtensors import local_tensor
from meshwright.store import CheckpointStore, TrainingState, load_optimizer, save_optimizer
from tests.optim.outer import simulation as sim

STOP, END = 7, 13


def _guarded(net):
    """fp16 weights with fp32 masters and a loss scale."""
    master = MasterWeights(net.parameters())
    inner = master.optimizer(lambda params: torch.optim.AdamW(params, lr=0.01), net.parameters())
    return GuardedOptimizer(inner, scaler=LossScaler("cpu", initial_scale=64.0), master=master)


def _halved(net):
    return net.half()


MAKE = {
    "diloco": (None, lambda net: DiLoCo(sim.adamw(net), 5, model=net)),
    "split": (None, lambda net: DiLoCo(sim.sgd(net), 5, model=net, split=True)),
    "slowmo, reset": (None, lambda net: SlowMo(sim.adamw(net), 0.5, 5, model=net, inner_state="reset")),
    "streaming": (None, lambda net: StreamingDiLoCo(sim.adamw(net), 6, 2, 2, 0.25, "int8", model=net)),
    "in warm-up": (None, lambda net: BMUF(sim.adamw(net), global_sync_iter=2, warmup_iterations=9, model=net)),
    "in synchronous warm-up": (
        None, lambda net: BMUF(sim.adamw(net), global_sync_iter=2, warmup_iterations=9, warmup="synchronous"),
    ),
    "at a block's end": (None, lambda net: DiLoCo(sim.adamw(net), STOP, model=net)),
    "fp16": (_halved, lambda net: DiLoCo(_guarded(net), 5)),
}  # fmt: skip


def built(name):
    change, make = MAKE[name]
    net = sim.model() if change is None else change(sim.model().float())
    return net, make(net)


def step(net, optimizer, number):
    net.zero_grad()
    inputs = sim.batch(runtime.rank(), number).to(next(net.parameters()).dtype)
    loss = sim.loss_of(net, inputs)
    guard = getattr(optimizer, "guard", None)
    (loss if guard is None else guard.scaled(loss)).backward()
    net.seen += runtime.rank() + 1
    optimizer.step()


def bits(net, optimizer):
    inner = getattr(optimizer, "guard", None) or getattr(optimizer, "inner", optimizer)
    states = [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in (*net.state_dict().values(), *states)]


def stopped_and_not(name, directory):
    """Trains to the end, saving on the way; again from the checkpoint; all bits are those of the first."""
    net, optimizer = built(name)
    state = TrainingState(net, optimizer)
    for number in range(END):
        if number == STOP:
            state.step = STOP
            CheckpointStore(directory).save(state)
        step(net, optimizer, number)
    other, resumed = built(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(runtime.rank() + 0.5)  # nothing may come from the beginning
    info = CheckpointStore(directory).load(TrainingState(other, resumed))
    assert info.step == STOP
    assert resumed.num_updates == STOP
    for number in range(STOP, END):
        step(other, resumed, number)
    assert resumed.num_syncs == optimizer.num_syncs > 0
    return all(torch.equal(a, b) for a, b in zip(bits(net, optimizer), bits(other, resumed), strict=True))


def test_resuming_in_mid_block_changes_nothing(ranks, tmp_path):
    def directory(name):
        return tmp_path / name.replace(" ", "-")

    for name in MAKE:
        assert ranks(2).run(stopped_and_not, name, directory(name)) == [True, True], name


def saved_in_mid_block(directory):
    net, optimizer = built("diloco")
    for number in range(STOP):
        step(net, optimizer, number)
    CheckpointStore(directory).save(TrainingState(net, optimizer, step=STOP))
    return list(map(torch.clone, net.state_dict().values())), sim.weights_of_copies(optimizer)


def resumed_by_others(directory):
    """As many replicas as there are ranks."""
    net, optimizer = built("diloco")
    CheckpointStore(directory).load(TrainingState(net, optimizer))
    start = list(map(torch.clone, net.state_dict().values())), sim.weights_of_copies(optimizer)
    for number in range(STOP, END):
        step(net, optimizer, number)
    exps = [state["exp_avg"] for state in optimizer.state.values()]
    return start, optimizer.num_updates, optimizer.num_syncs, all(exp.isfinite().all() for exp in exps)


def resumed_without(directory):
    net = sim.model()
    optimizer = sim.adamw(net)
    CheckpointStore(directory).load(TrainingState(net, optimizer))
    return list(map(torch.clone, net.state_dict().values())), len(optimizer.state)


def begun_from_one(directory):
    """A run without replicas is saved, and goes on as replicas."""
    net = sim.model()
    optimizer = sim.adamw(net)
    net.zero_grad()
    sim.loss_of(net, sim.batch(0, 0)).backward()
    optimizer.step()
    CheckpointStore(directory).save(TrainingState(net, optimizer, step=1))
    other, outer = built("diloco")
    CheckpointStore(directory).load(TrainingState(other, outer))
    same = all(torch.equal(a, b) for a, b in zip(sim.weights(net), sim.weights_of_copies(outer), strict=True))
    for number in range(5):
        step(other, outer, number)
    return same, outer.num_syncs, bool(outer.state)


def test_other_numbers_of_replicas(ranks, tmp_path):
    two = ranks(2).run(saved_in_mid_block, tmp_path)
    means = [(a + b) / 2 if a.is_floating_point() else a for a, b in zip(two[0][0], two[1][0], strict=True)]
    for size in (1, 3):
        for start, num_updates, num_syncs, finite in ranks(size).run(resumed_by_others, tmp_path):
            weights, world = start
            assert (num_updates, num_syncs, finite) == (END, END // 5, True)
            for one, other in zip(weights, means, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-15, atol=1e-15)
            assert all(torch.equal(a, b) for a, b in zip(world, two[0][1], strict=True))
    weights, num_states = ranks(1).run(resumed_without, tmp_path)[0]
    assert num_states == len(two[0][1])
    for one, other in zip(weights, means, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-15, atol=1e-15)


def test_one_model_becomes_replicas(ranks, tmp_path):
    assert ranks(2).run(begun_from_one, tmp_path) == [(True, 1, True)] * 2


def other_fragments(directory):
    net, optimizer = built("streaming")
    for number in range(STOP):
        step(net, optimizer, number)
    own = copy.deepcopy(optimizer.state_dict())  # torch hands out live tensors
    CheckpointStore(directory).save(TrainingState(net, optimizer, step=STOP))
    assert own["flags"]["under_way"], "the test wants a fragment under way"
    again, same = built("streaming")
    again.load_state_dict(net.state_dict())
    same.load_state_dict(own)
    for number in range(STOP, END):
        step(net, optimizer, number)
        step(again, same, number)
    equal = all(torch.equal(a, b) for a, b in zip(bits(net, optimizer), bits(again, same), strict=True))
    net = sim.model()
    with pytest.raises(CheckpointError, match="cuts the model otherwise"):
        CheckpointStore(directory).load(TrainingState(net, StreamingDiLoCo(sim.adamw(net), 6, 3, 1, model=net)))
    with pytest.raises(CheckpointError, match="does not fit into one optimizer file"):
        save_optimizer(optimizer, net, directory / "optim.pt")
    with pytest.raises(CheckpointError, match="does not fit into one optimizer file"):
        load_optimizer(optimizer, net, directory / "optim.pt")
    with pytest.raises(CheckpointError, match="not one of this outer optimizer"):
        same.load_state_dict(torch.optim.SGD(net.parameters()).state_dict())
    return equal


RULES = {
    "split": {"rule": "diloco", "sync_every": 4, "split": True},
    "in warm-up": {"rule": "bmuf", "sync_every": 4, "warmup_steps": 9, "warmup": "broadcast"},
}


def resumed_under_a_strategy(directory, rule, **axes):
    """Through ``accelerate``, in mid-block: whether all weights are those of the run that was not interrupted."""

    def built_job(seed):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(*(torch.nn.Linear(*sizes) for sizes in ((3, 33), (33, 20), (20, 5), (5, 3))))
        strategy = [("parallel_mode", axes), *(["fsdp"] if "zero" in axes else []), ("outer", RULES[rule])]
        return mw.accelerate(net, torch.optim.AdamW, None, spread, strategy=strategy, optim_args={"lr": 0.01})

    def train(job, steps):
        for number in steps:
            generator = torch.Generator().manual_seed(100 * number + runtime.rank())
            job.step(torch.randn(4, 3, generator=generator))

    first, second = built_job(0), built_job(1)
    train(first, range(STOP))
    CheckpointStore(directory).save(TrainingState(first.model, first.optim, step=STOP))
    CheckpointStore(directory).load(TrainingState(second.model, second.optim))
    train(first, range(STOP, END))
    train(second, range(STOP, END))
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    return all(torch.equal(local_tensor(a), local_tensor(b)) for a, b in pairs)


def spread(inputs, output):
    return (output - inputs.roll(1, 1)).square().mean()


@pytest.mark.parametrize(
    "axes", [{"replica": 2}, pytest.param({"replica": 2, "zero": 2}, marks=pytest.mark.long)], ids=len
)
@pytest.mark.parametrize("rule", RULES)
def test_global_weights_are_nobodys_own_ones(ranks, tmp_path, rule, axes):
    found = ranks(2 ** len(axes)).run(resumed_under_a_strategy, tmp_path, rule, **axes)
    assert all(found), found


def test_fragments_under_way_and_state_dicts(ranks, tmp_path):
    assert ranks(2).run(other_fragments, tmp_path) == [True, True]
