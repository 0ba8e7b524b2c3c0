"""Record how a model is initialised on ``meta``, and compute its values later, one tensor at a time.

A model that no host can hold is built without memory. :func:`record` runs the code that builds it, with every tensor on
``meta``, and notes the operators. :meth:`InitialValues.compute` runs them again with memory, in an order in which a
tensor is alive only from its first operator to its last: whoever calls it gets each parameter whole, and keeps what it
needs. See [Note: initial values].
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import MeshwrightError, ModelError
from meshwright.runtime.torch_internals.fake_tensors import TorchDispatchMode, disable_current_modes
from meshwright.runtime.torch_internals.operators import packet_of, schema_of
from meshwright.runtime.torch_internals.pytree import tree_leaves, tree_map
from meshwright.runtime.torch_internals.tensors import storage_identity

# --- [Note: initial values]
#
# The values must be those of the ordinary build with the same seed, bit for bit, whatever the layout. Random numbers
# come from one stream, so every rank draws all of them, in the order of the build, and keeps its part. Draws whose
# tensor is overwritten later (transformers initialises what torch's modules have initialised already) only move the
# stream on: their numbers are dropped at once. Everything that is not drawn runs as early as it can, so that a
# conversion of the whole model at the end of a build does not keep the model whole until then.
#
# Tensors are known by their storage. Views, ``.data`` and ``detach`` share it, so an operator's argument is described
# by its storage and its place in it, and no view has to be computed again.


@dataclass(frozen=True)
class _Place:
    """A tensor as a part of a storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor on memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.strides)  # type: ignore[call-overload,no-any-return]


@dataclass
class _Operator:
    """One operator of a build, with places for its tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    reads: frozenset[int]
    """Storages of its arguments."""
    writes: frozenset[int]
    """Storages that it makes or changes."""
    replaces: frozenset[int]
    """Those whose earlier content does not matter: new ones, and those that it overwrites whole."""
    is_random: bool
    fills: bool
    """Whether what it makes has content."""


@dataclass
class InitialValues:
    """The operators that give a model its initial values, and where its tensors lie.

    Made by :func:`record`.
    """

    operators: list[_Operator] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    """Values by storage that no operator made: numbers that the code had in Python or NumPy."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of every storage."""
    places: dict[str, _Place] = field(default_factory=dict)
    """Parameters and buffers by name, tied ones under each of their names."""
    generator: torch.Tensor | None = None
    """State of torch's generator before the build."""

    def without_values(self) -> list[str]:
        """Return the names of the tensors that no operator writes: the build leaves whatever was in memory."""
        filling = (each.writes for each in self.operators if each.fills)
        written = set(self.constants).union(*filling)
        return [name for name, place in self.places.items() if place.storage not in written and 0 not in place.shape]

    def computed_from(self, names: Collection[str], sources: Collection[str]) -> list[str]:
        """Return those of ``names`` whose values depend on those of ``sources``."""
        read = {self.places[name].storage for name in sources}
        wanted = {name: self.places[name].storage for name in names if self.places[name].storage not in read}

        def depends(storages: set[int]) -> bool:
            needed = zip(self.operators, _needed(self.operators, storages), strict=True)
            return any(is_needed and each.reads & read and not _takes_shape_only(each) for each, is_needed in needed)

        if not depends(set(wanted.values())):  # one pass for what is usual
            return []
        return [name for name, storage in wanted.items() if depends({storage})]

    def compute(
        self,
        names: Collection[str],
        deliver: Callable[[str, torch.Tensor], None],
        *,
        draws: bool = True,
        skipped: Collection[str] = (),
    ) -> None:
        """Compute the values of tensors, one after the other.

        Args:
            names: The tensors wanted.
            deliver: Called with a name and the whole tensor on the CPU, which is freed afterwards; once for each name.
            draws: Whether to draw the numbers of all others, too, so that the values, and torch's generator
                afterwards, are those of the ordinary build. False is faster where nothing wanted is drawn, and leaves
                the generator as it is.
            skipped: Tensors for which no numbers are drawn, as where ``from_pretrained`` builds a model.
        """
        before = torch.get_rng_state()
        if self.generator is not None:
            torch.set_rng_state(self.generator)
        wanted: dict[int, list[str]] = defaultdict(list)
        for name in names:
            wanted[self.places[name].storage].append(name)
        with torch.no_grad(), disable_current_modes(), torch.device("cpu"):
            _Replay(self, wanted, deliver, draws=draws, skipped={self.places[name].storage for name in skipped}).run()
        if not draws:
            torch.set_rng_state(before)


