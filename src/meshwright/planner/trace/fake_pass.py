"""Run forward and backward of one micro-batch on fake tensors, as one rank of the axes that divide the model.

[Note: passes without data] A :class:`Pass` puts fake tensors of one rank's shapes in place of parameters, buffers and
inputs, runs the user's forward and loss under recorders, and gives the model its own tensors back. How an axis changes
a rank's work is known to the methods (``traced_layers`` and ``traced_tokens`` of
:class:`~meshwright.methods.planner_hooks.PlannerHooks`): they change the running model through hooks, and count what a
real rank would send.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from meshwright.cost import Inputs
from meshwright.methods import in_phase_order
from meshwright.methods.base import INNER_AXES, parts_between_layers
from meshwright.methods.checkpoint import find_parts
from meshwright.methods.replace.model_changes import packed_as
from meshwright.nn import FakeTensors, caches_off, find_blocks, run_with
from meshwright.nn.batches import cast_floating, map_tree
from meshwright.planner.trace.aten_kernels import FlopCount, device_of_pass, kernels_of_device, storage_of, tensors_in
from meshwright.planner.trace.continued_blocks import (
    Copies,
    NotRepeatedError,
    continued,
    continued_boundaries,
    continued_ops,
)
from meshwright.planner.trace.live_tensors import LiveBytes, SavedTensors, record_saved
from meshwright.planner.trace.op_recording import (
    BlockEnds,
    ModelOps,
    OpRecorder,
    Ops,
    PlacedWork,
    model_ops,
    sort_kernels,
    summarise,
    with_split_layers,
)
from meshwright.planner.trace.repeated_blocks import Indices, Repeated
from meshwright.planner.trace.split_backward import BackwardInParts
from meshwright.runtime.lazy import paused_collection
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor
from meshwright.runtime.torch_internals.operators import cast_grouped_products
from meshwright.runtime.torch_internals.tensors import storage_identity

if TYPE_CHECKING:
    from meshwright.cost import Activations, Boundary, Placed, SplitBackward, Transient
    from meshwright.cost.activations import Given
    from meshwright.methods import Resolved, SampleRun
    from meshwright.methods.fp8_torchao import Fp8Trace
    from meshwright.methods.tensor.tensor_parallel import SaveLog


class Trace(Protocol):
    """The run of one rank of an axis, or of several; nothing is sent, and everything is counted."""

    dims: dict[nn.Parameter, int]

    @property
    def divides_batch(self) -> bool:
        """Return whether tokens or samples are divided: a model that cannot be traced so cannot be trained so."""

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of a parameter on one rank."""

    def running(self, log: SaveLog) -> contextlib.AbstractContextManager[None]:
        """Change one forward pass inside the block; ``log`` grows with every tensor saved for backward."""

    def boundaries(self, model: nn.Module, log: SaveLog) -> tuple[Boundary, ...]:
        """Return the collectives of the last run, a micro-batch."""


