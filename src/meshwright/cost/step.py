"""The simulated step: what one training step computes, holds and sends on one rank, as plain immutable data.

Methods change it by replacement (``cost(step) -> step``) in the way their ``apply`` changes the real job. Sizes are
bytes, and shapes those of the whole tensor before data-parallel sharding (under ``tensor_parallel``: of a rank's part).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from meshwright.cost.activations import Activations, Placed, sums_of
from meshwright.errors import StrategyError


def names_class(reference: str, names: Iterable[str]) -> bool:
    """Return whether ``reference`` (bare ``"Block"`` or qualified ``"package.module.Block"``) names one of ``names``.

    A class defined in a script is ``__main__.Block`` there and ``train.Block`` elsewhere: only its bare name counts.

    Args:
        reference: Name of a class in a strategy.
        names: Qualified names of a class and of the classes it derives from.
    """
    wanted_bare = reference.rsplit(".", 1)[-1]
    only_bare = "." not in reference or reference.startswith("__main__.")
    for name in names:
        if only_bare or name.startswith("__main__."):
            if name.rsplit(".", 1)[-1] == wanted_bare:
                return True
        elif name == reference:
            return True
    return False


# --- State that is kept beside the weights over many steps.


@dataclass(frozen=True)
class OuterState:
    """State that replicas keep to synchronise: fp32 tensors (fp64 beside fp64) as large as what trains."""

    num_tensors: int  # global weights, and the outer momentum
    split_axis: str | None = None  # dealt out over this axis, parameter by parameter; None: all on every rank
    on_host: bool = False  # in host memory, beside a device with memory of its own


@dataclass(frozen=True)
class Average:
    """A moving average of what trains, sharded like it, and on the host where its optimizer's copy is."""

    itemsize: int | None = None  # bytes per element; None: as wide as the weights, fp32 at least
    every: int = 1  # steps from one update to the next


# --- Compression: bytes of compressed numbers, and the hierarchy of nodes they travel over.

Kind = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True)
class Encoding:
    """Numbers in 8 or 4 bits with one scale per block of elements."""

    kind: Kind
    block_size: int  # elements that share a scale
    scale_bytes: int = 4  # 4: fp32, 2: bf16

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of neighbouring elements of one tensor, whose last block may be shorter."""
        codes = -(-numel // 2) if self.kind == "int4" else numel
        return codes + -(-numel // self.block_size) * self.scale_bytes


@dataclass(frozen=True)
class Compression:
    """Compression of weights that are gathered and of gradients that are reduced; None: uncompressed."""

    gather: Encoding | None = None
    reduce: Encoding | None = None
    min_numel: int = 0  # tensors of fewer elements travel as they are
    ranks_per_node: int | None = None  # of the job; None: one collective over all nodes

    def num_bytes(self, encoding: Encoding | None, tensor_numel: int, numel: int, itemsize: int) -> int:
        """Return the bytes of ``numel`` elements, a part of a floating tensor of ``tensor_numel``."""
        if encoding is None or tensor_numel < self.min_numel:
            return numel * itemsize
        return encoding.num_bytes(numel)

    def neighbours(self, axes: Sequence[tuple[str, int]], axis: str) -> int | None:
        """Return the number of consecutive ranks along an axis on one node; None for one collective over them all.

        Args:
            axes: ``(name, size)``, innermost first: neighbours along an axis lie as many ranks apart as the axes
                before it hold.
            axis: Axis along which a collective runs.

        Raises:
            StrategyError: When nodes cut the axis into unequal parts.
        """
        size, names = dict(axes).get(axis, 1), [name for name, _ in axes]
        if self.ranks_per_node is None or size == 1:
            return None
        stride = math.prod(each for _, each in axes[: names.index(axis)])
        if stride % self.ranks_per_node == 0:
            return None  # every rank on a node of its own
        found, rest = divmod(self.ranks_per_node, stride)
        if not rest and found % size == 0:
            return None  # all on one node
        if rest or size % found:
            raise StrategyError(
                "comm: nodes cut the axis that communicates into unequal parts",
                expected=f"ranks per node that divide {stride * size}, or are divided by it, in steps of {stride}",
                got=f"{self.ranks_per_node} ranks per node, {axis}={size}"
                + (f" over {stride} ranks each" if stride > 1 else ""),
                fix="change the sizes of the axes, or leave hierarchical out",
            )
        return found


# --- The step and its parts.

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]
Moment = Literal["forward", "backward", "update"]
ProductDtype = Literal["fp32", "half", "fp8", "fp4"]
"""What matrix products run in."""

HALF: Final = "half"
FP8: Final = "fp8"

Scaling = Literal["", "delayed", "current", "blocks", "nvfp4", "tensorwise", "rowwise", "mxfp8"]
BoundaryAxis = Literal["tensor", "sequence", "context", "expert"]


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps per parameter, as dims of the parameter and bytes per element."""

    dims: tuple[int, ...]  # () is a scalar such as a step counter, (0, 1) the shape of a matrix itself
    itemsize: int
    numel_apart: int = 1  # elements along dims that are not the parameter's, such as a low rank
    own_type: bool = False  # True: it keeps its type also where parameters are in half precision
    only_for_half: bool = False  # an fp32 copy that exists where the parameter itself is in half precision


