"""Run a model in stages over the mesh axis `pipeline`: the method `pipeline_parallel` and its cost.

The mechanism lies in the other files of this room: ``stage_cut.py`` decides the stages, ``splice.py`` runs single
stages ([Note: splicing]), ``execution.py`` runs steps by a schedule, and ``chain.py`` plain calls of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, PositiveInt
from torch import nn

from meshwright.cost import Activations, Block, Buffer, Parameter, Stages, Step, Traffic, local_shape
from meshwright.errors import StrategyError
from meshwright.inspect import keep_name_order
from meshwright.methods.base import SHARDING, Conflict, Job, Method, Phase, torch_dtype
from meshwright.methods.parallel_mode import averagers
from meshwright.methods.pipeline.chain import PipelineRank
from meshwright.methods.pipeline.outer_parameters import Dataflow, parameter_costs, place_stages
from meshwright.methods.pipeline.schedules import (
    SCHEDULES,
    ScheduleName,
    backward_moments,
    check_micro_batches,
    in_flight_peaks,
    most_in_flight,
    schedule_name,
    stage_ranks,
    steady_micro_batches,
)
from meshwright.methods.pipeline.splice import Splice, part_of, release_other_parts
from meshwright.methods.pipeline.stage_cut import (
    Cut,
    balanced_bounds,
    block_list,
    check_apart,
    check_enough,
    check_not_compiled,
    given_bounds,
)
from meshwright.methods.planner_hooks import SearchScope
from meshwright.nn import keep_part_of_whole, move_to, without_fast_path, wrap_method
from meshwright.optim import Stages as NormStages
from meshwright.strategy import Bytes

if TYPE_CHECKING:
    from meshwright.methods.pipeline.execution import PipelineEngine


def stage_cost(schedule: str, step: Step) -> Step:
    """Reduce a step to that of the rank ``step.stages.here``: its blocks, saved activations and messages."""
    stages = step.stages
    assert stages is not None
    blocks = [_on_rank(block, stages.here) for block in step.blocks]
    copies = [
        Buffer(p.numel, p.itemsize, p.floating)
        for block in step.blocks
        for p in block.parameters
        if stages.here in p.buffer_on
    ]
    step = step.replace(
        stages=dataclasses.replace(stages, schedule=schedule),
        blocks=tuple(block for block in blocks if block is not None),
        buffers=(*(b for b in step.buffers if b.on_rank in (None, stages.here)), *copies),
        activations=_in_flight(schedule, step, stages) if step.activations is not None else None,
        flops=None if step.flops is None else _share(step, step.flops, stages),
        fp8_flops=_share(step, step.fp8_flops, stages) or 0,
        boundaries=tuple(b for b in step.boundaries if b.on_ranks is None or stages.here in b.on_ranks),
    )
    return step.send(
        Traffic("send", "pipeline", _hidden_bytes(step, stages, forward=True), "forward"),
        Traffic("send", "pipeline", _hidden_bytes(step, stages, forward=False), "backward"),
        Traffic("send", "pipeline", _shared_bytes(step), "backward"),
    )


def _share(step: Step, total: int, stages: Stages) -> int | None:
    """Return this rank's share of operations, by the places of matrix products; None if these are unknown."""
    if step.activations is None:
        return None if total else 0
    amounts = step.activations.flops_at
    here = sum(size for stage in stages.own for places, size in amounts if stages.has(stage, places))
    return round(total * here / max(sum(size for _, size in amounts), 1))


def _on_rank(block: Block, rank: int) -> Block | None:
    count = block.on_ranks[rank] if block.on_ranks else block.count
    parameters = tuple(p for p in block.parameters if p.trained_on is None or rank in p.trained_on)
    if not count or not (parameters or block.ops):
        return None
    return dataclasses.replace(block, count=count, parameters=parameters)


