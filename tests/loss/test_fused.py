import itertools

import pytest
import torch
import torch.nn.functional as F

from meshwright.errors import ConfigError, DataError, ModelError
from meshwright.loss import FusedCrossEntropy, fused_cross_entropy
from tests.loss.helpers import EPSILON, HALF, distance, live_bytes

REDUCTIONS = ("mean", "sum", "none")


def problem(num_rows, num_classes, dtype, scale=3.0):
    generator = torch.Generator().manual_seed(num_classes)
    logits = (torch.randn(num_rows, num_classes, generator=generator) * scale).to(dtype).requires_grad_()
    target = torch.randint(num_classes, (num_rows,), generator=generator)
    target[::5] = -100
    return logits, target, torch.rand(num_classes, generator=generator) + 0.1


def reference(logits, target, weight, upstream=None, dtype=torch.float32, **options):
    wide = logits.detach().to(dtype).requires_grad_()
    loss = F.cross_entropy(wide, target, None if weight is None else weight.to(dtype), **options)
    loss.backward(None if upstream is None else upstream.to(dtype))
    return loss.detach(), wide.grad


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(("num_rows", "num_classes"), [(64, 10), (32, 1000), (6, 30000)])
def test_it_is_torchs_fp32_cross_entropy_with_every_option(dtype, num_rows, num_classes):
    logits, target, weights = problem(num_rows, num_classes, dtype)
    before = logits.detach().clone()
    for weight, reduction, smoothing in itertools.product((None, weights), REDUCTIONS, (0.0, 0.1)):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        loss = fused_cross_entropy(logits, target, weight, **options)
        upstream = torch.linspace(0.5, 1.5, loss.numel()).reshape(loss.shape)
        expected, _ = reference(logits, target, weight, upstream, **options)
        _, exact = reference(logits, target, weight, upstream, dtype=torch.float64, **options)
        (gradient,) = torch.autograd.grad(loss, logits, upstream)
        assert loss.dtype == torch.float32
        assert loss.shape == expected.shape
        assert gradient.dtype == dtype
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-6)
        assert distance(gradient, exact) < 1.01 * EPSILON[dtype] + 5e-7
        if dtype in HALF:  # every single number is rounded once, and no more
            below_normal = torch.finfo(dtype).smallest_normal * EPSILON[dtype]
            allowed = 1.01 * EPSILON[dtype] * exact.abs() + below_normal + 1e-9
            assert ((gradient.double() - exact).abs() <= allowed).all()
    assert torch.equal(logits, before)


def test_it_is_nearer_to_fp64_than_torchs_fp32():
    logits, target, _ = problem(32, 5000, torch.float32)
    for smoothing in (0.0, 0.1):
        exact, exact_gradient = reference(logits, target, None, dtype=torch.float64, label_smoothing=smoothing)
        _, torchs_gradient = reference(logits, target, None, label_smoothing=smoothing)
        loss = fused_cross_entropy(logits, target, label_smoothing=smoothing)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.item() == pytest.approx(exact.item(), rel=3e-7)
        assert distance(gradient, exact_gradient) < min(distance(torchs_gradient, exact_gradient), 5e-7)


@pytest.mark.parametrize("dtype", HALF)
def test_the_seeds_acceptance_at_scale_32768(dtype):
    """BMTrain's test, |Δloss| < 1e-5 and |Δgrad| < 0.1 at a loss scale of 32768 over 16384 rows; here only rounding.

    Fewer rows with the same scale per row: gradients of the same size.
    """
    for num_rows, num_classes in ((4096, 10), (512, 1000), (16, 30000)):
        logits, target, weight = problem(num_rows, num_classes, dtype, scale=1.0)
        loss_scale = torch.tensor(32768.0 * num_rows / 16384)
        loss = FusedCrossEntropy(weight)(logits, target)
        expected, gradient = reference(logits, target, weight, loss_scale)
        loss.backward(loss_scale)
        assert abs(loss.item() - expected.item()) < 1e-5
        error = (logits.grad.float() - gradient).abs().max()
        assert error <= 1.01 * EPSILON[dtype] * gradient.abs().max()
        assert error < 0.1


def test_derivatives_of_every_form_against_finite_differences():
    logits, target, weight = problem(6, 5, torch.float64)
    for weight_of, reduction, smoothing in itertools.product((None, weight), REDUCTIONS, (0.0, 0.3, 1.0)):
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 2}
        assert torch.autograd.gradcheck(
            lambda x, w=weight_of, o=options: fused_cross_entropy(x, target.clamp(min=0), w, **o), logits
        )