@dataclass(frozen=True)
class Updating:
    """Temporaries of an optimizer while it updates a parameter, and the operators that it runs."""

    together: tuple[StateTensor, ...]  # while the whole group is updated
    apart: tuple[StateTensor, ...]  # while its own turn lasts
    group: int = 0  # groups are updated one after the other
    operators: int = 0  # run for each parameter by itself; those over lists of parameters are not counted
    only_divided: bool = False  # where no parameter is divided over ranks, one kernel does it without temporaries


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, as it is given."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool = True
    floating: bool = True
    owners: tuple[str, ...] = ()  # qualified class names of the modules it lies in
    states: tuple[StateTensor, ...] = ()  # what the optimizer will keep for it
    updating: Updating | None = None  # what it holds for a moment; None: nothing
    sharded: bool = True  # False: left whole on every rank although others are sharded
    shard_dim: int = 0  # the dim that a sharding axis divides
    tensor_dim: int | None = None  # the dim that a tensor axis divides; None: none
    expert: tuple[int | None, int] | None = None  # its expert's number in a list (None: stacked), of how many
    trained_on: tuple[int, ...] | None = None  # outside the blocks of a pipeline: the ranks that train it; None: all
    buffer_on: tuple[int, ...] = ()  # the ranks that hold its first value as a buffer
    num_fp8: int = 0  # layers that multiply with it in 8 bits
    gather_itemsize: int | None = None  # bytes per element when it is gathered; None: as the step computes

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Buffer:
    """A buffer of the model: whole on every rank."""

    numel: int
    itemsize: int
    floating: bool = True
    on_rank: int | None = None  # of a block of a pipeline: the rank that holds it; None: all


@dataclass(frozen=True)
class Op:
    """A kernel of one micro-batch, as one rank of the tensor and sequence axes runs it.

    A ``matmul`` is ``batch`` products ``[m, k] x [k, n]``. An ``attention`` is ``batch`` fused attentions (samples x
    heads) of ``m`` queries over ``n`` keys of width ``k``. A ``move`` reads and writes ``num_bytes``. Backward follows
    from forward, unless the ops of backward are listed beside those of forward.
    """

    kind: Literal["matmul", "attention", "move"]
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    num_bytes: int = 0
    backward_bytes: int | None = None  # of a move; None: twice what forward moves
    of_weights: bool = False  # of a move: it casts weights, which costs the same for any number of samples
    functions: int = 0  # of a move: elements to which it applies a function that takes a CPU longer than their bytes
    dtype: ProductDtype = HALF
    causal: bool = False  # of an attention: half of the scores are not computed
    variant: Literal["", "early", "flash1", "flash2", "masked"] = ""  # see Constants, and Efficiency.flash2
    scaling: Scaling = ""  # of a product in 8 or 4 bits, see ``casts``
    casts_weight: bool = True  # of the same; False: its weight is cast once a step, or was gathered so
    count: int = 1
    inside: tuple[str, ...] = ()  # qualified names of the classes of the modules it lies in
    needed_in: tuple[str, ...] = ()  # those of them in which something is saved for backward after it
    operator: str = ""  # as recomputation names it, without the overload, such as ``aten.mm``; "": it is never kept
    recomputed: float = 0.0  # runs a second time, in backward: in this share of the blocks that it stands for
    traced: bool = False  # launched as operators of our engine are; else one of a module's few kernels, as in families
    launches: float = 1.0  # by the host, each time it runs: a share where several are fused into one
    when_fused: tuple[int, float] | None = None  # of a traced move: its bytes and launches where its block is compiled
    on_rank: int | None = None  # outside the blocks of a pipeline: the rank that runs it; None: all
    moment: Literal["both", "forward", "backward"] = "both"  # both: backward follows by rule

    @property
    def flops(self) -> int:
        """Floating-point operations, of forward alone where backward follows by rule."""
        per_element = {"matmul": 2, "attention": 4, "move": 0}[self.kind]
        return per_element * self.m * self.n * self.k * self.batch * self.count // (2 if self.causal else 1)