# Operators that make memory without content, and those that write all of their first argument without reading it.
_aten: Any = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_OVERWRITE = {
    _aten.normal_, _aten.uniform_, _aten.fill_, _aten.zero_, _aten.copy_, _aten.exponential_, _aten.log_normal_,
    _aten.random_, _aten.cauchy_, _aten.geometric_, _aten.bernoulli_,
}  # fmt: skip


_OF_SHAPE = _EMPTY | {
    _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like, _aten.new_zeros,
    _aten.new_ones, _aten.new_full,
}  # fmt: skip


def _takes_shape_only(operator: _Operator) -> bool:
    """Return whether an operator needs no values of its arguments."""
    return operator.output is not None and packet_of(operator.function) in _OF_SHAPE  # functions of init have none


class _Replay:
    """One run of the operators; see [Note: initial values]."""

    def __init__(
        self,
        values: InitialValues,
        wanted: Mapping[int, list[str]],
        deliver: Callable[[str, torch.Tensor], None],
        *,
        draws: bool,
        skipped: set[int],
    ) -> None:
        self._values, self._wanted, self._deliver = values, wanted, deliver
        self._needed = _needed(values.operators, set(wanted))
        is_random = any(each and op.is_random for each, op in zip(self._needed, values.operators, strict=True))
        self._draws, self._skipped = draws or is_random, skipped  # a drawn value depends on all draws before it
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._uses = self._count_uses()

    def _count_uses(self) -> dict[int, int]:
        uses: dict[int, int] = defaultdict(int)
        for place, operator in enumerate(self._values.operators):
            if self._needed[place]:
                for storage in operator.reads | operator.writes:
                    uses[storage] += 1
        return uses

    def run(self) -> None:
        """Run what is needed, and deliver every tensor when nothing uses it any more."""
        for storage in self._wanted:
            if not self._uses[storage]:  # a constant that no operator touches
                self._finish(storage)
        for place in _order(self._values.operators, self._needed):
            operator = self._values.operators[place]
            if not self._needed[place]:
                skips = operator.writes and operator.writes <= self._skipped
                if operator.function is torch.set_rng_state or (self._draws and not skips):
                    _draw(operator, self._values.sizes)
                continue
            self._run(operator)
            for storage in operator.reads | operator.writes:
                self._uses[storage] -= 1
                if not self._uses[storage]:
                    self._finish(storage)

    def _run(self, operator: _Operator) -> None:
        args, kwargs = tree_map(self._real, (operator.args, operator.kwargs))
        if not operator.fills:
            return  # memory is made where it is used first
        result = operator.function(*args, **kwargs)
        for place, tensor in zip(tree_leaves(operator.output), tree_leaves(result), strict=False):
            if isinstance(place, _Place) and place.storage in operator.replaces - operator.reads:
                self._memory[place.storage] = _like_recorded(tensor, place).untyped_storage()

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, _Place):
            return leaf.on(self._storage(leaf.storage))
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _storage(self, storage: int) -> torch.UntypedStorage:
        if storage not in self._memory:
            constant = self._values.constants.get(storage)
            self._memory[storage] = (
                torch.empty(self._values.sizes[storage], dtype=torch.uint8).untyped_storage()
                if constant is None
                else constant.clone().untyped_storage()
            )
        return self._memory[storage]

    def _finish(self, storage: int) -> None:
        for name in self._wanted.get(storage, ()):
            self._deliver(name, self._values.places[name].on(self._storage(storage)))
        self._memory.pop(storage, None)


