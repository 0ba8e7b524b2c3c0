"""Cross entropy of logits in parts against torch's of whole ones, and what code that knows nothing of parts sees."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.loss import HeadLogits, Vocabulary, VocabularyShards, fused_cross_entropy
from meshwright.methods.tensor.axis_exchange import TensorAxis
from tests.loss.helpers import Doubled

BATCH, TIME, CLASSES = 3, 5, 14
OPTIONS = [
    {},
    {"reduction": "sum", "ignore_index": 4},
    {"reduction": "none", "label_smoothing": 0.1},
    {"weight": torch.linspace(0.1, 2, CLASSES, dtype=torch.float64), "label_smoothing": 0.2, "ignore_index": 3},
]


def whole_logits(dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(BATCH, TIME, CLASSES, generator=generator, dtype=torch.float64) * 4
    return logits.to(dtype).requires_grad_()


TARGETS = torch.randint(CLASSES, (BATCH, TIME), generator=torch.Generator().manual_seed(6))


def shards_of(axis, dtype=torch.float64):
    """This rank's logits, and what a head that is split returns of them."""
    part = whole_logits(dtype).detach().chunk(axis.size, -1)[axis.index].clone().requires_grad_()
    vocabulary = Vocabulary(
        part.shape[-1] * axis.index, CLASSES, axis.sum, axis.max, lambda part: axis.gather(part, -1)
    )  # fmt: skip
    return part, VocabularyShards.of(part, vocabulary)


def check_like_torch(axis, function, reference=None, dtype=torch.float64, gathers=False, close=1e-12):
    part, shards = shards_of(axis, dtype)
    whole = whole_logits(dtype)
    result, expected = function(shards), (reference or function)(whole)
    assert isinstance(result, torch.Tensor)
    assert not isinstance(result, VocabularyShards)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=close, atol=close)
    result.sum().backward()
    expected.sum().backward()
    own = whole.grad.chunk(axis.size, -1)[axis.index]
    torch.testing.assert_close(part.grad, own, rtol=close, atol=close)
    assert (shards.whole is not None) == gathers


def next_tokens(logits, **options):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TARGETS[:, 1:].flatten(), **options)


def in_ways_that_lead_there(logits):
    """As transformers does it, and with an index, a mask, a scale and two kinds of view."""
    kept = torch.arange(TIME) != 1
    logits = (logits.float().contiguous() * 2.0)[:, kept][..., 1:, :].reshape(BATCH, TIME - 2, -1)
    return F.cross_entropy(logits.contiguous().view(-1, CLASSES), TARGETS[:, kept][:, 1:].reshape(-1))


def on_every_rank():
    axis = TensorAxis(init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))["tensor"])
    for options in OPTIONS:
        check_like_torch(axis, lambda logits, options=options: next_tokens(logits, **options))
    check_like_torch(axis, in_ways_that_lead_there, close=1e-6)
    check_like_torch(axis, lambda logits: next_tokens(logits.float()), dtype=torch.bfloat16, close=1e-2)
    check_like_torch(
        axis, lambda logits: fused_cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1),
        lambda logits: F.cross_entropy(logits.float().flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1),
        dtype=torch.bfloat16, close=1e-2,
    )  # fmt: skip
    for function in (
        lambda logits: logits.argmax(-1) + logits.logsumexp(-1),
        lambda logits: F.cross_entropy(logits.transpose(1, 2), TARGETS),
        lambda logits: F.cross_entropy(logits.flatten(0, 1), logits.detach().flatten(0, 1).softmax(-1)),
        lambda logits: logits[..., 3] * logits[0, 0, 1],
    ):
        _, shards = shards_of(axis)
        torch.testing.assert_close(function(shards), function(whole_logits()))
    _, shards = shards_of(axis)
    assert "part=(3, 5, 7)" in repr(shards)
    assert (shards.shape, shards.dim(), shards.dtype) == ((3, 5, 14), 3, torch.float64)
    assert shards.requires_grad
    with torch.no_grad():
        shards[..., 0] = -50.0  # changes the whole, which it is from then on
    changed = whole_logits().detach()
    changed[..., 0] = -50.0
    torch.testing.assert_close(next_tokens(shards), next_tokens(changed))
    check_like_torch(axis, lambda logits: Doubled.apply(logits.float()).sum(), close=1e-6)
    with pytest.raises(mw.DataError, match="not one class per row"):
        F.cross_entropy(shards_of(axis)[1].flatten(0, 1), TARGETS.flatten()[:3])
    return check_heads(axis)


def check_heads(axis):
    """Compare lazy logits of a head, of which each rank has some classes, with those of the whole one."""
    torch.manual_seed(4)
    values = [torch.randn(shape, dtype=torch.float64) for shape in ((BATCH, TIME, 6), (CLASSES, 6), (CLASSES,))]
    vocabulary = Vocabulary(7 * axis.index, CLASSES, axis.sum, axis.max, lambda part: axis.gather(part, -1))

    def compare(function, close=1e-12):
        hidden, weight, bias = (value.clone().requires_grad_() for value in values)
        parts = [value.chunk(axis.size)[axis.index].clone().requires_grad_() for value in values[1:]]
        own = values[0].clone().requires_grad_()
        logits = HeadLogits.of(axis.copy(own), *parts).over(vocabulary)
        assert logits.shape == (BATCH, TIME, CLASSES)
        result, expected = function(logits), function(F.linear(hidden, weight, bias))
        assert type(result) is torch.Tensor
        torch.testing.assert_close(result, expected, rtol=close, atol=close)
        result.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(own.grad, hidden.grad, rtol=close, atol=close)
        for part, whole in zip(parts, (weight, bias), strict=True):
            torch.testing.assert_close(part.grad, whole.grad.chunk(axis.size)[axis.index], rtol=close, atol=close)
        return logits

    for options in OPTIONS:
        assert compare(lambda logits, options=options: next_tokens(logits, **options)).whole is None
    compare(in_ways_that_lead_there, 1e-6)  # a scale is applied to this rank's logits
    compare(lambda logits: logits.softmax(-1).square() + logits[..., :1])
    compare(lambda logits: Doubled.apply(logits.float()).sum(), 1e-5)
    with pytest.raises(RuntimeError, match=r"targets are not in 0\.\.13"):
        compare(lambda logits: F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten().clamp(min=14)))
    with torch.no_grad():
        logits = HeadLogits.of(values[0], *[value.chunk(axis.size)[axis.index] for value in values[1:]])
        torch.testing.assert_close(logits.over(vocabulary).argmax(-1), F.linear(*values).argmax(-1))
    return True


def test_logits_in_parts_are_like_whole_ones(ranks):
    assert all(ranks(2).run(on_every_rank))
