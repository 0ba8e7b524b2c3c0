"""Views of tensors without data are those of torch's own mode."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.nn.fake_results import cast_of, view_of

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
