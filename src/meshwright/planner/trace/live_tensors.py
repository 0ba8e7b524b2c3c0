"""Track the tensors of a pass: what forward saves for backward, and the bytes that live at every operator.

:func:`record_saved` works in real training, too, to measure what forward saves. :class:`LiveBytes` and the record of
operators are for passes without data.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.cost import Instant, Transient, outermost_instants
from meshwright.cost.activations import PRODUCTS
from meshwright.methods.recompute import call_name, can_keep, is_recomputed, keeps_results, kept_now
from meshwright.nn import find_blocks, is_compiled, outside_compiled
from meshwright.nn.swapped_parameters import FakeDispatchMode
from meshwright.planner.trace.aten_kernels import FlopCount, reference, storage_of, tensors_in
from meshwright.planner.trace.fused_kernels import Fate, Fusion, Moved
from meshwright.runtime.torch_internals.fake_tensors import TorchDispatchMode

if TYPE_CHECKING:
    from meshwright.cost.activations import Given
    from meshwright.methods.tensor.tensor_parallel import SaveLog


@dataclass
class Result:
    """A storage that operators or blocks have returned; that of an operator can be kept instead of running it again."""

    num_bytes: int
    calls: list[Call] = field(default_factory=list)
    places: set[int] = field(default_factory=set)
    returned_by: set[int] = field(default_factory=set)  # the blocks that did, by their places


@dataclass(frozen=True)
class Call:
    """A call of an operator that computes, or whose result can be kept."""

    operator: str
    stack: tuple[nn.Module, ...]
    num_saved_before: int
    flops: int
    place: int
    num_needed: int = 0  # modules of ``stack``, from the outermost, that save something after it
    turns: tuple[int, ...] = ()  # of a product: the parity of its turn in each module of ``stack``


@dataclass
class SavedTensors:
    """The storages saved for backward, and the modules that were running when each was saved."""

    sizes: dict[int, int] = field(default_factory=dict)  # storage -> bytes
    savers: dict[int, list[tuple[nn.Module, ...]]] = field(default_factory=dict)  # storage -> module stacks
    inputs: dict[nn.Module, dict[int, int]] = field(default_factory=dict)  # module -> storage of an argument -> bytes
    weights: set[int] = field(default_factory=set)  # storages of parameters and buffers: saved, but not by forward
    given: dict[int, Given] = field(default_factory=dict)  # storages of the model's input
    references: dict[int, StorageWeakRef] = field(default_factory=dict)  # to saved storages with data
    met: list[StorageWeakRef] = field(default_factory=list)  # keeps addresses of storages from being reused
    log: SaveLog = field(default_factory=list)  # the module stack of every save, in order
    places: dict[int, set[int]] = field(default_factory=dict)  # storage -> where in the list of blocks it was saved
    run_at: dict[nn.Module, set[int]] = field(default_factory=dict)  # module -> where it ran
    runs: Counter[nn.Module] = field(default_factory=Counter)  # module -> how often it ran
    results: dict[int, Result] = field(default_factory=dict)  # storage -> who made it, where operators are recorded
    work: list[Call] = field(default_factory=list)  # calls of operators in order, where they are recorded
    fates: dict[int, Fate] = field(default_factory=dict)  # storage -> see there
    fusion: Fusion = field(default_factory=Fusion)
    moved: list[Moved | None] = field(default_factory=list)  # by operators: what each moves in compiled blocks
    running: list[nn.Module] = field(default_factory=list)  # the modules that run now, outermost first
    entered: int = 0  # modules that have begun to run since the last kernel, in the same block
    place: int = -1  # where in the list of blocks
    complete: bool = False  # whether forward has run: what runs again in backward saves nothing more

    def add(self, storage: int, num_bytes: int, place: int, reference: StorageWeakRef) -> None:
        """Add a storage that the graph keeps for backward without saving it.

        It counts for the module that took it, or for the place where it was made.
        """
        taker = next((module for module, taken in self.inputs.items() if storage in taken), None)
        self.sizes[storage] = num_bytes
        self.savers[storage] = [() if taker is None else (taker,)]
        self.places[storage] = {place} if taker is None else set(self.run_at[taker])
        self.met.append(reference)

    @property
    def bytes(self) -> int:
        """Return the bytes saved; every storage counts once, and weights do not."""
        return sum(size for storage, size in self.sizes.items() if storage not in self.weights)

    def note_needed(self) -> None:
        """Note of every call how many modules around it save something after it, and what compiled blocks save."""
        others = self.weights | self.given.keys()
        self.fates = self.fusion.fates(each for each in self.sizes if each not in others)
        self.moved = self.fusion.moved(self.sizes.keys(), self.fates)
        last: dict[nn.Module, int] = {}  # the number of the last tensor saved while it ran
        for position, stack in enumerate(self.log):
            last.update(dict.fromkeys(stack, position))

        def noted(call: Call) -> Call:
            needed = sum(last.get(module, -1) >= call.num_saved_before for module in call.stack)
            return dataclasses.replace(call, num_needed=needed)

        self.work = [noted(call) for call in self.work]
        for made in self.results.values():
            made.calls = [noted(call) for call in made.calls]

    def forget_freed(self) -> None:
        """Forget storages that are free again: of a block's trial run, or of a graph inside a function's forward."""
        for storage in [each.cdata for each in (*self.met, *self.references.values()) if each.expired()]:
            for known in (self.sizes, self.savers, self.places):
                known.pop(storage, None)

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Return the bytes saved of a tensor's storage."""
        storage, _ = storage_of(tensor)
        return 0 if storage in self.weights else self.sizes.get(storage, 0)

    def bytes_beside(self, tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> int:
        """Return the bytes of tensors that are neither saved nor share memory with others."""
        known = {*self.sizes, *self.weights, *(storage for storage, _ in map(storage_of, others))}
        return sum(size for storage, size in {*map(storage_of, tensors)} if storage not in known)

    def kept_by_place(self) -> dict[int, int]:
        """Return the bytes saved, by the first place where each storage was saved."""
        found: dict[int, int] = {}
        for storage, places in self.places.items():
            if storage not in self.weights and storage not in self.given:
                found[min(places)] = found.get(min(places), 0) + self.sizes[storage]
        return found


@contextlib.contextmanager
def record_saved(
    model: nn.Module,
    *,
    counter: FlopCount | None = None,
    blocks: Sequence[nn.Module] = (),
    retains_graph: bool = True,
) -> Iterator[SavedTensors]:
    """Record what a forward pass inside the block saves for backward, with results that ``checkpoint`` keeps.

    Args:
        model: The model that runs; gathered weights of sharded modules are recognised while they run.
        counter: Counts FLOPs. With it operators are recorded, too, and the address of every storage is kept until
            the end of the record: only for fake tensors, which hold no data.
        blocks: Blocks of the list that a pipeline cuts, in the order in which they run; they are the places.
        retains_graph: Whether a backward may leave saved tensors in the graph. An operator that saves its own result
            would then refer to itself for ever, so what is saved is detached.
    """
    # Of blocks all weights are looked at: some take those of modules in them that they never call.
    whole = {model, *(block for _, block in find_blocks(model))}
    recorder = _Recorder(counter, blocks, whole, detaches=retains_graph)
    hooks = [
        hook
        for module in outside_compiled(model)
        for hook in (
            module.register_forward_pre_hook(recorder.enter, with_kwargs=True),
            module.register_forward_hook(recorder.leave, always_call=True),
        )
    ]
    if counter is not None:
        watched: contextlib.AbstractContextManager[Any] = _WithoutData(recorder.watch)
    else:
        watched = _Operators(recorder.keep) if keeps_results(model) else contextlib.nullcontext()
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor), watched:
            yield recorder.saved
    finally:
        for hook in hooks:
            hook.remove()
        recorder.saved.met.clear()
    recorder.saved.note_needed()


