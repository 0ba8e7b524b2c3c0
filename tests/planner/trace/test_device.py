import pytest
import torch
from torch import nn

from meshwright.planner.trace.aten_kernels import device_of_pass
from meshwright.planner.trace.fake_pass import Pass
from meshwright.planner.trace.tracer import stands_in


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


class Narrower(nn.Module):
    """Attention whose values are narrower than its keys, as DeepSeek's."""

    def __init__(self, masked=False):
        super().__init__()
        self.qkv, self.masked = nn.Linear(64, 4 * (24 + 24 + 16)), masked

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (4, 64)).transpose(1, 2)
        query, key, value = heads.split((24, 24, 16), dim=-1)
        mask = torch.ones(128, 128, dtype=torch.bool).tril() if self.masked else None
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, mask, 0.0, mask is None)
        return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_narrower_values_is_fused_as_on_cuda(masked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def traced(device, dtype=None):
        def forward(model, x):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                return model(x)

        return Pass(Narrower(masked), torch.ones(2, 128, 64), forward, device=torch.device(device)).predict()

    here, there = traced("cpu"), traced("cuda")
    (op,) = [op for op in there.ops.outside if op.kind == "attention"]
    assert (op.m, op.n, op.k, op.batch) == (128, 128, (24 + 16) // 2, 2 * 4)
    assert sum(op.operator == "aten.bmm" for op in here.ops.outside) == 2
    assert not any(op.operator == "aten.bmm" for op in there.ops.outside)
    # Scores of all heads are not saved; a mask is, once for all of them.
    scores, mask = 2 * 4 * 128 * 128 * 4, masked * 128 * 128 * 4
    assert here.activations.saved_bytes - there.activations.saved_bytes > 0.8 * scores - mask
    assert {op.dtype for op in traced("cuda", torch.bfloat16).ops.outside if op.kind == "attention"} == {"half"}