def test_shapes_and_target_types_are_torchs():
    generator = torch.Generator().manual_seed(0)
    for shape in [(7,), (4, 7), (2, 7, 3), (2, 7, 3, 2), (0, 7)]:
        logits = torch.randn(shape, generator=generator, requires_grad=True)
        target = torch.randint(7, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=generator)
        for reduction in REDUCTIONS:
            loss = fused_cross_entropy(logits, target.int(), reduction=reduction)
            expected = F.cross_entropy(logits, target, reduction=reduction)
            torch.testing.assert_close(loss, expected, equal_nan=True)
            gradients = [torch.autograd.grad(each.sum(), logits)[0] for each in (loss, expected)]
            torch.testing.assert_close(*gradients)


def test_logits_at_the_limits():
    large = torch.tensor([[60000.0, 59968.0, -60000.0], [-60000.0] * 3], dtype=torch.float16, requires_grad=True)
    masked = torch.tensor([[0.0, 1.0, -torch.inf], [-torch.inf, 2.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    for logits, target in ((large, torch.tensor([1, 2])), (masked, torch.tensor([0, 2]))):
        loss = fused_cross_entropy(logits, target, reduction="none")
        expected, gradient = reference(logits, target, None, torch.ones(2), reduction="none")
        loss.sum().backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(logits.grad.float(), gradient, atol=1e-3, rtol=1e-2)
    assert fused_cross_entropy(masked, torch.tensor([2, 2]), reduction="none").tolist()[0] == torch.inf


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_over_no_rows_is_nan_with_a_gradient_of_zero(smoothing):
    logits = torch.randn(3, 4, requires_grad=True)
    loss = fused_cross_entropy(logits, torch.full((3,), -100), label_smoothing=smoothing)
    loss.backward()
    assert loss.isnan()
    assert torch.equal(logits.grad, torch.zeros(3, 4))


def test_extra_memory_is_a_part_of_the_logits():
    num_rows, num_classes = 1024, 4096  # fp32 copy: 16 MiB; the gradient in bf16: 8 MiB
    logits, target, _ = problem(num_rows, num_classes, torch.bfloat16)
    in_fp32 = 4 * num_rows * num_classes
    forward, largest = live_bytes(lambda: fused_cross_entropy(logits, target))
    assert forward < in_fp32 / 6
    assert largest < num_rows * num_classes / 8
    whole, _ = live_bytes(lambda: fused_cross_entropy(logits, target).backward())
    assert in_fp32 / 2 <= whole < in_fp32 / 2 + in_fp32 / 6
    plain, _ = live_bytes(lambda: F.cross_entropy(logits.float(), target).backward())
    assert plain > 2 * in_fp32


def test_it_runs_compiled_under_autocast_and_refuses_second_derivatives():
    logits, target, weight = problem(8, 11, torch.bfloat16)

    def loss_of(logits):
        return fused_cross_entropy(logits, target, weight, label_smoothing=0.1)

    expected = loss_of(logits)
    (gradient,) = torch.autograd.grad(expected, logits)
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)(logits)
    assert compiled.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.equal(torch.autograd.grad(compiled, logits)[0], gradient)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss_of(logits), expected)
    (once,) = torch.autograd.grad(loss_of(logits), logits, create_graph=True)
    assert torch.equal(once, gradient)
    with pytest.raises(ModelError, match=r"second derivative of FusedCrossEntropy.*What to do: use torch.nn"):
        once.sum().backward()


def test_the_module_keeps_its_options_and_moves_its_weight():
    weight = torch.tensor([1.0, 2.0, 4.0])
    loss = FusedCrossEntropy(weight, ignore_index=1, reduction="sum", label_smoothing=0.2).double()
    assert loss.weight.dtype == torch.float64
    logits, target = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 2])
    expected = F.cross_entropy(logits, target, weight.double(), ignore_index=1, reduction="sum", label_smoothing=0.2)
    assert loss(logits, target).item() == pytest.approx(expected.item())
    assert "reduction='sum'" in repr(loss)


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda x, t: fused_cross_entropy(x, t, reduction="meen"), ConfigError, "did you mean 'mean'"),
        (lambda x, t: FusedCrossEntropy(label_smoothing=1.5), ConfigError, "label_smoothing.*0 to 1"),
        (lambda x, t: fused_cross_entropy(x, t[:2]), DataError, r"shape \(3,\).*one target"),
        (lambda x, t: fused_cross_entropy(x, x), DataError, "class probabilities"),
        (lambda x, t: fused_cross_entropy(x.int(), t), ModelError, "floating-point"),
        (lambda x, t: fused_cross_entropy(x[0, 0], t[0]), ModelError, "logits"),
        (lambda x, t: fused_cross_entropy(x, t, torch.ones(3)), ModelError, r"weight.*shape \(4,\)"),
        (lambda x, t: fused_cross_entropy(x, t, torch.ones(4, requires_grad=True)), ModelError, "with a gradient"),
        (lambda x, t: fused_cross_entropy(x, t + 4), (IndexError, RuntimeError), "out of bounds"),
    ],
)
def test_misuse_is_refused(call, error, word):
    with pytest.raises(error, match=word):
        call(torch.randn(3, 4), torch.tensor([0, 1, 2]))