def _in_flight(schedule: str, step: Step, stages: Stages) -> Activations:
    """Return the activations of all micro-batches in flight on this rank."""
    known = step.activations
    assert known is not None
    ranks, micro_batches = max(stages.ranks) + 1, step.num_micro_batches
    if schedule != "gpipe":  # torch's tables are slow to build
        micro_batches = min(micro_batches, steady_micro_batches(schedule, ranks))
    peaks = in_flight_peaks(schedule, ranks, len(stages.ranks) // ranks, micro_batches)[stages.here]
    in_flight = tuple(tuple(dict(moment)[stage] for stage in stages.own) for moment in peaks)
    backward_at = backward_moments(schedule, ranks, len(stages.ranks) // ranks, micro_batches)[stages.here]
    is_last = stages.here == stages.ranks[-1]
    return dataclasses.replace(
        known.cut(tuple(functools.partial(stages.has, stage) for stage in stages.own), in_flight, backward_at),
        loss_bytes=known.loss_bytes if is_last else 0,
        outside_bytes=known.outside_bytes if is_last else 0,
    )


def _hidden_bytes(step: Step, stages: Stages, *, forward: bool) -> int:
    """Return the bytes of hidden states, or their gradients, sent to the ranks of neighbouring stages."""
    sent = 0
    for stage, rank in enumerate(stages.ranks):
        to = stage + 1 if forward else stage - 1
        if rank == stages.here and 0 <= to < len(stages.ranks) and stages.ranks[to] != rank:
            sent += (stages.boundary_bytes or 0) * step.num_micro_batches
    return sent


def _shared_bytes(step: Step) -> int:
    """Return the bytes of gradients of parameters that several ranks train: this rank's shards, sent to each other."""
    return sum(
        _largest_shard(step, p) * p.itemsize * (len(p.trained_on) - 1)
        for _, p in step.every_parameter()
        if p.trainable and p.trained_on is not None
    )


def _largest_shard(step: Step, parameter: Parameter) -> int:
    """Return the elements of the first rank's shard of a parameter, the largest."""
    shape = [
        size // step.size("tensor") if dim == parameter.tensor_dim else size for dim, size in enumerate(parameter.shape)
    ]
    return math.prod(local_shape(tuple(shape), step.size(step.shard_axis), 0))


# --- The last step of applying the method, once all others have changed the model


def finish_pipeline(job: Job, engine: PipelineEngine) -> None:
    """Give the engine the final model; replaces :func:`~meshwright.methods.parallel_mode.replicate` in a pipeline."""
    from meshwright.methods.pipeline.execution import StageGradients

    assert job.cut is not None
    rank = engine.rank
    shared = [
        (job.model.get_parameter(item.name), item.trained_on)
        for item in job.cut.outside
        if len(item.trained_on) > 1 and rank.index in item.trained_on
    ]
    casts = job.sharding.precision if job.shard_axis is not None else None
    compute = torch_dtype(casts.compute) if casts is not None else None
    every = averagers(job, in_backward=False) if job.shard_axis is None else []
    engine.finish(job.model, StageGradients(rank, shared, every), compute, exchanges=job.experts is not None)
    repeated = frozenset(parameter for parameter, ranks in shared if rank.index != ranks[0])
    job.stages = NormStages(job.device, rank.group, repeated)
    inner = job.micro_batch

    @contextlib.contextmanager
    def micro_batch(is_last: bool) -> Iterator[None]:
        with inner(is_last), engine.micro_batch(is_last):
            yield

    job.micro_batch = micro_batch


# --- The method

AXIS = "pipeline"

_RENAMED = {"pipe_schedule": "schedule", "chunks": "num_micro_batches"}

# Keys of ATorch's two engines, and what to do here instead.
_FOREIGN = {
    "shard_planner": "leave it out; blocks are balanced by their time, or cut by hand with split=[…]",
    "pipe_ranks": "leave it out; the ranks follow from parallel_mode",
    "insert_before_modules": "cut by hand with split=[…], the number of blocks of every stage",
}
_INERT = {
    "dynamic_shape": "shapes may always change from batch to batch",
    "use_c10d": "stages always talk over torch.distributed's process groups",
}


_SEARCHED_STAGES = (2, 4)  # on every rank
_MOST_RANKS = 64


class PipelineParallel(Method):
    """Divides a model's blocks into stages, through which micro-batches travel (Huang et al. 2019). Seed: ATorch.

    ``Accelerated.step`` runs the schedule. A hand-written loop, ``loss_func(x, model(x)).backward()``, runs the stages
    one after the other, as GPipe does for one micro-batch. The ranks of a pipeline take the same samples.

    Config: None, the name of a schedule, or keys. ``dynamic_shape`` and ``use_c10d`` of ATorch are accepted, and change
    nothing.
    """

    method_name: ClassVar[str] = "pipeline_parallel"
    phase: ClassVar[Phase] = Phase.PIPELINE
    summary: ClassVar[str] = "cuts the model's blocks into stages over the pipeline axis"
    effect: ClassVar[str] = (
        "memory: blocks / n. Time: blocks / n, and a bubble. Communication: one activation per stage and micro-batch"
    )
    seed_name: ClassVar[str | None] = "ATorch: pipeline_parallel"
    axis: ClassVar[str | None] = AXIS
    short_forms: ClassVar[Mapping[type, str]] = {str: "schedule"}
    foreign_keys: ClassVar[Mapping[str, str]] = _FOREIGN
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="checkpoint",
            reason="the schedule computes gradients of inputs alone, and reentrant recomputation cannot",
            fix="leave no_reentrant out, or use the schedule gpipe, 1f1b or interleaved",
            when=lambda own, other: own.splits_backward and not other.no_reentrant,
            own_keys="schedule='zbv' or 'dualpipev'",
            other_keys="no_reentrant=False",
        ),
        *(
            Conflict(
                other=name,
                reason="these keys leave parameters out of units, which a step reduces at its end, all together",
                fix="leave these keys out",
                when=lambda own, other: bool(other.atorch_ignored_cls) or other.wrap_trainable_outmost,
                other_keys="atorch_ignored_cls or wrap_trainable_outmost",
            )
            for name in SHARDING
        ),
    )

    schedule: Annotated[ScheduleName, BeforeValidator(schedule_name)] = "1f1b"
    num_micro_batches: PositiveInt | None = None
    """Parts of a batch that travel one after the other; None: as given to ``accelerate``, else one for every rank."""
    num_stages_per_rank: PositiveInt | None = None
    """Stages on every rank: 2 or more for ``interleaved``, 2 for ``zbv`` and ``dualpipev``, 1 for the others."""
    split: tuple[PositiveInt, ...] | None = None
    """Blocks of every stage; None balances their time within the memory limit."""
    memory_limit: Bytes | None = None
    """Most memory of a rank, in bytes or as "40 GiB"; None: the memory of a CUDA device, no limit on the CPU."""
    blocks: str | None = None
    """Path of the ModuleList that is cut; None: the only one there is."""
    nstages: PositiveInt | None = None
    """ATorch's number of stages over all ranks; must agree with the axis and ``num_stages_per_rank``."""
    dynamic_shape: bool | None = None
    use_c10d: bool | None = None

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Translate ATorch's names."""
        keys = {_RENAMED.get(key, key): value for key, value in keys.items()}
        if isinstance(keys.get("split"), list):
            keys["split"] = tuple(keys["split"])
        _check_stages(keys)
        return keys

    def notices(self) -> list[str]:
        """Return a notice for each accepted key that changes nothing."""
        given = [key for key in _INERT if getattr(self, key) is not None]
        return [f"pipeline_parallel: {key} changes nothing; {_INERT[key]}" for key in given]

    @classmethod
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Try every schedule; where a prediction takes long, the two that others are seldom better than.

        Of 44 cases that were searched whole (``benchmarks/regret.py``), interleaved stages win one by more than 8 %.
        """
        zbv = cls.parse({"schedule": "zbv"})
        if scope.is_slow:
            return cls.parse(None), zbv
        interleaved = (cls.parse({"schedule": "interleaved", "num_stages_per_rank": each}) for each in _SEARCHED_STAGES)
        return cls.parse(None), *interleaved, zbv, cls.parse({"schedule": "gpipe"})

    @classmethod
    def axis_sizes(cls, divisors: Sequence[int], node: int) -> tuple[int, ...]:
        """Go beyond a node: ranks send each other single activations."""
        return tuple(size for size in divisors if size <= _MOST_RANKS)

    @property
    def surcharge(self) -> float:
        """Ask more of schedules that split backward, and of ``gpipe``.

        Few have trained with the former, and compiled blocks cannot. The latter holds all micro-batches where ``1f1b``
        is as fast with a few: what a prediction has between them is messages.
        """
        return 0.05 if self.splits_backward or self.schedule == "gpipe" else 0.02

    @property
    def asked_micro_batches(self) -> int | None:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        return self.num_micro_batches

    @property
    def splits_backward(self) -> bool:
        """True if the schedule computes the gradients of inputs first, and those of weights later."""
        return SCHEDULES[self.schedule].splits_backward

    @property
    def stages_per_rank(self) -> int:
        """Number of stages on every rank."""
        return self.num_stages_per_rank or (1 if self.schedule in ("gpipe", "1f1b") else 2)

    def cut(self, model: nn.Module, ranks: int, flow: Dataflow | None, bounds: tuple[int, ...] | None = None) -> Cut:
        """Return the cut of a plain model.

        Args:
            model: The whole model.
            ranks: Size of the pipeline axis.
            flow: What the blocks of :meth:`blocks_of` depend on; None if unknown.
            bounds: Bounds of the stages; None takes those given by ``split``, or balances by parameters.

        Raises:
            ModelError, StrategyError: When the model cannot be cut this way.
        """
        path, found = block_list(model, self.blocks)
        check_apart(model, path)
        stages = self.ranks_of_stages(ranks)
        if bounds is None and self.split is not None:
            bounds = given_bounds(self.split, len(found), len(stages))
        elif bounds is None:
            bounds = balanced_bounds(parameter_costs(model, list(found), flow), stages)
        return place_stages(model, path, bounds, stages, flow)

    def ranks_of_stages(self, ranks: int) -> tuple[int, ...]:
        """Return the pipeline rank of every stage on an axis of ``ranks`` ranks."""
        return stage_ranks(self.schedule, ranks, self.stages_per_rank)

    def fewest_micro_batches(self, ranks: int) -> int:
        """Return the default number of micro-batches: one per rank, or per stage if the schedule needs as many."""
        return ranks * (self.stages_per_rank if SCHEDULES[self.schedule].needs_full else 1)

    def in_flight(self, ranks: int, micro_batches: int) -> float:
        """Return the peak number of micro-batches in flight on a rank, counting each of its stages as a fraction.

        Raises:
            StrategyError: When the schedule cannot run with this number of micro-batches.
        """
        stages = ranks * self.stages_per_rank
        check_micro_batches(self.schedule, ranks, stages, micro_batches)
        return most_in_flight(self.schedule, ranks, self.stages_per_rank, micro_batches) / self.stages_per_rank

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks that are divided into stages."""
        return list(block_list(model, self.blocks)[1])

    def check_numbers(self, blocks: int, ranks: int, micro_batches: int) -> None:
        """Refuse fewer blocks than stages, and numbers of micro-batches that the schedule cannot run with.

        Raises:
            ModelError, StrategyError: With the numbers that are possible.
        """
        stages = ranks * self.stages_per_rank
        if self.nstages not in (None, stages):
            raise StrategyError(
                "pipeline_parallel: nstages is not the number of stages",
                expected=f"{stages}: a pipeline axis of {ranks}, with {self.stages_per_rank} on every rank",
                got=str(self.nstages),
                fix="leave nstages out, or set the axis, num_stages_per_rank or another schedule",
            )
        check_enough(blocks, stages)
        check_micro_batches(self.schedule, ranks, stages, micro_batches)

    def check(self, job: Job) -> None:
        """Refuse models that cannot be cut, and numbers of micro-batches that the schedule cannot run with."""
        ranks = job.size(AXIS)
        if ranks == 1:
            return
        self.check_numbers(len(self.blocks_of(job.model)), ranks, job.num_micro_batches)
        check_not_compiled(job.model, self.blocks)

    def apply(self, job: Job) -> None:
        """Release the other ranks' blocks; from now on the model's forward runs single stages."""
        if job.size(AXIS) == 1:
            return
        from meshwright.methods.pipeline.execution import PipelineEngine  # what only a real pipeline needs

        assert job.cut is not None, "the plan has decided it"
        _, blocks = block_list(job.model, self.blocks)
        splice = Splice(job.cut)
        mesh = job.require_mesh()
        rank = PipelineRank(mesh.get_group(AXIS), job.cut.ranks, job.index(AXIS), job.device)
        part = part_of(job.model, job.cut, rank.index)
        keep_part_of_whole(job.model, part)
        keep_name_order(job.model, part.names)
        release_other_parts(job.model, blocks, job.cut, rank.index, splice, job.device)
        job.pipeline = PipelineEngine(rank, splice, self.schedule)
        wrap_method(job.model, "forward", job.pipeline.around_model)
        without_fast_path(job.model)
        if hasattr(type(job.model), "generate"):
            wrap_method(job.model, "generate", job.pipeline.around_generate)
            for module in job.model.modules():
                if hasattr(type(module), "generate") and module is not job.model:
                    wrap_method(module, "forward", job.pipeline.around_inner)
        job.loss_func = job.pipeline.loss(job.loss_func)
        if job.shard_axis is None and job.size("tensor") == job.size("expert") == 1:
            move_to(job.model, job.device)
        if any(getattr(method, "shards", False) for method in job.strategy.methods):
            job.notices.append(
                "pipeline_parallel: weights of a stage stay gathered, and its gradients are reduced once per step"
            )

    def cost(self, step: Step) -> Step:
        """Reduce the step to one pipeline rank: its blocks, saved activations and messages."""
        return stage_cost(self.schedule, step) if step.size(AXIS) > 1 else step


def _check_stages(keys: Mapping[str, Any]) -> None:
    name, number = schedule_name(keys.get("schedule", "1f1b")), keys.get("num_stages_per_rank")
    if name not in SCHEDULES or not isinstance(number, int):
        return
    fits = number == 1 if name in ("gpipe", "1f1b") else number == 2 if SCHEDULES[name].v_shaped else number >= 2
    if not fits:
        raise StrategyError(
            f"pipeline_parallel: the schedule {name!r} does not run with this number of stages on a rank",
            expected="1 for gpipe and 1f1b, 2 for zbv and dualpipev, 2 or more for interleaved",
            got=str(number),
            fix="correct num_stages_per_rank, or leave it out",
        )
