"""Compress weight gathers and gradient reductions of FSDP2 and DDP (`comm`, after ZeRO++).

The method only records the compression on the job. The method that shards then calls :func:`quantise_units`, and plain
data parallelism :func:`quantise_averages`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field, field_validator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm.compression import Packing, Route, gathered_messages, reduced_row, route
from meshwright.comm.transport import all_gather_flat
from meshwright.cost import AVERAGING, Compression, Encoding, Step
from meshwright.errors import StrategyError
from meshwright.methods.base import SHARDING, Conflict, Job, Method, Need, Phase
from meshwright.nn import Comm as FsdpComm, is_mean, parameter_groups
from meshwright.runtime import groups_along, mesh_order, ranks_per_host, settings
from meshwright.runtime.torch_internals.fsdp import whole_size_of


def quantise_units(model: nn.Module, compression: Compression, way: Route) -> None:
    """Compress the collectives of every unit of a sharded model from now on.

    Args:
        model: Sharded with ``fully_shard`` over the ranks of ``way``.
        compression: Encodings of weights and gradients.
        way: The ranks that shard, and their nodes.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        parameters = [parameter for group in parameter_groups(module) for parameter in group.fsdp_params]
        shards = [parameter.sharded_param for parameter in parameters]
        unit = _Unit(parameters, compression, way)
        floating = bool(shards) and all(shard.is_floating_point() for shard in shards)
        if floating and (compression.gather is not None or way.nodes is not None):
            module.set_custom_all_gather(_AllGather(unit))  # type: ignore[arg-type]
        reduced = [shard.is_floating_point() for shard in shards if shard.requires_grad]
        if reduced and all(reduced) and (compression.reduce is not None or way.nodes is not None):
            module.set_custom_reduce_scatter(_ReduceScatter(unit))  # type: ignore[arg-type]


class _Unit:
    """The parameters that FSDP2 packs together, and the encoding of a rank's part of them."""

    def __init__(self, parameters: list[Any], compression: Compression, way: Route) -> None:
        self._parameters, self._compression, self.way = parameters, compression, way
        self._warned = False

    def gathered(self, num_elements: int) -> Packing:
        """Return the packing of a rank's padded shards; without an encoding they may be fp8 bytes already."""
        if self._compression.gather is None:
            return Packing((num_elements,), (False,), None)
        return self._packing(self._parameters, self._compression.gather)

    def reduced(self, num_elements: int) -> Packing:
        """Return the packing of the gradients that one rank will own.

        They stay unquantised if they are not the gradients of all trainable parameters.
        """
        trained = [each for each in self._parameters if each.sharded_param.requires_grad]
        packing = self._packing(trained, self._compression.reduce)
        if sum(packing.sizes) == num_elements:
            return packing
        if not self._warned:
            self._warned = True
            warnings.warn(
                "comm: some parameters of a unit took no part in a step, and FSDP2 does not say which; the gradients "
                "of this unit are not quantised in such steps",
                stacklevel=2,
            )
        return Packing((num_elements,), (False,), None)

    def _packing(self, parameters: list[Any], encoding: Encoding | None) -> Packing:
        return Packing(
            tuple(each.padded_sharded_param_size.numel() for each in parameters),
            tuple(whole_size_of(each).numel() >= self._compression.min_numel for each in parameters),
            encoding,
        )


class _AllGather(FsdpComm):
    """FSDP2's all-gather, compressed."""

    def __init__(self, unit: _Unit) -> None:
        self._unit = unit

    @torch.no_grad()
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill ``output_tensor`` (ranks · elements) with every rank's ``input_tensor`` as all ranks decode it."""
        way = self._unit.way
        if group.size() != way.size:
            # reshard_after_forward is an integer: a smaller group gathers what has been decoded before.
            work: dist.Work | None = all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        packing = self._unit.gathered(input_tensor.numel())
        messages = gathered_messages(packing.pack(input_tensor.view(1, -1)).view(-1), way)
        packing.unpack(messages, input_tensor.dtype, output_tensor.view(way.size, -1))
        return None  # done, in the order of the stream


