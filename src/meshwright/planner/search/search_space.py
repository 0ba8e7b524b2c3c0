"""Enumerate what a search tries: mesh sizes, methods on each mesh, and micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from meshwright.cost import Cluster
from meshwright.errors import StrategyError
from meshwright.methods import Method, Role, SearchScope, in_phase_order, mesh_method, method_of_axes, methods_for
from meshwright.methods.base import INNER_AXES
from meshwright.methods.composition import check_rules, conflicts_of, shard_axis_of
from meshwright.planner.plans import Plan, Subject, usable_bytes
from meshwright.strategy import MethodConfig, Strategy
from meshwright.strategy.value import METHOD_CONFIGS

if TYPE_CHECKING:
    from torch import nn

    from meshwright.methods import PipelineParallel

Choice = tuple[MethodConfig, ...]
"""Methods that are one answer to a decision; the empty choice does nothing."""

_EVERY_ZERO_SIZE = 8  # up to so many data-parallel ranks, all divisors are tried for a group that shards


@dataclass(frozen=True)
class Space:
    """The choices of a search, which tries all their combinations that the composition rules allow.

    Args:
        sizes: Sizes to try of the axes ``tensor``, ``sequence``, ``context``, ``expert``, ``pipeline`` and ``replica``,
            1 included; an axis that is absent is not tried.
        axis_methods: The methods that may work on each of these axes.
        sharding: Methods that shard parameters over an axis ``zero``; the empty choice is data parallelism.
        hybrid: Whether groups of ranks that shard may hold copies of each other (HSDP).
        inner_axes: Most of the axes ``tensor``, ``sequence``, ``context`` and ``expert`` that are used together.
        precision: Methods that lower the precision, the fastest first.
        half_dtype: Half precision of the devices.
        recompute: Methods that recompute activations, the least first.
        offload: Methods that offload, the least first.
        loss: Methods that change how the loss is computed; those that others exclude on a mesh are not tried there.
        kernels: Methods that change which kernels run the model, the fastest first. Only the first are tried, and only
            the last beside schedules that split backward: see [Note: kernels].
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
    loss: tuple[Choice, ...] = ((),)
    kernels: tuple[Choice, ...] = ((),)
    extra: Choice = ()
    micro_batches: tuple[int | None, ...] | None = None

    def replace(self, **changes: Any) -> Space:
        """Return the space with some choices changed."""
        return dataclasses.replace(self, **changes)


def choices(*options: Any) -> tuple[Choice, ...]:
    """Read choices as users write methods; None is the choice to do nothing."""
    return tuple(Strategy([] if option is None else [option]).methods for option in options)


def default_space(subject: Subject, *, lower_precision: bool = True, module: nn.Module | None = None) -> Space:
    """Return the space that is searched where a caller names none.

    Args:
        subject: A model and how it is trained; its cluster, if known, says how large a node is and which precisions it
            has.
        lower_precision: Whether half precision is tried; False keeps the subject's own.
        module: The module that plans are for, where the subject describes it by formulas.
    """
    cluster: Cluster | None = getattr(subject, "cluster", None)
    world, node = subject.world, cluster.devices_per_node if cluster is not None else subject.world
    has_half = lower_precision and cluster is not None and not cluster.device.is_host
    scope = SearchScope(
        world,
        cluster.device.half_dtype if has_half and cluster is not None else None,
        model=getattr(subject, "model", module),
        follows_graph=getattr(subject, "follows_graph", False),
    )
    working = {axis: _of_axis(axis) for axis in (*INNER_AXES, "pipeline", "replica")}
    sizes = {axis: method.axis_sizes(divisors_of(world), node) for axis, method in working.items()}
    return Space(
        sizes={axis: every for axis, every in sizes.items() if every},
        axis_methods={axis: on_axis(axis, scope) for axis in working},
        sharding=((), *searched(Role.SHARDING, scope)),
        precision=searched(Role.PRECISION, scope) or ((),),
        half_dtype=subject.half_dtype,
        recompute=((), *searched(Role.RECOMPUTATION, scope)),
        loss=searched(Role.LOSS, scope, optional=True),
        kernels=(*searched(Role.KERNELS, scope), ()),
    )


