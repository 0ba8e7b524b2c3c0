"""Results of operators on tensors without data are those of torch's own mode."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.nn.swapped_parameters import KnownResults, cast_of, view_of

aten = torch.ops.aten
CALLS = [
    (aten.alias.default, ()),
    (aten.detach.default, ()),
    (aten.expand.default, ([7, 4, 6, 5],)),
    (aten.permute.default, ([2, 0, 1],)),
    (aten.select.int, (1, -2)),
    (aten.slice.Tensor, (1, 1, None, 2)),
    (aten.slice.Tensor, (2, -4, 100)),
    (aten.squeeze.dim, (0,)),
    (aten.transpose.int, (0, -1)),
    (aten.unsqueeze.default, (-1,)),
    (aten.view.default, ([4, 30],)),
    (aten.view.default, ([2, -1, 5],)),
]


def described(tensor):
    plain = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.requires_grad)
    return (type(tensor), *plain, tensor.untyped_storage()._cdata)


@pytest.mark.parametrize(("func", "args"), CALLS, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_views_are_those_of_the_mode(func, args, device, dtype):
    with FakeTensorMode() as mode:
        seen = torch.empty(4, 6, 5, dtype=dtype, device=device)
        expected = func(seen, *args)
    found = view_of(func, (seen, *args), {})
    assert described(found) == described(expected)
    assert found.fake_mode is mode


@pytest.mark.parametrize("strides", [(30, 5, 1), (1, 4, 24), (60, 10, 2), (0, 5, 1)], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize(("dtype", "to"), [(torch.float32, torch.bfloat16), (torch.int64, torch.float64)], ids=str)
def test_casts_are_those_of_the_mode(strides, device, dtype, to):
    with FakeTensorMode():
        seen = torch.empty_strided((4, 6, 5), strides, dtype=dtype, device=device)
        expected = aten._to_copy.default(seen, dtype=to)
    found = cast_of(aten._to_copy.default, (seen,), {"dtype": to})
    assert described(found)[:-1] == described(expected)[:-1]
    assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    assert cast_of(aten._to_copy.default, (seen,), {"dtype": to, "device": torch.device("cpu")}) is None


def test_transposed_weights_and_a_shape_that_is_wrong():
    with FakeTensorMode():
        weight = torch.empty(3, 5)
    assert view_of(aten.t.default, (weight,), {}).shape == (5, 3)
    with pytest.raises(RuntimeError, match="invalid for input of size 15"):
        view_of(aten.view.default, (weight, [4, 4]), {})
    assert not weight.fake_mode.in_kernel_invocation  # what went wrong has left nothing behind
    assert not torch._C._meta_in_tls_dispatch_include()


def test_others_are_left_to_the_mode():
    with FakeTensorMode() as mode:
        seen, constant = torch.empty(4, 6), torch.tensor(3)
    assert view_of(aten.relu.default, (seen,), {}) is None
    assert view_of(aten.view.default, (torch.empty(4, 6), [24]), {}) is None
    assert view_of(aten.view.default, (seen, [object()]), {}) is None
    assert view_of(aten.slice.Tensor, (seen,), {"dim": 0}) is None
    assert constant.constant is not None  # torch knows its value, and that of its views
    assert view_of(aten.detach.default, (constant,), {}) is None
    assert mode.in_kernel_invocation is False


# --- Results that are known


def matrix(*shape, dtype=torch.float32, device="cpu"):
    return torch.empty(shape, dtype=dtype, device=device)


REPEATED = {
    "product": lambda: (aten.mm.default, (matrix(4, 6), matrix(5, 6).t())),
    "broadcast": lambda: (aten.mul.Tensor, (matrix(3, 4, 6), matrix(3, 4, 1))),
    "permuted": lambda: (aten.add.Tensor, (matrix(3, 4, 6).permute(2, 0, 1), matrix(6, 3, 4))),
    "promoted": lambda: (aten.mul.Tensor, (matrix(4, 6, dtype=torch.bfloat16), 2.0)),
    "whole": lambda: (aten.mul.Tensor, (matrix(4, 6, dtype=torch.int64), 2)),
    "several": lambda: (aten.native_layer_norm.default, (matrix(4, 6), [6], matrix(6), matrix(6), 1e-5)),
    "listed": lambda: (aten.cat.default, ([matrix(4, 6), matrix(2, 6)],)),
    "on_a_gpu": lambda: (aten.silu.default, (matrix(4, 6, device="cuda:1"),)),
    "two_devices": lambda: (aten.mul.Tensor, (matrix(4, 6, device="cuda:1"), matrix())),
    "in_place": lambda: (aten.exp_.default, (matrix(4, 6),)),
    "padded": lambda: (aten.slice_backward.default, (matrix(4, 2), [4, 6], 1, 0, 2, 1)),
    "unsafe_view": lambda: (aten._unsafe_view.default, (matrix(4, 6), [2, 12])),
}


@pytest.mark.parametrize("name", REPEATED)
def test_known_results_are_those_of_the_mode(name):
    with FakeTensorMode() as mode:
        func, args = REPEATED[name]()
        expected = func(*args)
        with KnownResults():
            for _ in range(3):
                found = func(*args)
                several = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
                for one, other in several:
                    assert described(one)[:-1] == described(other)[:-1]
                    assert one.fake_mode is mode
                    assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
                    is_argument = [one is each for each in args]
                    assert is_argument == [other is each for each in args]


def test_a_shape_that_is_wrong_is_refused_again():
    with FakeTensorMode(), KnownResults():
        left, right = torch.empty(4, 6), torch.empty(5, 6)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                aten.mm.default(left, right)
        # A result of its own for each call, and its shape.
        first, second = left + 1, left + 1
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        assert (left + 1).dtype == torch.float32
        assert (torch.empty(4, 6, dtype=torch.int64) + 1).dtype == torch.int64
        assert (torch.empty(4, 6, dtype=torch.int64) + 1.0).dtype == torch.float32


def test_views_among_known_results_share_memory():
    with FakeTensorMode(), KnownResults():
        for _ in range(2):
            seen = torch.empty(4, 6)
            for view in (seen.t(), seen.view(24), aten._unsafe_view.default(seen, [24]), seen.contiguous()):
                assert view.untyped_storage()._cdata == seen.untyped_storage()._cdata
