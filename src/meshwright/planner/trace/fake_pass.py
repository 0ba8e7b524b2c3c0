"""Run forward and backward of one micro-batch on fake tensors, as one rank of the axes that divide the model."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import nn

from meshwright.methods.replace.model_changes import one_sequence_per_sample, without_grouped_kernels
from meshwright.nn import find_blocks, run_with
from meshwright.nn.batches import map_tree
from meshwright.planner.trace.aten_kernels import FlopCount, converted_to, device_of_pass, kernels_of_device
from meshwright.planner.trace.live_tensors import LiveBytes, SavedTensors, record_saved
from meshwright.planner.trace.op_recording import ModelOps, OpRecorder, Ops, model_ops, sort_kernels, summarise
from meshwright.planner.trace.repeated_blocks import (
    NotRepeatedError,
    Places,
    continued,
    continued_boundaries,
    continued_ops,
)
from meshwright.runtime.lazy import paused_collection
from meshwright.runtime.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from meshwright.runtime.torch_internals.pytree import tree_leaves

if TYPE_CHECKING:
    from meshwright.cost import Activations, Boundary, Placed, Transient
    from meshwright.methods import ContextParallel, ExpertParallel, Resolved, SampleRun, TensorParallel, TokensTrace
    from meshwright.methods.fp8_torchao import Fp8Trace
    from meshwright.methods.tensor.tensor_parallel import SaveLog
    from meshwright.methods.tokens.sequence_parallel import Ranks
    from meshwright.planner.trace.op_recording import Repeated


class Trace(Protocol):
    """What an axis, or several, make of one rank's run; nothing is sent, all is counted."""

    dims: dict[nn.Parameter, int]
    divides_batch: ClassVar[bool]
    """Whether tokens or samples are divided: a model that cannot be traced so cannot be trained so either."""

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape that one rank holds."""

    def running(self, log: SaveLog) -> contextlib.AbstractContextManager[None]:
        """Around one forward pass; ``log`` grows with every tensor saved for backward."""

    def boundaries(self, model: nn.Module, log: SaveLog) -> tuple[Boundary, ...]:
        """Return what the last run sends in one micro-batch."""


class LayersAndTokens:
    """Layers divided by one trace, and tokens by another.

    Args:
        layers: Of a tensor axis.
        tokens: Of sequence and context axes.
    """

    divides_batch: ClassVar[bool] = True

    def __init__(self, layers: Trace, tokens: TokensTrace) -> None:
        self._layers, self._tokens = layers, tokens
        self.dims = layers.dims

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape that one rank holds."""
        return self._layers.local_shape(parameter)

    @contextlib.contextmanager
    def running(self, log: SaveLog) -> Iterator[None]:
        """Tokens are cut around the layers."""
        with self._layers.running(log), self._tokens.running(log):
            yield

    def boundaries(self, model: nn.Module, log: SaveLog) -> tuple[Boundary, ...]:
        """Return what both send."""
        return self._layers.boundaries(model, log) + self._tokens.boundaries(model, log)


def trace_of(resolved: Resolved, model: nn.Module, sample: SampleRun) -> Trace | None:
    """Return how the axes of a strategy divide the work; None where none does.

    Raises:
        ModelError: When the model cannot be divided so.
    """
    sizes = dict(resolved.axes)
    experts = cast("ExpertParallel | None", resolved.strategy.get("expert_parallel"))
    if experts is not None and sizes.get("expert", 1) > 1:
        return experts.trace(model, sizes["expert"])
    tensor = cast("TensorParallel | None", resolved.strategy.get("tensor_parallel"))
    layers = tensor.trace(model, sizes.get("tensor", 1), sample) if tensor is not None else None
    tokens = _tokens_trace(resolved, model)
    return LayersAndTokens(layers, tokens) if layers and tokens else layers or tokens


def _tokens_trace(resolved: Resolved, model: nn.Module) -> TokensTrace | None:
    sizes, context = dict(resolved.axes), cast("ContextParallel | None", resolved.strategy.get("context_parallel"))
    ring, heads = sizes.get("context", 1), sizes.get("sequence", 1)
    if max(ring, heads) == 1:
        return None
    from meshwright.methods import TokensTrace, TracedContext, TracedSequence

    axes: list[Ranks] = []
    if "sequence_parallel" in resolved.strategy and heads > 1:
        axes.append(functools.partial(TracedSequence, heads, ring))
    if context is not None and ring > 1:
        axes.append(functools.partial(TracedContext, ring, context.balance, heads))
    return TokensTrace(model, *axes) if axes else None


def trace_key(resolved: Resolved) -> tuple[object, ...]:
    """Equal for strategies with one trace."""
    axes = ("tensor", "sequence", "context", "expert")
    named = [resolved.strategy.get(f"{name}_parallel") for name in axes]
    return *named, *(dict(resolved.axes).get(axis, 1) for axis in axes)


# --- Floating-point operations by place: before the blocks that a pipeline cuts, in each of them, and behind them.

BACKWARD_FLOPS = 2  # the two products of backward, each as large as the one of forward


