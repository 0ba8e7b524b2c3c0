import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from meshwright.errors import ConfigError, DataError, ModelError
from meshwright.loss import LinearCrossEntropy, Vocabulary, cross_entropy_rows, linear_cross_entropy
from meshwright.loss.cross_entropy_rows import _plain_rows, losses_and_gradients_, make_rows
from meshwright.loss.linear_head import default_chunk_size
from meshwright.loss.vocabulary_parallel import _local_sums, gradients_of_parts
from meshwright.runtime import imitated_gpu
from tests.loss.helpers import EPSILON, distance, live_bytes

REDUCTIONS = ("mean", "sum", "none")
N, D, C = 50, 16, 37


def problem(dtype=torch.float32, num_tokens=N, width=D, num_classes=C):
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, width), (num_classes, width), (num_classes,)]
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    target = torch.randint(num_classes, (num_tokens,), generator=generator)
    target[::7] = -100
    return tensors, target, torch.rand(num_classes, generator=generator) + 0.1


def plain(hidden, weight, target, bias=None, *, class_weight=None, **options):
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    wide = torch.promote_types(logits.dtype, torch.float32)
    class_weight = None if class_weight is None else class_weight.to(wide)
    return F.cross_entropy(logits.to(wide), target.flatten(), class_weight, **options)


def in_fp64(tensors):
    return [None if each is None else each.detach().double().requires_grad_() for each in tensors]


def results(loss_func, tensors, target, **options):
    """Loss and gradients of hidden, weight and bias, for an upstream gradient that is not 1."""
    hidden, weight, bias = tensors
    loss = loss_func(hidden, weight, target, bias, **options)
    upstream = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    wanted = [each for each in tensors if each is not None and each.requires_grad]
    return [loss, *torch.autograd.grad(loss, wanted, upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_plain_computation_with_every_option(dtype):
    tensors, target, weights = problem(dtype)
    for bias, class_weight, reduction, smoothing, chunk in itertools.product(
        (False, True), (None, weights), REDUCTIONS, (0.0, 0.1), (7, None)
    ):
        given = tensors if bias else [*tensors[:2], None]
        options = {"reduction": reduction, "label_smoothing": smoothing, "class_weight": class_weight}
        actual = results(linear_cross_entropy, given, target, chunk_size=chunk, **options)
        exact = results(plain, in_fp64(given), target, **options)
        same_type = results(plain, given, target, **options)
        assert actual[0].dtype == torch.promote_types(dtype, torch.float32)
        assert actual[0].shape == exact[0].shape
        # Logits are rounded to the half type in both; the loss then agrees to fp32's accuracy.
        torch.testing.assert_close(actual[0], same_type[0], atol=1e-5, rtol=1e-5)
        for own, theirs, truth in zip(actual, same_type, exact, strict=True):
            assert own.shape == truth.shape
            assert distance(own, truth) < 2 * distance(theirs, truth) + 4 * EPSILON[dtype]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_derivatives_against_finite_differences(reduction):
    tensors, target, weights = problem(torch.float64, num_tokens=5, width=3, num_classes=4)
    options = {"reduction": reduction, "label_smoothing": 0.2, "class_weight": weights, "chunk_size": 2}
    assert torch.autograd.gradcheck(lambda h, w, b: linear_cross_entropy(h, w, target, b, **options), tensors)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_right_one(reduction):
    for trained in itertools.product((False, True), repeat=3):
        if not any(trained):
            continue
        tensors, target, _ = problem()
        tensors = [tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(tensors, trained, strict=True)]
        actual = results(linear_cross_entropy, tensors, target, reduction=reduction, chunk_size=16)
        for own, truth in zip(actual, results(plain, tensors, target, reduction=reduction), strict=True):
            torch.testing.assert_close(own, truth, atol=1e-5, rtol=1e-5)
    tensors, target, _ = problem()
    with torch.no_grad():
        loss = linear_cross_entropy(*tensors[:2], target, reduction=reduction)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(*tensors[:2], target, reduction=reduction).detach())


def test_sequences_ignored_tokens_and_repeated_backward():
    (hidden, weight, _), target, _ = problem(num_tokens=48)
    hidden_BSD, target_BS = hidden.detach().reshape(4, 12, D).requires_grad_(), target.reshape(4, 12)
    loss = LinearCrossEntropy(reduction="none", chunk_size=10)(hidden_BSD, weight, target_BS)
    assert loss.shape == (4, 12)
    assert (loss[target_BS == -100] == 0).all()
    loss = linear_cross_entropy(hidden_BSD, weight, target_BS)
    first = torch.autograd.grad(loss, (hidden_BSD, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden_BSD, weight), torch.tensor(2.0))
    for one, two in zip(first, again, strict=True):
        assert torch.equal(2 * one, two)
    assert (first[0][target_BS == -100] == 0).all()


def test_a_mean_over_no_tokens_is_nan_as_in_torch():
    (hidden, weight, _), target, _ = problem()
    for loss_func, smoothing in itertools.product((plain, linear_cross_entropy), (0.0, 0.1)):
        loss = loss_func(hidden, weight, torch.full_like(target, -100), label_smoothing=smoothing)
        assert loss.isnan()
        for gradient in torch.autograd.grad(loss, (hidden, weight)):
            assert torch.equal(gradient, torch.zeros_like(gradient))


def test_fp16_keeps_small_probabilities_and_large_sums():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 8, generator=generator).half().requires_grad_()
    weight = (torch.randn(70000, 8, generator=generator) * 0.01).half().requires_grad_()
    target, loss_scale = torch.zeros(64, dtype=torch.long), torch.tensor(2.0**16)
    # Probabilities of 1.4e-5 keep 8 of 11 bits in fp16, and the loss scale multiplies them only in backward.
    gradient, exact = (
        torch.autograd.grad(loss_func(*tensors, target), tensors[1], loss_scale)[0][1:]
        for loss_func, tensors in ((linear_cross_entropy, [hidden, weight]), (plain, in_fp64([hidden, weight])))
    )
    assert distance(gradient, exact) < 2 * EPSILON[torch.float16]
    # A class whose 4096 gradients add up to more than fp16 holds.
    many, head = torch.full((4096, 2), 40.0).half(), torch.zeros(2, 2).half().requires_grad_()
    loss = linear_cross_entropy(many, head, torch.zeros(4096, dtype=torch.long))
    assert torch.autograd.grad(loss, head)[0].tolist() == [[-20.0, -20.0], [20.0, 20.0]]