@dataclass(frozen=True)
class Block:
    """A distinct block, ``count`` times in the model; ``outside`` holds all that is in no block."""

    name: str
    count: int
    parameters: tuple[Parameter, ...]
    on_ranks: tuple[int, ...] = ()  # of a pipeline's blocks: how many of them each rank holds
    ops: tuple[Op, ...] = ()  # what one of them computes; empty: only the step's ``flops`` are known
    runs: int = 1  # in one micro-batch: several where it is listed, or called, several times


@dataclass(frozen=True)
class Stages:
    """A pipeline as one of its ranks sees it."""

    ranks: tuple[int, ...]  # the rank of every stage
    ranges: tuple[tuple[int, int], ...]  # of the blocks that every stage computes: first, and end
    num_blocks: int  # of the whole list
    here: int  # the rank whose step this is
    boundary_bytes: int | None = None  # what one block hands to the next in one micro-batch; None: unknown
    schedule: str = "1f1b"  # in which order ranks compute

    def sums(self, amounts: Placed) -> tuple[int, ...]:
        """Sum amounts over the places of every stage."""
        return sums_of(self.ranges, self.num_blocks, amounts)

    def has(self, stage: int, places: tuple[int, ...]) -> bool:
        """Return whether a stage has any of these places.

        The first stage also has what is before the blocks, the last what is behind them.
        """
        first, end = self.ranges[stage]
        behind = end + 1 if end == self.num_blocks else end
        return any(first <= place < behind or (place == -1 and first == 0 < end) for place in places)

    @property
    def own(self) -> tuple[int, ...]:
        """Stages of this rank."""
        return tuple(stage for stage, rank in enumerate(self.ranks) if rank == self.here)


@dataclass(frozen=True)
class Boundary:
    """A collective of one micro-batch at which a region divided over an axis begins or ends."""

    kind: CollectiveKind
    moment: Moment
    num_bytes: int  # payload of the whole tensor, or what one rank sends, as in Traffic
    inside: tuple[str, ...] = ()  # qualified names of the classes of the modules it happens in
    needed_in: tuple[str, ...] = ()  # those of them in which something is saved for backward after it
    path: str = ""  # of the layer
    on_ranks: tuple[int, ...] | None = None  # the pipeline ranks that run it; None: all
    axis: BoundaryAxis = "tensor"
    count: int = 1  # such collectives, which carry ``num_bytes`` together
    beside: bool = False  # runs beside products that do not wait for it


@dataclass(frozen=True)
class Placement:
    """Mesh axis that shards dim 0 of one class of state (None: whole), and its bytes per element."""

    axis: str | None = None
    itemsize: int | None = None  # None: as the parameter was given


@dataclass(frozen=True)
class Offloaded:
    """Fractions from 0 to 1 of elements that are in host memory or on a disk; see ``offload_placements``."""

    optimizer: float  # of the elements that train: their states, master weights and gradients at the update
    gradients: float = 0.0  # of the same: gradients that leave the device while backward runs
    parameters: float = 0.0  # of the sharded elements; their gradients and states are on the host, too
    on_disk: bool = False  # states and master weights are in files instead of host memory
    visiting_bytes: int = 0  # of fp32 parameters whose states visit the device at once; 0: the host updates


