"""Parameters of several dtypes in one unit: adapters over a half-precision or int8 base, complex beside real."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.cost import memory
from meshwright.methods import Fsdp
from meshwright.methods.zero_config import choose_units
from meshwright.planner import measured_state

BATCH = torch.randn(12, 8, 7, generator=torch.Generator().manual_seed(5))


class Adapter(nn.Module):
    """A frozen base of another dtype beside two small layers that train, as peft builds them."""

    def __init__(self, base):
        super().__init__()
        self.down = nn.ModuleDict({"default": nn.Linear(13, 3, bias=False)})
        self.up = nn.ModuleDict({"default": nn.Linear(3, 13, bias=False)})
        if base == "int8":
            self.register_parameter("base", nn.Parameter(torch.randint(-99, 99, (13, 13)).to(torch.int8), False))
            self.scale = nn.Parameter(torch.full((13, 1), 0.003), requires_grad=False)
        else:
            self.base = nn.Parameter(torch.randn(13, 13).mul_(0.2).to(base), requires_grad=False)

    def forward(self, x):
        weight = self.base.to(x.dtype)
        if self.base.dtype == torch.int8:
            weight = weight * self.scale.to(x.dtype)
        return torch.tanh(F.linear(x, weight) + self.up["default"](self.down["default"](x)))


class Mix(nn.Module):
    """A complex filter beside a real layer."""

    def __init__(self):
        super().__init__()
        self.real = nn.Linear(13, 13)
        self.filter = Filter()

    def forward(self, x):
        return torch.tanh(self.real(x)) + self.filter(x)


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, dtype=torch.complex64) * 0.3)

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight, n=13).to(x.dtype)


class Half(nn.Module):
    """A half-precision layer and a normalisation in fp32, both of which train."""

    def __init__(self):
        super().__init__()
        self.real, self.norm = nn.Linear(13, 13).bfloat16(), nn.LayerNorm(13)

    def forward(self, x):
        return self.norm(torch.tanh(self.real(x.bfloat16())).float()).to(x.dtype)


BLOCKS = {
    "bf16": lambda: Adapter(torch.bfloat16), "int8": lambda: Adapter("int8"), "complex": Mix, "half": Half,
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.last = nn.Linear(7, 13), nn.Linear(13, 3)
        self.layers = nn.ModuleList(BLOCKS[kind]() for _ in range(3))
        if kind in ("bf16", "int8"):
            self.first.requires_grad_(False).to(torch.bfloat16 if kind == "bf16" else torch.float32)

    def forward(self, x):
        x = self.first(x.to(self.first.weight.dtype)).float()
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def build(kind):
    torch.manual_seed(1)
    return Model(kind)


def loss_func(inputs, output):
    return output.float().square().mean()


def optimizer(params):
    return torch.optim.AdamW([p for p in params if p.requires_grad], lr=0.01)


def plain(kind):
    model = build(kind)
    optim, losses = optimizer(model.parameters()), []
    for batch in BATCH:
        optim.zero_grad()
        loss = loss_func(None, model(batch))
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(strategy, kind, **options):
    job = mw.accelerate(
        build(kind), optimizer, None, loss_func, strategy=strategy, sample_batch=BATCH[0, :2], batch_size=8, **options
    )
    losses = [job.step(batch.chunk(mw.world_size())[mw.rank()]).loss.item() for batch in BATCH]
    predicted = memory(job.plan.step, job._job.coordinate)
    for name, size in measured_state(job.model, job.optim).items():
        assert getattr(predicted, name) == size, (kind, strategy, name)
    return losses, {name: parameter.full_tensor().detach() for name, parameter in job.model.named_parameters()}


def train_each(cases):
    return [train(*case) for case in cases]


STRATEGIES = [["zero1"], ["zero2"], ["fsdp"], [("fsdp", {"wrap_trainable_outmost": True}), "checkpoint"]]


SHORT = ("half", "int8")  # tests/methods/test_complex.py trains complex ones too


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in SHORT else pytest.mark.long) for k in BLOCKS])
def test_units_of_several_dtypes_train_as_one_process_does(ranks, kind):
    expected, weights = plain(kind)
    tolerance = 1e-5 if kind != "half" else 1e-2  # the bf16 weights round sums of other orders
    for every in ranks(2).run(train_each, [(strategy, kind) for strategy in STRATEGIES]):
        for losses, own in every:
            torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)
            for name, value in own.items():
                assert value.dtype == weights[name].dtype
                if kind != "half":
                    torch.testing.assert_close(value, weights[name], rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.long), "complex", "bf16"])
def test_units_of_several_dtypes_train_in_mixed_precision(ranks, kind):
    expected, _ = plain(kind)
    for ((losses, own),) in ranks(2).run(train_each, [(["fsdp", ("amp_native", "bf16")], kind)]):
        torch.testing.assert_close(losses, expected, rtol=0.05, atol=0)
        assert own["layers.0.base" if kind != "complex" else "layers.0.filter.weight"].dtype == {
            "int8": torch.int8, "complex": torch.complex64, "bf16": torch.bfloat16,
        }[kind]  # fmt: skip


def test_complex_modules_are_units_of_their_own():
    model = build("complex")
    units = choose_units(Fsdp(), model)
    assert units.apart == [(f"layers.{index}", [model.layers[index].filter]) for index in range(3)]
    assert not choose_units(Fsdp(), build("bf16")).apart


def test_what_no_module_tells_apart_is_refused():
    model = build("complex")
    model.layers[1].real.bias = nn.Parameter(torch.zeros(13, dtype=torch.complex64))
    with pytest.raises(mw.ModelError, match=r"different dtypes.*layers\.1: .*layers\.1\.real\.bias"):
        choose_units(Fsdp(), model)
    tied = build("complex")
    tied.layers[0].twin = nn.Module()
    tied.layers[0].twin.weight, tied.layers[0].twin.more = tied.layers[0].filter.weight, nn.Linear(2, 2)
    assert choose_units(Fsdp(), tied).apart[0] == ("layers.0", [tied.layers[0].real, tied.layers[0].twin.more])
    tied.layers[0].twin.more.bias = tied.layers[0].real.bias
    tied.layers[0].real.weight = nn.Parameter(torch.zeros(13, 13, dtype=torch.complex64))
    with pytest.raises(mw.ModelError, match=r"different dtypes"):
        choose_units(Fsdp(), tied)


def gathered_in_codes(kind, *precision):
    losses, _ = train(["fsdp", ("comm", {"all_gather": "int8", "min_numel": 0}), *precision], kind)
    return losses[-1]


def test_weights_of_several_dtypes_are_not_encoded_together(ranks):
    for kind in ("bf16", "int8"):
        with pytest.raises(AssertionError, match="comm: all_gather encodes weights of one dtype"):
            ranks(2).run(gathered_in_codes, kind)
    for kind, *precision in (("complex",), ("bf16", ("amp_native", "bf16"))):
        expected = plain(kind)[0][-1]
        for loss in ranks(2).run(gathered_in_codes, kind, *precision):
            assert abs(loss - expected) < 0.05 * expected
