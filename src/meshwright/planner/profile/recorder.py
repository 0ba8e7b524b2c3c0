"""Every kernel of a pass over tensors without data, with the modules that launch it, forward and backward."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.methods.recompute.operators import operator_name
from meshwright.nn import class_names
from meshwright.planner.profile.operators import kernels_of
from meshwright.planner.profile.views import view_of
from meshwright.planner.profile.workspace import with_workspace

if TYPE_CHECKING:
    from meshwright.cost import Op, Scaling
    from meshwright.planner.profile.held import HeldBytes
    from meshwright.planner.saved import SavedTensors

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
        self, saved: SavedTensors, held: HeldBytes, fp8: Collection[nn.Module] = (), scaling: Scaling = ""
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
        node = torch._C._current_autograd_node()
        if node is None:
            ops = kernels_of(func, args, given, result)
            name = operator_name(func)
            self._note_forward(tuple(dataclasses.replace(op, operator=name, traced=True) for op in ops), (args, given))
            self._held.note(result, (args, given), self._saved.place, "forward" if self._saved.running else "loss")
        else:
            self._note_backward(kernels_of(func, args, given, result), node._sequence_nr())
            made = torch._C._autograd._get_sequence_nr() - 1
            if self._nodes and made > self._nodes[-1]:  # as backward runs a part of forward again: it has its place
                self._nodes.append(made)
                self._made.append(self._latest)
            self._held.note(result, (args, given), self._latest[2], "backward")
        return result

    def _note_forward(self, kernels: tuple[Op, ...], given: Any) -> None:
        number, running = torch._C._autograd._get_sequence_nr() - 1, tuple(self._saved.running)
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
    """Deals the kernels of a pass out to blocks, each with the classes of modules that recompute it.

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
        """The op, with the classes it lies in, and those whose recomputation comes by it.

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
