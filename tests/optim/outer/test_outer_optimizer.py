"""What happens beside the outer step: states, buffers, anomalies, masters, loss scales; and what is refused."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist

from meshwright import runtime
from meshwright.compat.bmtrain.optim_manager import OptimManager  # fmt: skip
from meshwright.errors import CheckpointError, ConfigError
from meshwright.optim import (
    BMUF,
    Adafactor,
    AdamOptimizer,
    AdamW8bit,
    DiLoCo,
    GuardedOptimizer,
    Lamb,
    LocalSGD,
    LossScaler,
    MasterWeights,
    OuterOptimizer,
    OuterPolicy,
    SlowMo,
)
from meshwright.optim.outer.synchronizer import AnomalyWatch
from tests.optim.outer import simulation as sim


def trained(optimizer, net, steps, first=0):
    for step in range(first, first + steps):
        sim.local_gradients(net, runtime.rank(), step)
        optimizer.step()


def gathered(tensor):
    every = [torch.empty_like(tensor) for _ in range(runtime.world_size())]
    dist.all_gather(every, tensor.contiguous())
    return every


def inner_states():
    """keep, average and reset, and averaging on demand under fairseq's name."""
    found = {}
    for policy in ("keep", "average", "reset"):
        net = sim.model()
        inner = sim.adamw(net)
        trained(LocalSGD(inner, 3, inner_state=policy), net, 3)
        weight = net.first.weight
        found[policy] = (dict(inner.state.get(weight) or {}), inner.param_groups[0]["lr"])
    kept, averaged = found["keep"][0]["exp_avg_sq"], found["average"][0]["exp_avg_sq"]
    every = gathered(kept)
    assert not torch.equal(every[0], every[1])
    torch.testing.assert_close(averaged, sum(every) / len(every), rtol=1e-14, atol=0)
    assert found["average"][0]["step"] == 3
    assert found["reset"] == ({}, 0.01)
    net = sim.model()
    inner = sim.adamw(net)
    optimizer = BMUF(inner, warmup_iterations=0, average_sync=True, global_sync_iter=100)
    trained(optimizer, net, 2)
    optimizer.average_params()
    one, two = gathered(inner.state[net.first.weight]["exp_avg"])
    assert torch.equal(one, two)


def buffers():
    found = {}
    for policy in ("average", "keep"):
        net = sim.model()
        trained(LocalSGD(sim.sgd(net), 2, model=net, buffers=policy), net, 2)
        found[policy] = float(net.seen[0])
    assert found == {"average": 3.0, "keep": 2.0 * (runtime.rank() + 1)}


def anomalies():
    """A replica that went astray, by nan or by far, is left out, and goes on from the other's weights."""
    for poison in (float("nan"), 1e3):
        net, alone = sim.model(), sim.model()
        optimizer = DiLoCo(sim.adamw(net), 1, anomaly_threshold=3.0, anomaly_warmup_syncs=2)
        trained(optimizer, net, 4)
        alone.load_state_dict(net.state_dict())
        before = copy.deepcopy(optimizer.state_dict())
        sim.local_gradients(net, 0, 4)
        if runtime.rank() == 1:
            with torch.no_grad():
                net.first.weight += poison
        optimizer.step()
        # The same with replica 0 alone: the mean over one.
        twin = DiLoCo(sim.adamw(alone), 1, group=_single())
        twin.inner.load_state_dict(before["inner"])
        twin.outer.load_state_dict(before["outer"])
        for own, value in zip(sim.copies(twin), before["global"]["state"].values(), strict=True):
            own.data.copy_(value["weight"])
        sim.local_gradients(alone, 0, 4)
        twin.step()
        if runtime.rank() == 0:
            for one, other in zip(sim.weights(net), sim.weights(alone), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
        one, two = gathered(net.first.weight.detach())
        assert torch.equal(one, two)
        assert one.isfinite().all()
    net = sim.model()
    optimizer = LocalSGD(sim.sgd(net), 1)
    before = sim.weights(net)
    sim.local_gradients(net, 0, 0)
    net.first.weight.grad.fill_(float("inf"))
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, sim.weights(net), strict=True)), "all were left out"


@functools.cache
def _single():
    return [dist.new_group([rank]) for rank in range(runtime.world_size())][runtime.rank()]


def clipped():
    net = sim.model()
    optimizer = LocalSGD(sim.sgd(net), 1, clip_pseudo_grad=1e-3)
    before = sim.weights(net)
    trained(optimizer, net, 1)
    moved = sum((a - b).square().sum() for a, b in zip(before, sim.weights(net), strict=True)).sqrt()
    assert float(moved) == pytest.approx(1e-3, rel=1e-2)
    assert not torch.equal(before[0], net.first.weight)


