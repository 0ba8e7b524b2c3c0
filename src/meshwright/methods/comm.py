"""``comm``: weights are gathered and gradients reduced in few bits, and between nodes first. After ZeRO++."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from meshwright.cost import AVERAGING, Encoding, Step, Wire
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.law import SHARDING, Conflict, Need
from meshwright.methods.parallel_mode import averaging_axis
from meshwright.runtime import settings

_SCALE_BYTES = {"fp32": 4, "bf16": 2}


class Comm(Method):
    """Quantised collectives for zero1, zero2, fsdp and plain data parallelism (ZeRO++, Wang et al. 2023).

    Under a sharding method the all-gather of weights and the reduce-scatter of gradients change; without one, the
    average of gradients. Numbers are quantised block by block, tensor by tensor; gradients are added up in fp32. The
    weights that the optimizer updates stay as they are: the copy of them that travels is quantised, and all ranks
    compute with the same bits.

    Config: ``{"all_gather": "int8", "reduce": "int4"}``; the short form ``"int4"`` is that of ``reduce``.
    """

    method_name: ClassVar[str] = "comm"
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
        Conflict(
            other="pipeline_parallel",
            reason="it reduces gradients and holds weights whole in a way of its own",
            fix="leave comm out",
        ),
        Conflict(
            other="expert_parallel",
            reason="it averages the gradients of experts apart from all others",
            fix="leave comm out",
        ),
    )

    all_gather: Literal["int8", "fp8"] | None = None
    """How weights are gathered; None: as they are."""
    reduce: Literal["int8", "int4"] | None = "int8"
    """How gradients are reduced; None: as they are."""
    block_size: Annotated[int, Field(ge=8, le=65536)] = 128
    """Elements that share a scale."""
    scale_dtype: Literal["fp32", "bf16"] = "fp32"
    min_numel: Annotated[int, Field(ge=0)] = 65536
    """Tensors of fewer elements, such as norms and biases, travel as they are."""
    hierarchical: Literal["auto"] | Annotated[int, Field(ge=1)] | None = None
    """Ranks per node: weights cross nodes once and are handed on within; gradients are added up within nodes first.
    ``auto``: as the launcher says (``LOCAL_WORLD_SIZE``). None: one collective over all ranks."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads the bits of gradients."""
        return {"reduce": raw} if isinstance(raw, str) else super().from_short(raw)

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuses a method that changes nothing."""
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
    def _wire(self) -> Wire:
        def encoding(kind: Literal["int8", "int4", "fp8"] | None) -> Encoding | None:
            return None if kind is None else Encoding(kind, self.block_size, _SCALE_BYTES[self.scale_dtype])

        per_node = settings().local_world_size if self.hierarchical == "auto" else self.hierarchical
        return Wire(encoding(self.all_gather), encoding(self.reduce), self.min_numel, per_node)

    def check(self, job: Job) -> None:
        """Refuses what it cannot change, and nodes that cut the axis into unequal parts."""
        self._check_engine(job)
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
        averaging = [axis for axis in AVERAGING if job.size(axis) > 1]
        if job.shard_axis is None and len(averaging) > 1:
            raise StrategyError(
                "comm: hierarchical goes along one axis",
                expected="a data, a sequence or a context axis, or a sharding method",
                got=", ".join(f"{axis}={job.size(axis)}" for axis in averaging),
                fix="add zero1, zero2 or fsdp, or leave hierarchical out",
            )
        self._wire.neighbours(job.axes, _axis(job))

    def apply(self, job: Job) -> None:
        """Tells the method that shards, or replicates, how to communicate."""
        job.wire = self._wire
        axis = _axis(job)
        if job.num_averaged == 1:
            job.notices.append("comm changes nothing: one rank has nobody to communicate with")
        elif self.hierarchical is not None and job.wire.neighbours(job.axes, axis) is None:
            job.notices.append(
                f"comm: hierarchical changes nothing; ranks along {axis} are all on one node, or each on its own"
            )
        largest = max((parameter.numel() for parameter in job.model.parameters()), default=0)
        if largest < self.min_numel and (self.all_gather or self.reduce):
            job.notices.append(
                f"comm quantises nothing: the largest tensor has {largest} elements, min_numel is {self.min_numel}"
            )

    def cost(self, step: Step) -> Step:
        """The same for the simulated step."""
        return step.replace(wire=self._wire)


def _axis(job: Job) -> str:
    """The axis whose collectives change: the one that is sharded over, else that of data parallelism."""
    return job.shard_axis or averaging_axis(job)