@dataclass(frozen=True)
class Copy:
    """Bytes that one rank moves between its memories in a step."""

    source: Literal["device", "host", "disk"]
    target: Literal["device", "host", "disk"]
    bytes_per_step: int
    moment: Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in a step.

    ``bytes_per_step`` is the payload of the whole tensor: the output of an all-gather, the input of a reduce-scatter,
    the buffer of an all-reduce, padding included. For an ``all_to_all`` it is what this rank has for all ranks, itself
    included; for a ``send`` what it sends to its neighbours.
    """

    kind: CollectiveKind
    axis: str
    bytes_per_step: int
    moment: Moment
    every: int = 1  # only in every so many steps
    calls: int = 1  # collectives per step that the bytes are cut into
    per_micro_batch: bool = False  # whether each micro-batch sends its part; False: all at the step's one moment
    hidden: bool = True  # whether it can run beside computation that does not wait for it
    beside: Literal["", "fed", "others"] = ""  # of inline ones: cut up beside products they feed, or beside others


def axis_parts(name: str) -> tuple[str, ...]:
    """Return the axes that a name stands for, outermost first; see [Note: joint axes] in ``runtime/mesh.py``."""
    return tuple(name.split("_"))


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
    smaller: Activations | None = None  # of all micro-batches but the first, where that alone has one sample more
    stages: Stages | None = None  # where the mesh has a pipeline axis
    flops: int | None = None  # of one micro-batch, forward and backward; recomputation not counted
    recompute_flops: int = 0  # of one micro-batch's recomputation
    fp8_flops: int = 0  # those of them that run in 8 bits
    boundaries: tuple[Boundary, ...] = ()  # as one rank of its axis meets them; so are activations and flops
    parameters: Placement = Placement()
    gradients: Placement = Placement()
    optimizer: Placement = Placement()
    master: Placement | None = None  # fp32 copies beside half parameters
    outer: OuterState | None = None
    average: Average | None = None
    offloaded: Offloaded | None = None
    on_cpu: bool = False  # the device's memory is host memory
    on_one_host: bool = False  # so is that of all ranks, and one host's: they hand on through memory that they share
    compute_itemsize: int | None = None  # bytes per element of gathered parameters; None: as given
    whole_itemsize: int | None = None  # of floating ones left whole beside shards, with fp32 masters; None: as shards
    reduce_itemsize: int | None = None  # bytes per element of gradients in collectives; None: as the gradient
    gathered: Literal["nothing", "unit", "model"] = "nothing"  # how much is whole at once while sharded
    gathers_ahead: bool = True  # backward gathers the next block while one computes
    updates_elements: bool = True  # the optimizer updates every element by itself
    waits_to_update: bool = False  # the host reads from the device whether to update (fp16's loss scale)
    whole_gradients: bool = False  # gradients accumulate whole until the last micro-batch
    compression: Compression | None = None  # of gathered weights and reduced gradients
    traffic: tuple[Traffic, ...] = ()
    collective_host_s: float | None = None  # per collective that blocks wait for; None: as in all steps
    micro_batch_s: float = 0.0  # that the device waits for the host in each micro-batch: of others' runs alone
    counted_again: tuple[str, ...] = ()  # axes whose ranks those behind them have, too: of others' runs alone

    @property
    def shards_in_memory(self) -> bool:
        """Return whether ranks exchange shards through shared memory of their host."""
        return self.on_one_host and self.compression is None and self.size(self.shard_axis) > 1

    def size(self, axis: str | None) -> int:
        """Return the number of ranks along an axis; 1 where the mesh has none of that name."""
        if axis is None or "_" not in axis:  # the usual case: searches ask some hundred thousand times
            return dict(self.axes).get(axis or "", 1)
        return math.prod(map(self.size, axis_parts(axis)))

    def index(self, axis: str, where: Mapping[str, int]) -> int:
        """Return a rank's index along an axis, from those along the axes of the mesh; absent ones count as 0."""
        return functools.reduce(lambda at, part: at * self.size(part) + where.get(part, 0), axis_parts(axis), 0)

    def held_itemsize(self, parameter: Parameter) -> int | None:
        """Return the bytes per element of a floating parameter as the model stores it; None: as given."""
        return self.whole_itemsize if self._cast_whole(parameter) else self.parameters.itemsize

    def has_master(self, parameter: Parameter) -> bool:
        """Return whether the optimizer updates an fp32 copy in place of a half parameter."""
        return self.master is not None or self._cast_whole(parameter)

    def _cast_whole(self, parameter: Parameter) -> bool:
        # Divided experts stay as they are given, and are cast where they compute.
        return self.whole_itemsize is not None and not parameter.sharded and parameter.expert is None

    def replace(self, **changes: object) -> Step:
        """Return the same step with some fields changed."""
        if not changes.keys() <= vars(self).keys():
            return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # says what is wrong
        # Searches make some ten thousand steps, and dataclasses' own function takes longer than the rest of a change.
        new = object.__new__(type(self))
        vars(new).update(vars(self), **changes)
        return new

    def send(self, *traffic: Traffic) -> Step:
        """Return the step with more collectives; those over an axis of one rank, or of no bytes, are dropped."""
        real = tuple(each for each in traffic if self.size(each.axis) > 1 and each.bytes_per_step > 0)
        return self.replace(traffic=self.traffic + real)

    def every_parameter(self) -> Iterator[tuple[int, Parameter]]:
        """Iterate over all distinct parameters with the number of times each is in the model."""
        return ((block.count, parameter) for block in self.blocks for parameter in block.parameters)


