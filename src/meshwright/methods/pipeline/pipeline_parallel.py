"""Cut a model into stages over the mesh axis `pipeline`: the method and its cost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import BeforeValidator, PositiveInt
from torch import nn

from meshwright.cost import Activations, Block, Buffer, Parameter, Stages, Step, Traffic, local_shape
from meshwright.errors import StrategyError
from meshwright.inspect import keep_name_order
from meshwright.methods.base import SHARDING, Conflict, Job, Method, Phase, torch_dtype
from meshwright.methods.gradient_averaging import GradientAverager, broadcast_states
from meshwright.methods.pipeline.chain import Line
from meshwright.methods.pipeline.execution import PipelineEngine, StageGradients
from meshwright.methods.pipeline.outer_parameters import Dataflow
from meshwright.methods.pipeline.schedules import (
    SCHEDULES,
    ScheduleName,
    backward_moments,
    check_micro_batches,
    held_at_most,
    most_in_flight,
    schedule_name,
    stage_ranks,
)
from meshwright.methods.pipeline.splice import Splice, keep_part, parameter_costs, part_of, place_stages
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
from meshwright.nn import keep_part_of_whole, without_fast_path, wrap_method, wrap_methods
from meshwright.optim import Stages as NormStages
from meshwright.strategy import Bytes


def stage_cost(schedule: str, step: Step) -> Step:
    """Return the step of the rank ``step.stages.here``.

    Its blocks, its share of what is kept for backward, what it sends.
    """
    stages = step.stages
    assert stages is not None
    blocks = [_held(block, stages.here) for block in step.blocks]
    lent = [_as_buffer(p) for block in step.blocks for p in block.parameters if stages.here in p.lent_to]
    step = step.replace(
        stages=dataclasses.replace(stages, schedule=schedule),
        blocks=tuple(block for block in blocks if block is not None),
        buffers=(*(b for b in step.buffers if b.on_rank in (None, stages.here)), *lent),
        activations=_kept(schedule, step, stages) if step.activations is not None else None,
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
    """This rank's part of operations, by where those of products lie; None where that is not known."""
    if step.activations is None:
        return None if total else 0
    amounts = step.activations.flops_at
    here = sum(size for stage in stages.own for places, size in amounts if stages.has(stage, places))
    return round(total * here / max(sum(size for _, size in amounts), 1))


def _held(block: Block, rank: int) -> Block | None:
    count = block.on_ranks[rank] if block.on_ranks else block.count
    parameters = tuple(p for p in block.parameters if p.trained_on is None or rank in p.trained_on)
    if not count or not (parameters or block.ops):
        return None
    return dataclasses.replace(block, count=count, parameters=parameters)


def _as_buffer(parameter: Parameter) -> Buffer:
    return Buffer(parameter.numel, parameter.itemsize, parameter.floating)


