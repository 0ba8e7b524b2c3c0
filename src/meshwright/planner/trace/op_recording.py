"""Record the kernels and tensors of a pass over a few equal blocks, as plain data by module."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from meshwright.cost import Activations, Op, SavedTensor, TracedModule, Transient, Work, pass_flops
from meshwright.cost.activations import Running
from meshwright.methods.recompute import operator_name
from meshwright.nn import class_names, find_blocks
from meshwright.planner.trace.aten_kernels import kernels_of, view_of, with_workspace
from meshwright.runtime.torch_internals.autograd import current_node, next_sequence_number, sequence_number_of
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor, TorchDispatchMode
from meshwright.runtime.torch_internals.modules import (
    CHILDREN,
    buffers_of,
    children_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    parameters_of,
)
from meshwright.runtime.torch_internals.pytree import tree_leaves

if TYPE_CHECKING:
    from meshwright.cost import Scaling
    from meshwright.planner.trace.live_tensors import LiveBytes, SavedTensors


FEWEST = 8  # blocks for which this is worth while
RUN = 4  # the first, two whose neighbours are like them, and the last
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Repeated:
    """A list of equal blocks.

    Args:
        path: Of the list.
        holder: The list.
        blocks: All of them.
        paths: Of the blocks.
    """

    path: str
    holder: nn.ModuleList
    blocks: tuple[nn.Module, ...]
    paths: tuple[str, ...]

    def kept(self, count: int = RUN) -> tuple[nn.Module, ...]:
        """Return the first ``count - 1`` blocks and the last."""
        return (*self.blocks[: count - 1], self.blocks[-1])

    def divided_alike(self, dims: Mapping[nn.Parameter, int]) -> bool:
        """Return whether the same parameters of every block are divided, along the same dims."""
        return len({tuple(dims.get(parameter) for parameter in block.parameters()) for block in self.blocks}) == 1

    @contextlib.contextmanager
    def cut(self, count: int = RUN) -> Iterator[None]:
        """The model with fewer blocks: whoever goes through the list meets these alone, under the names they have."""
        whole = children_of(self.holder)
        names = [*list(whole)[: count - 1], list(whole)[-1]]
        setattr(self.holder, CHILDREN, _Few(whole, names))
        try:
            yield
        finally:
            setattr(self.holder, CHILDREN, whole)


class _Few(dict[str, Any]):
    """Some entries of a dict to go through, and all of them to look up: hooks may be put on any block."""

    def __init__(self, whole: dict[str, Any], names: Sequence[str]) -> None:
        super().__init__({name: whole[name] for name in names})
        self._whole = whole

    def __contains__(self, name: object) -> bool:
        return name in self._whole

    def __missing__(self, name: str) -> Any:
        return self._whole[name]


def find_repeated(model: nn.Module) -> Repeated | None:
    """Return the list of a model's many equal blocks; None where there is none, or more than one."""
    blocks = set(dict(find_blocks(model)).values())
    found = []
    for path, module in model.named_modules():
        listed = tuple(module.children()) if isinstance(module, nn.ModuleList) else ()
        if len(listed) >= FEWEST and blocks.issuperset(listed) and len(set(listed)) == len(module):
            paths = tuple(f"{path}.{name}" for name, _ in module.named_children())
            found.append(Repeated(path, module, listed, paths))  # type: ignore[arg-type]
    return found[0] if len(found) == 1 and _are_equal(found[0].blocks) else None


def _are_equal(blocks: Sequence[nn.Module]) -> bool:
    """Equal in classes, shapes and settings; a number that counts the blocks may differ."""
    if len({(*(id(p) for p in block.parameters()),) for block in blocks}) < len(blocks):
        return False  # they share their weights
    first = _described(blocks[0])
    for index, block in enumerate(blocks):
        one = _described(block)
        if one.keys() != first.keys():
            return False
        if any(one[key] != value and not (value == 0 and one[key] == index) for key, value in first.items()):
            return False
    return True


