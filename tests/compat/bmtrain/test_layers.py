"""Every parallel layer by itself: values, and the gradient of the mean of all ranks' losses (BMTrain's own tests).

Each rank weighs its outputs differently, so nothing is right by symmetry. An input that ranks hold parts of gets the
gradient of the sum of their losses; where they all hold the same, their gradients add up to that.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright import runtime
from meshwright.compat.bmtrain.block import Block
from meshwright.compat.bmtrain.distributed_module import DistributedModule
from meshwright.compat.bmtrain.layers import ColumnParallelLinear, Linear, RowParallelLinear, VPEmbedding
from meshwright.compat.bmtrain.model_setup import init_parameters
from meshwright.compat.bmtrain.parameter import DistributedParameter
from meshwright.errors import ConfigError, LaunchError, ModelError
from meshwright.nn import OpParallelLinear
from tests.compat.bmtrain.seed_models import full
from tests.compat.bmtrain.tensor_models import tensor_groups

IN, OUT, ROWS = 6, 10, (4, 3)


def rows(x, rank):
    return x.chunk(2)[rank]


def features(x, rank):
    return x.chunk(2, -1)[rank]


def whole(x, rank):
    return x


def column(**options):
    return lambda: ColumnParallelLinear(IN, OUT, **options)


def row(**options):
    return lambda: RowParallelLinear(IN, OUT, **options)


def projected(**options):
    return lambda: OpLayer(**options)


class OpLayer(DistributedModule):
    """All that ``OpParallelLinear`` can be asked for and no layer of ours asks."""

    def __init__(self, columns, **options):
        super().__init__()
        shape, dim = ((OUT // 2, IN), 0) if columns else ((OUT, IN // 2), 1)
        self.weight = DistributedParameter(torch.empty(shape), True, nn.init.normal_, tp_mode=True, tp_split_dim=dim)
        self.options = options

    def forward(self, x):
        return OpParallelLinear.apply(x, self.weight, **self.options)


CASES = [  # how to make it, what a rank is given of the input, what it gets of the output
    (column(gather_input=True, gather_output=True), rows, whole),
    (column(gather_input=True, async_gather_chunks=1), rows, features),
    (column(gather_input=True, async_gather_chunks=9, bias=False), rows, features),
    (column(gather_input=False, gather_output=True), whole, whole),
    (column(gather_input=False), whole, features),
    (row(split_input=True, all_reduce_output=True), rows, whole),
    (row(all_reduce_output=True, async_chunks=5), features, whole),
    (row(split_input=True, async_chunks=1), rows, rows),
    (row(bias=False), features, rows),
    (projected(columns=False, split_input=True, reduce_output_type=1), whole, whole),
    (projected(columns=True, gather_input=True, async_gather_chunks=4), rows, features),
    (lambda: Linear(IN, OUT), rows, rows),
]


def assert_layer(make, given, got, wrap):
    torch.manual_seed(2)
    layer = wrap(make())
    init_parameters(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1)  # biases begin at zero
    plain = {name: full(parameter).requires_grad_() for name, parameter in layer.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*ROWS, IN, generator=generator).requires_grad_()
    y = F.linear(x, plain["weight"], plain.get("bias"))
    slopes = [torch.randn(got(y, 0).shape, generator=generator) for _ in range(2)]
    (sum((got(y, rank) * slope).sum() for rank, slope in enumerate(slopes)) / 2).backward()
    mine = given(x.detach(), runtime.rank()).clone().requires_grad_()
    output = layer(mine)
    torch.testing.assert_close(output, got(y.detach(), runtime.rank()), rtol=1e-5, atol=1e-6)
    (output * slopes[runtime.rank()]).sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(full(parameter.grad), plain[name].grad, rtol=1e-5, atol=1e-5)
    gradient = mine.grad
    if given is whole:
        dist.all_reduce(gradient)
    torch.testing.assert_close(gradient, 2 * given(x.grad, runtime.rank()), rtol=1e-5, atol=1e-5)


def _layers():
    for make, given, got in CASES:
        for wrap in (lambda layer: layer, Block):
            assert_layer(make, given, got, wrap)


def _embeddings():
    """Looking words up, ids of any shape; the head is tested by training."""
    for gathers in (True, False):
        layer = VPEmbedding(6, 4, dtype=torch.float32, gather_input=gathers)
        init_parameters(layer)
        plain = full(layer._parameters["weight"]).requires_grad_()
        every = torch.tensor([[0, 5, 5], [2, 3, 0]])
        slopes = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
        mine = runtime.tensor_rank() if gathers and runtime.tensor_size() == 2 else slice(None)
        ids, slope = every[mine], slopes[mine]
        losses = (F.embedding(every, plain) * slopes).sum()
        (losses / 2 if isinstance(mine, int) else losses).backward()
        found = layer(ids)
        torch.testing.assert_close(found, F.embedding(ids, plain).detach())
        (found * slope).sum().backward()
        torch.testing.assert_close(full(layer._parameters["weight"].grad), plain.grad)
        with pytest.raises((RuntimeError, IndexError), match=r"ids are not in 0\.\.5|out of range"):
            layer(torch.full_like(ids, 6))
        with pytest.raises(ModelError, match="looks up ids"):
            layer(ids.float())


def _halves():
    """Under autocast, and in half precision."""
    x = torch.ones(*ROWS, IN)
    for make in (column(), row(split_input=True), row(split_input=True, all_reduce_output=True)):
        layer = make()
        init_parameters(layer)
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(x)
        assert found.dtype == torch.bfloat16
        found.sum().backward()
        assert layer._parameters["weight"].grad.dtype == torch.float32
        assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    _doubles_under_autocast()


def _doubles_under_autocast():
    """fp64 stays as it is, as in ``F.linear``, whichever way the ranks communicate."""
    x, weight = torch.rand(*ROWS, IN, dtype=torch.float64), torch.rand(OUT, IN, dtype=torch.float64)
    ways = [{"gather_input": True}, {"reduce_output_type": 1}, {"reduce_output_type": 2}, {}]
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, weight).dtype == torch.float64
        for way in ways:
            assert OpParallelLinear.apply(x, weight, **way).dtype == torch.float64


def _misfits():
    for make, match in (
        (lambda: ColumnParallelLinear(4, 5), "out_features.*multiple of 2.*Got 5"),
        (lambda: RowParallelLinear(5, 4), "in_features.*multiple of 2.*Got 5"),
        (lambda: VPEmbedding(5, 4), "vocab_size.*multiple of 2.*Got 5"),
        (lambda: DistributedParameter(torch.ones(2), tp_split_dim=0), "without tp_mode"),
        (
            lambda: DistributedParameter(torch.ones(2), tp_mode=True, tp_split_dim=1),
            r"not a dim.*Got 1 for shape \(2,\)",
        ),
    ):
        with pytest.raises(ModelError, match=match):
            make()
    ordinary = nn.Module()
    ordinary.weight = DistributedParameter(torch.ones(2), tp_mode=True, tp_split_dim=0)
    with pytest.raises(ModelError, match=r"ordinary module.*weight.*DistributedModule"):
        Block(ordinary)
    weight = torch.ones(3, 3)
    for x, options, match in (
        (torch.ones(3, 3), {"reduce_output_type": 2}, r"rows cannot be scattered.*\(3, 3\)"),
        (torch.ones(2, 3), {"split_input": True}, "features cannot be split"),
        (torch.ones(3), {}, "at least two dims"),
        (torch.ones(2, 3), {"async_gather_chunks": 0}, "number of chunks"),
    ):
        with pytest.raises(ConfigError, match=match):
            OpParallelLinear.apply(x, weight, **options)
    with pytest.raises(LaunchError, match=r"tp_size does not divide.*divisor of 2.*Got 3"):
        runtime.init_distributed(backend="gloo", tp_size=3)
    with pytest.raises(LaunchError, match=r"called twice.*tp_size=2.*Got.*tp_size=1"):
        runtime.init_distributed(backend="gloo", timeout_s=120.0)


def _other_wrappers():
    """Full tensors load into parameters that somebody else has laid out."""
    module = DistributedModule()
    full_weight = torch.arange(12.0).view(3, 4)
    module.weight = nn.Parameter(distribute_tensor(torch.zeros(3, 4), runtime.world_mesh(), [Shard(1)]))
    module.load_state_dict({"weight": full_weight})
    assert torch.equal(full(module._parameters["weight"]), full_weight)


def _all():
    with tensor_groups(2):
        _layers()
        _embeddings()
        _halves()
        _other_wrappers()
        _misfits()


def test_layers_of_a_tensor_group(ranks):
    ranks(2).run(_all)


def _one():
    """Without tensor groups they are whole layers, whatever they are asked to exchange."""
    _embeddings()
    for make in (column(gather_output=True), row(split_input=True, all_reduce_output=True)):
        layer = Block(make())
        init_parameters(layer)
        x = torch.randn(*ROWS, IN)
        expected = F.linear(x, full(layer.weight), full(layer.bias))
        torch.testing.assert_close(layer(x), expected)
        assert repr(layer).endswith("Linear(in_features=6, out_features=10, bias=True)")


def test_layers_of_one_rank(ranks):
    ranks(1).run(_one)
