"""``FusedCrossEntropy(parallel=True)``: the classes lie on the ranks of a tensor group, and the loss is that of all."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from meshwright import runtime
from meshwright.errors import ModelError
from meshwright.loss import FusedCrossEntropy, fused_cross_entropy
from tests.compat.bmtrain.tensor_models import tensor_groups
from tests.loss.helpers import EPSILON, distance, live_bytes
from tests.loss.test_fused import problem


def part(logits):
    return logits.detach().chunk(2, 1)[runtime.tensor_rank()].clone().requires_grad_()


def assert_same(logits, target, weight, **options):
    """The gradient is that of the sum of the ranks' losses, which are equal: twice that of one."""
    plain = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(plain, target, None if weight is None else weight.double(), **options)
    upstream = torch.linspace(0.5, 1.5, expected.numel()).reshape(expected.shape)
    expected.backward(2 * upstream.double())
    mine = part(logits)
    loss = FusedCrossEntropy(weight, parallel=True, **options)(mine, target)
    loss.backward(upstream)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), atol=1e-5, rtol=1e-6)
    assert distance(mine.grad, part(plain.grad)) < 1.01 * EPSILON[mine.dtype] + 5e-7
    assert not mine.grad[target == -100].any() if target.dim() == 1 else True
    every = runtime.gather_objects(loss.detach())
    assert torch.equal(every[0], every[1])


def _losses():
    with tensor_groups(2):
        for dtype, (num_rows, num_classes) in itertools.product(
            (torch.float32, torch.bfloat16),
            ((64, 10), (9, 30000)),  # the latter in several slices
        ):
            logits, target, weights = problem(num_rows, num_classes, dtype)
            for weight, reduction, smoothing in itertools.product((None, weights), ("mean", "sum", "none"), (0.0, 0.1)):
                assert_same(logits, target, weight, reduction=reduction, label_smoothing=smoothing)
        logits, target, _ = problem(12, 10, torch.float32)
        deep = logits.detach().view(4, 3, 10).movedim(-1, 1)
        assert_same(deep, target.view(4, 3), None)
        assert fused_cross_entropy(part(logits), torch.full((12,), -100), parallel=True).isnan()
        far = part(torch.full((3, 10), 1e4).index_fill_(1, torch.tensor([7]), 1.1e4))
        assert fused_cross_entropy(far, torch.full((3,), 7), parallel=True) == 0
        with pytest.raises(RuntimeError, match=r"targets are not in 0\.\.9"):
            fused_cross_entropy(part(logits), target.clamp(min=10), parallel=True)
        with pytest.raises(ModelError, match=r"weight.*\(10,\)"):
            fused_cross_entropy(part(logits), target, torch.ones(5), parallel=True)
        _assert_small()


def _assert_small():
    """Nobody holds the logits of others, nor an fp32 copy of its own."""
    logits, target, _ = problem(256, 8000, torch.bfloat16)
    mine = part(logits)
    peak, largest = live_bytes(lambda: fused_cross_entropy(mine, target, parallel=True).backward())
    assert largest <= mine.numel()
    assert peak < mine.nbytes + 3 * 2**20  # the gradient, and a slice


def test_the_loss_of_split_classes(ranks):
    ranks(2).run(_losses)


def test_one_rank_has_all_classes():
    logits, target, weight = problem(8, 10, torch.float32)
    assert torch.equal(
        fused_cross_entropy(logits, target, weight, parallel=True), fused_cross_entropy(logits, target, weight)
    )
