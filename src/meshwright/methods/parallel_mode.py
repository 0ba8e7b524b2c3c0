"""``parallel_mode``: the named mesh, and plain data parallelism over its ``data`` axis. Seed: ATorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.cost import Step, mean_traffic
from meshwright.distributed.two_level import route
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.replicas import GradientAverager
from meshwright.methods.wire.replicated import quantise_averages
from meshwright.runtime import AXES, build_mesh, check_axes

_SPELLINGS = {"pipe": "pipeline"}


class ParallelMode(Method):
    """The axes of the mesh, innermost first, and optionally the order of the ranks on it.

    Config as in ATorch: ``([("tensor", 4), ("data", 2)], rank_order or None)``; also ``{"zero": 2, "data": 2}``. None
    means data parallelism over all ranks. The size of ``data`` is adjusted to the number of ranks.
    """

    method_name: ClassVar[str] = "parallel_mode"
    phase: ClassVar[Phase] = Phase.MESH
    summary: ClassVar[str] = "names the mesh axes; the data axis averages gradients over replicas"

    axes: tuple[tuple[str, int], ...] = ()
    rank_order: tuple[int, ...] | None = None

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads ``([(name, size), …], rank_order)`` with ATorch's further items, and a bare list of axes."""
        if not isinstance(raw, tuple | list) or not raw:
            return super().from_short(raw)
        if all(isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) for item in raw):
            return {"axes": raw}
        if len(raw) > 2 and raw[2]:
            raise StrategyError(
                "parallel_mode: several instances of one mesh are not supported",
                expected="([(name, size), …], rank_order)",
                got=f"multi_instance={raw[2]!r}",
                fix="start one job for each instance",
            )
        return {"axes": raw[0] or (), "rank_order": raw[1] if len(raw) > 1 else None}

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Takes axes given as keys (``zero=2, data=2``) and ATorch's spelling ``pipe``."""
        named = [(name, keys.pop(name)) for name in list(keys) if _SPELLINGS.get(name, name) in AXES]
        if named and "axes" not in keys:
            keys["axes"] = named
        if isinstance(keys.get("axes"), tuple | list):
            keys["axes"] = tuple(_spelled(item) for item in keys["axes"])
            if all(isinstance(item, tuple) and isinstance(item[1], int) for item in keys["axes"]):
                check_axes(keys["axes"])
        return keys

    def text_arguments(self) -> dict[str, Any]:
        """Prints axes as keys."""
        order = {"rank_order": list(self.rank_order)} if self.rank_order is not None else {}
        return {**dict(self.axes), **order}

    def apply(self, job: Job) -> None:
        """Creates the mesh and its process groups."""
        job.mesh = build_mesh(self.axes, self.rank_order, job.device.type)

    def cost(self, step: Step) -> Step:
        """Names the axes."""
        return step.replace(axes=self.axes)


def replicate(job: Job) -> None:
    """Averages gradients over ``data`` and ``sequence``; the default where no method shards the parameters.

    DDP does it, and buckets of our own where ``tensor_parallel`` has made DTensors of parameters.
    """
    trainable = any(parameter.requires_grad for parameter in job.model.parameters())
    if job.shard_axis is not None or job.num_averaged == 1 or not trainable:
        return
    group = job.flat_mesh("sequence", "data").get_group()
    if job.is_split:
        averager = GradientAverager(job.model, group, allow_unused=job.find_unused_parameters)
        job.micro_batch = averager.accumulating
        return
    options = {"find_unused_parameters": job.find_unused_parameters, **job.ddp_options}
    replicas = DistributedDataParallel(
        job.model,
        device_ids=[job.device.index] if job.device.type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,  # else every gradient exists twice
        **options,
    )
    if job.wire is not None:
        axis = "data" if job.size("data") > 1 else "sequence"
        way = route(group, job.wire.neighbours(job.axes, axis))
        quantise_averages(replicas, job.wire, way, job.device)
    job.model = replicas
    job.micro_batch = lambda is_last: contextlib.nullcontext() if is_last else _without_reduction(replicas)


@contextlib.contextmanager
def _without_reduction(replicas: nn.Module) -> Iterator[None]:
    assert isinstance(replicas, DistributedDataParallel)
    with replicas.no_sync():
        yield


def replicate_cost(step: Step) -> Step:
    """Twin of :func:`replicate`: one mean of every gradient per step."""
    if step.shard_axis is not None:
        return step
    # Over both axes at once, where there are two.
    axis = "data" if step.size("data") > 1 else "sequence"
    return step.send(*mean_traffic(step, axis, step.size("data") * step.size("sequence")))


def _spelled(item: Any) -> Any:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str):
        return (_SPELLINGS.get(item[0], item[0]), item[1])
    return item
