"""Enumerate what a search tries: mesh sizes, methods on each mesh, and micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.cost import Cluster
from meshwright.errors import StrategyError
from meshwright.methods import Offload, PipelineParallel, in_phase_order
from meshwright.methods.composition import check_rules, shard_axis_of
from meshwright.planner.plans import Subject
from meshwright.strategy import MethodConfig, Strategy

Choice = tuple[MethodConfig, ...]
"""Methods that are taken together; none: the decision is to do nothing."""

_MOST_TOKEN_RANKS = 16  # beyond, a rank's part of a sample is too short to be worth dividing
_MOST_STAGES = 64
_EVERY_ZERO_SIZE = 8  # of so many data-parallel ranks all divisors are tried for a group that shards
_STAGES_PER_RANK = (2, 4)
_FRACTIONS = (0.25, 0.5, 0.75)
_MOST_IN_PART = 1024  # devices; sharded over more, states are small beside all else


@dataclass(frozen=True)
class Space:
    """The choices of a search; it tries their combinations, as far as the law of methods allows.

    Args:
        sizes: Sizes to try of the axes ``tensor``, ``sequence``, ``context``, ``expert``, ``pipeline`` and ``replica``,
            1 included; an axis that is absent is not tried.
        axis_methods: The methods that may work on each of these axes.
        sharding: What may shard parameters, over an axis ``zero``; nothing: data parallelism.
        hybrid: Whether parameters may be sharded within groups that hold copies of each other (HSDP).
        inner_axes: Most of the axes ``tensor``, ``sequence``, ``context`` and ``expert`` that are used together.
        precision: What may lower the precision, what computes fastest first.
        half_dtype: What half precision is on the devices.
        recompute: What may recompute activations, the least first.
        offload: What may leave the device.
        extra: Methods that every candidate has.
        micro_batches: Numbers of micro-batches; None: all that divide a replica's samples.
    """

    sizes: dict[str, tuple[int, ...]]
    axis_methods: dict[str, tuple[Choice, ...]]
    sharding: tuple[Choice, ...]
    hybrid: bool = True
    inner_axes: int = 2
    precision: tuple[Choice, ...] = ((),)
    half_dtype: str = "bf16"
    recompute: tuple[Choice, ...] = ((),)
    offload: tuple[Choice, ...] = ((),)
    extra: Choice = ()
    micro_batches: tuple[int | None, ...] | None = None

    def replace(self, **changes: Any) -> Space:
        """Return the same space with some choices changed."""
        return dataclasses.replace(self, **changes)


def choices(*options: Any) -> tuple[Choice, ...]:
    """Read choices as users write methods; None is the choice to do nothing."""
    return tuple(Strategy([] if option is None else [option]).methods for option in options)


def default_space(subject: Subject, *, lower_precision: bool = True) -> Space:
    """Return what is tried for a subject when nothing else is asked for.

    Args:
        subject: What is planned; its cluster, if it has one, says how large a node is and which precisions it has.
        lower_precision: Whether half precision is tried; without, what the subject has is kept.
    """
    cluster: Cluster | None = getattr(subject, "cluster", None)
    world, node = subject.world, cluster.devices_per_node if cluster is not None else subject.world
    divisors = divisors_of(world)
    within = tuple(size for size in divisors if node % size == 0 or (size % node == 0 and size <= node))
    tokens = tuple(size for size in divisors if size <= _MOST_TOKEN_RANKS)
    return Space(
        sizes={
            "tensor": within,
            "sequence": within,
            "context": tokens,
            "pipeline": tuple(size for size in divisors if size <= _MOST_STAGES),
        },
        axis_methods={
            "tensor": choices("tensor_parallel", ("tensor_parallel", {"sequence": True})),
            "sequence": choices("sequence_parallel"),
            "context": choices("context_parallel"),
            "expert": choices("expert_parallel"),
            "pipeline": _pipelines(),
            "replica": choices("outer"),
        },
        sharding=choices(None, "zero1", "zero2", "fsdp"),
        precision=_precisions(cluster) if lower_precision else ((),),
        half_dtype=subject.half_dtype,
        recompute=_recomputations(),
    )


def offloads(world: int = 1) -> tuple[Choice, ...]:
    """Return what may leave the device: states also in part, the least first, as their update waits for the host.

    Args:
        world: Devices; on very many, states leave whole or not at all.
    """
    parts = (("offload", {"optimizer": fraction}) for fraction in _FRACTIONS if world <= _MOST_IN_PART)
    # Of gradients what can leave before the update: on some meshes backward does not complete them.
    every = ("offload", {"optimizer": 1.0, "parameters": 1.0, "activations": 1.0})
    return choices(*parts, ("offload", "optimizer"), ("offload", "activation"), every)


@functools.cache
def divisors_of(number: int) -> tuple[int, ...]:
    """All of them, from 1."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def zero_sizes(ranks: int, inner: int, node: int) -> tuple[int, ...]:
    """Return the sizes of a group that shards within ``ranks``.

    All of them, or of many those that fill a node and steps of 4.

    Args:
        ranks: Data-parallel ranks.
        inner: Ranks that lie closer together than they.
        node: Ranks of a node.
    """
    if ranks <= _EVERY_ZERO_SIZE:
        return divisors_of(ranks)[1:]
    size, found = max(2, node // inner), [ranks]
    while size < ranks:
        if ranks % size == 0:
            found.append(size)
        size *= 4
    return tuple(sorted(found))


def _pipelines() -> tuple[Choice, ...]:
    name = "pipeline_parallel"
    interleaved = ((name, {"schedule": "interleaved", "num_stages_per_rank": each}) for each in _STAGES_PER_RANK)
    return choices(name, *interleaved, (name, {"schedule": "zbv"}), (name, {"schedule": "gpipe"}))


def _precisions(cluster: Cluster | None) -> tuple[Choice, ...]:
    """Mixed precision: its gradients add up in fp32. ``half``, which is faster and less exact, is tried when asked."""
    if cluster is None or cluster.device.is_host:
        return ((),)
    return choices(("amp_native", cluster.device.half_dtype))


def _recomputations() -> tuple[Choice, ...]:
    """Nothing, everything, and what lies between."""
    return choices(None, ("checkpoint", {"policy": "selective"}), ("checkpoint", {"every": 2}), "checkpoint")


# --- The combinations of a space: meshes, then what works on them, then how a batch goes through.

INNER = ("tensor", "sequence", "context", "expert")
"""Axes that divide a sample's work or a layer's weights, innermost first; data parallelism lies around them."""

Refusals = dict[str, str]
"""Reasons why strategies cannot train, and the first strategy of each."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """Sizes of axes, the innermost first, and the methods that work on them. Each is made once, and equals itself."""

    inner: tuple[tuple[str, int], ...]
    ranks: int  # data-parallel ranks: those of the axes data and zero
    pipeline: int
    replica: int
    inner_methods: Choice


@dataclass(frozen=True, eq=False)
class Branch:
    """A mesh with what shards on it, and precision, recomputation, offloading and a schedule; it equals itself."""

    mesh: Mesh
    axes: tuple[tuple[str, int], ...]
    sharding: Choice
    precision: Choice
    recompute: Choice
    rest: Choice  # of offloading, outer steps and whatever was asked for
    schedule: PipelineParallel | None

    @property
    def methods(self) -> Choice:
        """All but the mesh."""
        pipeline = () if self.schedule is None else (self.schedule,)
        return (
            *self.mesh.inner_methods, *pipeline, *self.sharding, *self.precision, *self.recompute, *self.rest,
        )  # fmt: skip

    @property
    def but_for_groups(self) -> object:
        """Return what it has in common with those whose groups shard over more or fewer ranks."""
        return self.mesh, self.sharding, self.precision, self.recompute, self.rest, self.schedule

    # To hash what methods are takes long; passes through a space share them.
    @property
    def but_for_sharding(self) -> object:
        """Return what its methods have in common with those of one mesh that shard otherwise."""
        others = (*self.precision, *self.recompute, *self.rest)
        return id(self.schedule), tuple(map(id, others))

    @property
    def but_for_offload(self) -> object:
        """Return what it has in common with those of other passes that offload something else."""
        return self.axes, tuple(id(method) for method in self.methods if not isinstance(method, Offload))

    def strategy(self) -> Strategy:
        """As a user would write it."""
        return Strategy([mesh_of(self.axes), *self.methods])

    @property
    def shape(self) -> tuple[int, int]:
        """Ranks of a pipeline, and stages on each."""
        return self.mesh.pipeline, self.schedule.stages_per_rank if self.schedule is not None else 1


def mesh_of(axes: tuple[tuple[str, int], ...]) -> tuple[str, dict[str, object]]:
    """Return the method that names a mesh."""
    return "parallel_mode", {"axes": axes}


def axes_text(sizes: Mapping[str, int]) -> str:
    """``"tensor 2, pipeline 4"``; what is not divided is left out."""
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "data parallelism"


class Candidates:
    """All branches of a space for a world; what cannot be is refused with a reason, each reason once."""

    def __init__(self, space: Space, world: int, node: int, batch_size: int | None) -> None:
        self.space, self.world, self.node, self.batch_size = space, world, node, batch_size
        self.refused: Refusals = {}
        self._lawful: dict[tuple[tuple[int, ...], frozenset[str]], bool] = {}

    def refuse(self, reason: str, strategy: Strategy | str) -> None:
        """Note why a strategy cannot train."""
        self.refused.setdefault(reason, str(strategy))

    def meshes(self) -> Iterator[Mesh]:
        """Factorisations of the world whose replicas share the batch equally; the least divided first."""
        for sizes in sorted(self._sizes(), key=lambda sizes: (math.prod(sizes.values()), tuple(sizes.items()))):
            ranks = self.world // math.prod(sizes.values())
            replicas = ranks * sizes.get("replica", 1) * sizes.get("expert", 1)
            if self.batch_size is not None and not self._divides(self.batch_size, replicas):
                parts = ", ".join(str(count) for count in self.space.micro_batches or () if count)
                self.refuse(
                    f"a batch of {self.batch_size} samples does not divide between {replicas} replicas"
                    + (f" with {parts} micro-batches each" if parts else ""),
                    axes_text(sizes),
                )
                continue
            inner = tuple((axis, sizes[axis]) for axis in INNER if sizes.get(axis, 1) > 1)
            for methods in itertools.product(*(self.space.axis_methods[axis] for axis, _ in inner)):
                chosen = tuple(itertools.chain.from_iterable(methods))
                yield Mesh(inner, ranks, sizes.get("pipeline", 1), sizes.get("replica", 1), chosen)

    def _divides(self, samples: int, replicas: int) -> bool:
        """Return whether replicas share a batch equally, in one of the numbers of micro-batches that the space names."""
        return any(samples % (replicas * (count or 1)) == 0 for count in self.space.micro_batches or (1,))

    def _sizes(self) -> Iterator[dict[str, int]]:
        names = list(self.space.sizes)
        for sizes in itertools.product(*self.space.sizes.values()):
            found = dict(zip(names, sizes, strict=True))
            inner = sum(found.get(axis, 1) > 1 for axis in INNER)
            if self.world % math.prod(sizes) == 0 and inner <= self.space.inner_axes:
                yield found

    def branches(self, mesh: Mesh, is_worth: Callable[[Branch], bool] | None = None) -> Iterator[Branch]:
        """All that can be done on a mesh, as far as the law allows.

        Args:
            mesh: Divides the ranks.
            is_worth: Asked of branches that offload nothing: whether to offload anything of them.
        """
        space = self.space
        outer = space.axis_methods["replica"][0] if mesh.replica > 1 else ()
        for sharding, axes in self._sharded(mesh):
            sizes = dict(axes)
            divided = frozenset(axis for axis, size in axes if size > 1)
            for precision, recompute, schedule in itertools.product(
                space.precision, space.recompute, self._schedules(mesh)
            ):
                rest = (*outer, *space.extra)
                if is_worth and not is_worth(Branch(mesh, axes, sharding, precision, recompute, rest, schedule)):
                    continue
                for offload in space.offload:
                    rest = (*outer, *offload, *space.extra)
                    branch = Branch(mesh, axes, sharding, precision, recompute, rest, schedule)
                    if self._allowed(branch, sizes, divided):
                        yield branch

    def _schedules(self, mesh: Mesh) -> list[PipelineParallel | None]:
        if mesh.pipeline == 1:
            return [None]
        chosen = itertools.chain.from_iterable(self.space.axis_methods["pipeline"])
        return [method for method in chosen if isinstance(method, PipelineParallel)]

    def _sharded(self, mesh: Mesh) -> Iterator[tuple[Choice, tuple[tuple[str, int], ...]]]:
        """What shards, with the whole mesh: nothing over ``data``, or over ``zero``, with ``data`` around it."""
        around = [("pipeline", mesh.pipeline)] if mesh.pipeline > 1 else []
        around += [("replica", mesh.replica)] if mesh.replica > 1 else []
        closer = math.prod(size for _, size in mesh.inner)
        for choice in self.space.sharding:
            if not choice:
                yield choice, _without_ones(*mesh.inner, ("data", mesh.ranks), *around)
                continue
            groups = zero_sizes(mesh.ranks, closer, self.node) if self.space.hybrid else (mesh.ranks,)
            for group in groups if mesh.ranks > 1 else ():
                yield choice, _without_ones(*mesh.inner, ("zero", group), ("data", mesh.ranks // group), *around)
            if mesh.ranks == 1 and shards_alone(mesh, self.space):
                alone = _hold_equal(mesh)
                yield choice, _without_ones(*mesh.inner, *around) if alone else (*mesh.inner, ("data", 1), *around)

    def _allowed(self, branch: Branch, sizes: dict[str, int], divided: frozenset[str]) -> bool:
        key = tuple(map(id, branch.methods)), divided  # the space keeps them
        known = self._lawful.get(key)
        return self._lawful.setdefault(key, self._is_lawful(branch, sizes)) if known is None else known

    def _is_lawful(self, branch: Branch, sizes: dict[str, int]) -> bool:
        strategy = branch.strategy()
        shard_axis = shard_axis_of(strategy, sizes)
        try:
            check_rules(strategy, sizes)
            for method in in_phase_order(strategy):
                method.check_mesh(sizes, shard_axis)
        except StrategyError as error:
            self.refuse(error.what, strategy)
            return False
        return True

    def micro_batches(self, mesh: Mesh) -> tuple[int | None, ...]:
        """Numbers of micro-batches of a step, the fewest first."""
        if self.space.micro_batches is not None and self.batch_size is not None:
            each = self.batch_size // replicas_of(mesh)
            return tuple(count for count in self.space.micro_batches if each % (count or 1) == 0)
        if self.space.micro_batches is not None:
            return self.space.micro_batches
        if self.batch_size is None:
            return (None,)
        return divisors_of(self.batch_size // replicas_of(mesh))


def replicas_of(mesh: Mesh) -> int:
    """Return how many different micro-batches are computed at once."""
    return mesh.ranks * mesh.replica * dict(mesh.inner).get("expert", 1)


def shards_alone(mesh: Mesh, space: Space) -> bool:
    """Return whether a space shards on a mesh with one data-parallel rank.

    Ranks that divide a sample or hold other experts hold equal weights: they can be sharded over, too. Parameters that
    leave a device come back as FSDP2 gathers them, on one rank, too.
    """
    offloads = itertools.chain.from_iterable(space.offload)
    leaves = any(isinstance(method, Offload) and method.parameters for method in offloads)
    return leaves or () not in space.sharding or _hold_equal(mesh)


def _hold_equal(mesh: Mesh) -> bool:
    return not {"sequence", "context", "expert"}.isdisjoint(dict(mesh.inner))


def _without_ones(*axes: tuple[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(axis for axis in axes if axis[1] > 1) or (("data", 1),)