class _ReduceScatter(FsdpComm):
    """FSDP2's reduce-scatter, compressed."""

    def __init__(self, unit: _Unit) -> None:
        self._unit = unit

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` (elements) with the sum or mean of the ranks' rows for this one."""
        way = self._unit.way
        rows = input_tensor.view(way.size, -1)
        total = reduced_row(rows, self._unit.reduced(rows.shape[1]), way)
        output_tensor.copy_(total / way.size if is_mean(op) else total)
        return None


# --- DDP, and what averages in its place: averages in few bits
#
# Every gradient of a bucket is cut into equal pieces, one per rank. Owners add up their pieces in fp32 and send the
# means, quantised once more, to all ranks. All decode the same bytes, so that replicas stay equal.


def quantise_averages(
    model: DistributedDataParallel, compression: Compression, way: Route, device: torch.device
) -> None:
    """Compress the averages of a DDP model's buckets from now on.

    Args:
        model: Replicated over the ranks of ``way``.
        compression: Encoding of gradients.
        way: The ranks that average, and their nodes.
        device: Device of the model.
    """
    if compression.reduce is not None or way.nodes is not None:
        model.register_comm_hook(None, _Averages(compression, way, device).average)


class _Averages:
    def __init__(self, compression: Compression, way: Route, device: torch.device) -> None:
        self._compression, self._way, self._device = compression, way, device
        # Overlaps with computation; DDP waits for it by the future's events.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def average(
        self,
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Replace the gradients of a bucket by their means over ranks, with equal bits on all of them."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[] if self._stream is None else [self._device]
        )
        with self._aside():
            future.set_result(self._averaged(bucket))
        return future

    def _averaged(self, bucket: dist.GradBucket) -> torch.Tensor:  # type: ignore[name-defined]
        buffer: torch.Tensor = bucket.buffer()
        if buffer.is_sparse:  # rows of embeddings, of which each rank has others: as DDP averages them
            buffer = buffer / self._way.size
            dist.all_reduce(buffer, group=self._way.group)
        elif any(parameter.is_complex() for parameter in bucket.parameters()):
            # DDP gives a buffer of real numbers, and would cut it as if it were one of complex ones.
            parts = buffer.split([2 * parameter.numel() for parameter in bucket.parameters()])
            average_in_place(parts, dataclasses.replace(self._compression, reduce=None), self._way)
        else:
            average_in_place([gradient.view(-1) for gradient in bucket.gradients()], self._compression, self._way)
        return buffer

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


# DDP reads the hook's annotations, which must be types; postponed ones are text.
_Averages.average.__annotations__.update(
    bucket=dist.GradBucket,  # type: ignore[attr-defined]
    **{"return": torch.futures.Future[torch.Tensor]},
)


def averaging_route(job: Job, compression: Compression, axes: Sequence[str]) -> Route:
    """Return the route of averages over replicas; collective over the world.

    Args:
        job: The job; none of its parameters is sharded.
        compression: What is compressed.
        axes: The axes along which the replicas lie; one at least has several ranks.
    """
    present = [axis for axis in mesh_order(job.axes) if axis in axes and job.size(axis) > 1]
    nodes = compression.neighbours(job.axes, job.mesh_axes.averaging_axis)
    return route(job.mesh_axes.flat_mesh(*axes).get_group(), nodes, groups_along(job.require_mesh(), present))


def averages_of(job: Job, axes: Sequence[str]) -> Callable[[Sequence[torch.Tensor]], None] | None:
    """Return a function that averages flat gradients over replicas in few bits; None where nothing is compressed.

    Args:
        job: The job; none of its parameters is sharded.
        axes: The axes along which the replicas lie.
    """
    compression = job.sharding.compression
    if compression is None:
        return None
    way = averaging_route(job, compression, axes)
    if compression.reduce is None and way.nodes is None:
        return None

    def average(gradients: Sequence[torch.Tensor]) -> None:
        plain = [each for each in gradients if not each.is_complex()]
        pairs = [torch.view_as_real(each).flatten() for each in gradients if each.is_complex()]
        for parts, encoding in ((plain, compression), (pairs, dataclasses.replace(compression, reduce=None))):
            if parts:
                average_in_place(parts, encoding, way)

    return average


def average_in_place(gradients: Sequence[torch.Tensor], compression: Compression, way: Route) -> None:
    """Replace flat gradients of one type by their means over ranks."""
    pieces = [-(-gradient.numel() // way.size) for gradient in gradients]
    packing = Packing(
        tuple(pieces), tuple(each.numel() >= compression.min_numel for each in gradients), compression.reduce
    )
    rows = gradients[0].new_zeros(way.size, sum(pieces))
    for gradient, part in zip(gradients, rows.split(pieces, dim=1), strict=True):
        for target, source in _runs(part, gradient):
            target.copy_(source)
    mean = reduced_row(rows, packing, way).div_(way.size).to(rows.dtype)
    messages = gathered_messages(packing.pack(mean.view(1, -1)).view(-1), way)
    packing.unpack(messages, rows.dtype, rows)
    for gradient, part in zip(gradients, rows.split(pieces, dim=1), strict=True):
        for source, target in _runs(part, gradient):
            target.copy_(source)


def _runs(part: torch.Tensor, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of views, of pieces ``(ranks, piece)`` and of a flat tensor: the full pieces, then a shorter one."""
    piece = part.shape[1]
    full, rest = divmod(flat.numel(), piece) if piece else (0, 0)
    if full:
        yield part[:full], flat[: full * piece].view(full, piece)
    if rest:
        yield part[full, :rest], flat[full * piece :]


# --- The method

_SCALE_BYTES = {"fp32": 4, "bf16": 2}


class Comm(Method):
    """Quantises the collectives of zero1, zero2, fsdp and plain data parallelism (ZeRO++, Wang et al. 2023).

    Under a sharding method the all-gather of weights and the reduce-scatter of gradients change; without one, the
    average of gradients. Numbers are quantised block by block within a tensor; gradients are added up in fp32. The
    weights that the optimizer updates keep their precision: only the copy that is sent is quantised, and all ranks
    compute with the same bits. Complex and sparse gradients are averaged as they are.

    Config: ``{"all_gather": "int8", "reduce": "int4"}``; the short form ``"int4"`` is that of ``reduce``.
    """

    method_name: ClassVar[str] = "comm"
    short_forms: ClassVar[Mapping[type, str]] = {str: "reduce"}
    phase: ClassVar[Phase] = Phase.PRECISION
    summary: ClassVar[str] = "weights and gradients travel in 8 or 4 bits; collectives in two levels over nodes"
    effect: ClassVar[str] = (
        "memory: a copy of a block's codes as they travel. Time: less where links bind, some for the codes. "
        "Communication: a half to a tenth of the bytes"
    )
    needs: ClassVar[tuple[Need, ...]] = (
        Need(
            any_of=SHARDING,
            reason="no other method gathers weights",
            fix="add one of them, or leave all_gather out: reduce alone quantises gradients",
            when=lambda own: own.all_gather is not None,
            own_keys="all_gather",
        ),
    )
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="fp8",
            reason="both say in which bits weights are gathered",
            fix="leave one of them out; reduce and hierarchical go together with fp8's all_gather",
            when=lambda own, other: bool(own.all_gather is not None and other.all_gather),
            own_keys="all_gather",
            other_keys="all_gather=True",
        ),
    )

    all_gather: Literal["int8", "fp8"] | None = None
    """Encoding of gathered weights; None: none."""
    reduce: Literal["int8", "int4"] | None = "int8"
    """Encoding of reduced gradients; None: none."""
    block_size: Annotated[int, Field(ge=8, le=65536)] = 128
    """Elements that share a scale."""
    scale_dtype: Literal["fp32", "bf16"] = "fp32"
    min_numel: Annotated[int, Field(ge=0)] = 65536
    """Tensors of fewer elements, such as norms and biases, are not quantised."""
    hierarchical: Literal["auto"] | Annotated[int, Field(ge=1)] | None = None
    """Ranks per node: weights cross nodes once and are passed on inside; gradients are added up within nodes first.
    ``auto`` takes the launcher's ``LOCAL_WORLD_SIZE``. None: one collective over all ranks."""

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuse a method that changes nothing."""
        if all(keys.get(key, default) is None for key, default in (("all_gather", None), ("reduce", "int8"))) and (
            keys.get("hierarchical") is None
        ):
            raise StrategyError(
                "comm is in the strategy and changes nothing",
                expected="all_gather, reduce or hierarchical",
                got="None for each of them",
                fix="set one of them, or leave the method out",
            )
        return keys

    @field_validator("block_size")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("an even number: two codes of 4 bits share a byte")
        return value

    @property
    def _compression(self) -> Compression:
        def encoding(kind: Literal["int8", "int4", "fp8"] | None) -> Encoding | None:
            return None if kind is None else Encoding(kind, self.block_size, _SCALE_BYTES[self.scale_dtype])

        per_node = settings().local_world_size if self.hierarchical == "auto" else self.hierarchical
        return Compression(encoding(self.all_gather), encoding(self.reduce), self.min_numel, per_node)

    def check(self, job: Job) -> None:
        """Refuse engines whose collectives it cannot change, and nodes that cut the axis into unequal parts."""
        self._check_engine(job)
        if self.all_gather is not None and job.shard_axis is not None:
            self._check_dtypes(job)
        if self.hierarchical is not None:
            self._check_nodes(job)

    def _check_engine(self, job: Job) -> None:
        if job.shard_axis is None and job.size("tensor") > 1:
            raise StrategyError(
                "comm does not go together with a tensor axis where no method shards",
                expected="zero1, zero2 or fsdp beside the tensor axis",
                got=f"tensor={job.size('tensor')}",
                fix="add one of them, or leave comm out",
            )

    def _check_dtypes(self, job: Job) -> None:
        """Refuse weights that are gathered as bytes, of several dtypes; complex ones have units of their own."""
        kinds = {p.dtype for p in job.model.parameters() if not p.dtype.is_complex}
        if _casts(job):
            kinds = {torch.float32 if dtype.is_floating_point else dtype for dtype in kinds}
        if len(kinds) > 1:
            raise StrategyError(
                "comm: all_gather encodes weights of one dtype",
                expected="parameters of one floating dtype, or amp_native or half, which gather them in one",
                got=", ".join(sorted(map(str, kinds))),
                fix="leave all_gather out: reduce compresses the gradients of such models too",
            )

    def _check_nodes(self, job: Job) -> None:
        mode = job.strategy.get("parallel_mode")
        order = getattr(mode, "rank_order", None)
        if order is not None and list(order) != sorted(order):
            raise StrategyError(
                "comm: hierarchical takes neighbouring ranks for neighbours on a node",
                expected="ranks in sequence",
                got=f"rank_order={list(order)}",
                fix="leave rank_order or hierarchical out",
            )
        averaging = [axis for axis in (*AVERAGING, "expert") if job.size(axis) > 1]
        if job.shard_axis is None and (len(averaging) > 1 or "expert" in averaging):
            raise StrategyError(
                "comm: hierarchical works along one axis",
                expected="a data, a sequence or a context axis, or a sharding method",
                got=", ".join(f"{axis}={job.size(axis)}" for axis in averaging),
                fix="add zero1, zero2 or fsdp, or leave hierarchical out",
            )
        self._compression.neighbours(job.axes, _axis(job))

    def apply(self, job: Job) -> None:
        """Record the compression for the method that shards, or for data parallelism."""
        if self.hierarchical == "auto":
            ranks_per_host("hierarchical='auto' of comm")
        job.sharding.compression = self._compression
        axis = _axis(job)
        if job.mesh_axes.num_averaged == 1:
            job.notices.append("comm changes nothing: one rank communicates with no other")
        elif self.hierarchical is not None and job.sharding.compression.neighbours(job.axes, axis) is None:
            job.notices.append(
                f"comm: hierarchical changes nothing; ranks along {axis} are all on one node, or each on its own"
            )
        largest = max((parameter.numel() for parameter in job.model.parameters()), default=0)
        if largest < self.min_numel and (self.all_gather or self.reduce):
            job.notices.append(
                f"comm quantises nothing: the largest tensor has {largest} elements, min_numel is {self.min_numel}"
            )

    def cost(self, step: Step) -> Step:
        """Record the compression on the simulated step."""
        return step.replace(compression=self._compression)


def _casts(job: Job) -> bool:
    """Return whether parameters are gathered in one precision, whatever theirs is."""
    asked = [getattr(job.strategy.get(name), "mixed_precision", None) for name in SHARDING]
    casts = any(each is not None and each.param_dtype is not None for each in asked)
    return casts or "amp_native" in job.strategy or "half" in job.strategy


def _axis(job: Job) -> str:
    """Return the axis whose collectives change: the one that is sharded over, else that of data parallelism."""
    return job.shard_axis or job.mesh_axes.averaging_axis