def _described(block: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        found[path, ""] = type(module), len(forward_hooks_of(module)), len(forward_pre_hooks_of(module))
        for name, value in vars(module).items():
            if isinstance(value, _SCALARS) or (
                isinstance(value, tuple) and all(isinstance(v, _SCALARS) for v in value)
            ):
                found[path, name] = value
        for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
            if tensor is not None:
                found[path, name] = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return found


# --- Every kernel of a pass over tensors without data, with the modules that launch it, forward and backward.

_NO_NUMBER = 2**64 - 1  # of the nodes that accumulate gradients

_Stack = tuple[nn.Module, ...]


class Kernel(NamedTuple):
    """One kernel, and who launched it."""

    op: Op
    running: _Stack  # the modules that ran; of backward: whose backward it is
    position: int  # among the forward calls
    num_saved_before: int  # tensors that forward had saved by then
    needs_grad: bool  # whether an argument did


class OpRecorder(TorchDispatchMode):
    """Notes the kernels of all operators that run under it.

    A kernel of backward belongs to the modules that ran when its autograd node was made: nodes carry numbers.

    Args:
        saved: The modules that run now, where they are and what they have saved, kept up to date by whoever watches the
            model.
        held: Told of every operator, with the place whose backward it is.
        fp8: Layers whose products run in 8 bits. What they cast belongs to these products (see ``cost.kernels``).
        scaling: How their tensors are scaled.
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
        self._calls = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, and torch's guard against it takes longer than the operators without data do."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for before and after every operator
        given = kwargs or {}
        result = view_of(func, args, given)  # past the modes beneath, for which views are nothing
        if result is None:
            result = with_workspace(func, args, func(*args, **given))
        if func.namespace == "prim":
            return result
        node = current_node()
        if node is None:
            ops = kernels_of(func, args, given, result)
            name = operator_name(func)
            self._note_forward(tuple(dataclasses.replace(op, operator=name, traced=True) for op in ops), (args, given))
            self._held.note(result, (args, given), self._saved.place, "forward" if self._saved.running else "loss")
        else:
            self._note_backward(kernels_of(func, args, given, result), sequence_number_of(node))
            made = next_sequence_number() - 1
            if self._nodes and made > self._nodes[-1]:  # as backward runs a part of forward again: it has its place
                self._nodes.append(made)
                self._made.append(self._latest)
            self._held.note(result, (args, given), self._latest[2], "backward")
        return result

    def _note_forward(self, kernels: tuple[Op, ...], given: Any) -> None:
        number, running = next_sequence_number() - 1, tuple(self._saved.running)
        if not self._nodes or number > self._nodes[-1]:
            self._nodes.append(number)
            self._made.append((running, self._calls, self._saved.place))
        self._calls += 1
        if kernels:
            needs_grad = any(leaf.requires_grad for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
            self.forward += self._kernels(kernels, running, self._calls, needs_grad=needs_grad)

    def _note_backward(self, kernels: tuple[Op, ...], number: int) -> None:
        if number != _NO_NUMBER and self._nodes:
            self._latest = self._made[max(bisect.bisect_right(self._nodes, number) - 1, 0)]
        if kernels:
            running, position, _ = self._latest
            ops = tuple(dataclasses.replace(op, moment="backward", traced=True) for op in kernels)
            self.backward += self._kernels(ops, running, position + 1, needs_grad=True)

    def _kernels(self, ops: tuple[Op, ...], running: _Stack, position: int, *, needs_grad: bool) -> list[Kernel]:
        saved = len(self._saved.log)
        if self._fp8 and not self._fp8.isdisjoint(running):
            narrow = (op for op in ops if op.kind == "matmul")
            ops = tuple(dataclasses.replace(op, dtype="fp8", scaling=self._scaling) for op in narrow)
        return [Kernel(op, running, position, saved, needs_grad) for op in ops]


class Ops(NamedTuple):
    """The ops of one micro-batch in the order in which they run, forward before backward."""

    inside: dict[nn.Module, tuple[Op, ...]]  # of every block that ran
    runs: dict[nn.Module, int]  # how often it did
    outside: tuple[Op, ...]  # before the blocks, and between them
    behind: tuple[Op, ...]  # after the last block has run


def sort_kernels(recorder: OpRecorder, blocks: Sequence[nn.Module], saved: SavedTensors, *, has_backward: bool) -> Ops:
    """Deal the kernels of a pass out to blocks, each with the classes of modules that recompute it.

    Args:
        recorder: After the pass.
        blocks: None inside another.
        saved: Of the same pass.
        has_backward: Whether backward ran to its end; if not, it is taken to follow from forward by rule.
    """
    last: dict[nn.Module, int] = {}  # the number of the last tensor saved while it ran
    for number, stack in enumerate(saved.log):
        last.update(dict.fromkeys(stack, number))
    listed, names = set(blocks), _Names(last)
    inside: dict[nn.Module | None, list[Op]] = {}
    every = [*_as_moments(recorder, has_backward=has_backward)]
    owners = [next((module for module in kernel.running if module in listed), None) for kernel in every]
    end = max((k.position for k, owner in zip(every, owners, strict=True) if owner is not None), default=0)
    behind: list[Op] = []
    for kernel, owner in zip(every, owners, strict=True):
        is_behind = owner is None and kernel.position > end > 0
        (behind if is_behind else inside.setdefault(owner, [])).append(names.on(kernel))
    outside = tuple(inside.pop(None, ()))
    found = {module: tuple(ops) for module, ops in inside.items() if module is not None}
    return Ops(found, {module: saved.runs[module] for module in found}, outside, tuple(behind))


def _as_moments(recorder: OpRecorder, *, has_backward: bool) -> list[Kernel]:
    if has_backward:
        return [*recorder.forward, *recorder.backward]
    return [
        kernel._replace(op=dataclasses.replace(kernel.op, moment="both")) if kernel.needs_grad else kernel
        for kernel in recorder.forward
    ]


class _Names:
    """Class names of the modules around kernels.

    Args:
        last: The number of the last tensor that was saved while a module ran.
    """

    def __init__(self, last: dict[nn.Module, int]) -> None:
        self._last = last
        self._known: dict[_Stack, tuple[str, ...]] = {}

    def on(self, kernel: Kernel) -> Op:
        """Return the op, with the classes it lies in, and those whose recomputation comes by it.

        Recomputation ends at the last tensor that is saved: of a module that saves nothing behind the kernel, it does
        not come so far.
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


# --- The ops of a model as plain data, by the paths of its blocks.


@dataclass(frozen=True)
class ModelOps:
    """What a micro-batch computes on one rank.

    Args:
        blocks: The path of every block that ran, with its ops.
        outside: Before the blocks and between them.
        behind: After the last block.
        runs: How often each of the blocks ran, by its path.
    """

    blocks: tuple[tuple[str, tuple[Op, ...]], ...]
    outside: tuple[Op, ...]
    behind: tuple[Op, ...]
    runs: Mapping[str, int]

    @functools.cached_property
    def by_path(self) -> dict[str, tuple[Op, ...]]:
        """Return the ops of every block, equal ones together."""
        alike = {id(ops): ops for _, ops in self.blocks}  # equal blocks have one description
        counted = {key: together(ops) for key, ops in alike.items()}
        return {path: counted[id(ops)] for path, ops in self.blocks}

    def outside_of(self, blocks: Container[str], last_rank: int | None) -> tuple[Op, ...]:
        """Return the ops of no block, and of blocks that are not among these; equal ones together.

        Args:
            blocks: Paths.
            last_rank: The pipeline rank that runs what is behind the blocks; None: there is no pipeline. What is before
                them runs on all of its ranks.
        """
        others = [op for path, ops in self.blocks if path not in blocks for op in ops]
        behind = together(self.behind)
        return (*together((*self.outside, *others)), *(dataclasses.replace(op, on_rank=last_rank) for op in behind))

    @property
    def flops(self) -> int:
        """Floating-point operations of forward and backward."""
        return sum(sum(pass_flops(op)) for op in self._every())

    def flops_in(self, dtype: str) -> int:
        """Return those of one precision."""
        return sum(sum(pass_flops(op)) for op in self._every() if op.dtype == dtype)

    def _every(self) -> Iterator[Op]:
        for _, ops in self.blocks:
            yield from ops
        yield from self.outside
        yield from self.behind


def together(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Equal ops as one that counts them."""
    found: dict[Op, int] = {}
    for op in ops:
        found[op] = found.get(op, 0) + 1
    return tuple(dataclasses.replace(op, count=count * op.count) for op, count in found.items())


def model_ops(model: nn.Module, ops: Ops) -> ModelOps:
    """Return the ops with paths in place of modules."""
    paths = tuple((path, ops.inside[block]) for path, block in find_blocks(model) if block in ops.inside)
    runs = {path: ops.runs[block] for path, block in find_blocks(model) if block in ops.inside}
    return ModelOps(paths, ops.outside, ops.behind, runs)


# --- From a recorded forward pass to plain data: each tensor with who saves, takes and makes it, and all work.

_Key = tuple[tuple[Running, ...], tuple[int, ...], tuple[tuple[str, Running], ...], tuple[int, ...], int]  # of equals


def summarise(model: nn.Module, saved: SavedTensors, transients: tuple[Transient, ...]) -> Activations:
    """Return what the forward pass of a plain model keeps, and what recomputation can change of that."""
    named = [(path, module) for path, module in model.named_modules() if path]
    numbers = {module: number for number, (_, module) in enumerate(named)}
    blocks = [block for _, block in find_blocks(model)]
    block_of = {module: place for place, block in enumerate(blocks) for module in block.modules()}
    return Activations(
        saved.bytes,
        modules=tuple(TracedModule(path, tuple(class_names(module)), block_of.get(module)) for path, module in named),
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
        made_by = saved.results[storage].operators if storage in saved.results else []
        tensor = SavedTensor(
            size,
            tuple(sorted({_running(stack, numbers) for stack in saved.savers.get(storage, [])})),
            tuple(sorted(set(inputs.get(storage, [])))),
            tuple(sorted({(operator, _running(stack, numbers)) for operator, stack in made_by})),
            tuple(sorted(places[storage])),
            min(saved.places.get(storage) or places[storage]),
        )
        key = (tensor.savers, tensor.inputs_of, tensor.results, tensor.places, tensor.needed_from)
        found[key] = tensor if key not in found else _larger(found[key], size)
    return tuple(found[key] for key in sorted(found))  # two runs that save the same are equal


def _larger(tensor: SavedTensor, more: int) -> SavedTensor:
    return dataclasses.replace(tensor, num_bytes=tensor.num_bytes + more)


def _work(saved: SavedTensors, numbers: dict[nn.Module, int]) -> tuple[Work, ...]:
    last: dict[nn.Module, int] = {}  # the number of the last tensor saved while it runs
    for position, stack in enumerate(saved.log):
        last.update(dict.fromkeys(stack, position))
    found: dict[tuple[str, Running, int, int], int] = {}
    for each in saved.work:
        needed = sum(last.get(module, -1) >= each.num_saved_before for module in each.stack if module in numbers)
        key = each.operator, _running(each.stack, numbers), needed, each.place
        found[key] = found.get(key, 0) + each.flops
    return tuple(
        Work(operator, running, needed, flops, place)
        for (operator, running, needed, place), flops in sorted(found.items())
    )


def _running(stack: Iterable[nn.Module], numbers: dict[nn.Module, int]) -> Running:
    return tuple(numbers[module] for module in stack if module in numbers)
