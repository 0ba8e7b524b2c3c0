"""Ranks that run different layers where they are sharded: told on all of them, and nothing else is."""

import types

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.methods import zero as gather_order_check
from meshwright.training.accelerated import MeanLoss
from tests.hosts import host_memory

ALL = (0, 1, 2, 3)


class Dropping(nn.Module):
    """Runs the layers that ``runs`` says, one call after the other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in ALL)
        self.last = nn.Linear(16, 3)
        self.__dict__["runs"] = []

    def forward(self, x):
        x = self.first(x)
        for place in self.runs.pop(0) if self.runs else ALL:
            x = self.layers[place](x)
        return self.last(x)


def accelerated(strategy, model=None, micro=1):
    torch.manual_seed(0)
    return mw.accelerate(
        model or Dropping(), torch.optim.SGD, None, lambda x, out: out.square().mean(), strategy=strategy,
        optim_args={"lr": 0.1}, num_micro_batches=micro, sample_batch=torch.ones(2, 7), batch_size=16,
    )  # fmt: skip


def batch(size=4):
    return torch.randn(size, 7, generator=torch.Generator().manual_seed(mw.rank()))


def whole(model):
    return torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])


def told(strategy, runs, micro, by_hand=False):
    """What comes of a step in which the last rank runs the second of two lists of layers, and of one after it."""
    job = accelerated(strategy, micro=micro)
    before = whole(job.model)
    job.model.runs.extend(runs[mw.rank() == mw.world_size() - 1])
    try:
        step_by_hand(job, micro) if by_hand else job.step(batch())
    except mw.ModelError as error:
        assert torch.equal(whole(job.model), before)
        found = str(error)
    else:
        found = "nothing"
    job.model.runs.clear()
    job.step(batch())
    return found


def step_by_hand(job, micro):
    job.optim.zero_grad()
    for index, part in enumerate(batch().chunk(micro)):
        with job._job.micro_batch(index == micro - 1):
            job.loss_func(part, job.model(part)).backward()
    job.optim.step()


ONE_LEFT_OUT = [[(0, 1, 3)], [(0, 2, 3)]]
IN_THE_FIRST = [[(0, 1, 3), ALL], [(0, 2, 3), ALL]]
IN_THE_SECOND = [[ALL, (0, 1, 3)], [ALL, (0, 2, 3)]]
GATHERED = "layers.1 on rank 0 and layers.2 on rank 1 as exchange 3,"
GATHERED_LATER = "layers.1 on rank 0 and layers.2 on rank 1 as exchange 20,"
REDUCED = "the gradient of layers.1.0.weight on rank 0 and the gradient of layers.2.0.weight on rank 1 as exchange "
APART = [
    (["zero1"], [[ALL], [(0, 2, 1, 3)]], GATHERED),
    (["zero1"], IN_THE_FIRST, GATHERED),
    (["zero1"], IN_THE_SECOND, REDUCED),
    (["zero2"], IN_THE_SECOND, REDUCED),
    (["fsdp"], ONE_LEFT_OUT, GATHERED),
    (["fsdp", "checkpoint"], IN_THE_SECOND, GATHERED_LATER),
    (["fsdp", ("compile", {"backend": "eager"})], IN_THE_SECOND, GATHERED_LATER),
]


def told_each(cases, shared):
    with host_memory(shared):
        return [told(strategy, runs, len(runs[0])) for strategy, runs in cases]


@pytest.mark.parametrize("shared", [True, False])
def test_other_layers_are_told_on_every_rank_before_weights_change(ranks, shared):
    for every in ranks(2).run(told_each, [case[:2] for case in APART], shared):
        for found, (*case, expected) in zip(every, APART, strict=True):
            assert "The ranks have run different layers" in found, case
            assert expected in found, case
            assert "in this step, which has changed no weight" in found, case


def test_of_four_ranks_one_has_run_others(ranks):
    case = ["zero2", ("parallel_mode", {"zero": 2, "data": 2})], ONE_LEFT_OUT
    for shared in (True, False):
        for (found,) in ranks(4).run(told_each, [case], shared):
            assert "layers.1 on rank 0 and layers.2 on rank 3 as exchange 3," in found


def test_a_loop_written_by_hand_is_told_before_its_update(ranks):
    for found in ranks(2).run(told, ["fsdp"], IN_THE_SECOND, 2, by_hand=True):
        assert "layers.1 on rank 0 and layers.2 on rank 1" in found
        assert "which has changed no weight" in found


def trained(strategy, calls):
    """Weights after steps whose calls run other layers on rank 0, beside those of one process."""
    job, plain, runs = accelerated(strategy, micro=3), Dropping(), []
    plain.load_state_dict({name: p.full_tensor() for name, p in job.model.state_dict().items()})
    optim = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        job.model.runs.extend(calls[mw.rank()])
        job.step(batch(6))
        runs += [calls[rank][part] for rank in range(2) for part in range(3)]
        optim.zero_grad()
        for rank in range(2):
            for part in torch.randn(6, 7, generator=torch.Generator().manual_seed(rank)).chunk(3):
                plain.runs.append(runs.pop(0))
                (plain(part).square().mean() / 6).backward()
        optim.step()
    return (whole(job.model) - torch.cat([p.detach().flatten() for p in plain.parameters()])).abs().max().item()


def test_what_is_not_exchanged_may_differ(ranks):
    # zero1 keeps weights gathered and reduces in the last micro-batch alone: a layer left out before it harms nobody.
    for off in ranks(2).run(trained, ["zero1"], [[ALL, (0, 1, 3), ALL], [ALL] * 3]):
        assert off < 1e-6


class Several(Dropping):
    """Looks at its input first without gradients, as often as the rank likes; half of it is frozen."""

    def __init__(self):
        super().__init__()
        self.layers[:2].requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for _ in range(1 + mw.rank() if torch.is_grad_enabled() else 1):
                x = x + super().forward(x).mean()
        return super().forward(x) + super().forward(-x)


def without_alarm(strategy):
    job = accelerated(strategy, Several())
    for _ in range(3):
        job.evaluate(batch())
        with torch.no_grad():
            job.model(batch())
            if mw.rank() == 0:  # what is gathered already is looked at alone
                job.model(batch())
        step_by_hand(job, 2)
        job.step(batch())
        job.dry_run(batch())
    return job.step(batch()).loss.item()


@pytest.mark.parametrize("strategy", [["zero1"], ["zero2"]], ids=str)
def test_ranks_may_look_alone_at_what_they_have_gathered(ranks, strategy):
    one, other = ranks(2).run(without_alarm, strategy)
    assert one == other


def test_a_gpu_is_asked_for_the_last_step(monkeypatch):
    monkeypatch.setattr(gather_order_check, "HostCopy", lambda sums: sums.cpu)
    monkeypatch.setattr(gather_order_check.GatherOrderCheck, "_where_apart", lambda self, order: str(order))
    orders = [b"one", b"two", b"three"]
    exchanges = types.SimpleNamespace(take=lambda: orders.pop(0))
    watch = gather_order_check.GatherOrderCheck(types.SimpleNamespace(size=lambda axis: 2), exchanges)

    def on_gpu(numbers):
        sums = torch.tensor(numbers, dtype=torch.float32) * 8  # 2 along each of 3 axes
        return types.SimpleNamespace(device=torch.device("cuda"), cpu=sums)

    watch.check(on_gpu(watch.numbers()))
    watch.check(on_gpu([number + 1 for number in watch.numbers()]))
    numbers = watch.numbers()
    with pytest.raises(mw.ModelError, match="b'two', in the last step, after which weights are wrong"):
        watch.check(on_gpu(numbers))


def test_of_thousands_of_ranks_one_that_ran_others_is_told(monkeypatch):
    monkeypatch.setattr(gather_order_check.GatherOrderCheck, "_where_apart", lambda self, order: str(order))
    orders = iter(number.to_bytes(4) for number in range(3000))
    exchanges = types.SimpleNamespace(take=lambda: next(orders))
    watch = gather_order_check.GatherOrderCheck(
        types.SimpleNamespace(size=lambda axis: 16), exchanges
    )  # 16 along each of 3 axes
    other = torch.tensor(watch.numbers(), dtype=torch.float32) * 16**3
    for _ in range(2999):  # as if all others had run the first
        watch.numbers()
        with pytest.raises(mw.ModelError, match="different layers"):
            watch.check(other)


UNEVEN = (7, 13, 14, 15, 26, 28, 30, 56, 60, 120, 240, 1000)  # divided by as a GPU does, multiples of them are off


def divide_as_gpus_do(monkeypatch):
    """Let tensors divide by a number as CUDA's kernels do: multiplying by its inverse, rounded to fp32."""

    def divided(self, other, into=torch.mul):
        return into(self, torch.tensor(1 / other, dtype=self.dtype).item())

    monkeypatch.setattr(torch.Tensor, "__truediv__", divided)
    monkeypatch.setattr(torch.Tensor, "__itruediv__", lambda self, other: divided(self, other, torch.Tensor.mul_))
    assert torch.tensor(7.0 * 25) / 7 != 25


