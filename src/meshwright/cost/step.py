"""The simulated step: what one training step holds and sends on one rank, as plain immutable data.

Methods change it by replacement (``cost(step) -> step``) in the way their ``apply`` changes the real job. Nothing here
imports torch; sizes are bytes, counts are numbers, and shapes are those of the whole tensor before data-parallel
sharding (under ``tensor_parallel``: of one tensor rank's part).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.cost.wire import Wire


@dataclass(frozen=True)
class StateTensor:
    """One tensor an optimizer keeps per parameter: which of the parameter's dims it has, and bytes per element."""

    dims: tuple[int, ...]  # () is a scalar such as a step counter, (0, 1) the shape of a matrix itself
    itemsize: int
    numel_apart: int = 1  # elements along dims that are not the parameter's, such as a low rank
    own_type: bool = False  # True: it keeps its type also where parameters are in half precision
    only_for_half: bool = False  # an fp32 copy that exists where the parameter itself is in half precision


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model, as it is given."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool = True
    floating: bool = True
    owners: tuple[str, ...] = ()  # qualified class names of the modules it lies in
    states: tuple[StateTensor, ...] = ()  # what the optimizer will keep for it
    sharded: bool = True  # False: left whole on every rank although others are sharded
    tensor_dim: int | None = None  # the dim that a tensor axis divides; None: none
    trained_on: tuple[int, ...] | None = None  # outside the blocks of a pipeline: the ranks that train it; None: all
    lent_to: tuple[int, ...] = ()  # the ranks that hold its first value as a buffer

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Buffer:
    """One buffer of the model: whole on every rank."""

    numel: int
    itemsize: int
    floating: bool = True
    on_rank: int | None = None  # of a block of a pipeline: the rank that holds it; None: all


@dataclass(frozen=True)
class Block:
    """The parameters of one distinct block, ``count`` times in the model; ``outside`` holds what is in no block."""

    name: str
    count: int
    parameters: tuple[Parameter, ...]
    on_ranks: tuple[int, ...] = ()  # of a pipeline's blocks: how many of them each rank holds


@dataclass(frozen=True)
class Stages:
    """A pipeline as one of its ranks sees it."""

    ranks: tuple[int, ...]  # the rank of every stage
    sizes: tuple[int, ...]  # blocks of every stage
    here: int  # the rank whose step this is
    boundary_bytes: int | None = None  # what one block hands to the next in one micro-batch; None: unknown


@dataclass(frozen=True)
class RecomputePart:
    """What recomputing every module of one class would change."""

    classes: tuple[str, ...]  # qualified names of the class and its bases
    inside: tuple[str, ...]  # qualified names of the classes its modules lie in
    freed_bytes: int  # no longer saved between forward and backward (net of the inputs that are kept instead)
    working_bytes: int  # saved again while one such module runs backward (the largest)


@dataclass(frozen=True)
class Activations:
    """What forward saves for backward on one rank for one micro-batch."""

    saved_bytes: int
    parts: tuple[RecomputePart, ...] = ()
    block_classes: tuple[str, ...] = ()  # classes of the model's repeated blocks
    working_bytes: int = 0  # of the part being recomputed


@dataclass(frozen=True)
class Boundary:
    """A collective where what an axis divides, layers or tokens, begins or ends, in one micro-batch."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    moment: Literal["forward", "backward"]
    num_bytes: int  # payload of the whole tensor, as in Traffic
    inside: tuple[str, ...] = ()  # qualified names of the classes of the modules it happens in
    needed_in: tuple[str, ...] = ()  # those of them in which something is saved for backward after it
    path: str = ""  # of the layer
    on_ranks: tuple[int, ...] | None = None  # the pipeline ranks that run it; None: all
    axis: Literal["tensor", "sequence"] = "tensor"


@dataclass(frozen=True)
class Placement:
    """Where one class of state lives: the mesh axis that shards dim 0 (None: whole) and its bytes per element."""

    axis: str | None = None
    itemsize: int | None = None  # None: as the parameter was given


@dataclass(frozen=True)
class OuterState:
    """What replicas keep to synchronise: tensors in fp32 (fp64 beside fp64) as large as what trains."""

    num_tensors: int  # global weights, and the outer momentum
    split_axis: str | None = None  # dealt out over this axis, parameter by parameter; None: all on every rank
    on_host: bool = False  # in host memory, beside a device with memory of its own


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in a step.

    ``bytes_per_step`` is the payload of the whole tensor: the output of an all-gather, the input of a reduce-scatter,
    the buffer of an all-reduce, padding included. A ``send`` counts what this rank sends to its neighbours.
    """

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]
    axis: str
    bytes_per_step: int
    moment: Literal["forward", "backward", "update"]
    every: int = 1  # only in every so many steps


@dataclass(frozen=True)
class Step:
    """One training step on one rank, before a ``Cluster`` turns it into seconds."""

    blocks: tuple[Block, ...]
    axes: tuple[tuple[str, int], ...]
    shard_axis: str | None = None  # the axis that a ZeRO method shards over; None: parameters are replicated
    buffers: tuple[Buffer, ...] = ()
    buffers_itemsize: int | None = None  # bytes per element of floating buffers; None: as given
    num_micro_batches: int = 1
    activations: Activations | None = None  # None: unknown (no sample batch, or the model could not be traced)
    stages: Stages | None = None  # where the mesh has a pipeline axis
    flops: int | None = None  # of one micro-batch, forward and backward; recomputation not counted
    boundaries: tuple[Boundary, ...] = ()  # as one rank of its axis meets them; so are activations and flops
    parameters: Placement = Placement()
    gradients: Placement = Placement()
    optimizer: Placement = Placement()
    master: Placement | None = None  # fp32 copies beside half parameters
    outer: OuterState | None = None
    on_cpu: bool = False  # the device's memory is host memory
    compute_itemsize: int | None = None  # bytes per element of gathered parameters; None: as given
    reduce_itemsize: int | None = None  # bytes per element of gradients on the wire; None: as the gradient
    gathered: Literal["nothing", "unit", "model"] = "nothing"  # how much is whole at once while sharded
    whole_gradients: bool = False  # gradients accumulate whole until the last micro-batch
    wire: Wire | None = None  # in how many bits weights are gathered and gradients reduced; None: as they are
    traffic: tuple[Traffic, ...] = ()

    def size(self, axis: str | None) -> int:
        """Ranks along an axis; 1 where the mesh has none of that name."""
        return dict(self.axes).get(axis, 1) if axis is not None else 1

    def replace(self, **changes: object) -> Step:
        """The same step with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def send(self, *traffic: Traffic) -> Step:
        """The same step with more collectives; those over an axis of one rank, or of no bytes, send nothing."""
        real = tuple(each for each in traffic if self.size(each.axis) > 1 and each.bytes_per_step > 0)
        return self.replace(traffic=self.traffic + real)

    def every_parameter(self) -> Iterator[tuple[int, Parameter]]:
        """All distinct parameters with the number of times each is in the model."""
        for block in self.blocks:
            for parameter in block.parameters:
                yield block.count, parameter