def _kept(schedule: str, step: Step, stages: Stages) -> Activations:
    """Activations of all micro-batches in flight on this rank."""
    known = step.activations
    assert known is not None
    ranks, micro_batches = max(stages.ranks) + 1, step.num_micro_batches
    if schedule != "gpipe":
        micro_batches = min(micro_batches, 2 * ranks)  # no more are in flight after it, and torch's tables are slow
    held = held_at_most(schedule, ranks, len(stages.ranks) // ranks, micro_batches)[stages.here]
    in_flight = tuple(tuple(dict(moment)[stage] for stage in stages.own) for moment in held)
    backward_at = backward_moments(schedule, ranks, len(stages.ranks) // ranks, micro_batches)[stages.here]
    is_last = stages.here == stages.ranks[-1]
    return dataclasses.replace(
        known.cut(tuple(functools.partial(stages.has, stage) for stage in stages.own), in_flight, backward_at),
        loss_bytes=known.loss_bytes if is_last else 0,
        outside_bytes=known.outside_bytes if is_last else 0,
    )


def _hidden_bytes(step: Step, stages: Stages, *, forward: bool) -> int:
    """Return the hidden states, or their gradients, to the ranks of the neighbouring stages."""
    sent = 0
    for stage, rank in enumerate(stages.ranks):
        to = stage + 1 if forward else stage - 1
        if rank == stages.here and 0 <= to < len(stages.ranks) and stages.ranks[to] != rank:
            sent += (stages.boundary_bytes or 0) * step.num_micro_batches
    return sent


def _shared_bytes(step: Step) -> int:
    """Return the gradients of parameters that several ranks train: this rank's shards, to each of the others."""
    return sum(
        _largest_shard(step, p) * p.itemsize * (len(p.trained_on) - 1)
        for _, p in step.every_parameter()
        if p.trainable and p.trained_on is not None
    )


def _largest_shard(step: Step, parameter: Parameter) -> int:
    """Return the elements of the first rank's part of a parameter, which no other's exceeds."""
    shape = [
        size // step.size("tensor") if dim == parameter.tensor_dim else size for dim, size in enumerate(parameter.shape)
    ]
    return math.prod(local_shape(tuple(shape), step.size(step.shard_axis), 0))


# --- The end of ``pipeline_parallel``'s ``apply``: what its engine must know of the model as all methods have left it.


def finish_pipeline(job: Job, engine: PipelineEngine) -> None:
    """Take the place of :func:`~meshwright.methods.parallel_mode.replicate` where a pipeline runs."""
    assert job.cut is not None
    line = engine.line
    shared = [
        (job.model.get_parameter(item.name), item.trained_on)
        for item in job.cut.outside
        if len(item.trained_on) > 1 and line.rank in item.trained_on
    ]
    engine.finish(job.model, StageGradients(line, shared, _averager(job)), _compute_dtype(job))
    repeated = frozenset(parameter for parameter, ranks in shared if line.rank != ranks[0])
    job.stages = NormStages(line.group, job.device, repeated)
    inner = job.micro_batch

    @contextlib.contextmanager
    def micro_batch(is_last: bool) -> Iterator[None]:
        with inner(is_last), engine.micro_batch(is_last):
            yield

    job.micro_batch = micro_batch


def _averager(job: Job) -> GradientAverager | None:
    trains = any(parameter.requires_grad for parameter in job.model.parameters())
    if job.shard_axis is not None or job.num_averaged == 1 or not trains:
        return None
    group = job.flat_mesh("context", "sequence", "data").get_group()
    return GradientAverager(job.model, group, allow_unused=job.find_unused_parameters, in_backward=False)


def _compute_dtype(job: Job) -> torch.dtype | None:
    return torch_dtype(job.precision.compute) if job.precision is not None and job.shard_axis is not None else None


# --- ``pipeline_parallel``: a model's blocks are cut into stages over the mesh axis ``pipeline``. Seed: ATorch.

AXIS = "pipeline"

_RENAMED = {"pipe_schedule": "schedule", "chunks": "num_micro_batches"}

# What ATorch's two engines needed to be told, and what this one does instead.
_REFUSED = {
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
    """Every rank holds the blocks of its own stages, and micro-batches travel through them (Huang et al. 2019).

    ``Accelerated.step`` runs the schedule. A loop of one's own, ``loss_func(x, model(x)).backward()``, runs the stages
    one after the other, as GPipe does for one micro-batch. The ranks of a pipeline take the same samples.

    Config: None, or keys. ``dynamic_shape`` and ``use_c10d`` of ATorch are accepted, and change nothing.
    """

    method_name: ClassVar[str] = "pipeline_parallel"
    phase: ClassVar[Phase] = Phase.PIPELINE
    summary: ClassVar[str] = "cuts the model's blocks into stages over the pipeline axis"
    effect: ClassVar[str] = (
        "memory: blocks / n. Time: blocks / n, and a bubble. Communication: one activation per stage and micro-batch"
    )
    seed_name: ClassVar[str | None] = "ATorch: pipeline_parallel"
    axis: ClassVar[str | None] = AXIS
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
    """Parts of a batch that travel one after the other; None: as ``accelerate`` was told, else one for every rank."""
    num_stages_per_rank: PositiveInt | None = None
    """Stages on every rank: 2 or more for ``interleaved``, 2 for ``zbv`` and ``dualpipev``, 1 for the others."""
    split: tuple[PositiveInt, ...] | None = None
    """Blocks of every stage; None balances their time, as far as memory lasts."""
    memory_limit: Bytes | None = None
    """What a rank may hold, in bytes or as "40 GiB"; None: the memory of a CUDA device, no limit on the CPU."""
    blocks: str | None = None
    """Path of the ModuleList that is cut; None: the only one there is."""
    nstages: PositiveInt | None = None
    """Of ATorch: the stages over all ranks, which must be those that there are."""
    dynamic_shape: bool | None = None
    use_c10d: bool | None = None

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Take ATorch's names, and refuse its keys that have no meaning here."""
        given = dict(keys)
        for key in sorted(keys.keys() & _REFUSED.keys()):
            if keys.pop(key) is None:
                continue
            raise StrategyError(
                f"pipeline_parallel: {key!r} configures an engine of ATorch's, which there is none of here",
                expected="schedule, num_micro_batches, num_stages_per_rank, split and blocks",
                got=f"{key}={given[key]!r}",
                fix=_REFUSED[key],
            )
        keys = {_RENAMED.get(key, key): value for key, value in keys.items()}
        if isinstance(keys.get("split"), list):
            keys["split"] = tuple(keys["split"])
        _check_stages(keys)
        return keys

    def notices(self) -> list[str]:
        """Say which accepted keys change nothing."""
        given = [key for key in _INERT if getattr(self, key) is not None]
        return [f"pipeline_parallel: {key} changes nothing; {_INERT[key]}" for key in given]

    @classmethod
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Try every schedule; where a prediction takes long, the two that none of the others was ever better than.

        That is so on all of the models that were searched whole.
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
    def asked_micro_batches(self) -> int | None:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        return self.num_micro_batches

    @property
    def splits_backward(self) -> bool:
        """Return whether the schedule computes gradients of inputs alone, and those of weights later."""
        return SCHEDULES[self.schedule].splits_backward

    @property
    def stages_per_rank(self) -> int:
        """Return the stages on every rank."""
        return self.num_stages_per_rank or (1 if self.schedule in ("gpipe", "1f1b") else 2)

    def cut(self, model: nn.Module, ranks: int, flow: Dataflow | None, bounds: tuple[int, ...] | None = None) -> Cut:
        """Return the cut of a plain model.

        Args:
            model: The whole model.
            ranks: Of the pipeline axis.
            flow: What blocks depend on (see :meth:`blocks_of`); None when that could not be found out.
            bounds: Of the stages; None takes those given by hand, or balances by parameters.

        Raises:
            ModelError, StrategyError: When the model cannot be cut so.
        """
        path, found = block_list(model, self.blocks)
        check_apart(model, path)
        stages = self.ranks_of_stages(ranks)
        if bounds is None and self.split is not None:
            bounds = given_bounds(self.split, len(found), len(stages))
        elif bounds is None:
            bounds = balanced_bounds(parameter_costs(model, list(found), flow), len(stages))
        return place_stages(model, path, bounds, stages, flow)

    def ranks_of_stages(self, ranks: int) -> tuple[int, ...]:
        """Return the pipeline rank of every stage, for an axis of so many ranks."""
        return stage_ranks(self.schedule, ranks, self.stages_per_rank)

    def fewest_micro_batches(self, ranks: int) -> int:
        """One for every rank of the axis; for every stage where the schedule needs as many."""
        return ranks * (self.stages_per_rank if SCHEDULES[self.schedule].needs_full else 1)

    def in_flight(self, ranks: int, micro_batches: int) -> float:
        """Return the micro-batches whose activations are kept at once by the rank that keeps most, of all its stages.

        Raises:
            StrategyError: When the schedule cannot run with this number of micro-batches.
        """
        stages = ranks * self.stages_per_rank
        check_micro_batches(self.schedule, ranks, stages, micro_batches)
        return most_in_flight(self.schedule, ranks, self.stages_per_rank, micro_batches) / self.stages_per_rank

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks that are cut."""
        return list(block_list(model, self.blocks)[1])

    def check_numbers(self, blocks: int, ranks: int, micro_batches: int) -> None:
        """Refuse fewer blocks than stages, and numbers of micro-batches that the schedule cannot run with.

        Raises:
            ModelError, StrategyError: Saying what it can.
        """
        stages = ranks * self.stages_per_rank
        if self.nstages not in (None, stages):
            raise StrategyError(
                "pipeline_parallel: nstages is not the number of stages that there are",
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
        """Free the other ranks' blocks; the model's forward runs single stages from now on."""
        if job.size(AXIS) == 1:
            return
        assert job.cut is not None, "the plan has decided it"
        broadcast_states(job.model, job.device)  # while it is the same model on all ranks
        _, blocks = block_list(job.model, self.blocks)
        splice = Splice(job.cut)
        mesh = job.require_mesh()
        line = Line(mesh.get_group(AXIS), job.cut.ranks, job.index(AXIS), job.device)
        part = part_of(job.model, job.cut, line.rank)
        keep_part_of_whole(job.model, part)
        keep_name_order(job.model, part.names)
        keep_part(job.model, blocks, job.cut, line.rank, splice)
        job.pipeline = PipelineEngine(line, splice, self.schedule)
        wrap_method(job.model, "forward", job.pipeline.around_model)
        without_fast_path(job.model)
        if hasattr(type(job.model), "generate"):
            wrap_method(job.model, "generate", job.pipeline.around_generate)
            inner = [each for each in job.model.modules() if hasattr(type(each), "generate") and each is not job.model]
            wrap_methods(inner, "forward", job.pipeline.around_inner)
        job.loss_func = job.pipeline.loss(job.loss_func)
        if job.shard_axis is None and job.size("tensor") == 1:
            job.model.to(job.device)
        if any(getattr(method, "shards", False) for method in job.strategy.methods):
            job.notices.append(
                "pipeline_parallel: gathered weights of a stage stay whole, and its gradients are reduced once per step"
            )

    def cost(self, step: Step) -> Step:
        """Return the part of one pipeline rank, what it keeps for backward, and what it sends."""
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