class Traces:
    """Several traces as one.

    Args:
        every: Those of axes that divide layers and experts first, then the one of axes that divide tokens.
    """

    def __init__(self, every: Sequence[Trace]) -> None:
        self._every = every
        self.divides_batch = any(each.divides_batch for each in every)
        self.dims = {parameter: dim for each in every for parameter, dim in each.dims.items()}
        found = (getattr(each, "experts", {}) for each in every)
        self.experts = {parameter: place for experts in found for parameter, place in experts.items()}

    @property
    def stands_in(self) -> bool:
        """See :class:`~meshwright.methods.ExpertTrace`; True, too, where no trace knows of experts."""
        return all(getattr(each, "stands_in", True) for each in self._every)

    @stands_in.setter
    def stands_in(self, value: bool) -> None:
        for each in self._every:
            if hasattr(each, "stands_in"):
                each.stands_in = value

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See :class:`Trace`; one parameter is divided by one trace at most."""
        whole = tuple(parameter.shape)
        shapes = (each.local_shape(parameter) for each in self._every)
        return next((shape for shape in shapes if shape != whole), whole)

    @contextlib.contextmanager
    def running(self, log: SaveLog) -> Iterator[None]:
        """See :class:`Trace`; tokens are cut around the layers."""
        with contextlib.ExitStack() as stack:
            for each in self._every:
                stack.enter_context(each.running(log))
            yield

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        """See :func:`flowing`."""
        with contextlib.ExitStack() as stack:
            for each in self._every:
                stack.enter_context(flowing(each))
            yield

    def boundaries(self, model: nn.Module, log: SaveLog) -> tuple[Boundary, ...]:
        """See :class:`Trace`."""
        return tuple(boundary for each in self._every for boundary in each.boundaries(model, log))


def flowing(split: Trace | None) -> contextlib.AbstractContextManager[None]:
    """Let a plain, whole model run without data inside, where the trace of one rank knows how (experts)."""
    found: contextlib.AbstractContextManager[None] = getattr(split, "flowing", contextlib.nullcontext)()
    return found


def trace_of(resolved: Resolved, model: nn.Module, sample: SampleRun) -> Trace | None:
    """Build the trace of one rank of the axes that divide a forward pass; None if no axis of the strategy does.

    Raises:
        ModelError: When the model cannot be divided so.
    """
    strategy, sizes, methods = resolved.strategy, dict(resolved.axes), in_phase_order(resolved.strategy)
    every = [found for each in methods if (found := each.traced_layers(model, sizes, sample, strategy)) is not None]
    within = parts_between_layers(strategy, lambda axis: sizes.get(axis, 1))
    ranks = [found for each in methods if (found := each.traced_tokens(sizes, within)) is not None]
    if ranks:
        from meshwright.methods import TokensTrace

        every.append(TokensTrace(model, *ranks))
    return Traces(every) if len(every) > 1 else next(iter(every), None)


def trace_key(resolved: Resolved) -> tuple[object, ...]:
    """Return a key shared by strategies that divide the work alike."""
    every = in_phase_order(resolved.strategy)
    methods = (each for each in every if each.axis in INNER_AXES)
    keeps, in_parts = (any(getattr(each, what) for each in every) for what in ("keeps_gathered", "splits_backward"))
    return *methods, *(size for size in resolved.axes if size[0] in INNER_AXES and size[1] > 1), keeps, in_parts


# --- The pass.


def places_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the blocks that a model repeats; of a model without any, the parts that would be recomputed one by one."""
    return tuple(module for _, module in find_blocks(model) or find_parts(model))


class Predicted(NamedTuple):
    """The prediction for one micro-batch on one rank: what it saves, computes and sends."""

    activations: Activations
    flops: int  # of forward and backward, recomputation not counted
    boundaries: tuple[Boundary, ...]  # what is sent over the axes that divide layers, tokens or experts
    ops: ModelOps
    idle: tuple[str, ...] = ()  # parameters that should train and get no gradient, of modules that ran

    def agrees(self, other: Predicted) -> bool:
        """Return whether both are equal up to the order of collectives."""
        sent, others = collections.Counter(self.boundaries), collections.Counter(other.boundaries)
        return sent == others and self._replace(boundaries=(), idle=()) == other._replace(boundaries=(), idle=())


