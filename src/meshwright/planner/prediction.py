"""What a model would save, compute and send in one micro-batch: a pass over fake tensors that hold no data."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from meshwright.collector import paused_collection
from meshwright.methods.traced_transformers import one_sequence_per_sample, without_grouped_kernels
from meshwright.nn import find_blocks, run_with
from meshwright.planner.profile.continued import (
    NotRepeatedError,
    continued,
    continued_boundaries,
    continued_ops,
)
from meshwright.planner.profile.device import converted_to, device_of_pass, kernels_of_device
from meshwright.planner.profile.flops import FlopCount
from meshwright.planner.profile.held import HeldBytes
from meshwright.planner.profile.model_ops import ModelOps, model_ops
from meshwright.planner.profile.places import Places
from meshwright.planner.profile.recorder import OpRecorder, Ops, sort_kernels
from meshwright.planner.saved import SavedTensors, record_saved
from meshwright.planner.summary import summarise
from meshwright.planner.work import PlacedWork
from meshwright.utils.trees import map_tree

if TYPE_CHECKING:
    from meshwright.cost import Activations, Boundary, Placed, Transient
    from meshwright.methods.float8.trace import Fp8Trace
    from meshwright.methods.tensor.trace import SaveLog
    from meshwright.planner.profile.repeated import Repeated
    from meshwright.planner.traces import Trace


class Predicted(NamedTuple):
    """Of one micro-batch on one rank."""

    activations: Activations
    flops: int  # of forward and backward, recomputation not counted
    boundaries: tuple[Boundary, ...]  # what is sent over the axes that divide layers, tokens or experts
    ops: ModelOps
    idle: tuple[str, ...] = ()  # parameters that should train and that backward does not come by; those that ran

    def agrees(self, other: Predicted) -> bool:
        """Whether both are the same but for the order in which collectives are listed."""
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
        """Runs the whole model.

        Raises:
            Exception: Whatever the model raises when it runs without data.
        """
        return self._predicted(self._record())

    def predict_repeated(self, repeated: Repeated, *, check: bool) -> Predicted:
        """Runs a few of a list's blocks, and continues for all of them.

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
        held = HeldBytes(state.values(), _tensors(inputs))
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
        """Those of the blocks that the model has now, while a list may be cut."""
        here = {module for _, module in self.model.named_modules()}
        return [block for block in self._blocks if block in here]

    @functools.cached_property
    def _blocks(self) -> Sequence[nn.Module]:
        return self.blocks or [block for _, block in find_blocks(self.model)]

    def _recorder(self, saved: SavedTensors, held: HeldBytes) -> OpRecorder:
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
    """Leaves that no tensor stood in for have the gradients behind it that they had: none without data.

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
    """What backward of a loss comes to."""
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
        """Runs it, as behind autocast, which lets go of the weights that it has cast."""
        torch.clear_autocast_cache()
        with torch.autocast(self._device_type, enabled=False), _own_gradients(self._loss):
            self._loss.backward()
        self.has_run = True
