"""Logits that a head has not computed: their loss is that of the logits, and anything else sees the logits."""

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.loss import HeadLogits, fused_cross_entropy, next_token_loss
from tests.live_bytes import peak_bytes
from tests.loss.helpers import Doubled

BATCH, TIME, WIDTH, CLASSES = 3, 5, 8, 14
TARGETS = torch.randint(CLASSES, (BATCH, TIME), generator=torch.Generator().manual_seed(6))


def head(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(5)
    shapes = [(BATCH, TIME, WIDTH), (CLASSES, WIDTH), (CLASSES,)][: 2 + bias]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def next_tokens(logits, **options):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TARGETS[:, 1:].flatten(), **options)


def as_transformers_does(logits):
    kept = torch.arange(TIME) != 1
    logits = logits.float().contiguous()[:, kept][..., 1:, :]
    return F.cross_entropy(logits.contiguous().view(-1, CLASSES), TARGETS[:, kept][:, 1:].reshape(-1))


CASES = {
    "next tokens": (next_tokens, False),
    "options": (lambda x: next_tokens(x, reduction="none", label_smoothing=0.1, ignore_index=3), False),
    "class weights": (lambda x: next_tokens(x, weight=torch.linspace(0.1, 2, CLASSES, dtype=x.dtype)), False),
    "transformers": (as_transformers_does, False),
    "our own": (lambda x: next_token_loss(TARGETS, x), False),
    "fused": (lambda x: fused_cross_entropy(x.flatten(0, 1), TARGETS.flatten()), False),
    "scaled": (lambda x: next_tokens(x * 2.0), True),
    "probabilities": (lambda x: x.softmax(-1).square(), True),
    "classes in the middle": (lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS), True),
    "some classes": (lambda x: x[..., 3] * x[0, 0, 1], True),
    "own backward": (lambda x: Doubled.apply(x), None),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_like_computed_ones(name):
    function, makes = CASES[name]
    dtype = torch.float32 if name == "transformers" else torch.float64  # of fp64 logits it rounds
    for bias in (True, False):
        plain, lazy = head(dtype, bias), head(dtype, bias)
        logits = HeadLogits.of(*lazy)
        result, expected = function(logits), function(F.linear(*plain))
        assert type(result) is torch.Tensor
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
        result.sum().backward()
        expected.sum().backward()
        for a, b in zip(lazy, plain, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)
        assert makes is None or (logits.whole is not None) == makes


def test_types_are_those_of_the_computed_logits():
    hidden, weight, bias = head(torch.float32)
    logits = HeadLogits.of(hidden, weight, bias)
    assert (logits.shape, logits.dtype, logits.requires_grad) == ((BATCH, TIME, CLASSES), torch.float32, True)
    assert "hidden=(3, 5, 8)" in repr(logits)
    assert logits.half().dtype == torch.float16  # rounded, so computed
    assert logits.whole is not None
    plain = head(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits, expected = HeadLogits.of(hidden, weight, bias), F.linear(*plain)
        assert logits.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(next_tokens(logits), next_tokens(expected), rtol=1e-3, atol=1e-3)
    assert logits.whole is None
    torch.testing.assert_close(next_tokens(logits.float()), next_tokens(expected.float()), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits.detach(), expected.detach(), rtol=0, atol=0)


def test_a_weight_that_was_freed_is_an_error():
    hidden, weight = head(bias=False)
    logits = HeadLogits.of(hidden, weight)
    weight.untyped_storage().resize_(0)  # as FSDP2 does behind a unit
    for use in (next_tokens, lambda x: x.exp()):
        with pytest.raises(mw.ModelError, match="was freed before the loss"):
            use(logits)


def test_the_logits_never_lie_in_memory():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2048, 16, generator=generator).requires_grad_()
    weight = torch.randn(4096, 16, generator=generator).requires_grad_()
    target = torch.randint(4096, (2048,), generator=generator)
    _, peak = peak_bytes(lambda: F.cross_entropy(HeadLogits.of(hidden, weight), target).backward())
    assert peak < 2048 * 4096 * 4 / 2  # half of the logits alone; computed ones take three times themselves


class OneOf:
    """One of several ranks with the same hidden states; the test adds up what each of them has."""

    def __init__(self, index, size):
        self.place = index, size

    def total(self, part):
        return part


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("count", [7, 2])  # not divided by the ranks, and fewer than they are
def test_ranks_compute_a_share_of_the_rows_each(reduction, count):
    torch.manual_seed(0)
    hidden, weight = torch.randn(count, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    target = torch.randint(5, (count,))
    target[0] = -100

    def computed(*ranks):
        loss = F.cross_entropy(HeadLogits.of(hidden, weight, ranks=ranks), target, reduction=reduction)
        return loss.detach(), torch.autograd.grad(loss.sum(), (hidden, weight))

    whole, gradients = computed()
    # Two axes, of two ranks and of three.
    shares = [computed(OneOf(outer, 2), OneOf(inner, 3)) for outer in range(2) for inner in range(3)]
    torch.testing.assert_close(sum(loss for loss, _ in shares), whole)
    assert sum(bool(own[0].any()) for _, own in shares) == (5 if count == 7 else 1)  # the first row is ignored
    for place, gradient in enumerate(gradients):
        torch.testing.assert_close(sum(own[place] for _, own in shares), gradient)