class Alike:
    """The mesh of one of many ranks along ``data``, all of which have the same numbers."""

    def __init__(self, num_ranks, monkeypatch):
        self.num_ranks = num_ranks
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: tensor.mul_(group))

    def size(self, axis):
        return self.num_ranks if axis == "data" else 1

    def require_mesh(self):
        return types.SimpleNamespace(get_group=lambda axis: self.num_ranks, device_type="cpu")


@pytest.mark.parametrize("num_ranks", UNEVEN)
def test_numbers_are_compared_without_dividing_them(monkeypatch, num_ranks):
    divide_as_gpus_do(monkeypatch)
    ranks, orders = Alike(num_ranks, monkeypatch), iter(number.to_bytes(4, "little") for number in range(200))
    log = types.SimpleNamespace(take=lambda: next(orders), is_any=lambda: True)
    watch = gather_order_check.GatherOrderCheck(ranks, log)
    monkeypatch.setattr(watch, "_where_apart", lambda order: "a false alarm")
    for _ in range(100):
        watch.before_update()
    job = types.SimpleNamespace(mesh_axes=ranks, size=ranks.size, gather_order_check=watch)
    for epoch in range(100):
        loss = MeanLoss(job, types.SimpleNamespace(epoch=epoch))(torch.tensor(2.0))
        assert abs(loss - 2.0) < 1e-6


def out_of_step(epochs):
    try:
        MeanLoss(accelerated(["zero1"])._job, types.SimpleNamespace(epoch=epochs[mw.rank()]))(torch.tensor(2.0))
    except mw.DataError as error:
        return str(error)


def test_the_rank_in_the_mean_of_all_epochs_is_told_too(ranks):
    for rank, found in enumerate(ranks(3).run(out_of_step, (0, 1, 2))):
        assert f"epoch {rank} on this rank, 1 on average" in found


def alike_after_all():
    job = accelerated(["fsdp"])
    job.step(batch())
    check = job._job.gather_order_check
    check.check(torch.tensor(check.numbers(), dtype=torch.float32) * 2 + 1)  # as if a sum were wrong
    return job.step(batch()).loss.item()


def test_a_wrong_sum_of_equal_orders_ends_and_stops_nobody(ranks):
    one, other = ranks(2).run(alike_after_all)
    assert one == other
