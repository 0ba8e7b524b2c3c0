"""Run modules with other tensors in place of their parameters and buffers, and restore what they held before."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from meshwright.errors import ModelError
from meshwright.nn.batches import map_tree
from meshwright.nn.module_structure import part_of_whole
from meshwright.runtime.torch_internals.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    in_kernel_invocation_manager,
    logger,
)
from meshwright.runtime.torch_internals.modules import buffers_of, parameters_of
from meshwright.runtime.torch_internals.operators import schema_of, to_copy, unsafe_view
from meshwright.runtime.torch_internals.tensors import storage_identity


def call_with(
    module: nn.Module, state: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a module with other tensors; afterwards its own tensors and its attributes are as they were.

    ``torch.func.functional_call`` alone visits a shared module once for each of its places, and the second time
    restores the swapped tensors as if they were the module's own.

    Args:
        module: The module to call.
        state: Tensors by the names of ``named_parameters`` and ``named_buffers``; of a shared tensor by its first name.
            Tensors without an entry stay.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    swapped = {
        id(tensor): state[name]
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if name in state
    }
    places = {
        f"{path}.{name}" if path else name: swapped[id(tensor)]
        for path, each in module.named_modules()  # every module once
        for name, tensor in (*parameters_of(each).items(), *buffers_of(each).items())
        if id(tensor) in swapped
    }
    before = SavedAttributes()
    for each in module.modules():
        before.save(each)
    try:
        return torch.func.functional_call(module, places, args, kwargs, tie_weights=False)
    finally:
        before.restore()


def run_with(
    run: Callable[[nn.Module, Any], Any], model: nn.Module, state: Mapping[str, torch.Tensor], inputs: Any
) -> Any:
    """Return ``run(model, inputs)`` with other tensors in the model, as :func:`call_with` swaps them.

    This is for passes over fake tensors. A pass runs on one rank alone, and must leave no trace in training. So every
    other tensor that a module holds, and all tensors of modules outside the model, such as a loss with weights of its
    own, are replaced by fake ones as well, and restored afterwards.

    Raises:
        ModelError: When the pass runs another model that is distributed already, such as a teacher in the loss: it
            would keep what it gathers, fake tensors, or wait for ranks that do not run this pass.
    """
    before, own, seen = SavedAttributes(), set(model.modules()), set[nn.Module]()

    def enter(module: nn.Module, args: Any) -> None:
        if module in seen:
            return
        _check_not_distributed(module)
        seen.add(module)
        if module not in own:
            before.save(module)
        _replace_by_fakes(module)

    hook = register_module_forward_pre_hook(enter)
    try:
        with without_leftovers(model):
            return call_with(_Run(run, model), {f"model.{name}": tensor for name, tensor in state.items()}, (inputs,))
    finally:
        hook.remove()
        before.restore()


def _replace_by_fakes(module: nn.Module) -> None:
    # Under a fake tensor mode, ``detach`` makes a fake tensor of a real one.
    places: tuple[dict[str, Any], ...] = (vars(module), parameters_of(module), buffers_of(module))
    for place in places:
        for name, tensor in place.items():
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                place[name] = tensor.detach().requires_grad_(tensor.requires_grad)


def _check_not_distributed(module: nn.Module) -> None:
    syncs_buffers = isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers()
    if isinstance(module, FSDPModule) or part_of_whole(module) is not None or syncs_buffers:
        raise ModelError(
            "another model runs in it whose ranks need each other, which a pass without data cannot run",
            expected="a model and a loss of plain modules",
            got=type(module).__name__,
            fix="train on: only predictions miss it",
        )


class _Run(nn.Module):
    """A function of a model as a module, whose tensors can be swapped during a call."""

    def __init__(self, run: Callable[[nn.Module, Any], Any], model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, inputs: Any) -> Any:
        return self._run(self.model, inputs)


class FakeTensors:
    """Fake tensors for one pass of a model: with shapes, dtypes and devices, but without data.

    Args:
        device: Device of all of them; None keeps each tensor's own.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor like another tensor, which may be on ``meta``."""
        if self._device is not None and tensor.device.type == "meta":
            with self._mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        fake: torch.Tensor = self._mode.from_tensor(tensor.detach())
        return fake if self._device is None else fake.to(self._device)

    def like_all(self, tree: Any) -> Any:
        """Return a tree, such as a model's input, with fake tensors in place of its tensors."""
        return map_tree(lambda leaf: self.like(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Create fake tensors only while the pass runs, and show no warnings: training will show them.

        Nor does torch log the operators that fail: what the caller makes of the exception is said once.
        """
        with warnings.catch_warnings(), _without_grouped_kernels(), self._mode, KnownResults():
            warnings.simplefilter("ignore")
            level = logger.level
            logger.setLevel(logging.CRITICAL)
            try:
                yield
            finally:
                logger.setLevel(level)


@contextlib.contextmanager
def _without_grouped_kernels() -> Iterator[None]:
    """Let transformers' experts run on fake tensors in any precision: their grouped kernel takes bf16 only.

    They save the same tensors for backward without it.
    """
    transformers = sys.modules.get("transformers.integrations.moe")
    if transformers is None or not hasattr(transformers, "_can_use_grouped_mm"):
        yield
        return
    # A mock would keep what it is called with.
    with mock.patch.object(transformers, "_can_use_grouped_mm", _never):
        yield


def _never(*_: Any, **__: Any) -> bool:
    return False


# --- State beside tensors: attributes such as counters and masks, and caches of functions.

_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque)


class SavedAttributes:
    """Snapshot of modules' attributes; plain containers in them are followed, however deep."""

    def __init__(self) -> None:
        # Containers and copies of them by ``id``, which stays theirs as long as they are referenced here.
        self._contents: dict[int, tuple[Any, Any]] = {}

    def save(self, module: nn.Module) -> None:
        """Save a module's own attributes, parameters, buffers and hooks; not the values of its tensors."""
        self._save(vars(module))

    def restore(self) -> None:
        """Restore the contents of every container that has changed."""
        for container, content in self._contents.values():
            if _items(container) != _items(content):
                container.clear()
                (container.extend if isinstance(container, list | collections.deque) else container.update)(content)

    def _save(self, value: Any) -> None:
        if type(value) not in _CONTAINERS or id(value) in self._contents:
            return
        self._contents[id(value)] = (value, copy.copy(value))
        for each in value.values() if isinstance(value, dict) else value:
            self._save(each)


def _items(container: Any) -> list[tuple[int, int]]:
    # Compare by identity: ``==`` on tensors is elementwise.
    pairs = container.items() if isinstance(container, dict) else ((each, None) for each in container)
    return [(id(key), id(value)) for key, value in pairs]


# [Note: caches of a model's code] Code may keep tensors outside its modules: in attributes of its classes, in globals
# of its files and of those whose functions they import, in caches and closures of functions, and in plain objects.
# After a pass without data none may hold a fake tensor, or training would compute with it. What holds one is as it was
# before; all else stays as the pass has left it, for a flag that says what has been done is still right. Installed
# libraries keep tensors in caches of functions.

_MOST_PLACES, _MOST_ITEMS = 20_000, 10_000
_OF_MODULES = frozenset(vars(nn.Module()))
_NOTHING = object()
_Place = dict[Any, Any] | list[Any] | set[Any] | collections.deque[Any] | type


@contextlib.contextmanager
def without_leftovers(model: nn.Module) -> Iterator[None]:
    """Leave no fake tensor in what a model's code holds outside its modules; see [Note: caches of a model's code].

    Caches of functions (``functools.lru_cache``, ``cache``) that have stored anything in the block are cleared on exit.

    Args:
        model: The model. What its modules, its classes and the files that define these refer to is looked at, and
            ``__main__``; lists of data, which are long, are not.
    """
    outside = _Outside(model)
    misses = [each.cache_info().misses for each in outside.caches]
    contents = [(each, dict(vars(each)) if isinstance(each, type) else copy.copy(each)) for each in outside.places]
    try:
        yield
    finally:
        for cache, before in zip(outside.caches, misses, strict=True):
            if cache.cache_info().misses != before:
                cache.cache_clear()
        for place, content in contents:
            _without_fakes(place, content)


class _Outside:
    """Containers and caches to which a model's code refers beside its modules.

    Attributes:
        places: Containers, attributes of objects, and classes.
        caches: Of functions.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: list[_Place] = []
        self.caches: list[functools._lru_cache_wrapper[Any]] = []
        self._seen = dict[int, Any]()  # by ``id``, which stays theirs as long as they are referenced here
        classes = {parent for module in model.modules() for parent in type(module).__mro__}
        kept = {each for each in classes if each.__module__.partition(".")[0] not in ("torch", "builtins")}
        self._own = {each for each in kept if _is_users(each.__module__)}
        names = {"__main__", *(each.__module__ for each in kept)}
        files = {name: vars(sys.modules[name]) for name in sorted(names) if name in sys.modules}
        own = [file for name, file in files.items() if _is_users(name)]
        functions = [each for file in own for each in file.values() if isinstance(each, types.FunctionType)]
        imported = [each.__globals__ for each in functions if _is_users(each.__module__ or "torch")]
        self._seen |= {id(module): module for module in model.modules()}
        attributes = (each for module in model.modules() for each in vars(module).items())
        self._walk([*imported, *(value for name, value in attributes if name not in _OF_MODULES), *own, *self._own])
        # Of libraries, only functions: these keep tensors in caches, and have many objects.
        every = (each for place in (*files.values(), *map(vars, kept)) for each in place.values())
        self._walk([each for each in every if isinstance(each, _FUNCTIONS)])

    def _walk(self, left: list[Any]) -> None:
        most = len(self._seen) + _MOST_PLACES
        while left and len(self._seen) < most:
            left += self._parts(left.pop())

    def _parts(self, value: Any) -> list[Any]:
        """Note a value, and return what it refers to."""
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return []
        self._seen[id(value)] = value
        if isinstance(value, functools._lru_cache_wrapper):
            self.caches.append(value)
            return []
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if isinstance(value, _METHODS):
            return [value.__func__]
        place = value if isinstance(value, type) and value in self._own else _place_of(value)
        if place is None:
            return []
        self.places += [] if isinstance(place, tuple) else [place]
        return _values(place)


_METHODS = (staticmethod, classmethod, types.MethodType)
_FUNCTIONS = (types.FunctionType, functools._lru_cache_wrapper, *_METHODS)
_LEAVES = (str, bytes, int, float, type(None), torch.Tensor, torch.dtype, types.ModuleType)


@functools.cache
def _is_users(module: str) -> bool:
    """Return whether a module is of a user's own code, and of no library, wherever that is installed."""
    package, file = module.partition(".")[0], getattr(sys.modules.get(module), "__file__", None) or ""
    is_own = package not in ("torch", "meshwright", *sys.stdlib_module_names)
    return is_own and "site-packages" not in file and "dist-packages" not in file


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not _NOTHING
    except ValueError:  # of a variable that is not bound yet
        return False


def _place_of(value: Any) -> Any:
    """Return the container that a value is, or that of a plain object's attributes; None: it holds nothing."""
    if type(value) in _CONTAINERS or type(value) is tuple:
        return value if len(value) <= _MOST_ITEMS else None
    if isinstance(value, type) or not _is_users(type(value).__module__):
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _values(place: Any) -> list[Any]:
    if isinstance(place, type):
        return [*vars(place).values()]
    return [*place.values()] if isinstance(place, dict) else [*place]


def _without_fakes(place: _Place, content: Any) -> None:
    """Give what holds a fake tensor in a place the value that it had before, or none."""
    if isinstance(place, type | dict):
        for key, value in [*(vars(place) if isinstance(place, type) else place).items()]:
            before = content.get(key, _NOTHING)
            if value is before or not _holds_fake(value):
                continue
            if isinstance(place, type):
                delattr(place, key) if before is _NOTHING else setattr(place, key, before)
            elif before is _NOTHING:
                del place[key]
            else:
                place[key] = before
    elif _items(place) != _items(content) and any(map(_holds_fake, place)):
        place.clear()
        (place.extend if isinstance(place, list | collections.deque) else place.update)(content)


def _holds_fake(value: Any) -> bool:
    left, seen = [value], dict[int, Any]()
    while left and len(seen) < _MOST_PLACES:
        each = left.pop()
        if isinstance(each, FakeTensor):
            return True
        if not isinstance(each, _LEAVES) and id(each) not in seen:
            seen[id(each)] = each
            place = vars(each) if isinstance(each, nn.Module) else _place_of(each)
            left += [] if place is None else _values(place)
    return False


# --- Results of operators on fake tensors, told without going through ``FakeTensorMode``.

# [Note: known results] A pass without data calls some two thousand operators, and torch's mode takes a quarter of a
# millisecond for each, also where its own cache knows the result. Views and casts are made by their kernels for
# ``meta`` at once. What any other operator has returned once, with its layout, it returns again for arguments of the
# same layouts: the first call goes through the mode, and further ones allocate what it returned.

_aten = torch.ops.aten
VIEWS = frozenset(
    {
        _aten.alias.default, _aten.detach.default, _aten.expand.default, _aten.permute.default, _aten.select.int,
        _aten.slice.Tensor, _aten.squeeze.dim, _aten.t.default, _aten.transpose.int, _aten.unsqueeze.default,
        _aten.view.default,
    }
)  # fmt: skip
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
    """Remember what operators returned for arguments of each layout; see [Note: known results]."""

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
        if func is unsafe_view.default and not given:
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