# [Note: kernels] Fused kernels make every plan faster, but for schedules that fill bubbles with parts of backward: what
# is fused runs backward in one part. To try each plan with and without them would take twice the time to say so. So a
# search tries plans with the fastest kernels that go together with their schedules, and whether the few plans that it
# finds are worth these kernels (a large model's products leave little to fuse) is asked at last (``within_time.py``).


def searched(role: Role, scope: SearchScope | None = None, *, optional: bool = False) -> tuple[Choice, ...]:
    """Return the configs that methods offer as answers to one decision.

    With ``optional``, doing nothing comes first, unless a model gains by one of them in any plan.
    """
    scope, methods = scope or SearchScope(), methods_for(role)
    nothing: tuple[Choice, ...] = ((),) if optional and all(method.is_optional(scope) for method in methods) else ()
    return (*nothing, *((option,) for method in methods for option in method.search_options(scope)))


def on_axis(axis: str, scope: SearchScope | None = None) -> tuple[Choice, ...]:
    """Return the configs that the method of an axis offers."""
    return tuple((option,) for option in _of_axis(axis).search_options(scope or SearchScope()))


def _of_axis(axis: str) -> type[Method]:
    method = METHOD_CONFIGS[method_of_axes()[axis]]
    assert issubclass(method, Method)
    return method


def offloads(world: int = 1, trained: float = 1.0) -> tuple[Choice, ...]:
    """Return the choices of offloading on a number of devices, those that move the least first.

    Args:
        world: Number of devices.
        trained: Share of the parameters that train.
    """
    return searched(Role.OFFLOADING, SearchScope(world, trained=trained))


def trained_share(subject: Subject) -> float:
    """Return the share of a subject's parameters that train; 0 for formulas of adapters around a frozen base."""
    shape, model = getattr(subject, "shape", None), getattr(subject, "model", None)
    if shape is not None:
        return 0.0 if shape.adapters is not None else 1.0
    every = [] if model is None else [(each.numel(), each.requires_grad) for each in model.parameters()]
    whole = sum(numel for numel, _ in every)
    return sum(numel for numel, trained in every if trained) / whole if whole else 1.0


@functools.cache
def divisors_of(number: int) -> tuple[int, ...]:
    """Return all divisors of a number in ascending order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def zero_sizes(ranks: int, inner: int, node: int) -> tuple[int, ...]:
    """Return the sizes of groups to shard within: all divisors, or of many ranks whole nodes and steps of 4.

    Args:
        ranks: Data-parallel ranks.
        inner: Ranks of inner axes, which lie closer together.
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


# --- The combinations of a space: meshes, then branches on each, then numbers of micro-batches.