class PlacedWork:
    """Counts forward, and backward after it, of a model that runs under a FLOP counter.

    Args:
        model: The model.
        blocks: Of the list that is cut; they run in this order.
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
        """Around the forward pass."""
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
        """Forward and backward; the latter runs now. Where it cannot, it counts as twice the forward."""
        start = self._counter.total
        try:
            loss.backward()
        except Exception:  # what a user's function does to tensors without data; time is an estimate all the same
            return tuple(((place,), flops * (1 + BACKWARD_FLOPS)) for place, flops in self.forward.items())
        return tuple(((place,), flops + self._backward(place, start)) for place, flops in self.forward.items())

    def _backward(self, place: int, start: int) -> int:
        """From the arrival of the gradient of a block's output to that of the block before."""
        marks = {**self._arrived, len(self._index): start}
        if place not in marks:
            return 0  # before the blocks, where the first block's end cannot be told from it; or all is frozen
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
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._note(index))
        if index == len(self._index) - 1:
            self._switch(index + 1)

    def _note(self, index: int) -> None:
        self._arrived.setdefault(index, self._counter.total)


# --- What a model would save, compute and send in one micro-batch: a pass over fake tensors that hold no data.


class Predicted(NamedTuple):
    """Of one micro-batch on one rank."""

    activations: Activations
    flops: int  # of forward and backward, recomputation not counted
    boundaries: tuple[Boundary, ...]  # what is sent over the axes that divide layers, tokens or experts
    ops: ModelOps
    idle: tuple[str, ...] = ()  # parameters that should train and that backward does not come by; those that ran

    def agrees(self, other: Predicted) -> bool:
        """Return whether both are the same but for the order in which collectives are listed."""
        sent, others = collections.Counter(self.boundaries), collections.Counter(other.boundaries)
        return sent == others and self._replace(boundaries=(), idle=()) == other._replace(boundaries=(), idle=())


