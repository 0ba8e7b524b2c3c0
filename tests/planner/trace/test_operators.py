"""Single operators, and a block whose bytes are counted by hand."""

import collections

import torch
from torch import nn

import meshwright as mw
from meshwright.cost import Op, pass_flops
from meshwright.planner.trace.aten_kernels import kernels_of, tensor_bytes
from meshwright.planner.trace.fake_pass import Pass

aten = torch.ops.aten
N, H, F = 6, 4, 10  # rows, width, wider


def kernels(function, *args, **kwargs):
    return kernels_of(function, args, kwargs, function(*args, **kwargs))


def test_what_launches_nothing():
    x = torch.ones(2, 3)
    assert kernels(aten.t.default, x) == kernels(aten.view.default, x, [3, 2]) == ()
    assert kernels(aten.expand.default, x, [4, 2, 3]) == kernels(aten.empty_like.default, x) == ()


def test_bytes_are_read_and_written_once():
    x = torch.ones(2, 3)
    assert kernels(aten.add.Tensor, x, x.expand(2, 3)) == (Op("move", num_bytes=3 * 24, moment="forward"),)
    assert kernels(aten.add.Tensor, x, torch.ones(3).expand(2, 3))[0].num_bytes == 24 + 12 + 24
    assert kernels(aten.zero_.default, x)[0].num_bytes == 24
    assert kernels(aten.copy_.default, x, x.half())[0].num_bytes == 12 + 24
    rows = kernels(aten.embedding.default, torch.ones(1000, 5), torch.tensor([1, 7]))[0]
    assert rows.num_bytes == 2 * (2 * 5 * 4) + 2 * 8  # of the table no more than is returned
    assert tensor_bytes(torch.ones(1, 3).expand(7, 3)) == 12


def test_products_and_attention_by_their_dims():
    half = torch.ones(4, 6, dtype=torch.bfloat16)
    (product,) = kernels(aten.mm.default, half, half.t())
    assert (product.m, product.n, product.k, product.dtype) == (4, 4, 6, "half")
    image, filters = torch.ones(2, 3, 8, 8), torch.ones(5, 3, 4, 4)
    given = (None, [4, 4], [0, 0], [1, 1], False, [0, 0], 1)
    (convolution,) = kernels(aten.convolution.default, image, filters, *given)
    assert (convolution.m, convolution.n, convolution.k) == (2 * 4, 5, 3 * 16)
    # As torch calls it where padding is "valid".
    assert kernels(aten.convolution.default, image, filters, None, [4, 4], [0], [1, 1], False, [0], 1) == (convolution,)
    made = aten.convolution(image, filters, *given)
    backward = (made, image, filters, [5], *given[1:])
    assert len(kernels(aten.convolution_backward.default, *backward, [False, True, True])) == 1
    assert [op.flops for op in kernels(aten.convolution_backward.default, *backward, [True, True, False])] == [
        convolution.flops
    ] * 2
    heads = torch.ones(2, 3, 8, 4)
    (attention,) = kernels(aten._scaled_dot_product_flash_attention_for_cpu.default, heads, heads, heads, 0.0, True)
    assert attention == Op("attention", 8, 8, 4, 6, dtype="fp32", causal=True, moment="forward")
    assert attention.flops == 4 * 6 * 8 * 8 * 4 // 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, F), nn.GELU())
        self.layers = nn.ModuleList([layers])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_a_block_by_hand():
    found = Pass(Net(), torch.ones(N, H), lambda model, x: model(x)).predict()
    ((path, ops),) = found.ops.by_path.items()
    assert path == "layers.0"
    moved = collections.Counter((op.moment, op.num_bytes // 4) for op in ops for _ in range(op.count) if not op.flops)
    norm, wide = N * H, N * F
    assert moved == {
        ("forward", (norm + 2 * H) + (norm + 2 * N)): 1,  # normalisation: rows' means and deviations beside them
        ("forward", 2 * wide): 1,
        ("backward", 1 + 2 * wide): 1,  # the sum's gradient is one number
        ("backward", wide + F): 1,  # of the bias
        ("backward", (2 * norm + 2 * N + 2 * H) + 2 * H): 1,  # the input needs no gradient
    }
    products = collections.Counter((op.moment, op.m, op.n, op.k) for op in ops if op.flops)
    assert products == {("forward", N, F, H): 1, ("backward", N, H, F): 1, ("backward", F, H, N): 1}
    assert sum(sum(pass_flops(op)) for op in ops) == 3 * 2 * N * F * H == found.flops
    (product,) = [op for op in ops if op.moment == "forward" and op.kind == "matmul"]
    assert "torch.nn.modules.linear.Linear" in product.inside
    # Its own inputs are saved before it runs, its result behind it, by the activation: recomputing the block comes
    # by it, recomputing the layer alone need not.
    assert "torch.nn.modules.container.Sequential" in product.needed_in
    assert "torch.nn.modules.linear.Linear" not in product.needed_in


def test_frozen_layers_have_no_backward():
    net = Net().requires_grad_(False)
    with torch.no_grad():
        net.layers[0][1].bias.requires_grad_(True)
    found = Pass(net, torch.ones(N, H), lambda model, x: model(x)).predict()
    assert all(op.traced for op in found.ops.by_path["layers.0"])  # each is one operator, and no module's kernels
    kinds = collections.Counter((op.moment, op.kind) for op in found.ops.by_path["layers.0"])
    assert kinds["backward", "matmul"] == 0 < kinds["backward", "move"]


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("needs data")


def test_backward_that_cannot_run_follows_by_rule():
    found = Pass(Net(), torch.ones(N, H), lambda model, x: Refuses.apply(model(x))).predict()
    assert {op.moment for op in found.ops.by_path["layers.0"]} == {"both"}
    assert found.flops == 3 * 2 * N * F * H


class Experts(nn.Module):
    """Two stacked experts, and a product of all rows before them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Parameter(torch.zeros(2, 8, 16))

    def forward(self, rows):
        ends = torch.tensor([2, 6], dtype=torch.int32, device=rows.device)
        return nn.functional.grouped_mm(self.first(rows), self.second, offs=ends)


def test_products_of_experts_are_work():
    """torch's own table of FLOPs lacks them."""
    rows = torch.zeros(N, 8, dtype=torch.bfloat16)
    found = Pass(Experts().bfloat16(), rows, lambda model, rows: model(rows).sum()).predict()
    assert found.flops == 3 * 2 * N * 8 * (8 + 16)


class Upsampled(torch.nn.Module):
    """A decoder's end: double the image, then convolve and normalise it."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4)

    def forward(self, image):
        return self.norm(self.convolution(torch.nn.functional.interpolate(image, scale_factor=2, mode="nearest")))


def test_operators_with_a_decomposition_for_exports_are_one_kernel():
    images = torch.randn(2, 3, 8, 8)
    plan = mw.plan(
        Upsampled(), "h100x1", global_batch=2, sample_batch=images, loss_func=lambda batch, output: output.sum(),
        strategy=[],
    )[0]  # fmt: skip
    whole = 2 * 16 * 16 * 4  # bytes of one channel
    # The convolution saves its input, the norm its own, and a mean and a deviation of each channel.
    assert plan.memory.activations == 3 * whole + 4 * whole + 2 * 4 * 4