def _like_recorded(tensor: torch.Tensor, place: _Place) -> torch.Tensor:
    """Return a result with the strides that the recorded one has: places in it refer to these."""
    if tensor.stride() == place.strides and tensor.storage_offset() == place.offset:
        return tensor
    return torch.empty_strided(place.shape, place.strides, dtype=place.dtype).copy_(tensor)


def _draw(operator: _Operator, sizes: Mapping[int, int]) -> None:
    """Draw the numbers of an operator whose result nobody wants: later ones must be those of the ordinary build."""
    memory: dict[int, torch.UntypedStorage] = {}

    def real(leaf: Any) -> Any:
        if isinstance(leaf, _Place):
            if leaf.storage not in memory:
                # Zeros: a distribution may check its parameters.
                memory[leaf.storage] = torch.zeros(sizes[leaf.storage], dtype=torch.uint8).untyped_storage()
            return leaf.on(memory[leaf.storage])
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    args, kwargs = tree_map(real, (operator.args, operator.kwargs))
    operator.function(*args, **kwargs)


def _needed(operators: list[_Operator], wanted: set[int]) -> list[bool]:
    """Return for every operator whether a wanted value depends on it."""
    live, needed = set(wanted), [False] * len(operators)
    for place in range(len(operators) - 1, -1, -1):
        operator = operators[place]
        if operator.writes & live:
            needed[place] = True
            live -= operator.replaces
            live |= operator.reads - operator.replaces
    return needed


def _order(operators: list[_Operator], needed: list[bool]) -> Iterator[int]:
    """Yield the operators to run: draws in the order of the build, everything else as early as it can."""
    waits: dict[int, int] = {}
    followers: dict[int, list[int]] = defaultdict(list)
    touched: dict[int, list[int]] = defaultdict(list)  # by storage, since it was changed last, that change included
    last_draw = -1
    for place, operator in enumerate(operators):
        if not (needed[place] or operator.is_random):
            continue
        before: set[int] = set()
        if needed[place]:
            for storage in operator.reads | operator.writes:
                earlier = touched[storage]
                if storage in operator.writes:
                    before.update(earlier)
                    touched[storage] = [place]
                else:
                    before.update(earlier[:1])
                    touched[storage] = [*earlier, place] if earlier else [-1, place]
        if operator.is_random:
            before.add(last_draw)
            last_draw = place
        before.discard(-1)
        waits[place] = len(before)
        for each in before:
            followers[each].append(place)
    ready = [(operators[place].is_random, place) for place, count in waits.items() if not count]
    heapq.heapify(ready)
    while ready:
        _, place = heapq.heappop(ready)
        yield place
        for each in followers[place]:
            waits[each] -= 1
            if not waits[each]:
                heapq.heappush(ready, (operators[each].is_random, each))


# --- Recording


class Recording:
    """A context in which tensors are made on ``meta``, and the operators that give them values are noted.

    Numbers that the code brings from Python or NumPy (``torch.tensor``) stay on the CPU. torch's generator does not
    move.
    """

    def __init__(self) -> None:
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._before = torch.get_rng_state()
        self._recorder = _Recorder(InitialValues(generator=self._before))
        for context in (torch.device("meta"), self._recorder, _BuildMode(self._recorder)):
            self._contexts.enter_context(context)
        return self

    def __exit__(self, *error: object) -> None:
        self._recorder.note_seed()
        self._contexts.close()
        torch.set_rng_state(self._before)

    def has_built(self, model: nn.Module) -> bool:
        """Return whether the first parameter of a model was made here."""
        parameter = next(model.parameters(), None)
        return parameter is not None and self._recorder.has_noted(parameter)

    def values_of(self, model: nn.Module) -> InitialValues:
        """Return the values of a model that was built here. Parameters that have some already lose them."""
        self._recorder.name_tensors(model)
        self._recorder.forget_values(model)
        return self._recorder.values