def test_under_autocast_it_computes_what_the_plain_head_does():
    (hidden, weight, bias), target, _ = problem(num_tokens=300)
    for reduction in REDUCTIONS:
        with torch.autocast("cpu", torch.bfloat16):
            actual = results(linear_cross_entropy, (hidden, weight, bias), target, reduction=reduction)
            expected = results(plain, (hidden, weight, bias), target, reduction=reduction)
        torch.testing.assert_close(actual[0], expected[0], atol=1e-5, rtol=1e-5)
        for own, theirs in zip(actual[1:], expected[1:], strict=True):
            assert own.dtype == torch.float32
            assert distance(own, theirs) < 2 * EPSILON[torch.bfloat16]
    hidden64, weight64 = hidden.detach().double().requires_grad_(), weight.detach().double()
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_cross_entropy(hidden64, weight64, target).dtype == torch.float64


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_holds_the_logits(dtype, reduction):
    num_tokens, width, num_classes, chunk = 512, 8, 2000, 32
    (hidden, weight, _), target, _ = problem(dtype, num_tokens, width, num_classes)

    def train(loss_func, **options):
        loss_func(hidden, weight, target, reduction=reduction, **options).sum().backward()

    peak, largest = live_bytes(lambda: train(linear_cross_entropy, chunk_size=chunk))
    assert largest <= chunk * num_classes
    gradients = 3 * 4 * (num_classes + num_tokens) * width  # summed, returned, added to .grad
    assert peak < 4 * 4 * chunk * num_classes + gradients + 2**16
    logits_bytes = 4 * num_tokens * num_classes
    assert peak < logits_bytes / 2
    plain_peak, plain_largest = live_bytes(lambda: train(plain))
    assert plain_largest == num_tokens * num_classes
    assert plain_peak > 2 * logits_bytes


def test_chunks_grow_with_hidden_and_never_get_too_small():
    assert default_chunk_size(16384, 4096, 128000, on_gpu=False) == 1024
    assert default_chunk_size(512, 64, 32000, on_gpu=False) == 256
    assert default_chunk_size(0, 64, 10, on_gpu=False) == 256
    assert default_chunk_size(16384, 4096, 128000, on_gpu=True) == 2048