Refusals = dict[str, str]
"""Reasons why strategies cannot train, and the first strategy of each."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """Sizes of axes, and the methods of the inner ones. Compared by identity: each mesh is made once."""

    inner: tuple[tuple[str, int], ...]
    ranks: int  # data-parallel ranks: those of the axes data and zero
    pipeline: int
    replica: int
    inner_methods: Choice

    @functools.cached_property
    def replicas(self) -> int:
        """Return the number of different micro-batches that are computed at once."""
        return self.ranks * self.replica * dict(self.inner).get("expert", 1)


@dataclass(frozen=True, eq=False)
class Branch:
    """A mesh with one answer to every decision but the number of micro-batches. Compared by identity."""

    mesh: Mesh
    axes: tuple[tuple[str, int], ...]
    sharding: Choice
    precision: Choice
    recompute: Choice
    rest: Choice  # of offloading, the loss, kernels, outer steps and whatever was asked for
    schedule: PipelineParallel | None

    @property
    def methods(self) -> Choice:
        """Return all methods but the mesh."""
        pipeline = () if self.schedule is None else (self.schedule,)
        return (
            *self.mesh.inner_methods, *pipeline, *self.sharding, *self.precision, *self.recompute, *self.rest,
        )  # fmt: skip

    @functools.cached_property
    def surcharge(self) -> float:
        """Return the share by which it must be faster to be worth its methods."""
        return methods_surcharge(self.methods)

    @functools.cached_property
    def family(self) -> Family:
        """Return the family of its strategy."""
        return family_of(self.axes, self.methods)

    @property
    def but_for_groups(self) -> object:
        """Return a key shared by branches that differ only in how many ranks a group shards over."""
        return self.mesh, self.sharding, self.precision, self.recompute, self.rest, self.schedule

    # To hash what methods are takes long; passes through a space share them.
    @property
    def but_for_sharding(self) -> object:
        """Return a key shared by branches on one mesh that differ only in the sharding method."""
        others = (*self.precision, *self.recompute, *self.rest)
        return id(self.schedule), tuple(map(id, others))

    @functools.cached_property
    def but_for_offload(self) -> object:
        """Return a key shared by branches, also of other passes, that differ only in what they offload."""
        return self.axes, tuple(id(method) for method in self.methods if role_of(method) is not Role.OFFLOADING)

    def strategy(self) -> Strategy:
        """Return the strategy as a user would write it."""
        return Strategy([mesh_method(self.axes), *self.methods])

    @property
    def shape(self) -> tuple[int, int]:
        """Return the ranks of the pipeline, and the stages on each."""
        return self.mesh.pipeline, self.schedule.stages_per_rank if self.schedule is not None else 1


def role_of(method: MethodConfig) -> Role | None:
    """Return the decision of a search that a method is an option of; None if it is an option of none."""
    return method.role if isinstance(method, Method) else None


def axes_text(sizes: Mapping[str, int]) -> str:
    """Describe sizes of axes, such as ``"tensor 2, pipeline 4"``; undivided axes are left out."""
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "data parallelism"


class Candidates:
    """Enumerate the branches of a space for a world, and collect why others cannot be, each reason once."""

    def __init__(self, space: Space, world: int, node: int, batch_size: int | None) -> None:
        self.space, self.world, self.node, self.batch_size = space, world, node, batch_size
        self.refused: Refusals = {}
        self._together: dict[tuple[int, ...], bool] = {}
        self._lawful: dict[tuple[tuple[int, ...], frozenset[str]], bool] = {}

    def refuse(self, reason: str, strategy: Strategy | str) -> None:
        """Note why a strategy cannot train."""
        self.refused.setdefault(reason, str(strategy))

    def meshes(self) -> Iterator[Mesh]:
        """Yield the meshes of the world whose replicas share the batch equally, the least divided first."""
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
            inner = tuple((axis, sizes[axis]) for axis in INNER_AXES if sizes.get(axis, 1) > 1)
            for methods in itertools.product(*(self.space.axis_methods[axis] for axis, _ in inner)):
                chosen = tuple(itertools.chain.from_iterable(methods))
                mesh = Mesh(inner, ranks, sizes.get("pipeline", 1), sizes.get("replica", 1), chosen)
                if self.losses(mesh):
                    yield mesh

    def losses(self, mesh: Mesh) -> tuple[Choice, ...]:
        """Return the options of the loss that go together with the methods of a mesh."""
        if self.space.loss == ((),):
            return self.space.loss
        return tuple(
            option
            for option in self.space.loss
            if any(self._goes_with(mesh, schedule, option) for schedule in self._schedules(mesh))
        )

    def _goes_with(self, mesh: Mesh, schedule: PipelineParallel | None, loss: Choice) -> bool:
        """Return whether an option of the loss goes together with a mesh; where not, that is no news to a user."""
        if not loss:
            return True
        schedules = () if schedule is None else (schedule,)
        others = (*mesh.inner_methods, *schedules, *self._kernels(schedule), *self.space.extra)
        key = tuple(map(id, (*loss, *others)))  # the space keeps them
        if key not in self._together:
            sizes = {**dict(mesh.inner), "pipeline": mesh.pipeline}
            methods = [each for each in (*others, *loss) if isinstance(each, Method)]
            self._together[key] = next(conflicts_of(methods, sizes), None) is None
        if len(self.space.loss) > 1:  # it may be left out
            sizes = dict(mesh.inner)
            return self._together[key] and all(each.is_tried_on(sizes) for each in loss if isinstance(each, Method))
        return self._together[key]

    def _divides(self, samples: int, replicas: int) -> bool:
        """Return whether replicas share a batch equally in one of the space's numbers of micro-batches."""
        return any(samples % (replicas * (count or 1)) == 0 for count in self.space.micro_batches or (1,))

    def _sizes(self) -> Iterator[dict[str, int]]:
        names = list(self.space.sizes)
        for sizes in itertools.product(*self.space.sizes.values()):
            found = dict(zip(names, sizes, strict=True))
            inner = sum(found.get(axis, 1) > 1 for axis in INNER_AXES)
            if self.world % math.prod(sizes) == 0 and inner <= self.space.inner_axes:
                yield found

    def branches(self, mesh: Mesh, is_worth: Callable[[Branch], bool] | None = None) -> Iterator[Branch]:
        """Yield all branches of a mesh that the composition rules allow.

        Args:
            mesh: One of :meth:`meshes`.
            is_worth: Called with each branch that offloads nothing; False leaves out what it could offload.
        """
        space = self.space
        outer = space.axis_methods["replica"][0] if mesh.replica > 1 else ()
        for sharding, axes in self._sharded(mesh):
            sizes = dict(axes)
            divided = frozenset(axis for axis, size in axes if size > 1)
            for precision, recompute, schedule, loss in itertools.product(
                space.precision, space.recompute, self._schedules(mesh), space.loss
            ):
                if not self._goes_with(mesh, schedule, loss):
                    continue
                kernels = self._kernels(schedule)
                rest = (*outer, *loss, *kernels, *space.extra)
                if is_worth and not is_worth(Branch(mesh, axes, sharding, precision, recompute, rest, schedule)):
                    continue
                for offload in self._offloads(mesh, sharding):
                    rest = (*outer, *loss, *offload, *kernels, *space.extra)
                    branch = Branch(mesh, axes, sharding, precision, recompute, rest, schedule)
                    if self._allowed(branch, sizes, divided):
                        yield branch

    def _offloads(self, mesh: Mesh, sharding: Choice) -> Iterable[Choice]:
        """Return what may leave devices, and nothing beside it where an earlier pass without it did not come here."""
        every = self.space.offload
        came = mesh.ranks > 1 or not sharding or _hold_equal(mesh)
        return [offload for offload in every if offload] if came and len(every) > 1 else every

    def _kernels(self, schedule: PipelineParallel | None) -> Choice:
        in_parts = schedule is not None and schedule.splits_backward
        return self.space.kernels[-1 if in_parts else 0]

    def _schedules(self, mesh: Mesh) -> list[PipelineParallel | None]:
        if mesh.pipeline == 1:
            return [None]
        chosen = itertools.chain.from_iterable(self.space.axis_methods["pipeline"])
        return [cast("PipelineParallel", method) for method in chosen]

    def _sharded(self, mesh: Mesh) -> Iterator[tuple[Choice, tuple[tuple[str, int], ...]]]:
        """Yield each sharding choice with the axes of the whole mesh.

        Data parallelism is over ``data``; sharding is over ``zero`` with ``data`` around it.
        """
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
        """Return the numbers of micro-batches to try, the fewest first."""
        if self.space.micro_batches is not None and self.batch_size is not None:
            each = self.batch_size // mesh.replicas
            return tuple(count for count in self.space.micro_batches if each % (count or 1) == 0)
        if self.space.micro_batches is not None:
            return self.space.micro_batches
        if self.batch_size is None:
            return (None,)
        return divisors_of(self.batch_size // mesh.replicas)


def shards_alone(mesh: Mesh, space: Space) -> bool:
    """Return whether a space shards on a mesh with one data-parallel rank.

    Ranks that divide a sample or hold other experts hold equal weights, so they can be sharded over, too. Parameters
    that leave a device come back as FSDP2 gathers them, even on one rank. Where memory is short, sharding on one rank
    helps by itself: weights are cast block by block, and autocast keeps all that it has cast until backward is done.
    """
    offloads = itertools.chain.from_iterable(space.offload)
    leaves = any(isinstance(method, Method) and method.moves_parameters for method in offloads)
    return leaves or () not in space.sharding or _hold_equal(mesh)


def _hold_equal(mesh: Mesh) -> bool:
    return not {"sequence", "context", "expert"}.isdisjoint(dict(mesh.inner))


def _without_ones(*axes: tuple[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(axis for axis in axes if axis[1] > 1) or (("data", 1),)


# --- What a plan asks of those who run it, and its family
#
# [Note: choice within the error] Predictions of two plans for the same model are off by about 8 % against each other,
# so a plan that is 3 % faster on paper is as likely to be slower. What is certain is what a plan asks of those who
# run it: copies to the host, more axes, a full device. Plans are therefore ranked by their figure with surcharges: of
# each method its ``surcharge`` (see :class:`~meshwright.methods.planner_hooks.PlannerHooks`), and of a device that is
# full ``FULL_DEVICE``. Those of layouts that published runs use stay within
# ``MODEL_ERROR`` (kernels, which plans that are compared have alike, add theirs), so what is faster by more than
# predictions are off comes first; methods that no published run was compared with may ask for more, and all together
# for at most ``MOST``. Bounds take the surcharge of the methods, so a search finds what ranking every plan would.

MODEL_ERROR = 0.08
"""Share by which predictions of plans for one model are off against each other (docs/predictions.md)."""

MOST = 0.15
"""Largest surcharge of a plan."""

FULL_DEVICE = 0.02
"""Surcharge of a plan that takes all memory it may; of one that takes half of it, half of that."""

LONE_SHARDS = 0.05
"""Surcharge of sharding on a single rank: it saves autocast's copies of weights, and nobody expects it."""

_SAMPLED = ("data", "zero")
_TOKENS = {"sequence": "tokens", "context": "tokens"}

Family = tuple[tuple[str, ...], bool, bool]
"""Axes that divide the model or samples, whether parameters or states are sharded, and whether any are offloaded."""


def methods_surcharge(methods: Iterable[MethodConfig]) -> float:
    """Return the share by which a plan with some methods must be faster to be worth them."""
    return min(sum(method.surcharge for method in methods if isinstance(method, Method)), MOST)


def surcharge(plan: Plan) -> float:
    """Return the share by which a plan must be faster than one without methods on an empty device."""
    # A limit that somebody gives is not a fuller device.
    usable = 0 if plan.forecast is None else usable_bytes(plan.forecast.cluster.device)
    usable = max(usable, plan.limit_bytes or 0)
    full = min(plan.needed_bytes / usable, 1.0) if usable else 0.0
    axis = plan.step.shard_axis
    lone = axis is not None and plan.step.size(axis) == 1 and plan.step.offloaded is None
    return min(methods_surcharge(plan.strategy.methods) + FULL_DEVICE * full + LONE_SHARDS * lone, MOST)


def family_of(axes: Sequence[tuple[str, int]], methods: Iterable[MethodConfig]) -> Family:
    """Return the family of a strategy: what it divides and moves, but not in how many parts, or which schedule it has.

    Args:
        axes: Sizes of the mesh.
        methods: All its methods.
    """
    named = {_TOKENS.get(axis, axis) for axis, size in axes if size > 1 and axis not in _SAMPLED}
    known = [method for method in methods if isinstance(method, Method)]
    shards = any(method.role is Role.SHARDING for method in known)
    return tuple(sorted(named)), shards, any(method.role is Role.OFFLOADING for method in known)
