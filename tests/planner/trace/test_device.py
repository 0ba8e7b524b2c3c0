import torch
from torch import nn

from meshwright.planner.trace.aten_kernels import device_of_pass, stands_in
from meshwright.planner.trace.fake_pass import Pass


def test_a_model_on_the_host_is_traced_on_the_device_that_it_will_train_on(monkeypatch):
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    for place in ("cpu", "meta"):
        model = nn.Linear(2, 2, device=place)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert device_of_pass(model, cuda) == cuda
        assert stands_in(model, cuda) is None
        assert device_of_pass(model, cpu) == cpu
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert device_of_pass(model, cuda) == cpu
        assert "no cuda device here" in stands_in(model, cuda)


def test_dropout_is_one_kernel_with_a_mask_of_bytes_as_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    elements = 4 * 8

    def traced(device):
        return Pass(model, torch.ones(4, 8), lambda net, x: net(x), device=torch.device(device)).predict()

    here, there = traced("cpu"), traced("cuda")
    moved = {op.operator: op.num_bytes for op in there.ops.outside if op.kind == "move"}
    assert moved["aten.native_dropout"] == (4 + 4 + 1) * elements
    assert "aten.bernoulli_" not in moved
    assert here.activations.saved_bytes - there.activations.saved_bytes == 3 * elements
    model.eval()
    assert "aten.native_dropout" not in {op.operator for op in traced("cuda").ops.outside}
