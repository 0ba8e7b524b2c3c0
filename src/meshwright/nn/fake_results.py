"""Tell the results of operators on fake tensors without going through ``FakeTensorMode``.

[Note: known results] A pass without data calls some two thousand operators, and torch's mode takes a quarter of a
millisecond for each, also where its own cache knows the result. Views and casts are made by their kernels for ``meta``
at once. What any other operator has returned once, with its layout, it returns again for arguments of the same layouts:
the first call goes through the mode, and further ones allocate what it returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from meshwright.runtime.torch_internals.fake_tensors import FakeTensor, TorchDispatchMode, in_kernel_invocation_manager
from meshwright.runtime.torch_internals.operators import schema_of, to_copy
from meshwright.runtime.torch_internals.tensors import storage_identity

_aten = torch.ops.aten
VIEWS = frozenset(
    {
        _aten.alias.default, _aten.detach.default, _aten.expand.default, _aten.permute.default, _aten.select.int,
        _aten.slice.Tensor, _aten.squeeze.dim, _aten.t.default, _aten.transpose.int, _aten.unsqueeze.default,
        _aten.view.default,
    }
)  # fmt: skip
_UNSAFE_VIEW = _aten._unsafe_view.default  # a view that says it is none
_SIZES = (int, float, bool, type(None))


def view_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FakeTensor | None:
    """Return the result of a view of a fake tensor, without going through ``FakeTensorMode``.

    None where only the mode can tell.

    Args:
        func: Overload of the operator, as a dispatch mode gets it.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    return _sized(func, args) if func in VIEWS and not kwargs else None


def _sized(func: Any, args: tuple[Any, ...]) -> FakeTensor | None:
    """Return the result of an operator of a fake tensor and numbers in the same memory."""
    if type(args[0]) is not FakeTensor or args[0].constant is not None:
        return None
    for each in args[1:]:
        sizes = each if isinstance(each, list | tuple) else (each,)
        if not all(isinstance(size, _SIZES) for size in sizes):
            return None  # symbolic numbers
    return _by_kernel(func, args, {})


def cast_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FakeTensor | None:
    """Return the result of a cast of a fake tensor on its own device, without going through ``FakeTensorMode``.

    None where the call is anything else.
    """
    if func is not to_copy.default or kwargs.keys() != {"dtype"} or type(args[0]) is not FakeTensor:
        return None
    return _by_kernel(func, args, kwargs) if args[0].constant is None else None


def _by_kernel(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FakeTensor:
    seen: FakeTensor = args[0]
    with in_kernel_invocation_manager(seen.fake_mode):
        made = func(*args, **kwargs)
    return FakeTensor(seen.fake_mode, made, seen.fake_device)


# --- Results of equal calls.

_MOST = 20_000  # calls that are remembered, some kilobytes each
_VALUES = (*_SIZES, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CHANGE_TENSORS = ("set_", "detach_")  # not their values, and perhaps not their layouts either


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Given(NamedTuple):
    """A result that is one of the arguments, by its number among the tensors."""

    number: int


_Result = _Layout | _Given
_Unknown = object()


class Results:
    """What operators returned for arguments of each layout; see [Note: known results]."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[_Result, ...] | _Result | None] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, or tell its result.

        Args:
            func: Overload of the operator, as a dispatch mode gets it.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        tensors: list[FakeTensor] = []
        key = _key_of(func, args, kwargs, tensors)
        if key is None or not tensors:
            return func(*args, **kwargs)
        known = self._known.get(key, _Unknown)
        if known is None:
            return func(*args, **kwargs)
        if known is not _Unknown:
            return _made(known, tensors)
        result = func(*args, **kwargs)
        if len(self._known) >= _MOST:
            self._known.clear()
        # Arguments are described again: what changed the layout of one of them is not repeatable.
        again: list[FakeTensor] = []
        is_same = _key_of(func, args, kwargs, again) == key
        self._known[key] = _described(func, result, tensors) if is_same else None
        return result


class FakeDispatchMode(TorchDispatchMode):
    """A dispatch mode for passes without data, of which nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's guard against compiling a mode takes longer than the operators without data do."""
        return False


class KnownResults(FakeDispatchMode):
    """Tell results that are known in place of the ``FakeTensorMode`` beneath; see [Note: known results]."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        # Asked before and after every operator.
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        given = kwargs or {}
        result = view_of(func, args, given) if func in VIEWS else cast_of(func, args, given)
        if func is _UNSAFE_VIEW and not given:
            result = _sized(func, args)
        return _RESULTS.of(func, args, given) if result is None else result


_RESULTS = Results()  # of this process: layouts mean the same in every pass


def _key_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[FakeTensor]) -> Any | None:
    """Return a key of a call, and collect its tensors; None where layouts do not say it all."""
    found: list[Any] = [func, torch.get_default_dtype()]
    for each in args:
        if not _add_to(found, each, tensors):
            return None
    for name, each in kwargs.items():
        found.append(name)
        if not _add_to(found, each, tensors):
            return None
    return tuple(found)


def _add_to(found: list[Any], value: Any, tensors: list[FakeTensor]) -> bool:
    kind = type(value)
    if kind is FakeTensor:
        # A number that is known may decide the result, and the conjugate of another tensor is no layout.
        if value.constant is not None or value.is_complex() or value.layout is not torch.strided:
            return False
        tensors.append(value)
        found.append((value.shape, value.stride(), value.dtype, value.fake_device))
        return True
    if kind in (list, tuple):
        found.append(len(value))
        return all(_add_to(found, each, tensors) for each in value)
    found.append((kind, value))  # 1, 1.0 and True are equal
    return kind in _VALUES


def _described(func: Any, result: Any, given: list[FakeTensor]) -> tuple[_Result, ...] | _Result | None:
    """Return what an operator returned; None where that cannot be made again."""
    if schema_of(func).name.split("::")[1] in _CHANGE_TENSORS:
        return None
    if not isinstance(result, tuple):
        return _layout_of(result, given)
    every = [_layout_of(each, given) for each in result]
    storages = {storage_identity(each.untyped_storage()) for each in result if type(each) is FakeTensor}
    if type(result) is not tuple or len(storages) < len(result) or None in every:
        return None
    return tuple(every)  # type: ignore[arg-type]


def _layout_of(result: Any, given: list[FakeTensor]) -> _Result | None:
    if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
        return None
    for number, each in enumerate(given):
        if result is each:
            return _Given(number)
    storage = result.untyped_storage()
    identity = storage_identity(storage)
    if any(storage_identity(each.untyped_storage()) == identity for each in given) or result.storage_offset():
        return None  # a view
    found = _Layout(tuple(result.shape), result.stride(), result.dtype, result.fake_device)
    is_whole = storage.nbytes() == _empty(found).untyped_storage().nbytes()
    return found if is_whole and not result.is_complex() else None


def _made(known: Any, given: list[FakeTensor]) -> Any:
    if type(known) is tuple:
        return tuple(_made(each, given) for each in known)
    if type(known) is _Given:
        return given[known.number]
    mode = given[0].fake_mode
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, _empty(known), known.device)


def _empty(layout: _Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