def test_compiled_it_runs_between_two_graphs_and_second_derivatives_are_refused():
    (hidden, weight, bias), target, _ = problem()

    def loss_of(hidden):
        return linear_cross_entropy(2 * hidden, weight, target, bias) * 3

    compiled = torch.compile(loss_of, backend="aot_eager")(hidden)
    assert torch.equal(compiled, loss_of(hidden))
    assert torch.equal(torch.autograd.grad(compiled, hidden)[0], torch.autograd.grad(loss_of(hidden), hidden)[0])
    for reduction in REDUCTIONS:
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()
        (once,) = torch.autograd.grad(loss, hidden, create_graph=True)
        with pytest.raises(ModelError, match="second derivative of LinearCrossEntropy"):
            once.sum().backward()


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda h, w, t: linear_cross_entropy(h, w, t, reduction="avg"), ConfigError, "mean, sum, none"),
        (lambda h, w, t: LinearCrossEntropy(chunk_size=0), ConfigError, "chunk_size"),
        (lambda h, w, t: linear_cross_entropy(h, w.t(), t), ModelError, r"hidden \(3, 2\).*weight \(2, 4\)"),
        (lambda h, w, t: linear_cross_entropy(h, w.half(), t), ModelError, "of one type.*autocast"),
        (lambda h, w, t: linear_cross_entropy(h, w, t, h[0]), ModelError, r"bias \(2,\)"),
        (lambda h, w, t: linear_cross_entropy(h, w, h), DataError, r"shape \(3,\)"),
        (lambda h, w, t: linear_cross_entropy(h, t, w), ModelError, "floating-point.*order of the arguments"),
        (lambda h, w, t: linear_cross_entropy(h, w, t, class_weight=h[0]), ModelError, "class_weight"),
    ],
)
def test_misuse_is_refused(call, error, word):
    with pytest.raises(error, match=word):
        call(torch.randn(3, 2), torch.randn(4, 2), torch.tensor([0, 1, 2]))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(D, D)
        self.head = torch.nn.Linear(D, C, bias=False)
        self.loss = LinearCrossEntropy(chunk_size=8)

    def forward(self, hidden, target):
        return self.loss(self.body(hidden), self.head.weight, target)


def in_a_sharded_model():
    torch.manual_seed(0)
    model, alone = Model(), Model()
    alone.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    (hidden, _, _), target, _ = problem()
    for _ in range(3):
        for each in (model, alone):
            loss = each(hidden.detach(), target)
            loss.backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    model.reshard()
    for own, plain_parameter in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), plain_parameter)
    refused = []
    for weight in (model.head.weight, distribute_tensor(alone.head.weight.detach(), mesh, [Replicate()])):
        try:
            linear_cross_entropy(hidden, weight, target)
        except ModelError as error:
            refused.append(str(error))
    return refused


def test_a_sharded_head_works_in_its_module_and_is_refused_outside(ranks):
    for refused in ranks(2).run(in_a_sharded_model):
        assert len(refused) == 2
        assert "pass weight.full_tensor(), or compute the loss in the forward" in refused[0]


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_passes_that_are_compiled_on_gpus_say_what_the_others_say(dtype, weighs, monkeypatch):
    torch.manual_seed(0)
    logits = (3 * torch.randn(7, 50)).to(dtype)
    target = torch.randint(0, 50, (7,))
    target[2] = -100
    class_weight = torch.rand(50) if weighs else None
    rows, upstream = make_rows(target, dtype, class_weight, -100, 0.0), torch.rand(7)
    expected = losses_and_gradients_(logits.clone(), rows, upstream)
    with imitated_gpu():
        torch.testing.assert_close(losses_and_gradients_(logits.clone(), rows, upstream), expected)
    torch.testing.assert_close(_plain_rows(logits, *rows[:3], upstream), expected)
    # As on a GPU, but for the compiler.
    monkeypatch.setattr(cross_entropy_rows, "_kernel", lambda function, *_: function)
    halves = [Vocabulary(25 * place, 50, *[lambda part: part] * 3) for place in range(2)]
    parts = [logits[:, 25 * place :][:, :25] for place in range(2)]
    highest = logits.amax(1, keepdim=True).to(upstream.dtype)
    each = [_local_sums(part, highest, rows, half) for part, half in zip(parts, halves, strict=True)]
    total = each[0] + each[1]
    slopes = [
        gradients_of_parts(part, highest, total[0], rows, upstream, half)
        for part, half in zip(parts, halves, strict=True)
    ]
    torch.testing.assert_close(torch.cat(slopes, 1), expected[1])
    torch.testing.assert_close(rows.weight_n * (total[0].log() - total[1]).squeeze(1), expected[0])