_RECORDINGS: collections.deque[Recording] = collections.deque(maxlen=4)  # of models that are about to be accelerated


def remember(recording: Recording) -> None:
    """Keep a recording until a model of it is accelerated; the latest few are."""
    _RECORDINGS.append(recording)


def remembered(model: nn.Module) -> InitialValues | None:
    """Return the initial values of a model that was built in a recording that is kept; None if in none."""
    found = next((each for each in _RECORDINGS if each.has_built(model)), None)
    if found is None:
        return None
    with disable_current_modes():  # the recording may still be under way
        return found.values_of(model)


def record(build: Callable[[], nn.Module]) -> tuple[nn.Module, InitialValues]:
    """Build a model on ``meta``, and note how it gets its values.

    Numbers that the code brings from Python or NumPy (``torch.tensor``) stay on the CPU. No generator moves.

    Args:
        build: Returns the model; called once.

    Raises:
        ModelError: When the build needs the values of tensors, or returns something else.
    """
    recording = Recording()
    try:
        with recording:
            model = build()
    except (MeshwrightError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ModelError(
            f"The model cannot be built without memory: {type(error).__name__}: {error}",
            expected="code that needs no values of tensors while it builds the model",
            got="a build on meta that fails",
            fix="compute such numbers with device='cpu', or pass the built model",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            "The function given as the model returns no module",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            fix="return the model from it",
        )
    return model, recording.values_of(model)


def record_reset(model: nn.Module) -> InitialValues:
    """Note how a model that is on ``meta`` already initialises itself.

    Its ``init_weights``, if it takes no argument, or else every module's ``reset_parameters`` (or torch's
    ``_reset_parameters``), children before the module that holds them: the order in which constructors call it.

    Raises:
        ModelError: When that fails.
    """

    def reset() -> nn.Module:
        own = getattr(model, "init_weights", None)
        if callable(own):
            own()
            return model
        for module in _children_first(model, set()):
            for name in ("reset_parameters", "_reset_parameters"):
                if callable(method := getattr(module, name, None)):
                    method()
                    break
        return model

    return record(reset)[1]


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


class _BuildMode(TorchFunctionMode):
    """Sees what the dispatcher does not: tensors of given numbers, and functions of ``torch.nn.init``."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _OF_NUMBERS and kwargs.get("device") is None and not isinstance(args[0], torch.Tensor):
            kwargs["device"] = "cpu"  # on meta the numbers would be lost
        if func == _IS_META:
            self._note_init(inspect.currentframe())
        return func(*args, **kwargs)

    def _note_init(self, frame: FrameType | None) -> None:
        """Note the function of ``torch.nn.init`` that asks whether its tensor is on meta, to do nothing if so.

        Those do that read what they have drawn: ``trunc_normal_``, ``orthogonal_``, ``sparse_``.
        """
        caller = frame.f_back if frame is not None else None
        if caller is not None and caller.f_globals is vars(nn.init):
            names = inspect.getargvalues(caller).args
            arguments = {name: caller.f_locals[name] for name in names}
            if any(isinstance(each, torch.Tensor) and each.is_meta for each in arguments.values()):
                self._recorder.note_function(getattr(nn.init, caller.f_code.co_name), arguments)


_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class _Recorder(TorchDispatchMode):
    """Notes every operator; arguments on ``meta`` and the CPU may be mixed."""

    def __init__(self, values: InitialValues) -> None:
        super().__init__()
        self.values = values
        self._alive: list[torch.UntypedStorage] = []  # so that no two storages have one identity
        self._numbers: dict[int, int] = {}  # of storages, by identity
        self._seed = torch.get_rng_state()  # the state of the generator that the build has set last

    def name_tensors(self, model: nn.Module) -> None:
        """Note where the parameters and buffers of a model lie."""
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.values.places = {name: self._noted(tensor) for name, tensor in named}

    def forget_values(self, model: nn.Module) -> None:
        """Move parameters to meta that the code has made of numbers, or read: their values are known here."""
        written = frozenset[int]().union(*(each.writes for each in self.values.operators))
        for parameter in model.parameters():
            if parameter.is_meta:
                continue
            number = self._place(parameter).storage
            if number not in written:
                self.values.constants[number] = _bytes_of(parameter)
            empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            torch.utils.swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
            storage = parameter.untyped_storage()
            self._alive.append(storage)
            self._numbers[storage_identity(storage)] = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Places before the call: what it changes may be a number known only now.
        noted = tree_map(self._noted, (args, kwargs))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(each.is_meta for each in inputs) and not all(each.is_meta for each in inputs):
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random:
            self.note_seed()
        output = func(*args, **kwargs)
        if is_random:
            torch.set_rng_state(self._seed)  # which a draw on the CPU has moved
        self._note(func, noted, tree_map(self._made, output))
        return output

    def _note(self, func: Any, noted: tuple[Any, dict[str, Any]], output: Any) -> None:
        args, kwargs = noted
        reads = frozenset(place.storage for place in tree_leaves((args, kwargs)) if isinstance(place, _Place))
        made = frozenset(place.storage for place in tree_leaves(output) if isinstance(place, _Place)) - reads
        # Of an operator in place, its first argument.
        changed = [place for place in _changed(func, args, kwargs) if isinstance(place, _Place)]
        writes = made | {place.storage for place in changed}
        if not writes:
            return  # a view
        replaces = made | {place.storage for place in changed if self._is_replaced(func, place, args)}
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        fills = packet_of(func) not in _EMPTY
        operator = _Operator(
            func, args, kwargs, output, reads, frozenset(writes), frozenset(replaces), is_random, fills
        )
        self.values.operators.append(operator)

    def has_noted(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage was met."""
        return storage_identity(tensor.untyped_storage()) in self._numbers

    def note_seed(self) -> None:
        """Note that the code has seeded the generator, if it has: on meta nothing else moves it."""
        state = torch.get_rng_state()
        if not torch.equal(state, self._seed):
            self._seed, none = state, frozenset[int]()
            self.values.operators.append(
                _Operator(torch.set_rng_state, (state,), {}, None, none, none, none, is_random=True, fills=True)
            )

    def note_function(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Note a function that fills a tensor, and decides by what it has drawn how to go on."""
        self.note_seed()
        noted = {name: self._noted(value) for name, value in arguments.items()}
        places = [place for place in noted.values() if isinstance(place, _Place)]
        written = frozenset(place.storage for place in places)
        replaced = {place.storage for place in places if _num_bytes(place) == self.values.sizes[place.storage]}
        self.values.operators.append(
            _Operator(function, (), noted, None, written, written, frozenset(replaced), is_random=True, fills=True)
        )

    def _is_replaced(self, func: Any, place: _Place, args: Any) -> bool:
        """Return whether an operator in place overwrites the whole storage without reading it."""
        sources = [each for each in tree_leaves(args[1:]) if isinstance(each, _Place)]
        whole = _num_bytes(place) == self.values.sizes[place.storage]
        return whole and packet_of(func) in _OVERWRITE and all(each.storage != place.storage for each in sources)

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_new = storage_identity(leaf.untyped_storage()) not in self._numbers
        place = self._place(leaf)
        if is_new and not leaf.is_meta:
            # No operator made it: a number of Python or NumPy.
            self.values.constants[place.storage] = _bytes_of(leaf)
        return place

    def _made(self, leaf: Any) -> Any:
        return self._place(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _place(self, tensor: torch.Tensor) -> _Place:
        storage = tensor.untyped_storage()
        identity = storage_identity(storage)
        if identity not in self._numbers:
            self._alive.append(storage)
            self._numbers[identity] = len(self._numbers)
            self.values.sizes[self._numbers[identity]] = storage.nbytes()
        number = self._numbers[identity]
        return _Place(number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator writes to."""
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))


def _on_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _num_bytes(place: _Place) -> int:
    return math.prod(place.shape) * place.dtype.itemsize


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's whole storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()  # type: ignore[call-overload,no-any-return]
