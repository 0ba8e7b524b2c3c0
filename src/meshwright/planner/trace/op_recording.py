"""Record the kernels of a pass without data by module, and turn the records of a pass into plain data.

:class:`OpRecorder` and :class:`PlacedWork` run during the pass. Behind it, :func:`sort_kernels` and :func:`model_ops`
describe what it computed, and :func:`summarise` what it saved.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.cost import FP8, Activations, Op, SavedTensor, TracedModule, Transient, Work, pass_flops
from meshwright.cost.activations import OperatorResult, Running
from meshwright.cost.calibration import BACKWARD, FORWARD, MODULE, SPLIT_LAYER
from meshwright.methods.recompute import call_name
from meshwright.nn import class_names, find_blocks
from meshwright.nn.swapped_parameters import FakeDispatchMode, view_of
from meshwright.planner.trace.aten_kernels import (
    FlopCount,
    kernels_of,
    reference,
    storage_of,
    tensors_in,
    with_workspace,
)
from meshwright.planner.trace.fused_kernels import CAST
from meshwright.runtime.torch_internals.autograd import current_node, next_sequence_number, sequence_number_of
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor

if TYPE_CHECKING:
    from meshwright.cost import Placed, Scaling
    from meshwright.planner.trace.fused_kernels import Moved
    from meshwright.planner.trace.live_tensors import Call, LiveBytes, SavedTensors


# --- Kernels, with the modules that launch them.

interrupts: list[Callable[[], None]] = []
"""Called now and then while a model is traced, inside a module, too, and while pipelines are cut; what they raise ends
both."""

_BETWEEN_INTERRUPTS = 64  # operators
_NO_NUMBER = 2**64 - 1  # of the nodes that accumulate gradients

_Stack = tuple[nn.Module, ...]


class Kernel(NamedTuple):
    """A kernel and the modules that launched it."""

    op: Op
    running: _Stack  # the modules that ran; of backward: whose backward it is
    position: int  # among the forward calls
    num_saved_before: int  # tensors that forward had saved by then
    needs_grad: bool  # whether an argument did
    call: int  # the number of its operator


class OpRecorder(FakeDispatchMode):
    """Record the kernels of all operators that run under it.

    A kernel of backward belongs to the modules that ran when its autograd node was made. Nodes carry rising numbers, by
    which their modules are found.

    Args:
        saved: What the running modules have saved, kept up to date by
            :func:`~meshwright.planner.trace.live_tensors.record_saved`.
        held: Notified of every operator.
        fp8: Layers whose products run in 8 bits. What they cast belongs to these products (see ``cost.device_time``).
        scaling: Scaling of their tensors.
    """

    def __init__(
        self, saved: SavedTensors, held: LiveBytes, fp8: Collection[nn.Module] = (), scaling: Scaling = ""
    ) -> None:
        super().__init__()
        self._saved, self._held, self._fp8, self._scaling = saved, held, set(fp8), scaling
        self.forward: list[Kernel] = []
        self.backward: list[Kernel] = []
        self._nodes: list[int] = []  # numbers of autograd nodes, rising
        self._made: list[tuple[_Stack, int, int]] = []  # for each: the modules that ran, the position, and the place
        self._latest: tuple[_Stack, int, int] = ((), 0, -1)
        self._casts: set[int] = set()  # numbers of the nodes that cast weights
        self._call = -1
        self._calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        # Asked before and after every operator.
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        given = kwargs or {}
        result = view_of(func, args, given)  # the modes beneath need not see views
        if result is None:
            result = with_workspace(func, args, func(*args, **given))
        if func.namespace == "prim":
            return result
        node, tensors, made = current_node(), tensors_in((args, given)), tensors_in(result)
        ops, name = kernels_of(func, args, given, result), call_name(func, args)
        self._saved.met.extend(map(reference, made))  # no other storage may have the address of one that is gone
        fusion, multiplies = self._saved.fusion, any(op.kind != "move" for op in ops)
        how = {"multiplies": multiplies, "runs": bool(ops), "in_backward": node is not None}
        if node is None:
            casts = name == CAST and storage_of(args[0])[0] in self._saved.weights
            self._call = fusion.note(name, tensors, made, self._saved.place, of_weights=casts, **how)
            self._note_forward(
                tuple(dataclasses.replace(op, operator=name, traced=True, of_weights=casts) for op in ops), tensors
            )
            self._held.note(result, tensors, self._saved.place, "forward" if self._saved.running else "loss")
        else:
            casts = self._begin_backward(sequence_number_of(node))
            self._call = fusion.note(name, tensors, made, self._latest[2], of_weights=casts, **how)
            self._note_backward(ops, of_weights=casts)
            self._held.note(result, tensors, self._latest[2], self._held.backward_part)
        if self._held.num_operators % _BETWEEN_INTERRUPTS == 0:
            for interrupt in interrupts:
                interrupt()
        return result

    def _note_forward(self, kernels: tuple[Op, ...], given: Sequence[torch.Tensor]) -> None:
        number, running = next_sequence_number() - 1, tuple(self._saved.running)
        if not self._nodes or number > self._nodes[-1]:
            self._nodes.append(number)
            self._made.append((running, self._calls, self._saved.place))
            self._casts |= {number for op in kernels if op.of_weights}
        self._calls += 1
        if kernels:
            launches, self._saved.entered = FORWARD + MODULE * self._saved.entered, 0
            first, *others = (dataclasses.replace(op, launches=FORWARD) for op in kernels)
            needs_grad = any(each.requires_grad for each in given)
            every = (dataclasses.replace(first, launches=launches), *others)
            self.forward += self._kernels(every, running, self._calls, needs_grad=needs_grad)

    def _begin_backward(self, number: int) -> bool:
        """Find whose backward runs, and return whether it is that of a cast of weights."""
        if number != _NO_NUMBER and self._nodes:
            self._latest = self._made[max(bisect.bisect_right(self._nodes, number) - 1, 0)]
        return number in self._casts

    def _note_backward(self, kernels: tuple[Op, ...], *, of_weights: bool) -> None:
        if kernels:
            running, position, _ = self._latest
            ops = tuple(
                dataclasses.replace(op, moment="backward", traced=True, of_weights=of_weights, launches=BACKWARD)
                for op in kernels
            )
            self.backward += self._kernels(ops, running, position + 1, needs_grad=True)
        made = next_sequence_number() - 1
        if self._nodes and made > self._nodes[-1]:  # a part of forward runs again in backward, at its place
            self._nodes.append(made)
            self._made.append(self._latest)

    def _kernels(self, ops: tuple[Op, ...], running: _Stack, position: int, *, needs_grad: bool) -> list[Kernel]:
        saved = len(self._saved.log)
        if self._fp8 and not self._fp8.isdisjoint(running):
            narrow = (op for op in ops if op.kind == "matmul")
            ops = tuple(dataclasses.replace(op, dtype=FP8, scaling=self._scaling) for op in narrow)
        return [Kernel(op, running, position, saved, needs_grad, self._call) for op in ops]


class Ops(NamedTuple):
    """The ops of one micro-batch in the order in which they run, forward before backward."""

    inside: dict[nn.Module, tuple[Op, ...]]  # of every block that ran
    runs: dict[nn.Module, int]  # how often it did
    outside: tuple[Op, ...]  # before the blocks, and between them
    behind: tuple[Op, ...]  # after the last block has run


def sort_kernels(recorder: OpRecorder, blocks: Sequence[nn.Module], saved: SavedTensors, *, has_backward: bool) -> Ops:
    """Assign the kernels of a pass to blocks, each with the classes of modules that recompute it.

    Args:
        recorder: The recorder after the pass.
        blocks: Blocks, none inside another.
        saved: Record of the same pass.
        has_backward: Whether backward ran to its end; if not, it is derived from forward by rule.
    """
    last: dict[nn.Module, int] = {}  # the number of the last tensor saved while it ran
    for number, stack in enumerate(saved.log):
        last.update(dict.fromkeys(stack, number))
    listed, names = set(blocks), _Names(last)
    inside: dict[nn.Module | None, list[Op]] = {}
    every = [*_as_moments(recorder, saved.moved, has_backward=has_backward)]
    owners = [next((module for module in kernel.running if module in listed), None) for kernel in every]
    end = max((k.position for k, owner in zip(every, owners, strict=True) if owner is not None), default=0)
    behind: list[Op] = []
    for kernel, owner in zip(every, owners, strict=True):
        is_behind = owner is None and kernel.position > end > 0
        (behind if is_behind else inside.setdefault(owner, [])).append(names.on(kernel))
    outside = tuple(inside.pop(None, ()))
    found = {module: tuple(ops) for module, ops in inside.items() if module is not None}
    return Ops(found, {module: saved.runs[module] for module in found}, outside, tuple(behind))


def with_split_layers(ops: Ops, split: Container[nn.Parameter]) -> Ops:
    """Return the ops with the host's time for layers that a tensor axis splits, beside their collectives.

    Args:
        ops: The ops of a pass.
        split: The parameters that are split.
    """

    def launched(block: nn.Module, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        count = sum(any(p in split for p in module.parameters(recurse=False)) for module in block.modules())
        left = dict(zip(("forward", "backward"), SPLIT_LAYER, strict=True))
        more = (left.pop(op.moment, 0.0) * count for op in ops)  # at the first of each pass
        return tuple(dataclasses.replace(op, launches=op.launches + each) for op, each in zip(ops, more, strict=True))

    return ops._replace(inside={block: launched(block, each) for block, each in ops.inside.items()})


def _as_moments(recorder: OpRecorder, moved: Sequence[Moved | None], *, has_backward: bool) -> Iterator[Kernel]:
    passes = (*recorder.forward, *recorder.backward) if has_backward else recorder.forward
    for kernel in passes:
        op = dataclasses.replace(kernel.op, when_fused=moved[kernel.call])
        yield kernel._replace(
            op=op if has_backward or not kernel.needs_grad else dataclasses.replace(op, moment="both")
        )


class _Names:
    """Class names of the modules around kernels.

    Args:
        last: The number of the last tensor that was saved while a module ran.
    """

    def __init__(self, last: dict[nn.Module, int]) -> None:
        self._last = last
        self._known: dict[_Stack, tuple[str, ...]] = {}

    def on(self, kernel: Kernel) -> Op:
        """Return the op with the classes it lies in, and those whose recomputation reaches it.

        Recomputation ends at the last saved tensor, so a module that saves nothing behind the kernel does not reach it.
        """
        op = kernel.op
        if op.moment == "backward":
            return dataclasses.replace(op, inside=self._of(kernel.running))
        needed = tuple(m for m in kernel.running if self._last.get(m, -1) >= kernel.num_saved_before)
        return dataclasses.replace(op, inside=self._of(kernel.running), needed_in=self._of(needed))

    def _of(self, modules: _Stack) -> tuple[str, ...]:
        if modules not in self._known:
            self._known[modules] = tuple(sorted({name for module in modules for name in class_names(module)}))
        return self._known[modules]


# --- What blocks return.


class _Held(NamedTuple):
    reference: StorageWeakRef  # keeps the address from being used for another
    num_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Held:
        storage = tensor.untyped_storage()
        return cls(StorageWeakRef(storage), storage.nbytes())


class _End(NamedTuple):
    """A result of a block, and the gradient that has come for it."""

    place: int
    begin: int  # the next operator
    output: _Held
    gradient: _Held


class BlockEnds:
    """Follow what blocks return and its gradients, which reentrant recomputation holds while a block runs backward.

    torch's reentrant checkpoint is a function of the graph: its backward is given the gradient of a block's result,
    runs the block again to its end, and holds both until the gradients inside the block are complete. Elsewhere the
    gradient is free once the last operator of the block has used it, and recomputation does not come to the result.

    Args:
        blocks: Blocks in the order in which they run; they are the places.
        held: Follows the storages.
    """

    def __init__(self, blocks: Sequence[nn.Module], held: LiveBytes) -> None:
        self._places, self._held = {block: place for place, block in enumerate(blocks)}, held
        self._ends: list[_End] = []
        self.left_last = 0
        """The next operator when the last block has run, with all hooks that the axes of a strategy put behind it."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward pass inside the block, and its backward afterwards."""
        # Before hooks that change the result, such as gathers of tokens: recomputation does not run them.
        hooks = [block.register_forward_hook(self._watch, prepend=True) for block in self._places]
        hooks += [block.register_forward_hook(self._leave) for block in list(self._places)[-1:]]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.left_last = self._held.num_operators

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._note, self._places[module], _Held.of(tensor)))

    def _note(self, place: int, output: _Held, gradient: torch.Tensor) -> None:
        self._ends.append(_End(place, self._held.num_operators, output, _Held.of(gradient)))

    def let_go(self) -> list[tuple[int, int]]:
        """Return after every operator what nothing holds any more of its block's results, and of their gradients."""
        found, backward = [[0, 0] for _ in self._held.moments], dict[int, list[int]]()
        for index, moment in enumerate(self._held.moments):
            if moment.during == "backward":
                backward.setdefault(moment.place, []).append(index)
        for number, end in enumerate(self._ends):
            # To the next run of the block, whose gradient is another.
            later = (other.begin for other in self._ends[number:] if other.place == end.place)
            behind = next((begin for begin in later if begin > end.begin), len(found))
            for which, each in enumerate((end.output, end.gradient)):
                own, begin = backward.get(end.place, []), self._held.lifetime_of(each.reference.cdata)[1]
                for index in own[bisect.bisect_left(own, max(end.begin, begin)) : bisect.bisect_left(own, behind)]:
                    found[index][which] += each.num_bytes
        return [(results, gradients) for results, gradients in found]

    def in_forward(self, found: Sequence[Transient], saved: SavedTensors) -> tuple[Transient, ...]:
        """Return the temporary tensors of every place with what is held while it runs forward, and runs again."""
        kept, last_made = saved.kept_by_place(), dict[int, int]()
        for key, places in saved.places.items():
            made, _ = self._held.lifetime_of(key)
            last_made[min(places)] = max(made, last_made.get(min(places), -1))
        before = {
            here.place: sum(size for place, size in kept.items() if place <= here.place)
            + sum(other.returned for other in found if other.place < here.place)
            for here in found
        }
        running, again = dict.fromkeys(before, 0), dict.fromkeys(before, 0)
        furthest = -1  # where a block runs again, blocks behind it have saved tensors already
        for number, (place, during, held, _) in enumerate(self._held.moments):
            furthest = max(furthest, place)
            if during == "forward" and place == furthest and place in before:
                running[place] = max(running[place], held - before[place])
                if number <= last_made.get(place, -1):
                    again[place] = max(again[place], held - before[place])
        outputs = {end.place: end.output.num_bytes for end in self._ends}
        return tuple(
            each._replace(running=running[each.place], again=again[each.place], output=outputs.get(each.place, 0))
            for each in found
        )