# FlashAttention-2 (Dao 2023, §3.1) recomputes the scores: backward does five products where forward does two.
ATTENTION_BACKWARD_FLOPS = 2.5


def pass_flops(op: Op) -> tuple[int, int]:
    """Return the floating-point operations of forward and of backward, without recomputation."""
    forward = op.flops if op.moment != "backward" else 0
    if op.moment == "forward":
        return forward, 0
    if op.kind == "attention":
        return forward, round(op.flops * ATTENTION_BACKWARD_FLOPS)
    return forward, op.flops * (1 if op.moment == "backward" else 2)


# --- Bytes per element.


def element_bytes(tensor: Parameter | Buffer, itemsize: int | None) -> int:
    """Return the bytes per element under a precision; integer tensors keep their own."""
    return itemsize if itemsize is not None and tensor.floating else tensor.itemsize


def gathered_itemsize(step: Step, parameter: Parameter) -> int:
    """Return the bytes per element of a gathered parameter."""
    own = parameter.gather_itemsize
    return own if own is not None else element_bytes(parameter, step.compute_itemsize)


def padded_bytes(step: Step, parameter: Parameter, itemsize: int) -> int:
    """Return the bytes of a parameter, or its gradient, in a collective: every rank sends equally many rows."""
    parts, dim, shape = step.size(step.shard_axis), parameter.shard_dim, parameter.shape
    if not shape:
        return itemsize
    return math.ceil(shape[dim] / parts) * parts * math.prod((*shape[:dim], *shape[dim + 1 :])) * itemsize


# --- Collectives at the boundaries of tensor, sequence and expert parallelism.


def inline_traffic(step: Step, axis: str, boundaries: Iterable[Boundary]) -> list[Traffic]:
    """Return the collectives of boundaries in every micro-batch, by kind and moment; blocks wait for them."""
    sent: dict[tuple[CollectiveKind, Moment, bool], tuple[int, int]] = {}
    for each in boundaries:
        size, calls = sent.get(key := (each.kind, each.moment, each.beside), (0, 0))
        sent[key] = size + each.num_bytes, calls + each.count
    return [
        Traffic(
            kind,
            axis,
            size * step.num_micro_batches,
            moment,
            calls=calls * step.num_micro_batches,
            per_micro_batch=True,
            hidden=False,
            beside="others" if beside else "",
        )
        for (kind, moment, beside), (size, calls) in sent.items()
    ]


def send_boundaries(step: Step, axis: str) -> Step:
    """Return the step with the traffic of its boundaries over ``axis`` in all micro-batches."""
    return step.send(*inline_traffic(step, axis, (each for each in step.boundaries if each.axis == axis)))


# --- Collectives of sharding and of data parallelism, compressed or not, over one level or two.

_BUCKET_BYTES = 25 * 2**20  # what DDP reduces at once


def gathered_bytes(step: Step, parameter: Parameter) -> int:
    """Return the bytes of a parameter in an all-gather over the sharding axis, with equal rows from every rank."""
    return _bytes(
        step, parameter, gathered_itemsize(step, parameter), step.compression.gather if step.compression else None
    )