def half_precision():
    """fp32 masters see what the replicas agree on: a guard's, and those in the states of ours."""
    makes = {
        "guard": _guarded,
        "adam": lambda net: AdamOptimizer(net.parameters(), lr=0.01),
        "lamb": lambda net: Lamb(net.parameters(), lr=0.01),
    }
    for name, make in makes.items():
        for state in ("keep", "reset"):
            net = sim.model().to(torch.bfloat16)
            net.seen = net.seen.float()
            inner = make(net)
            optimizer = LocalSGD(inner, 2, inner_state=state)
            for step in range(4):
                net.zero_grad()
                sim.loss_of(net, sim.batch(runtime.rank(), step).bfloat16()).backward()
                optimizer.step()
            weight = net.first.weight
            if name == "guard":
                master = inner.master.of[weight].detach()
            else:
                master = inner.state[weight]["master"]
            one, two = gathered(master)
            world = optimizer.synchronizer.copy.of[inner.master.of[weight] if name == "guard" else weight]
            assert torch.equal(one, two), (name, state)
            assert torch.equal(master, world), (name, state)
            assert torch.equal(weight, master.bfloat16()), (name, state)
            assert not torch.equal(weight.float(), master), "the master is finer"
            if state == "reset" and name == "lamb":
                assert inner.state[weight]["step"] == 0
    # Without a master what rounding takes away is no progress of a replica: nothing moves where nothing trains.
    net = sim.model().to(torch.bfloat16)
    net.seen = net.seen.float()
    optimizer = DiLoCo(torch.optim.SGD(net.parameters(), lr=0.0), 1)
    before = sim.weights(net)
    for step in range(3):
        sim.loss_of(net, sim.batch(0, step).bfloat16()).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, sim.weights(net), strict=True))


def _guarded(net):
    master = MasterWeights(net.parameters())
    return GuardedOptimizer(
        master.optimizer(lambda ps: torch.optim.AdamW(ps, lr=0.01), net.parameters()), master=master
    )


def overflow_of_one():
    """fp16: in a synchronous warm-up all skip together; afterwards each replica for itself, and all count on."""
    net = sim.model().float()
    inner = torch.optim.SGD(net.parameters(), lr=0.02)
    guard = GuardedOptimizer(inner, scaler=LossScaler("cpu", initial_scale=8.0))
    optimizer = LocalSGD(guard, 2, warmup_steps=2)
    skipped = []
    for step in range(6):
        optimizer.zero_grad()
        loss = sim.loss_of(net, sim.batch(runtime.rank(), step).float())
        guard.scaled(loss).backward()
        if runtime.rank() == 1 and step in (0, 4):
            net.first.weight.grad.fill_(float("inf"))
        optimizer.step()
        skipped.append(guard.step_was_skipped)
    assert skipped == [True, False, False, False, runtime.rank() == 1, False]
    assert (optimizer.num_updates, optimizer.num_syncs) == (6, 2)
    one, two = gathered(net.first.weight.detach())
    assert torch.equal(one, two)


def managed():
    """An OptimManager measures, scales and skips within a replica, and its replicas go on together."""
    net = sim.model().float()
    outer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9), 3)
    manager = OptimManager(loss_scale=4.0)
    schedule = torch.optim.lr_scheduler.StepLR(outer, 1, gamma=0.9)
    manager.add_optimizer(outer, schedule)
    skipped = []
    for step in range(6):
        manager.zero_grad()
        manager.backward(sim.loss_of(net, sim.batch(runtime.rank(), step).float()))
        own = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]) / manager.loss_scale
        norm = manager.clip_grad_norm(outer.param_groups, max_norm=10.0)
        torch.testing.assert_close(norm, own)
        if runtime.rank() == 1 and step == 1:
            net.first.weight.grad.fill_(float("inf"))
        manager.step()
        skipped.append(manager.step_was_skipped)
        if step == 3:
            saved = copy.deepcopy((manager.state_dict(), net.state_dict()))
    assert skipped == [False, runtime.rank() == 1, *[False] * 4]
    assert (outer.num_updates, outer.num_syncs) == (6, 2)
    one, two = gathered(net.first.weight.detach())
    assert torch.equal(one, two)
    again = sim.model().float()
    other = LocalSGD(torch.optim.SGD(again.parameters(), lr=1.0, momentum=0.9), 3)
    resumed = OptimManager(loss_scale=1.0)
    resumed.add_optimizer(other, torch.optim.lr_scheduler.StepLR(other, 1, gamma=0.9))
    again.load_state_dict(saved[1])
    resumed.load_state_dict(saved[0])
    for step in (4, 5):
        resumed.zero_grad()
        resumed.backward(sim.loss_of(again, sim.batch(runtime.rank(), step).float()))
        resumed.clip_grad_norm(other.param_groups, max_norm=10.0)
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True))
    gathered_states = manager.state_dict(gather_opt=True)  # rank 0's replica, for any number of ranks
    resumed.load_state_dict(copy.deepcopy(gathered_states))
    assert (other.num_updates, other.num_syncs) == (6, 2)
    with pytest.raises(ConfigError, match="replicas"):
        resumed.add_optimizer(torch.optim.SGD(sim.model().parameters()))


