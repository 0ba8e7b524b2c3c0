"""Linear layers in 8 bits against the formulas written out by hand, and what may not change their state."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from meshwright.nn.fp8 import DelayedScaling, Fp8Linear, Fp8Options, to_fp8, to_plain, update_scales

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def layer(recipe=None, *, emulate=True, keep_weight=True, bias=True, sizes=(16, 32)):
    torch.manual_seed(0)
    return to_fp8(nn.Linear(*sizes, bias=bias), Fp8Options(recipe or DelayedScaling(), emulate, keep_weight))


def conv1d(linear):
    """The same layer with a weight (in, out), as GPT-2 has it."""
    outputs, inputs = linear.weight.shape
    made = Conv1D(outputs, inputs)
    with torch.no_grad():
        made.weight.copy_(linear.weight.t())
        made.bias.copy_(linear.bias)
    return to_fp8(made, linear.fp8)


def numbers(bits):
    return bits.view(torch.float32)


class ByHand:
    """Delayed scaling in plain words: numbers, lists and fp32 products."""

    def __init__(self, recipe):
        self.recipe = recipe
        self.formats = [E4M3, E4M3, E5M2 if recipe.fp8_format == "HYBRID" else E4M3]
        self.scales, self.histories, self.updates = [0.0] * 3, [[], [], []], 0

    def rounded(self, tensor, role):
        amax = tensor.abs().max()
        scale = torch.tensor(self.scales[role])
        if scale == 0:  # the largest power of two that is not too large
            scale = torch.tensor(2.0) ** torch.log2(LARGEST[self.formats[role]] / amax / 2**self.recipe.margin).floor()
        limit = LARGEST[self.formats[role]]
        return (tensor * scale).clamp(-limit, limit).to(self.formats[role]).float(), 1 / scale

    def step(self, x, weight, gradient):
        """Output and gradients of one micro-batch."""
        (x8, x_inverse), (w8, w_inverse), (g8, g_inverse) = (
            self.rounded(tensor, role) for role, tensor in enumerate((x, weight, gradient))
        )
        return (
            (x8 @ w8.t()) * (x_inverse * w_inverse), (g8 @ w8) * (g_inverse * w_inverse),
            (g8.t() @ x8) * (g_inverse * x_inverse),
        )  # fmt: skip

    def update(self, largest):
        for role, amax in enumerate(largest):
            history = self.histories[role] = [float(amax), *self.histories[role]][: self.recipe.amax_history_len]
            used = history[0] if self.recipe.amax_compute_algo == "most_recent" else max(history)
            if self.updates % self.recipe.interval == 0 and used > 0:
                limit = torch.tensor(LARGEST[self.formats[role]])
                self.scales[role] = (limit / torch.tensor(used) / 2.0**self.recipe.margin).item()
        self.updates += 1


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=2),
        DelayedScaling(margin=2, interval=2, fp8_format="E4M3"),
        DelayedScaling(amax_compute_algo="most_recent", interval=3, amax_history_len=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("keep_weight", [True, False])
def test_the_formulas_to_the_bit(recipe, keep_weight):
    linear, expected = layer(recipe, keep_weight=keep_weight), ByHand(recipe)
    generator = torch.Generator().manual_seed(3)
    for step in range(5):
        largest = [0.0, linear.weight.detach().abs().max(), 0.0]
        linear.zero_grad()
        total = torch.zeros_like(linear.weight)
        for _ in range(2):  # micro-batches, of rows that fill no tile
            x = torch.randn(2, 5, 16, generator=generator) * 4.0 ** (step % 3)
            gradient = torch.randn(10, 32, generator=generator) * 1e-7
            x.requires_grad_()
            output = linear(x)
            output.backward(gradient.view(2, 5, 32))
            wanted, of_input, of_weight = expected.step(x.detach().view(10, 16), linear.weight.detach(), gradient)
            total = total + of_weight
            torch.testing.assert_close(output.view(10, 32), wanted + linear.bias, rtol=0, atol=0)
            torch.testing.assert_close(x.grad.view(10, 16), of_input, rtol=0, atol=0)
            largest = [max(largest[0], x.detach().abs().max()), largest[1], max(largest[2], gradient.abs().max())]
        torch.testing.assert_close(linear.weight.grad, total, rtol=1e-6, atol=0)  # sums in rows filled up
        expected.update(largest)
        update_scales([linear])
        assert numbers(linear.fp8_scale).tolist() == expected.scales
        assert numbers(linear.fp8_amax_history)[:, : recipe.amax_history_len].tolist() == [
            [*history, *[0.0] * (recipe.amax_history_len - len(history))] for history in expected.histories
        ]
        with torch.no_grad():
            linear.weight.mul_(1.25)


def test_hardware_products_are_given_the_same_numbers():
    """torch's scaled product runs on a CPU too: operands, scales and their order are those of a GPU."""
    x, gradient = torch.randn(20, 16), torch.randn(20, 32)
    results = []
    for emulate in (True, False):
        linear = layer(emulate=emulate)
        for _ in range(2):
            linear.zero_grad()
            x.requires_grad_().grad = None
            output = linear(x)
            output.backward(gradient)
            update_scales([linear])
        results.append((output, x.grad.clone(), linear.weight.grad))
    for emulated, real in zip(*results, strict=True):
        torch.testing.assert_close(emulated, real, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("made", [lambda linear: linear, conv1d], ids=["linear", "conv1d"])
def test_operands_lie_as_the_tensor_cores_want_them(monkeypatch, made):
    seen = []

    def product(left, right, **options):
        seen.append((left.stride(), right.stride(), left.shape[1], right.shape[1], left.dtype, right.dtype))
        return torch.zeros(left.shape[0], right.shape[1], dtype=options["out_dtype"])

    monkeypatch.setattr("meshwright.nn.fp8.scaled_mm", product)
    made(layer(emulate=False))(torch.randn(7, 16, requires_grad=True)).sum().backward()
    assert len(seen) == 3
    for (_, along), (first, _), inner, columns, *_ in seen:
        assert along == first == 1  # row order by column order
        assert inner % 16 == columns % 16 == 0
    of_weight = (E4M3, E5M2) if made is conv1d else (E5M2, E4M3)  # cuBLAS has products of both
    assert [each[4:] for each in seen] == [(E4M3, E4M3), (E5M2, E4M3), of_weight]


@pytest.mark.parametrize("keep_weight", [True, False])
@pytest.mark.parametrize("rows", [1, 20])
def test_operands_lie_so_whatever_the_strides_of_the_tensors(monkeypatch, rows, keep_weight):
    seen, by_hand = [], layer(keep_weight=keep_weight)

    def product(left, right, **options):
        seen.append((left, right))
        return options["scale_a"] * options["scale_b"] * (left.float() @ right.float())

    monkeypatch.setattr("meshwright.nn.fp8.scaled_mm", product)
    torch.manual_seed(0)
    plain = nn.Linear(16, 32)
    plain.weight = nn.Parameter(plain.weight.detach().t().contiguous().t())
    linear = to_fp8(plain, Fp8Options(DelayedScaling(), emulate=False, keep_weight=keep_weight))
    x, gradient = torch.randn(16, rows).t(), torch.randn(32, rows).t()
    results = []
    for each in (linear, by_hand):
        inputs = x.detach().requires_grad_()
        output = each(inputs)
        output.backward(gradient)
        results.append((output, inputs.grad, each.weight.grad))
    for left, right in seen:
        assert left.stride() == (left.shape[1], 1)
        assert right.stride() == (1, right.shape[0])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_what_is_kept_changes_only_where_it_must():
    linear, x = layer(), torch.randn(4, 16)
    casts = []
    plain_cast = linear.cast
    linear.cast = lambda tensor, role, record: (casts.append(role), plain_cast(tensor, role, record=record))[1]
    linear(x)
    linear(x)  # a second micro-batch, or recomputation
    assert casts.count(1) == 1
    noted = numbers(linear.fp8_amax).clone()
    assert noted.tolist() == [x.abs().max(), linear.weight.abs().max(), 0.0]
    with torch.no_grad():
        linear.weight.data.mul_(2)  # leaves no trace
        doubled = linear(100 * x)
    torch.testing.assert_close(doubled, (100 * x) @ linear.weight.t() + linear.bias, rtol=0.1, atol=10)
    assert torch.equal(numbers(linear.fp8_amax), noted)
    update_scales([linear])
    linear(x)
    assert casts.count(1) == 3
    with torch.no_grad():
        linear.weight.add_(1)
    linear(x)
    assert casts.count(1) == 4


def test_overflow_shows_and_stays_out_of_the_history():
    linear = layer()
    for bad in (float("inf"), float("nan")):
        x = torch.randn(4, 16)
        x[1, 2] = bad
        assert not torch.isfinite(linear(x)).any()
        output = linear(torch.randn(4, 16, requires_grad=True))
        output.backward(torch.full_like(output, bad))
        assert not torch.isfinite(linear.weight.grad).any()
    assert numbers(linear.fp8_amax)[2] == 0
    update_scales([linear])
    scale = numbers(linear.fp8_scale)
    assert torch.isfinite(scale).all()
    assert scale[2] == 0  # no gradient has been seen yet
    assert torch.isfinite(linear(torch.randn(4, 16))).all()


def test_types_and_shapes_are_those_of_a_plain_layer():
    linear = layer().bfloat16()
    assert linear.fp8_scale.dtype == torch.int32  # bits of fp32, which no cast touches
    linear(torch.randn(3, 16, dtype=torch.bfloat16)).sum().backward()
    assert linear.weight.grad.dtype == torch.bfloat16
    linear = layer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = linear(torch.randn(2, 3, 16))
    assert (output.dtype, output.shape) == (torch.bfloat16, (2, 3, 32))
    assert linear(torch.randn(0, 16)).shape == (0, 32)
    assert linear(torch.randn(16)).shape == (32,)
    assert "fp8=HYBRID" in repr(linear)


def test_frozen_weights_get_no_gradient_and_keep_no_input():
    linear = layer()
    linear.requires_grad_(False)
    saved = []
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.shape), t)[1], lambda t: t):
        linear(x).sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None
    assert (4, 16) not in saved