def reduced_bytes(step: Step, parameter: Parameter) -> int:
    """Return the bytes of a parameter's gradient in a reduction over the sharding axis."""
    size = element_bytes(parameter, step.reduce_itemsize)
    return _bytes(step, parameter, size, step.compression.reduce if step.compression else None)


def _bytes(step: Step, parameter: Parameter, size: int, encoding: Encoding | None) -> int:
    if step.compression is None or encoding is None or not parameter.floating:
        return padded_bytes(step, parameter, size)
    ranks = step.size(step.shard_axis)
    return ranks * step.compression.num_bytes(
        encoding, parameter.numel, padded_bytes(step, parameter, 1) // ranks, size
    )


def gather_traffic(
    step: Step, axis: str, num_bytes: int, moment: Moment, *, calls: int = 1, each: bool = False
) -> tuple[Traffic, ...]:
    """Return an all-gather of so many bytes; in a hierarchy one between nodes, then one within them.

    Args:
        step: The step that gathers.
        axis: Over which.
        num_bytes: Payload of the whole tensor.
        moment: When.
        calls: Collectives that the bytes are cut into.
        each: Whether each micro-batch sends its part.
    """
    around = _between_nodes(step, axis, num_bytes)
    sizes = (num_bytes,) if around is None else (around, num_bytes)
    return tuple(Traffic("all_gather", axis, size, moment, calls=max(calls, 1), per_micro_batch=each) for size in sizes)


def reduce_traffic(step: Step, axis: str, num_bytes: int, *, calls: int = 1, each: bool = False) -> tuple[Traffic, ...]:
    """Return a reduce-scatter of so many bytes.

    It is an all-to-all on CPUs and with compression; in a hierarchy one within nodes, then one between them.

    Args:
        step: The step that reduces.
        axis: Over which.
        num_bytes: Payload of the whole tensor.
        calls: Collectives that the bytes are cut into.
        each: Whether each micro-batch sends its part.
    """
    around = _between_nodes(step, axis, num_bytes)
    calls = max(calls, 1)
    if not step.on_cpu and (step.compression is None or (step.compression.reduce is None and around is None)):
        return (Traffic("reduce_scatter", axis, num_bytes, "backward", calls=calls, per_micro_batch=each),)
    sizes = (num_bytes,) if around is None else (num_bytes, around)
    return tuple(Traffic("all_to_all", axis, size, "backward", calls=calls, per_micro_batch=each) for size in sizes)


def mean_traffic(step: Step, axis: str, ranks: int, *, experts: bool = False) -> tuple[Traffic, ...]:
    """Return the mean over replicas of whole gradients: an all-reduce, or two legs if compressed.

    Each gradient is cut into equal pieces, one for every rank; the owner of a piece forms its mean.

    Args:
        step: The step that averages.
        axis: Over which, or the first of several.
        ranks: Number of replicas.
        experts: Whether experts' gradients are meant, or all others.
    """
    meant = [(n, p) for n, p in step.every_parameter() if p.trainable and (p.expert is not None) == experts]
    trained = [(count, p, element_bytes(p, step.reduce_itemsize)) for count, p in meant]
    compression = step.compression
    if compression is None or (compression.reduce is None and compression.neighbours(step.axes, axis) is None):
        total = sum(count * p.numel * size for count, p, size in trained)
        return (Traffic("all_reduce", axis, total, "backward", calls=math.ceil(total / _BUCKET_BYTES) or 1),)

    def bytes_of(parameter: Parameter, size: int) -> int:
        if parameter.floating:
            return compression.num_bytes(compression.reduce, parameter.numel, math.ceil(parameter.numel / ranks), size)
        return math.ceil(2 * parameter.numel / ranks) * size // 2  # complex: pairs of numbers, as they are

    message = sum(count * bytes_of(p, size) for count, p, size in trained)
    return (
        *reduce_traffic(step, axis, message * ranks),
        *gather_traffic(step, axis, message * ranks, "backward"),
    )


def _between_nodes(step: Step, axis: str, num_bytes: int) -> int | None:
    """Return the bytes of the collective between nodes, which one rank of each joins; None without hierarchy."""
    neighbours = step.compression.neighbours(step.axes, axis) if step.compression is not None else None
    return None if neighbours is None else num_bytes // neighbours