class _Recorder:
    """The hooks of :func:`record_saved`, called by autograd, modules and operators."""

    def __init__(
        self, counter: FlopCount | None, blocks: Sequence[nn.Module], whole: set[nn.Module], *, detaches: bool
    ) -> None:
        self.saved = SavedTensors()
        self.saved.fusion = Fusion(self.saved.weights, len(blocks))
        self._detaches, self._counter, self._whole = detaches, counter, whole
        self._index = {block: number for number, block in enumerate(blocks)}
        self._stack = self.saved.running
        self._products: list[int] = []  # that have run in each of these modules

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd saves."""
        saved, running = self.saved, tuple(self._stack)
        packed = tensor.detach() if self._detaches else tensor
        if saved.complete:
            return packed
        key, size = storage_of(tensor)
        saved.sizes[key] = size
        saved.savers.setdefault(key, []).append(running)
        saved.places.setdefault(key, set()).add(saved.place)
        saved.log.append(running)
        if self._counter is not None:
            saved.met.append(reference(tensor))
        else:
            saved.references[key] = reference(tensor)
        return packed

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module begins to run."""
        saved = self.saved
        self._stack.append(module)
        saved.entered = 1 if module in self._index else saved.entered + 1
        self._products.append(0)
        if saved.complete:
            return
        saved.place = self._index.get(module, saved.place)
        saved.run_at.setdefault(module, set()).add(saved.place)
        saved.runs[module] += 1
        tensors = tensors_in((args, kwargs))
        saved.inputs.setdefault(module, {}).update(map(storage_of, tensors))
        if self._counter is not None:
            saved.met.extend(map(reference, tensors))
        elif torch.is_grad_enabled() and is_recomputed(module):
            # Held until it runs again, also where autograd saves no argument by name.
            saved.sizes.update(map(storage_of, tensors))
            saved.references.update((storage_of(tensor)[0], reference(tensor)) for tensor in tensors)
        inside = module in self._whole or is_compiled(module)  # no hook runs there
        for tensor in (*module.parameters(recurse=inside), *module.buffers(recurse=inside)):
            saved.weights.add(storage_of(tensor)[0])

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a module has run."""
        self._stack.pop()
        self._products.pop()
        if not self.saved.complete:
            if self._counter is not None and module in self._index:
                self._note_returned(output, self._index[module])
            self.saved.place += self._index.get(module) == len(self._index) - 1  # behind the last one

    def _note_returned(self, output: Any, place: int) -> None:
        for tensor in tensors_in(output):
            key, size = storage_of(tensor)
            made = self.saved.results.setdefault(key, Result(size))
            made.places.add(place)
            made.returned_by.add(place)
            self.saved.met.append(reference(tensor))
            self.saved.fusion.in_memory.add(key)

    def keep(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, whose result a recomputed module may keep."""
        result = operator(*args, **kwargs)
        if kept_now(operator, args, kwargs):
            self.saved.sizes.update(map(storage_of, tensors_in(result)))
        return result

    def watch(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator without data; outside the model, as in backward, it is no part of forward's work."""
        saved, counter = self.saved, self._counter
        if counter is None or not self._stack or saved.complete:
            return operator(*args, **kwargs)
        position, before = len(saved.log), counter.total
        result = operator(*args, **kwargs)
        flops, name = counter.total - before, call_name(operator, args)
        turns: tuple[int, ...] = ()
        if name in PRODUCTS:
            turns = tuple(count % 2 for count in self._products)
            self._products = [count + 1 for count in self._products]
        call = Call(name, tuple(self._stack), position, flops, saved.place, turns=turns)
        if flops:
            saved.work.append(call)
        if can_keep(operator, args, kwargs):
            for key, size in map(storage_of, tensors_in(result)):
                made = saved.results.setdefault(key, Result(size))
                made.calls.append(call)
                made.places.add(saved.place)
                saved.met.extend(map(reference, tensors_in(result)))
        return result


class _Operators(TorchDispatchMode):
    """Calls every operator through a function."""

    def __init__(self, around: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._around = around

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(func, args, kwargs or {})


class _WithoutData(_Operators, FakeDispatchMode):
    """Calls every operator of a pass without data through a function."""

    # Defined again: torch puts its guard around the method when a class that defines it is made.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(func, args, kwargs or {})


# --- The bytes that a pass without data holds, operator by operator, as one with data would.

Pass = Literal["forward", "loss", "backward", "weights"]
"""The part of a pass that runs; ``weights`` is the second part of a backward in two."""


class _Made(NamedTuple):
    reference: StorageWeakRef
    watch: weakref.ref[torch.UntypedStorage]  # tells when the storage is free
    num_bytes: int
    operator: int  # its number
    place: int | None  # whose backward it is; None in forward


class _Moment(NamedTuple):
    place: int
    during: Pass
    held: int  # bytes
    behind: Mapping[int, int] = {}  # of these, what backward of places behind this one has made, by those places


class _Gradient(NamedTuple):
    num_bytes: int
    made: int  # the operator that did
    complete: int  # the operator before
    place: int


class LiveBytes:
    """Follow the storages that operators make until nothing refers to them.

    Args:
        state: Parameters and buffers, which are not counted.
        inputs: Tensors of the micro-batch, which live throughout and are not counted.
    """

    def __init__(self, state: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        self._others: dict[int, StorageWeakRef] = {}  # storages that no operator made
        self._live: dict[int, _Made] = {}
        self._at_the_end: dict[int, _Made] = {}  # of forward
        self._before_backward: dict[int, _Made] = {}
        self._freed: dict[int, tuple[int, int]] = {}  # the operators that made each storage, and that found it free
        self._held = 0
        # Of all that is held only what changes is looked at: a model of many experts holds thousands of tensors.
        self._expired: list[int] = []  # storages that became free since the last operator
        self._made_in_backward: dict[int, int] = defaultdict(int)  # bytes that are held, by place
        self.moments: list[_Moment] = []  # of each operator
        self.backward_part: Pass = "backward"
        self._gradients: list[_Gradient] = []
        for tensor in state:
            self._is_other(tensor)
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._complete)
        for tensor in inputs:
            self._is_other(tensor)

    def note(self, result: Any, given: Any, place: int, during: Pass) -> None:
        """Note that an operator has run.

        Args:
            result: Result of the operator.
            given: Arguments of the operator.
            place: Place in the model where it ran, or whose backward it is.
            during: The part of the pass that runs.
        """
        if self.moments and during != self.moments[-1].during:
            self._at_the_end = self._at_the_end or dict(self._live)
        begins = during == "backward" and self.moments and self.moments[-1].during != during
        arguments: set[int] | None = None
        for tensor in tensors_in(result):
            key, size = storage_of(tensor)
            if key in self._live or key in self._others:
                continue
            if arguments is None:
                arguments = {storage_of(each)[0] for each in tensors_in(given)}
            if key in arguments:
                self._is_other(tensor)
            else:
                storage = tensor.untyped_storage()
                watch = weakref.ref(storage, self._expiry_of(key))
                own = place if during == "backward" else None
                self._live[key] = _Made(StorageWeakRef(storage), watch, size, len(self.moments), own)
                self._held += size
                if own is not None:
                    self._made_in_backward[own] += size
        self.settle()
        if begins:
            before = len(self.moments)
            self._before_backward = {key: made for key, made in self._live.items() if made.operator < before}
        self.moments.append(_Moment(place, during, self._held, self._made_behind(place, during)))

    def _expiry_of(self, key: int) -> Callable[[object], None]:
        return lambda _: self._expired.append(key)

    def settle(self) -> int:
        """Forget what is free by now, and return the bytes held."""
        while self._expired:
            key = self._expired.pop()
            made = self._live.pop(key, None)
            if made is not None:
                self._let_go(made)
                self._freed[key] = made.operator, len(self.moments)
        return self._held

    def _let_go(self, made: _Made) -> None:
        self._held -= made.num_bytes
        if made.place is not None:
            self._made_in_backward[made.place] -= made.num_bytes

    @property
    def num_operators(self) -> int:
        """Return the number of operators that have run."""
        return len(self.moments)

    def lifetime_of(self, storage: int) -> tuple[int, int]:
        """Return the operators that made a storage and found it free; -1 and the number of all where none did."""
        made = self._live[storage].operator if storage in self._live else -1
        return self._freed.get(storage, (made, len(self.moments)))

    def alive(self) -> dict[int, tuple[int, int]]:
        """Return the storages that are held now: the operator that made each, and its bytes."""
        self.settle()
        return {key: (made.operator, made.num_bytes) for key, made in self._live.items()}

    def _made_behind(self, place: int, during: Pass) -> dict[int, int]:
        if during != "backward":
            return {}
        return {there: size for there, size in self._made_in_backward.items() if size and there > place}

    def _is_other(self, tensor: torch.Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._others[reference.cdata] = reference

    def _complete(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        key, size = storage_of(parameter.grad)
        found = self._live.pop(key, None)
        if found is not None:
            self._let_go(found)
            self._is_other(parameter.grad)
            place = self.moments[-1].place
            self._gradients.append(_Gradient(size, found.operator, len(self.moments), place))

    def add_kept(self, saved: SavedTensors) -> None:
        """Add what the graph keeps without saving it, and frees in backward.

        Such are the inputs of what a model recomputes by itself, which a function of the graph holds.
        """
        for key, made in self._before_backward.items():
            if key not in saved.sizes and key not in self._live:
                saved.add(key, made.num_bytes, self.moments[made.operator].place, made.reference)

    def transients(
        self, saved: SavedTensors, let_go: Sequence[tuple[int, int]], left_last: int
    ) -> tuple[Transient, ...]:
        """Return the temporary tensors of every place; none if backward has not run.

        Args:
            saved: Record of the same pass.
            let_go: See :meth:`~meshwright.planner.trace.op_recording.BlockEnds.let_go`.
            left_last: See the attribute there.
        """
        if not any(moment.during == "backward" for moment in self.moments):
            return ()
        weights, complete = self._gradients_by_operator()
        last = max(moment.place for moment in self.moments)
        returned, (left, remains, hung) = self._returned(saved, last), self._left_over(saved, last)
        first, late = self._up_to(saved), self._late(saved)
        found, cut = defaultdict[int, set[Instant]](set), defaultdict[int, set[Instant]](set)
        reentrant: defaultdict[int, set[Instant]] = defaultdict(set)
        reentrant_cut: defaultdict[int, set[Instant]] = defaultdict(set)
        far: defaultdict[int, int] = defaultdict(int)
        forward: defaultdict[int, set[Instant]] = defaultdict(set)
        every = zip(self.moments, weights, complete, late, let_go, strict=True)
        for number, ((place, during, whole, behind), coming, done, from_others, (results, gradients)) in enumerate(
            every
        ):
            held = whole - from_others
            if during == "forward" and place == last:
                # What hooks behind the last block make is made while its weights are there.
                at = last - 1 if number < left_last else last
                forward[at].add(Instant(held - coming - first(at) - sum(returned.values()), coming, done))
            elif during == "backward" or place == last:
                own = held - coming - first(place) - sum(left.values())
                others = sum(size for later, size in remains.items() if later > place)
                found[place].add(Instant(own - others, coming, done))
                reentrant[place].add(Instant(own - others + results + gradients, coming, done))
                elsewhere = sum(size for later, size in hung.items() if later > place)
                in_stage = own - elsewhere - sum(behind.values())
                cut[place].add(Instant(in_stage, coming, done))
                reentrant_cut[place].add(Instant(in_stage + results, coming, done))
                far[place] = max(far[place], behind.get(last, 0) if place < last - 1 else 0)
        totals: defaultdict[int, int] = defaultdict(int)
        for each in self._gradients:
            totals[each.place] += each.num_bytes
        return tuple(
            Transient(
                place,
                outermost_instants(found[place]),
                totals[place],
                outermost_instants(forward[place]),
                returned.get(place, 0),
                left.get(place, 0),
                remains.get(place, 0),
                outermost_instants(cut[place]) if place < last else (),
                far[place],
                reentrant=outermost_instants(reentrant[place]) if -1 < place < last else (),
                reentrant_cut=outermost_instants(reentrant_cut[place]) if -1 < place < last else (),
            )
            for place in sorted(found)
        )

    def _up_to(self, saved: SavedTensors) -> Callable[[int], int]:
        """Return a function from a place to the bytes that it and those before it have saved."""
        kept = saved.kept_by_place()
        places = sorted(kept)
        sums = [0, *itertools.accumulate(kept[place] for place in places)]
        return lambda place: sums[bisect.bisect_right(places, place)]

    def _late(self, saved: SavedTensors) -> Sequence[int]:
        """Return after every operator of backward the bytes that places behind its own have saved and still hold.

        There are some where a block runs several times: its last run is behind the first of the block that follows.
        """
        steps = [0] * (len(self.moments) + 1)
        backward = [index for index, each in enumerate(self.moments) if each.during == "backward"]
        before = functools.cache(lambda place: [index for index in backward if self.moments[index].place < place])
        for key, places in saved.places.items():
            made, freed = self._freed.get(key, (0, 0))
            earlier = before(min(places))
            for index in earlier[bisect.bisect_left(earlier, made) : bisect.bisect_left(earlier, freed)]:
                steps[index] += saved.sizes[key]
        return steps[:-1]

    def _returned(self, saved: SavedTensors, last: int) -> dict[int, int]:
        """Return by blocks the bytes that forward made there and nobody saved, at the end of forward."""
        found: dict[int, int] = {}
        for key, made in self._at_the_end.items():
            place = self.moments[made.operator].place
            if key not in saved.sizes and -1 < place < last:
                found[place] = found.get(place, 0) + made.num_bytes
        return found

    def _left_over(self, saved: SavedTensors, last: int) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        """Return by blocks the bytes made there and still held: not saved, other ones, and those of forward among them.

        References that form a circle wait for the garbage collector.
        """
        left: dict[int, int] = {}
        remains: dict[int, int] = {}
        hung: dict[int, int] = {}
        for key, made in self._live.items():
            place, during, *_ = self.moments[made.operator]
            is_left = during == "forward" and key not in saved.sizes
            # What else the graph held to the end is free with it.
            if -1 < place < last and (is_left or not made.reference.expired()):
                for found in (left,) if is_left else (remains, hung) if during == "forward" else (remains,):
                    found[place] = found.get(place, 0) + made.num_bytes
        return left, remains, hung

    def _gradients_by_operator(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return after every operator the bytes of incomplete gradients, and of complete ones of its place."""
        steps = [0] * (len(self.moments) + 1)
        completed = dict[int, list[tuple[int, int]]]()
        for each in self._gradients:
            steps[each.made] += each.num_bytes
            steps[each.complete] -= each.num_bytes
            completed.setdefault(each.complete, []).append((each.place, each.num_bytes))
        by_place, done = defaultdict[int, int](int), []
        for index, (place, *_) in enumerate(self.moments):
            for own, size in completed.get(index, ()):
                by_place[own] += size
            done.append(by_place[place])
        return list(itertools.accumulate(steps[:-1])), done
