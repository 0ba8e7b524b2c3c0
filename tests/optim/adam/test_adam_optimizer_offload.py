import threading

import pytest
import torch
from torch import nn

from meshwright import ModelError
from meshwright.optim import AdamOffloadOptimizer, AdamOptimizer
from meshwright.optim.adam.bucket_update import StagedLink
from tests.optim.helpers import equal, give_gradients, loss_of, net, train, whole


class LateStream:
    """A queue of copies that are done when somebody waits for them, and not before."""

    def __init__(self):
        self.waiting = []

    def add(self, targets, sources):
        assert [t.dtype for t in targets] == [s.dtype for s in sources]  # the bytes travel as they are
        self.waiting.append((targets, sources))
        return LateEvent(self, len(self.waiting))


class LateEvent:
    def __init__(self, stream, number):
        self.stream, self.number = stream, number

    @torch.no_grad()
    def synchronize(self):
        for place in range(self.number):
            if self.stream.waiting[place] is not None:
                torch._foreach_copy_(*self.stream.waiting[place])
                self.stream.waiting[place] = None


class LateCopies:
    """A device on the host, as late as it may be."""

    pinned = False

    def __init__(self):
        self.out, self.back, self.log = LateStream(), LateStream(), []

    def mark(self):
        return "mark"

    def to_host(self, host, device, after):
        assert after == "mark"
        self.log.append("out")
        return self.out.add(host, device)

    def to_device(self, device, host, after):
        assert after == "mark"
        self.log.append("back")
        return self.back.add(device, host)

    def join(self):
        self.log.append("join")
        LateEvent(self.back, len(self.back.waiting)).synchronize()


class Remote(AdamOffloadOptimizer):
    """Takes the host's own memory for a device's."""

    def _make_link(self, device):
        self.copies = LateCopies()
        return StagedLink(self.copies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bucket_elements", [1, 2**24])
def test_the_way_over_the_host_changes_nothing(dtype, bucket_elements):
    alone, model = big(dtype), big(dtype)
    here = AdamOptimizer(alone.parameters(), lr=0.02, weight_decay=0.1)
    remote = Remote(model.parameters(), lr=0.02, weight_decay=0.1, bucket_elements=bucket_elements)
    for step in range(10):
        for each, optim in ((alone, here), (model, remote)):
            give_gradients(each, step)
            optim.step(scale=3.0)
    assert equal(whole(model), whole(alone))
    assert all("master" in remote.state[parameter] for parameter in model.parameters())


def big(dtype):
    """Several buckets of the least size, a tensor with gaps and one that is transposed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 70), nn.Linear(70, 5)).to(dtype)
    model[1].weight = nn.Parameter(torch.randn(70, 5).to(dtype).t())
    model[1].bias = nn.Parameter(torch.randn(5, 3).to(dtype)[:, 1])
    return model


def test_copies_of_the_next_bucket_leave_before_the_last_is_back():
    model = big(torch.bfloat16)
    optim = Remote(model.parameters(), bucket_elements=1)
    give_gradients(model, 0)
    optim.step()
    log = optim.copies.log
    count = log.count("out")
    assert count > 4
    assert log == ["out", *["out", "back"] * (count - 1), "back", "join"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_bytes_are_12_per_element_and_bounded_staging(dtype):
    model = nn.Linear(300, 200).to(dtype)
    elements = sum(parameter.numel() for parameter in model.parameters())
    optim = Remote(model.parameters(), bucket_elements=4096)
    for step in range(3):
        give_gradients(model, step)
        optim.step()
    states = [v for state in optim.state.values() for key, v in state.items() if key != "step"]
    assert sum(tensor.untyped_storage().nbytes() for tensor in states) == 12 * elements
    size = dtype.itemsize
    scratch = 0 if dtype == torch.float32 else 4
    assert optim.staging_bytes == 4096 * (2 * (size + size) + scratch)


def test_parameters_in_host_memory_are_updated_in_place():
    model = net()
    optim = AdamOffloadOptimizer(model.parameters())
    train(model, optim, steps=2)
    assert optim.staging_bytes == 0
    assert not any("master" in state for state in optim.state.values())


@pytest.mark.parametrize("kind", [AdamOffloadOptimizer, Remote])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updating_behind_backward_is_a_step(kind, dtype):
    """Also with accumulated gradients, and for parameters that this backward does not reach."""
    stepped, behind = net(dtype), net(dtype)
    plain = AdamOptimizer(stepped.parameters(), lr=0.02, weight_decay=0.1)
    optim = kind(behind.parameters(), lr=0.02, weight_decay=0.1, bucket_elements=1, record_delta=True)
    hooked = []
    optim.register_step_post_hook(lambda *_: hooked.append(whole(behind)))
    for step in range(10):
        for model in (stepped, behind):
            loss_of(model, 100 + step).backward()
        (loss_of(stepped, step) * 8).backward()
        plain.step(scale=8.0)
        plain.zero_grad()
        with optim.step_in_backward(scale=8.0):
            (loss_of(behind, step) * 8).backward()
        assert all(parameter.grad is None for parameter in behind.parameters())
        behind.last.requires_grad_(step % 3 != 0)
        stepped.last.requires_grad_(step % 3 != 0)
        for model in (stepped, behind):
            if step == 5:
                model.first(torch.ones(1, 7, dtype=dtype)).sum().backward()
    assert equal(whole(behind), whole(stepped))
    assert equal(hooked[-1], whole(stepped))
    assert len(hooked) == 10
    assert optim.get_var_delta() > 0


def behind_backward_sharded():
    stepped, behind = net(sharded=True), net(sharded=True)
    plain = AdamOptimizer(stepped.parameters(), lr=0.02)
    optim = AdamOffloadOptimizer(behind.parameters(), lr=0.02)
    for step in range(10):
        loss_of(stepped, step).backward()
        plain.step()
        plain.zero_grad()
        with optim.step_in_backward():
            loss_of(behind, step).backward()
    assert equal(whole(behind), whole(stepped))
    twice = [loss_of(behind, 0), loss_of(behind, 1)]
    with pytest.raises(ModelError, match="second gradient"), optim.step_in_backward():
        sum(loss.backward() or 0 for loss in twice)


def test_updating_behind_the_backward_of_fsdp2(ranks):
    ranks(2).run(behind_backward_sharded)


def test_an_error_behind_backward_is_raised_and_leaves_no_thread(monkeypatch):
    model = nn.Sequential(nn.Linear(60, 70), nn.Linear(70, 5))
    optim = Remote(model.parameters(), bucket_elements=1)
    give_gradients(model, 0)
    optim.step()
    threads = threading.active_count()

    def broken(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr("meshwright.optim.adam.adam_rule.AdamRule.update", broken)
    with pytest.raises(MemoryError, match="no room"), optim.step_in_backward():
        model(torch.ones(2, 60)).sum().backward()
    give_gradients(model, 1)
    with pytest.raises(MemoryError, match="no room"):
        optim.step()
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError), optim.step_in_backward():
        raise ZeroDivisionError
    assert threading.active_count() == threads
    give_gradients(model, 2)
    optim.step()  # staging buffers of failed steps do not block
    model(torch.ones(2, 60)).sum().backward()  # no hook is left
    assert model[0].weight.grad is not None