@dataclass(frozen=True)
class Pass:
    """A model and how one micro-batch of it runs; the model itself is not touched.

    Args:
        model: A plain module, not wrapped or sharded.
        inputs: The model input of one micro-batch, as ``prepare_input`` returns it.
        forward: ``forward(model, inputs)`` computes the loss.
        param_dtype: Precision of the parameters as they compute; None keeps their own.
        autocast_dtype: Precision of autocast; None runs without.
        split: Lets the model run as one rank of the axes that divide layers, tokens or experts; None runs it whole.
        blocks: Of a list that runs in this order: activations and operations are told apart by their places in it.
            None: those that the model repeats.
        fp8: The layers that multiply in 8 bits, while the model runs as with them.
        device: What it will train on; None: where its parameters are.
    """

    model: nn.Module
    inputs: Any
    forward: Callable[[nn.Module, Any], Any]
    param_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    split: Trace | None = None
    blocks: Sequence[nn.Module] = ()
    fp8: Fp8Trace | None = None
    device: torch.device | None = None

    def predict(self) -> Predicted:
        """Run the whole model.

        Raises:
            Exception: Whatever the model raises when it runs without data.
        """
        return self._predicted(self._record())

    def predict_repeated(self, repeated: Repeated, *, check: bool) -> Predicted:
        """Run a few of a list's blocks, and continues for all of them.

        Args:
            repeated: The list.
            check: Whether to compare with a run of one block more.

        Raises:
            NotRepeatedError: When blocks turn out to differ in what they save or compute.
            Exception: Whatever the model raises when it runs without data, or with fewer blocks.
        """
        with repeated.cut():
            few = self._record()
        if check:
            one_more = len(repeated.kept()) + 1
            with repeated.cut(one_more):
                predicted = self._continued(few, repeated, repeated.kept(one_more))
                if not predicted.agrees(self.predict()):
                    raise NotRepeatedError("a run with one block more saves or computes something else")
        return self._continued(few, repeated, repeated.blocks)

    def _continued(self, few: _Recorded, repeated: Repeated, blocks: Sequence[nn.Module]) -> Predicted:
        left_out = {*repeated.blocks} - {*blocks}
        every = [block for block in self._blocks if block not in left_out]
        places = Places(few.blocks, every, repeated, blocks)
        return self._predicted(
            _Recorded(
                continued(few.saved, repeated.kept(), blocks, places),
                continued_boundaries(few.boundaries, repeated, blocks),
                continued_ops(few.ops, repeated.kept(), blocks),
                every,
                places.placed(few.placed),
                places.transients(few.transients),
                few.idle,
            )
        )

    def _predicted(self, recorded: _Recorded) -> Predicted:
        activations = summarise(self.model, recorded.saved, recorded.transients)
        activations = dataclasses.replace(activations, flops_at=recorded.placed)
        named = model_ops(self.model, recorded.ops)
        return Predicted(activations, named.flops, recorded.boundaries, named, recorded.idle)

    @paused_collection()  # references that form a circle would end at one operator or another, or not at all
    def _record(self) -> _Recorded:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        device = device_of_pass(self.model, self.device)
        state, inputs = self._state(fake, device), self._fake_inputs(fake, device)
        counter = FlopCount()
        blocks = self._blocks_here()
        work = PlacedWork(self.model, blocks, counter)
        autocast = torch.autocast(device.type, dtype=self.autocast_dtype) if self.autocast_dtype else _nothing()
        found = record_saved(self.model, counter=counter, blocks=blocks)
        held = LiveBytes(state.values(), _tensors(inputs))
        with warnings.catch_warnings(), fake, counter, autocast, found as saved:
            warnings.simplefilter("ignore")
            recorder = self._recorder(saved, held)

            def pass_of(model: nn.Module, inputs: Any) -> tuple[tuple[Boundary, ...], Placed, bool]:
                with self._as_one_rank(saved.log), work.counting():
                    loss = self.forward(model, inputs)
                boundaries = self.split.boundaries(self.model, saved.log) if self.split is not None else ()
                saved.complete = True
                backward = _Backward(loss, device.type)
                del loss
                return boundaries, work.everything(backward), backward.has_run  # type: ignore[arg-type]

            with recorder, _runs_without_data(), kernels_of_device(self.device, device):
                # Backward has the lent tensors, too: a model that recomputes by itself runs again.
                boundaries, placed, has_run = run_with(pass_of, self.model, state, inputs)
            held.add_kept(saved)
            transients = held.transients(saved) if has_run else ()
        listed = [block for _, block in find_blocks(self.model)]
        ops = sort_kernels(recorder, listed, saved, has_backward=has_run)
        return _Recorded(saved, boundaries, ops, blocks, placed, transients, _idle(state) if has_run else ())

    def _blocks_here(self) -> list[nn.Module]:
        """Return those of the blocks that the model has now, while a list may be cut."""
        here = {module for _, module in self.model.named_modules()}
        return [block for block in self._blocks if block in here]

    @functools.cached_property
    def _blocks(self) -> Sequence[nn.Module]:
        return self.blocks or [block for _, block in find_blocks(self.model)]

    def _recorder(self, saved: SavedTensors, held: LiveBytes) -> OpRecorder:
        if self.fp8 is None:
            return OpRecorder(saved, held)
        return OpRecorder(saved, held, self.fp8.layers.values(), self.fp8.scaling)

    def _as_one_rank(self, log: SaveLog) -> contextlib.AbstractContextManager[None]:
        return self.split.running(log) if self.split is not None else _nothing()

    def _state(self, fake: FakeTensorMode, device: torch.device) -> dict[str, torch.Tensor]:
        return {
            name: self._one_ranks(self._cast(converted_to(tensor, fake, device)), tensor).requires_grad_(
                tensor.requires_grad
            )
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
        }

    def _fake_inputs(self, fake: FakeTensorMode, device: torch.device) -> Any:
        def to_fake(leaf: Any) -> Any:
            return self._cast(converted_to(leaf, fake, device)) if isinstance(leaf, torch.Tensor) else leaf

        return map_tree(to_fake, self.inputs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.param_dtype) if self.param_dtype is not None and tensor.is_floating_point() else tensor

    def _one_ranks(self, fake: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if self.split is None or not isinstance(tensor, nn.Parameter):
            return fake
        shape = self.split.local_shape(tensor)
        return fake if shape == fake.shape else fake.new_empty(shape)


class _Recorded(NamedTuple):
    saved: SavedTensors
    boundaries: tuple[Boundary, ...]
    ops: Ops
    blocks: Sequence[nn.Module]  # those that ran, of which places are told
    placed: Placed  # operations
    transients: tuple[Transient, ...]
    idle: tuple[str, ...]


def _idle(state: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Behind backward: what requires a gradient, and has none."""
    without = (name for name, each in state.items() if each.requires_grad and each.grad is None and each.numel())
    return tuple(name.removeprefix("model.") for name in without)


_nothing = contextlib.nullcontext


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def _runs_without_data() -> Iterator[None]:
    """Transformers' code takes the ways that it takes with data, and those that tensors without data can go."""
    with one_sequence_per_sample(), without_grouped_kernels():
        yield


@contextlib.contextmanager
def _own_gradients(loss: Any) -> Iterator[None]:
    """Leave that no tensor stood in for have the gradients behind it that they had: none without data.

    Such as the weights of a criterion whose ``forward`` is called by itself, or that a function holds.
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
    """Return what backward of a loss comes to."""
    nodes = [node for node in (getattr(loss, "grad_fn", None),) if node is not None]
    met = set(nodes)
    while nodes:
        before = {node for node, _ in nodes.pop().next_functions if node is not None} - met
        met |= before
        nodes += before
    return [node.variable for node in met if hasattr(node, "variable")]


class _Backward:
    """Backward of a loss. Where a user's function cannot run it without data, it is taken to follow by rule."""

    def __init__(self, loss: Any, device_type: str) -> None:
        self._loss, self._device_type = loss, device_type
        self.has_run = False

    def backward(self) -> None:
        """Run it, as behind autocast, which lets go of the weights that it has cast."""
        torch.clear_autocast_cache()
        with torch.autocast(self._device_type, enabled=False), _own_gradients(self._loss):
            self._loss.backward()
        self.has_run = True
