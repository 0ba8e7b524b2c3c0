"""Gradients on their way to the host: the device's memory of few of them is taken at a time."""

import weakref

import torch
from torch import nn

from meshwright.optim import HostWeights
from meshwright.optim.offload_storage import DirectCopies


class Queued(DirectCopies):
    """Copies that a device has yet to wait for; notes whether a tensor was still there when it did."""

    queued = True

    def __init__(self):
        self.waited = []

    def to_host(self, host, device, after, *, held=False):
        super().to_host(host, device, after)
        return Waited(self.waited, device[0]) if held else None


class Waited:
    def __init__(self, log, tensor):
        self.log, self.tensor = log, weakref.ref(tensor)

    def wait(self):
        self.log.append(("device", self.tensor() is not None))

    def synchronize(self):
        self.log.append(("host", self.tensor() is not None))


def test_the_device_waits_for_the_oldest_gradients_and_keeps_them_until_then():
    model, copies = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5))), Queued()
    parameters = list(model.parameters())
    weights = HostWeights(
        parameters, offloaded=set(parameters), in_backward=set(parameters), resident=set(), fp32=True, copies=copies,
        pin_memory=False, disk=None, bucket_bytes=2 * 64,
    )  # fmt: skip
    model(torch.ones(2, 4)).sum().backward()
    assert copies.waited == [("device", True)] * 3, "all but two buckets' bytes"
    weights.collect_gradients()
    assert all(weights.offloaded[parameter].grad is not None for parameter in parameters)
    assert [place for place, _ in copies.waited[3:]] == ["host"] * 5
    model(torch.ones(2, 4)).sum().backward()
    del copies.waited[:]
    weights.zero_grad()
    assert copies.waited == [("host", True)] * 2, "of gradients that nobody collects the host waits"