def different_beginnings():
    """Found, mended and said; shapes that differ are refused everywhere."""
    torch.manual_seed(runtime.rank())
    net = torch.nn.Linear(3, 2)
    optimizer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.0), 5)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    one, two = gathered(net.weight.detach())
    assert torch.equal(one, two)
    other = torch.nn.Linear(3, 2 + runtime.rank())
    with pytest.raises(ConfigError, match=r"parameter 0: \(2, 3\).*in replica 0, \(3, 3\)"):
        LocalSGD(torch.optim.SGD(other.parameters()), 5).outer  # noqa: B018 - the first access starts
    with pytest.raises(ConfigError, match="distributed_world_size is not"):
        BMUF(torch.optim.SGD(net.parameters()), distributed_world_size=3)


def of_fairseq():
    """The methods of its optimizers, and one replica that is let alone."""
    net = sim.model()
    inner = sim.sgd(net)
    optimizer = BMUF(inner, warmup_iterations=2, global_sync_iter=2)
    sim.local_gradients(net, runtime.rank(), 0)
    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
    optimizer.multiply_grads(0.5)
    torch.testing.assert_close(optimizer.clip_grad_norm(0.0), norm / 2)
    optimizer.clip_grad_norm(norm / 4, aggregate_norm_fn=lambda own: own * 1.0)
    torch.testing.assert_close(
        torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]), norm / 4, rtol=1e-5, atol=0
    )
    optimizer.set_lr(0.03)
    assert (optimizer.get_lr(), inner.param_groups[0]["lr"], optimizer.get_num_updates()) == (0.03, 0.03, 0)
    assert optimizer.step(lambda: torch.tensor(7.0)) == 7.0  # fairseq drops what the closure returns
    optimizer.set_num_updates(1)
    saved = optimizer.state_dict()
    optimizer.set_lr(0.5)
    optimizer.load_state_dict(saved)
    assert optimizer.get_lr() == 0.03
    optimizer.load_state_dict(saved, optimizer_overrides={"lr": 0.2, "momentum": 0.0})
    assert (optimizer.get_lr(), inner.param_groups[0]["momentum"], optimizer.num_updates) == (0.2, 0.0, 1)
    assert optimizer.optimizer is inner
    assert all(mine is own for mine, own in zip(optimizer.params, net.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="plain optimizer's state goes into the inner one"):
        optimizer.load_state_dict(inner.state_dict())
    with pytest.raises(ConfigError, match="no count"):
        optimizer.set_num_updates(-1)
    with pytest.raises(ConfigError, match="parameter group is added"):
        optimizer.add_param_group({"params": []})
    alone = BMUF(sim.sgd(net), distributed_world_size=1, warmup_iterations=0, global_sync_iter=1)
    trained(alone, net, 2)
    assert (alone.num_updates, alone.num_syncs) == (2, 0)


def lent():
    """Global weights lent to the model are taken back."""
    net = sim.model()
    optimizer = DiLoCo(sim.sgd(net), 2, split=True)
    trained(optimizer, net, 3)
    own = sim.weights(net)
    with optimizer.global_weights():
        one, two = gathered(net.first.weight.detach())
        assert torch.equal(one, two)
    assert all(torch.equal(a, b) for a, b in zip(own, sim.weights(net), strict=True))


def lent_with_buffers():
    """Buffers are the mean of all, and each replica's own again; nothing is lent in warm-up but replica 0's."""
    for warmup_steps in (0, 9):
        net = sim.model()
        optimizer = DiLoCo(sim.sgd(net), 2, model=net, warmup_steps=warmup_steps, warmup="single")
        trained(optimizer, net, 3)
        own, seen = sim.weights(net), net.seen.clone()
        every, first = gathered(seen), gathered(net.first.weight.detach())[0]
        assert not torch.equal(*every)
        with optimizer.global_weights():
            if warmup_steps:
                assert torch.equal(net.first.weight, first)
            torch.testing.assert_close(net.seen, every[0] if warmup_steps else sum(every) / 2, rtol=1e-14, atol=0)
        assert torch.equal(seen, net.seen)
        assert all(torch.equal(a, b) for a, b in zip(own, sim.weights(net), strict=True))


def frozen_later():
    """Momentum does not move what has rested for a block; what was frozen from the beginning has no global weight."""
    for split in (False, True):
        net = sim.model()
        optimizer = DiLoCo(sim.sgd(net), 2, split=split)
        trained(optimizer, net, 4)
        net.first.weight.requires_grad_(False)
        trained(optimizer, net, 2, first=4)
        before = sim.weights(net)
        trained(optimizer, net, 4, first=6)
        moved = {
            name for (name, value), old in zip(net.named_parameters(), before, strict=True) if (value != old).any()
        }
        assert moved == {name for name, _ in net.named_parameters()} - {"first.weight"}
        net.first.weight.requires_grad_(True)
        trained(optimizer, net, 2, first=10)
        one, two = gathered(net.first.weight.detach())
        assert torch.equal(one, two)
        assert not torch.equal(one, before[0])
    net = sim.model()
    net.first.weight.requires_grad_(False)
    optimizer = DiLoCo(sim.sgd(net), 2)
    trained(optimizer, net, 1)
    net.first.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"1 parameters were unfrozen .*would not synchronise"):
        trained(optimizer, net, 1)