@dataclass(frozen=True)
class Pass:
    """One micro-batch of a model on fake tensors; the model itself is not touched.

    Args:
        model: A plain module, not wrapped or sharded.
        inputs: The model input of one micro-batch, as ``prepare_input`` returns it.
        forward: ``forward(model, inputs)`` computes the loss.
        param_dtype: Precision of the parameters as they compute; None keeps their own.
        autocast_dtype: Precision of autocast; None runs without.
        output_dtype: Precision to which the model's output is cast for the loss; None leaves it.
        split: Lets the model run as one rank of the axes that divide layers, tokens or experts; None runs it whole.
        blocks: Blocks of a list in the order in which they run, which are the places of activations and FLOPs. None:
            see :func:`places_of`.
        fp8: Layers that multiply in 8 bits.
        device: Device that it will train on; None: that of its parameters.
        views_batch: Whether the model input is views of a batch in the same memory.
        splits_backward: Whether backward runs in two parts, first for inputs and later for weights.
        copies_output: Whether what wraps the model copies its output, as DDP does where parameters may be unused.
    """

    model: nn.Module
    inputs: Any
    forward: Callable[[nn.Module, Any], Any]
    param_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    split: Trace | None = None
    blocks: Sequence[nn.Module] = ()
    fp8: Fp8Trace | None = None
    device: torch.device | None = None
    views_batch: bool = False
    splits_backward: bool = False
    copies_output: bool = False

    def predict(self) -> Predicted:
        """Run the whole model.

        Raises:
            Exception: Whatever the model raises when it runs without data.
        """
        return self._predicted(self._record())

    def predict_repeated(self, repeated: Repeated, *, check: bool) -> Predicted:
        """Run a few of the model's blocks, and extend their recording to all. See [Note: repeated blocks].

        Args:
            repeated: The blocks.
            check: Whether to compare with a run of more blocks.

        Raises:
            NotRepeatedError: When blocks turn out to differ in what they save or compute.
            Exception: Whatever the model raises when it runs without data, or with fewer blocks.
        """
        with repeated.cut(repeated.few):
            few = self._record()
        if check:
            with repeated.cut(repeated.more):
                predicted = self._continued(few, repeated, repeated.more)
                if not predicted.agrees(self.predict()):
                    raise NotRepeatedError("a run with more blocks saves or computes something else")
        return self._continued(few, repeated, repeated.all)

    def _continued(self, few: _Recorded, repeated: Repeated, wanted: Indices) -> Predicted:
        left_out = {*repeated.blocks} - {*repeated.chosen(wanted)}
        every = [block for block in self._blocks if block not in left_out]
        copies = Copies(repeated, repeated.few, wanted, few.blocks, every)
        return self._predicted(
            _Recorded(
                continued(few.saved, copies),
                continued_boundaries(few.boundaries, repeated, copies),
                continued_ops(few.ops, copies),
                every,
                copies.placed(few.placed),
                copies.transients(few.transients),
                few.idle,
                few.inputs,
            )
        )

    def _predicted(self, recorded: _Recorded) -> Predicted:
        activations = summarise(self.model, recorded.saved, recorded.transients)
        activations = dataclasses.replace(activations, flops_at=recorded.placed, inputs=recorded.inputs)
        named = model_ops(self.model, recorded.ops)
        return Predicted(activations, named.flops, recorded.boundaries, named, recorded.idle)

    def _record(self) -> _Recorded:
        recorded = self._recorded(None)
        if not (self.splits_backward and recorded.transients and recorded.blocks):
            return recorded
        found = self._recorded(BackwardInParts(recorded.blocks)).parts
        tails = self._recorded(BackwardInParts(recorded.blocks, between=True)).tails
        found = {place: each._replace(tail=tails.get(place, 0)) for place, each in found.items()}
        transients = (each._replace(split=found.get(each.place)) for each in recorded.transients)
        return recorded._replace(transients=tuple(transients))

    def _autocast(self, device: str) -> contextlib.AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return _nothing()
        cast_grouped_products(device)
        return torch.autocast(device, dtype=self.autocast_dtype)

    # Without pauses, circles of references would be freed at random operators.
    @paused_collection()
    def _recorded(self, parts: BackwardInParts | None) -> _Recorded:
        device = device_of_pass(self.model, self.device)
        fakes = FakeTensors(device)
        state, inputs = self._state(fakes), _FakeInputs(self, fakes)
        counter = FlopCount()
        blocks = self._blocks_here()
        work = PlacedWork(self.model, blocks, counter)
        autocast = self._autocast(device.type)
        found = record_saved(self.model, counter=counter, blocks=blocks, retains_graph=parts is not None)
        held = LiveBytes(state.values(), tensors_in(inputs.tree))
        ends = BlockEnds(blocks, held)
        with fakes.running(), counter, autocast, found as saved:
            saved.given = inputs.given
            recorder = self._recorder(saved, held)

            def pass_of(model: nn.Module, inputs: Any) -> tuple[tuple[Boundary, ...], Placed, bool]:
                cutting = parts.cutting() if parts is not None else ends.watching()
                with self._as_one_rank(saved.log), work.counting(), self._changing_output(model), cutting:
                    loss = self.forward(model, inputs)
                boundaries = self.split.boundaries(self.model, saved.log) if self.split is not None else ()
                saved.complete = True
                saved.forget_freed()
                run = (
                    functools.partial(parts.run, state=state, held=held) if parts is not None else torch.Tensor.backward
                )
                backward = _Backward(loss, device.type, run)
                del loss
                return boundaries, work.everything(backward), backward.has_run  # type: ignore[arg-type]

            # transformers' code takes the branches that it takes with data and that fake tensors can go.
            with (
                recorder,
                caches_off(self.model),
                packed_as(self.inputs),
                kernels_of_device(self.device, device),
            ):
                # The tensors are swapped in backward, too: a model that recomputes by itself runs again.
                boundaries, placed, has_run = run_with(pass_of, self.model, state, inputs.tree)
            held.add_kept(saved)
            transients = held.transients(saved, ends.let_go(), ends.left_last) if has_run and parts is None else ()
            transients = ends.in_forward(transients, saved)
        listed = [block for _, block in find_blocks(self.model)]
        ops = sort_kernels(recorder, listed, saved, has_backward=has_run)
        ops = ops if self.split is None else with_split_layers(ops, set(self.split.dims))
        idle = _idle(state) if has_run else ()
        recorded = _Recorded(saved, boundaries, ops, blocks, placed, transients, idle, inputs.sizes)
        if parts is None or not has_run:
            return recorded
        return recorded._replace(**parts.found(held, saved))

    def _blocks_here(self) -> list[nn.Module]:
        """Return the blocks that the model has now; a list may be cut short."""
        here = {module for _, module in self.model.named_modules()}
        return [block for block in self._blocks if block in here]

    @property
    def _blocks(self) -> Sequence[nn.Module]:
        return self.blocks or places_of(self.model)

    def _recorder(self, saved: SavedTensors, held: LiveBytes) -> OpRecorder:
        if self.fp8 is None:
            return OpRecorder(saved, held)
        return OpRecorder(saved, held, self.fp8.layers.values(), self.fp8.scaling)

    def _as_one_rank(self, log: SaveLog) -> contextlib.AbstractContextManager[None]:
        return self.split.running(log) if self.split is not None else _nothing()

    @contextlib.contextmanager
    def _changing_output(self, model: nn.Module) -> Iterator[None]:
        """Cast and copy what the model returns behind all other hooks, where the loss begins."""
        dtype, hooks = self.output_dtype, []
        if dtype is not None:
            hooks.append(model.register_forward_hook(lambda module, args, output: cast_floating(output, dtype)))
        if self.copies_output:
            hooks.append(model.register_forward_hook(lambda module, args, output: _copied(output)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _state(self, fakes: FakeTensors) -> dict[str, torch.Tensor]:
        return {
            name: self._one_ranks(self.cast(fakes.like(tensor)), tensor).requires_grad_(tensor.requires_grad)
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
        }

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cast a floating tensor to the precision that parameters compute in."""
        return tensor.to(self.param_dtype) if self.param_dtype is not None and tensor.is_floating_point() else tensor

    def _one_ranks(self, fake: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if self.split is None or not isinstance(tensor, nn.Parameter):
            return fake
        shape = self.split.local_shape(tensor)
        return fake if shape == fake.shape else fake.new_empty(shape)


class _Copies(torch.autograd.Function):
    """Copy tensors that are the graph's own results, as DDP does; the gradient is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


def _copied(output: Any) -> Any:
    """Return a model's output with copies in place of the tensors that lead to a gradient."""
    results = {id(each): each for each in tensors_in(output) if each.grad_fn is not None}
    copies = dict(zip(results, _Copies.apply(*results.values()), strict=True)) if results else {}
    return map_tree(lambda leaf: copies.get(id(leaf), leaf), output)


class _Recorded(NamedTuple):
    saved: SavedTensors
    boundaries: tuple[Boundary, ...]
    ops: Ops
    blocks: Sequence[nn.Module]  # those that ran: the places
    placed: Placed  # FLOPs
    transients: tuple[Transient, ...]
    idle: tuple[str, ...]
    inputs: Inputs
    parts: Mapping[int, SplitBackward] = {}  # of a backward in two parts, by places
    tails: Mapping[int, int] = {}  # of one that stops between them


class _FakeInputs:
    """The model input of a pass, and how it lies in memory beside the batch.

    Args:
        run: The pass.
        fakes: Makes its fake tensors.
    """

    def __init__(self, run: Pass, fakes: FakeTensors) -> None:
        self._run, self._fakes = run, fakes
        self._known: dict[Hashable, torch.Tensor] = {}  # a tensor that is given twice is held once
        self._bases: set[int] = set()  # storages of which several views may be given
        self.given: dict[int, Given] = {}
        """How each storage is given."""
        self.sizes = Inputs()
        self.tree = map_tree(self._fake, run.inputs)

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        key = id(leaf)
        if key not in self._known:
            self._known[key] = self._new(leaf)
        return self._known[key]

    def _new(self, leaf: torch.Tensor) -> torch.Tensor:
        like = self._fakes.like(leaf)
        fake = self._run.cast(like)
        key, size = storage_of(fake)
        now, is_view = self.sizes, self._run.views_batch and fake is like
        self.given[key] = "view" if is_view else "copy"
        base = storage_identity(leaf.untyped_storage())
        if is_view and base in self._bases:
            return fake
        self._bases.add(base)
        if is_view:
            self.sizes = now._replace(viewed_bytes=now.viewed_bytes + size)
        else:
            beside = storage_of(like)[1] if self._run.views_batch else 0
            self.sizes = now._replace(copied_bytes=now.copied_bytes + size, batch_bytes=now.batch_bytes + beside)
        return fake


def _idle(state: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of parameters that require a gradient and have none after backward."""
    without = (name for name, each in state.items() if each.requires_grad and each.grad is None and each.numel())
    return tuple(name.removeprefix("model.") for name in without)


_nothing = contextlib.nullcontext


@contextlib.contextmanager
def _own_gradients(loss: Any) -> Iterator[None]:
    """Restore the gradients of tensors that no fake tensor stood in for.

    Such are the weights of a criterion whose ``forward`` is called by itself, or that a function holds.
    """
    own = [(leaf, leaf.grad) for leaf in _leaves(loss) if not isinstance(leaf, FakeTensor)]
    for leaf, _ in own:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in own:
            leaf.grad = gradient


def _leaves(loss: Any) -> list[torch.Tensor]:
    """Return the leaves that backward of a loss reaches."""
    nodes = [node for node in (getattr(loss, "grad_fn", None),) if node is not None]
    met = set(nodes)
    while nodes:
        before = {node for node, _ in nodes.pop().next_functions if node is not None} - met
        met |= before
        nodes += before
    return [node.variable for node in met if hasattr(node, "variable")]


class _Backward:
    """Backward of a loss, and whether it could run without data."""

    def __init__(self, loss: Any, device_type: str, run: Callable[[Any], object]) -> None:
        self._loss, self._device_type, self._run = loss, device_type, run
        self.has_run = False

    def backward(self) -> None:
        """Run backward outside of autocast, which frees the weights that it has cast."""
        torch.clear_autocast_cache()
        with torch.autocast(self._device_type, enabled=False), _own_gradients(self._loss):
            self._run(self._loss)
        self.has_run = True