@pytest.mark.parametrize("keep_weight", [True, False])
def test_a_weight_that_is_in_by_out_gives_the_same_numbers(keep_weight):
    linear = layer(keep_weight=keep_weight)
    other = conv1d(linear)
    for step in range(3):
        torch.manual_seed(step)
        x, gradient = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 5, 32)
        results = []
        for each in (linear, other):
            x.grad = None
            each.zero_grad()
            output = each(x)
            output.backward(gradient)
            update_scales([each])
            results.append((output, x.grad.clone(), each.weight.grad, each.bias.grad, each.fp8_amax_history.clone()))
        (output, of_input, of_weight, of_bias, history), (*theirs, seen) = results
        for mine, found in zip((output, of_input, of_weight.t(), of_bias), theirs, strict=True):
            torch.testing.assert_close(found, mine, rtol=1e-6, atol=1e-6)
        assert torch.equal(history, seen)
    assert other(torch.randn(0, 16)).shape == (0, 32)


def test_conv1d_there_and_back():
    plain = Conv1D(32, 16)
    before = copy.deepcopy(plain)
    changed = to_fp8(plain, Fp8Options(DelayedScaling(), True, True))
    assert isinstance(changed, Conv1D)
    assert "fp8=HYBRID" in repr(changed)
    to_plain(changed)
    assert type(plain) is Conv1D
    x = torch.randn(2, 16)
    assert torch.equal(plain(x), before(x))


def test_there_and_back():
    plain = nn.Linear(16, 32)
    before = copy.deepcopy(plain)
    linear = to_fp8(plain, Fp8Options(DelayedScaling(), True, True))
    assert isinstance(linear, Fp8Linear)
    assert set(linear.state_dict()) - set(before.state_dict()) == {"fp8_amax_history", "fp8_scale", "fp8_num_updates"}
    to_plain(linear)
    x = torch.randn(2, 16)
    assert type(plain) is nn.Linear
    assert plain.state_dict().keys() == before.state_dict().keys()
    assert torch.equal(plain(x), before(x))


@pytest.mark.long  # the numbers are those of the tests above
def test_a_compiled_layer_computes_the_same():
    def run(compiled):
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        torch.manual_seed(1)
        model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
        layers = [to_fp8(model[index], Fp8Options(DelayedScaling(), True, True)) for index in (0, 2)]
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        losses = []
        for step in range(4):
            x = torch.randn(6, 16, generator=torch.Generator().manual_seed(step))
            loss = (call(x) - 1).square().mean()
            loss.backward()
            update_scales(layers)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [numbers(each.fp8_scale).tolist() for each in layers]

    assert run(True) == run(False)