ALL = (
    inner_states, buffers, anomalies, clipped, half_precision, overflow_of_one, managed, different_beginnings,
    of_fairseq, lent, lent_with_buffers, frozen_later,
)  # fmt: skip


@pytest.mark.parametrize("behaviour", ALL, ids=lambda behaviour: behaviour.__name__)
def test_on_two_replicas(ranks, behaviour):
    ranks(2).run(behaviour)


def test_an_anomaly_is_far_above_the_running_mean():
    watch = AnomalyWatch(3.0, 3)
    assert all(watch.passes(norm) for norm in (1.0, 1.2, 0.9, 1.1, 0.01))
    assert not watch.passes(50.0)
    assert watch.passes(1.0)
    assert not watch.passes(float("nan"))
    other = AnomalyWatch(3.0, 3)
    other.load_state_dict(watch.state_dict())
    assert not other.passes(50.0)


def test_what_is_refused():
    net = sim.model()
    with pytest.raises(ConfigError, match="cannot be averaged"):
        LocalSGD(AdamW8bit(sim.model().float().parameters()), inner_state="average")
    with pytest.raises(ConfigError, match="another's inner one"):
        LocalSGD(LocalSGD(sim.sgd(net)))
    with pytest.raises(ConfigError, match="outer learning rate or momentum"):
        DiLoCo(sim.sgd(net), outer_momentum=1.5)
    with pytest.raises(ConfigError, match="units of the inner learning rate"):
        SlowMo(Adafactor(sim.model().float().parameters()))
    with pytest.raises(ConfigError, match="Unknown nbm_mode"):
        BMUF(sim.sgd(net), use_nbm=True, nbm_mode="cntk")
    with pytest.raises(ConfigError, match=r"Unknown warmup 'synchronus' \(did you mean 'synchronous'"):
        OuterPolicy(warmup="synchronus")
    with pytest.raises(ConfigError, match="outer optimizer is no optimizer"):
        OuterOptimizer(sim.sgd(net), lambda params: None).outer  # noqa: B018


def test_one_replica_is_lookahead():
    """Without a process group: the outer step moves towards the fast weights (Zhang et al. 2019, α = 0.5, k = 2)."""
    net, reference = sim.model(), sim.model()
    optimizer = OuterOptimizer(sim.sgd(net), lambda ps: torch.optim.SGD(ps, lr=0.5), OuterPolicy(sync_every=2))
    inner, slow = sim.sgd(reference), sim.weights(reference)
    for step in range(6):
        for each, update in ((net, optimizer), (reference, inner)):
            sim.local_gradients(each, 0, step)
            update.step()
        if step % 2:
            with torch.no_grad():
                for place, parameter in enumerate(reference.parameters()):
                    slow[place] = slow[place] + 0.5 * (parameter - slow[place])
                    parameter.copy_(slow[place])
    for one, other in zip(sim.weights(net), sim.weights(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