# --- FLOPs by place: before the blocks that a pipeline cuts, in each of them, and behind them.

BACKWARD_FLOPS = 2  # the two products of backward, each as large as the one of forward


class PlacedWork:
    """Count the FLOPs of forward and backward by place while a model runs under a FLOP counter.

    Args:
        model: The model.
        blocks: Blocks of the list that is cut, in the order in which they run.
        counter: Counts while the model runs.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], counter: FlopCount) -> None:
        self._model, self._counter = model, counter
        self._index = {block: index for index, block in enumerate(blocks)}
        self._place, self._before = -1, 0
        self.forward = dict.fromkeys(range(-1, len(blocks) + 1), 0)
        self._arrived: dict[int, int] = {}  # block -> FLOPs before its backward

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count while the forward pass runs inside the block."""
        hooks = []
        for module in self._index:
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._switch(self._place)

    def everything(self, loss: torch.Tensor) -> Placed:
        """Run backward, and return the FLOPs of both passes by place.

        A backward that cannot run counts as twice the forward.
        """
        start = self._counter.total
        try:
            loss.backward()
        except Exception:  # what a user's function does to tensors without data; time is an estimate all the same
            return tuple(((place,), flops * (1 + BACKWARD_FLOPS)) for place, flops in self.forward.items())
        return tuple(((place,), flops + self._backward(place, start)) for place, flops in self.forward.items())

    def _backward(self, place: int, start: int) -> int:
        """Return the FLOPs from the arrival of the gradient of a block's output to that of the block before."""
        marks = {**self._arrived, len(self._index): start}
        if place not in marks:
            return 0  # before the blocks, whose end in backward is not seen; or everything is frozen
        following = [marks[earlier] for earlier in range(place) if earlier in marks]
        return (following[-1] if following else self._counter.total) - marks[place]

    def _switch(self, place: int) -> None:
        now = self._counter.total
        self.forward[self._place] += now - self._before
        self._place, self._before = place, now

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._switch(self._index[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        index = self._index[module]
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._note(index))
        if index == len(self._index) - 1:
            self._switch(index + 1)

    def _note(self, index: int) -> None:
        self._arrived.setdefault(index, self._counter.total)


# --- Ops as plain data.


@dataclass(frozen=True)
class ModelOps:
    """The ops of a micro-batch on one rank, by the paths of blocks.

    Args:
        blocks: Paths of the blocks that ran, with their ops.
        outside: Ops before the blocks and between them.
        behind: Ops behind the last block.
        runs: How often each block ran, by its path.
    """

    blocks: tuple[tuple[str, tuple[Op, ...]], ...]
    outside: tuple[Op, ...]
    behind: tuple[Op, ...]
    runs: Mapping[str, int]

    @functools.cached_property
    def by_path(self) -> dict[str, tuple[Op, ...]]:
        """Return the ops of every block; equal ones are counted."""
        alike = {id(ops): ops for _, ops in self.blocks}  # equal blocks have one description
        counted = {key: together(ops) for key, ops in alike.items()}
        return {path: counted[id(ops)] for path, ops in self.blocks}

    def outside_of(self, blocks: Container[str], last_rank: int | None) -> tuple[Op, ...]:
        """Return the ops outside the given blocks; equal ones are counted.

        Args:
            blocks: Paths of the blocks.
            last_rank: Pipeline rank that runs what is behind the blocks; None without a pipeline. What is before them
                runs on all ranks.
        """
        others = [op for path, ops in self.blocks if path not in blocks for op in ops]
        behind = together(self.behind)
        return (*together((*self.outside, *others)), *(dataclasses.replace(op, on_rank=last_rank) for op in behind))

    @property
    def flops(self) -> int:
        """Return the FLOPs of forward and backward."""
        return sum(sum(pass_flops(op)) for op in self._every())

    def flops_in(self, dtype: str) -> int:
        """Return the FLOPs of products in one precision."""
        return sum(sum(pass_flops(op)) for op in self._every() if op.dtype == dtype)

    def _every(self) -> Iterator[Op]:
        for _, ops in self.blocks:
            yield from ops
        yield from self.outside
        yield from self.behind


def together(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Return equal ops as one with a count."""
    found: dict[Op, int] = {}
    for op in ops:
        found[op] = found.get(op, 0) + 1
    return tuple(dataclasses.replace(op, count=count * op.count) for op, count in found.items())


def model_ops(model: nn.Module, ops: Ops) -> ModelOps:
    """Return recorded ops with paths in place of modules."""
    paths = tuple((path, ops.inside[block]) for path, block in find_blocks(model) if block in ops.inside)
    runs = {path: ops.runs[block] for path, block in find_blocks(model) if block in ops.inside}
    return ModelOps(paths, ops.outside, ops.behind, runs)


# --- Saved tensors and work as plain data.

_Key = tuple[
    tuple[Running, ...], tuple[int, ...], tuple[OperatorResult, ...], tuple[int, ...], int, str, tuple[int, ...], str
]
"""What equal saved tensors share."""


def summarise(model: nn.Module, saved: SavedTensors, transients: tuple[Transient, ...]) -> Activations:
    """Summarise what the forward pass of a plain model saves, and what recomputation can change."""
    named = [(path, module) for path, module in model.named_modules() if path]
    numbers = {module: number for number, (_, module) in enumerate(named)}
    blocks = [block for _, block in find_blocks(model)]
    block_of = {module: place for place, block in enumerate(blocks) for module in block.modules()}
    return Activations(
        saved.bytes,
        modules=tuple(
            TracedModule(path, tuple(class_names(module)), block_of.get(module), runs=max(saved.runs[module], 1))
            for path, module in named
        ),
        blocks=tuple(numbers[block] for block in blocks),
        stages=(_tensors(saved, numbers),),
        work=_work(saved, numbers),
        transients=transients,
    ).settled()


def _tensors(saved: SavedTensors, numbers: dict[nn.Module, int]) -> tuple[SavedTensor, ...]:
    inputs: dict[int, list[int]] = {}
    sizes = dict(saved.sizes)
    places = {storage: set(found) for storage, found in saved.places.items()}
    for module, taken in saved.inputs.items():
        for storage, size in taken.items():
            sizes.setdefault(storage, size)
            if module in numbers:
                inputs.setdefault(storage, []).append(numbers[module])
            if storage not in saved.sizes:
                places.setdefault(storage, set()).update(saved.run_at[module])
    for storage, made in saved.results.items():
        sizes.setdefault(storage, made.num_bytes)
        places.setdefault(storage, set()).update(made.places)
    found: dict[_Key, SavedTensor] = {}
    for storage, size in sizes.items():
        if storage in saved.weights:
            continue
        made_by = saved.results[storage].calls if storage in saved.results else []
        tensor = SavedTensor(
            size,
            tuple(sorted({_running(stack, numbers) for stack in saved.savers.get(storage, [])})),
            tuple(sorted(set(inputs.get(storage, [])))),
            tuple(sorted({_result(call, numbers) for call in made_by})),
            tuple(sorted(places[storage])),
            min(saved.places.get(storage) or places[storage]),
            saved.given.get(storage),
            tuple(sorted(saved.results[storage].returned_by)) if storage in saved.results else (),
            when_fused=saved.fates.get(storage, ""),
        )
        how, ends, fate = tensor.given or "", tensor.returned_by, tensor.when_fused
        key = (tensor.savers, tensor.inputs_of, tensor.results, tensor.places, tensor.needed_from, how, ends, fate)
        more = found[key].num_bytes if key in found else 0
        found[key] = dataclasses.replace(tensor, num_bytes=size + more)
    return tuple(found[key] for key in sorted(found))  # two runs that save the same are equal


def _result(call: Call, numbers: dict[nn.Module, int]) -> OperatorResult:
    return OperatorResult(
        call.operator, _running(call.stack, numbers), _num_needed(call, numbers), _turns(call, numbers)
    )


def _work(saved: SavedTensors, numbers: dict[nn.Module, int]) -> tuple[Work, ...]:
    found: dict[tuple[str, Running, int, int, tuple[int, ...]], int] = {}
    for each in saved.work:
        turns = _turns(each, numbers)
        key = each.operator, _running(each.stack, numbers), _num_needed(each, numbers), each.place, turns
        found[key] = found.get(key, 0) + each.flops
    return tuple(
        Work(operator, running, needed, flops, place, turns)
        for (operator, running, needed, place, turns), flops in sorted(found.items())
    )


def _num_needed(call: Call, numbers: dict[nn.Module, int]) -> int:
    return len(_running(call.stack[: call.num_needed], numbers))


def _turns(call: Call, numbers: dict[nn.Module, int]) -> tuple[int, ...]:
    return tuple(turn for module, turn in zip(call.stack, call.turns, strict=False) if module in numbers)


def _running(stack: Iterable[nn.Module], numbers: dict[nn.Module, int]) -> Running:
    return tuple(numbers[module] for module in stack if module in numbers)
