"""Decide where a pipeline axis cuts a model, and simulate the step of each pipeline rank.

Candidate cuts are simulated block by block with the cost twins of the strategy;
:class:`~meshwright.methods.pipeline.stage_cut.Balancer` chooses among them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from meshwright.cost import (
    Activations,
    Block,
    Boundary,
    OperatorResult,
    Parameter,
    SavedTensor,
    Stages,
    Step,
    memory,
)
from meshwright.errors import MeshwrightError, StrategyError, readable_bytes
from meshwright.methods import Role, cost_of, find_method, in_phase_order, methods_for
from meshwright.planner.trace.model_state import describe_buffers
from meshwright.planner.trace.op_recording import interrupts

if TYPE_CHECKING:
    from meshwright.methods import Cut, PipelineParallel, Resolved
    from meshwright.methods.pipeline.outer_parameters import Dataflow
    from meshwright.methods.pipeline.stage_cut import Balancer
    from meshwright.strategy import Strategy


Range = tuple[int, int]
Ranges = tuple[Range, ...]


class _Need(NamedTuple):
    """The bytes of a rank: a sum, and the most of what its stages save for the micro-batches in flight."""

    others: int
    saved: tuple[int, ...]  # of a micro-batch, by stages
    in_flight: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, total: int, known: Activations | None) -> _Need:
        if known is None:
            return cls(total, (), ())
        kept = (
            [each for each in stage if each.given is None and each.is_kept(known.recomputed)] for stage in known.stages
        )
        found = cls(0, tuple(sum(each.num_bytes for each in stage) for stage in kept), known.in_flight)
        return found._replace(others=total - found.total)

    @property
    def total(self) -> int:
        return self.others + max((sum(map(operator.mul, held, self.saved)) for held in self.in_flight), default=0)

    def with_more(self, count: int, other: _Need) -> _Need:
        saved = tuple(own + count * more for own, more in zip(self.saved, other.saved, strict=True))
        return _Need(self.others + count * other.others, saved, self.in_flight)


class CandidateStages:
    """Simulate stages of a pipeline that is not cut yet.

    Args:
        finest: The step of a model that is cut into its single blocks. Blocks, parameters and buffers say where they
            are (``on_ranks``, ``trained_on``, ``buffer_on``, ``on_rank``).
        num_blocks: Number of blocks.
        ranks: Pipeline rank of every stage.
        cost: Applies the cost twins of the strategy.
        uniform: Whether the strategy treats equal blocks alike.
    """

    def __init__(
        self, finest: Step, num_blocks: int, ranks: tuple[int, ...], cost: Callable[[Step], Step], *, uniform: bool
    ) -> None:
        self._finest, self._num_blocks, self._ranks, self._cost = finest, num_blocks, ranks, cost
        self._alike = _alike(finest, num_blocks) if uniform else tuple(range(num_blocks))
        stages, last = finest.activations.stages if finest.activations is not None else (), num_blocks - 1
        # What is before the blocks belongs to the first, what is behind them to the last.
        self._places = {
            tensor.places: {min(max(place, 0), last) for place in tensor.places} for stage in stages for tensor in stage
        }
        self._flops: dict[tuple[int, int], int] = {}  # of blocks of each kind; of the first and the last by themselves
        self._needs: dict[tuple[int, tuple[tuple[int, ...], ...]], _Need] = {}  # of ranks with blocks of these kinds
        self._kinds: dict[Range, tuple[Range, tuple[tuple[int, int], ...]]] = {}  # see ``_shortened``
        self._added: dict[tuple[int, int, int, int], _Need] = {}  # by the rank, its stages, the stage and a kind

    def flops(self, index: int) -> int:
        """Return the FLOPs of a block for a micro-batch, with recomputation.

        The first and the last block have what is around the blocks, too.
        """
        key = self._alike[index], index in (0, self._num_blocks - 1) and index
        if key not in self._flops:
            step = self._step(self._ranks[0], ((index, index + 1),))
            self._flops[key] = (step.flops or 0) + step.recompute_flops
        return self._flops[key]

    def need(self, rank: int, ranges: Ranges) -> int:
        """Return the bytes that a rank holds whose first stages compute these ranges of blocks.

        Unknown activations count as nothing.
        """
        return self._need(rank, ranges).total

    def estimated_need(self, rank: int, ranges: Ranges) -> int:
        """Return :meth:`need`, of a few blocks of each kind and stage and what one more of them adds.

        A search asks for thousands of ranges, and most memory is a sum over blocks; what is not, the caller checks.
        """
        fewer = [self._shortened(each) for each in ranges]
        least = tuple(part for part, _ in fewer)
        found = self._need(rank, least)
        for stage, (_, left) in enumerate(fewer):
            for kind, count in left:
                found = found.with_more(count, self._adds(rank, least, stage, ranges[stage], kind))
        return found.total

    def _need(self, rank: int, ranges: Ranges) -> _Need:
        key = rank, tuple(self._alike[first:end] for first, end in ranges)
        if key not in self._needs:
            step = self._step(rank, ranges)
            self._needs[key] = _Need.of(memory(step).total, step.activations)
        return self._needs[key]

    def _shortened(self, whole: Range) -> tuple[Range, tuple[tuple[int, int], ...]]:
        """Return the shortest range within another that has all of its kinds, and how many of each kind are left."""
        if whole not in self._kinds:
            kinds, first = set(self._alike[slice(*whole)]), whole[0]
            best, here = whole, collections.Counter[int]()
            for end in range(first + 1, whole[1] + 1):
                here[self._alike[end - 1]] += 1
                while here[self._alike[first]] > 1:
                    here[self._alike[first]] -= 1
                    first += 1
                if len(+here) == len(kinds) and end - first < best[1] - best[0]:
                    best = first, end
            left = collections.Counter(self._alike[slice(*whole)]) - collections.Counter(self._alike[slice(*best)])
            self._kinds[whole] = best, tuple(left.items())
        return self._kinds[whole]

    def _adds(self, rank: int, least: Ranges, stage: int, whole: Range, kind: int) -> _Need:
        """Return what a block adds to a stage with others of its kind."""
        key = rank, len(least), stage, kind
        if key not in self._added:
            start, second, *_ = (index for index in range(*whole) if self._alike[index] == kind)
            longer, shorter = (
                self._need(rank, (*least[:stage], (start, end), *least[stage + 1 :])) for end in (second + 1, second)
            )
            self._added[key] = longer.with_more(-1, shorter)
        return self._added[key]

    def _step(self, rank: int, ranges: Ranges) -> Step:
        for interrupt in interrupts:
            interrupt()
        own = {index for first, end in ranges for index in range(first, end)}
        every = [(0, 0)] * len(self._ranks)
        for stage, each in zip([s for s, owner in enumerate(self._ranks) if owner == rank], ranges, strict=False):
            every[stage] = each
        finest, known = self._finest, self._finest.activations
        if known is not None:  # most tensors are elsewhere, and every method would look at all of them
            here = {places for places in self._places if not own.isdisjoint(self._places[places])}
            stages = tuple(tuple(tensor for tensor in stage if tensor.places in here) for stage in known.stages)
            known = dataclasses.replace(known, stages=stages)
        return self._cost(
            finest.replace(
                activations=known,
                blocks=tuple(_on_rank(block, rank, max(self._ranks) + 1, own) for block in finest.blocks),
                buffers=tuple(
                    b if b.on_rank is None else dataclasses.replace(b, on_rank=rank)
                    for b in finest.buffers
                    if b.on_rank is None or b.on_rank in own
                ),
                stages=Stages(self._ranks, tuple(every), self._num_blocks, rank),
            )
        )


def _on_rank(block: Block, rank: int, ranks: int, own: set[int]) -> Block:
    counts: list[int] = [0] * ranks
    if block.on_ranks:
        counts[rank] = sum(block.on_ranks[index] for index in own)
    parameters = tuple(_placed(p, rank, own) for p in block.parameters)
    return dataclasses.replace(block, parameters=parameters, on_ranks=tuple(counts) if block.on_ranks else ())


def _placed(parameter: Parameter, rank: int, own: set[int]) -> Parameter:
    if parameter.trained_on is None:
        return parameter
    trains = bool(own.intersection(parameter.trained_on))
    keeps = bool(parameter.buffer_on) and not trains
    return dataclasses.replace(parameter, trained_on=(rank,) if trains else (), buffer_on=(rank,) if keeps else ())


def _alike(finest: Step, num_blocks: int) -> tuple[int, ...]:
    """Return a number for every block, equal for blocks that hold and save the same."""
    kinds: list[list[object]] = [[] for _ in range(num_blocks)]
    known = finest.activations
    for stage in known.stages if known is not None else ():
        for group, tensor in enumerate(stage):
            for index in tensor.places:
                if 0 <= index < num_blocks:
                    # Neighbours share what one hands to the other; all share masks.
                    among = tuple(p - index for p in tensor.places) if len(tensor.places) <= 2 else group
                    kinds[index].append((among, tensor.num_bytes, _by_class(known, tensor)))
    for block in finest.blocks:
        for number, count in enumerate(block.on_ranks):
            kinds[number].append((block.name, id(block), count))
        for parameter in block.parameters:
            for number in parameter.trained_on or ():
                kinds[number].append(parameter.name)
    for buffer in finest.buffers:
        if buffer.on_rank is not None:
            kinds[buffer.on_rank].append((buffer.numel, buffer.itemsize))
    texts = [repr(sorted(map(repr, kind))) for kind in kinds]
    return tuple(texts.index(text) for text in texts)


def _by_class(known: Activations | None, tensor: SavedTensor) -> object:
    """Describe who saves, takes and makes a tensor, by classes: modules of one class are recomputed alike."""
    assert known is not None

    def classes(running: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(known.modules[module].classes for module in running)

    def turns(result: OperatorResult) -> tuple[int, ...]:
        # Of modules around the blocks these alternate where a block has an odd number of products.
        pairs = zip(result.turns, result.running, strict=False)
        return tuple(turn for turn, module in pairs if known.modules[module].block is not None)

    makers = [(each.operator, classes(each.running), each.num_needed, turns(each)) for each in tensor.results]
    return [classes(running) for running in tensor.savers], classes(tensor.inputs_of), makers


# --- The decision.

_SAMPLES = 2  # in the traced batch: BatchNorm needs more than one


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of several ranks over the blocks of a model, as a strategy asks for it."""

    method: PipelineParallel
    ranks: int
    blocks: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Decision:
    """A cut, gaps in what is known of it, and notices for the user."""

    cut: Cut | None = None
    gaps: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def pipeline_of(resolved: Resolved, model: nn.Module, micro_batches: int) -> Pipeline | None:
    """Return the pipeline that a strategy asks for; None where there is none.

    Raises:
        ModelError, StrategyError: When the model has too few blocks, or a batch too few micro-batches.
    """
    method, ranks = _pipeline_in(resolved), dict(resolved.axes).get("pipeline", 1)
    if method is None or ranks == 1:
        return None
    blocks = method.blocks_of(model)
    method.check_numbers(len(blocks), ranks, micro_batches)
    return Pipeline(method, ranks, tuple(blocks))


def _pipeline_in(resolved: Resolved) -> PipelineParallel | None:
    return find_method(resolved.strategy, lambda each: each.axis == "pipeline")


def trace_flow(
    pipeline: Pipeline, model: nn.Module, inputs_of: Callable[[int], Any], forward: Callable[[nn.Module, Any], Any]
) -> tuple[Dataflow | None, str]:
    """Find the parameters outside the blocks that each block depends on, in a pass without data.

    Return them, or None with the reason why they could not be found.

    Raises:
        ModelError: When the model cannot be cut.
    """
    from meshwright.methods.pipeline.outer_parameters import trace_blocks

    try:
        inputs = inputs_of(_SAMPLES)
        if inputs is None:
            return None, "there is no sample to trace the model with; pass sample_batch"
        flow = trace_blocks(model, list(pipeline.blocks), inputs, forward)
    except MeshwrightError:
        raise
    except Exception as error:  # a user's model may do anything; it trains without this too
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    flow.boundary_bytes //= _SAMPLES
    return flow, ""


def decide_cut(
    pipeline: Pipeline,
    model: nn.Module,
    flow: tuple[Dataflow | None, str],
    step: Step,
    strategy: Strategy,
    describe: Callable[[Cut], tuple[Block, ...]],
    device_limit: int | None,
    *,
    must_fit: bool = True,
) -> Decision:
    """Cut a model by hand, or so that the slowest rank takes the least time among the cuts that fit into memory.

    Args:
        pipeline: The pipeline that the strategy asks for.
        model: The whole model.
        flow: Result of :func:`trace_flow`.
        step: Step of the whole model before any method, without blocks and buffers.
        strategy: Resolved; its ``cost`` twins predict what a rank holds.
        describe: Returns the model's blocks as plain data, for a cut.
        device_limit: Bytes that a rank may hold where the method names no limit; None: no limit.
        must_fit: Whether to refuse a pipeline of which no cut fits, if the limit is the device's; otherwise it is cut
            as if memory had no limit, and a notice says which cut needs least.

    Raises:
        StrategyError: When no cut fits; it names the smallest need.
    """
    from meshwright.methods.pipeline.outer_parameters import parameter_costs
    from meshwright.methods.pipeline.stage_cut import Balancer, balanced_bounds

    method, known = pipeline.method, flow[0]
    gaps = () if known is not None else (f"every pipeline rank keeps all parameters outside the blocks: {flow[1]}",)
    by_hand = method.cut(model, pipeline.ranks, known) if method.split is not None else None
    if by_hand is not None and method.memory_limit is None:
        return Decision(by_hand, gaps)
    candidates = _candidates(pipeline, model, known, step, strategy, describe)
    if step.activations is not None:
        costs = [candidates.flops(index) for index in range(len(pipeline.blocks))]
    else:
        costs = parameter_costs(model, list(pipeline.blocks), known)
    balancer = Balancer(costs, method.ranks_of_stages(pipeline.ranks), candidates.need)
    notices: tuple[str, ...] = (_ESTIMATED[by_hand is not None],) if step.activations is None else ()
    bounds = by_hand.bounds if by_hand is not None else balanced_bounds(costs, balancer.ranks)
    limit = method.memory_limit or device_limit
    if limit is not None and max(size for _, size in balancer.needs(bounds)) > limit:
        if by_hand is not None:
            raise _does_not_fit(balancer, bounds, limit, method, step, strategy)
        balanced, (bounds, balancer) = bounds, _within(limit, bounds, balancer, candidates)
        least = max(size for _, size in balancer.needs(bounds))
        if least > limit:
            if must_fit or method.memory_limit is not None:
                raise _does_not_fit(balancer, bounds, limit, method, step, strategy)
            # What needs least may be twice as slow, which is no answer to how fast this pipeline is.
            smallest = f"stages of {_sizes(bounds)} blocks need least, {readable_bytes(least)}"
            notices += (f"pipeline_parallel: no cut fits; {smallest}",)
            return Decision(method.cut(model, pipeline.ranks, known, balanced), gaps, notices)
        tried = "" if balancer.is_exhaustive else ", of the cuts that were looked at"
        notices += (f"pipeline_parallel: stages of {_sizes(bounds)} blocks, as memory allows{tried}",)
    return Decision(by_hand or method.cut(model, pipeline.ranks, known, bounds), gaps, notices)


_SAME = 1e-3  # share of a need by which an estimate may be off where a search has ended


def _within(
    limit: int, bounds: tuple[int, ...], balancer: Balancer, candidates: CandidateStages
) -> tuple[tuple[int, ...], Balancer]:
    """Return the cut that fits, or else the one that needs least, and the search that found it.

    Where estimates say of the cut that a search by them ends at what its needs do not, it is made again without them,
    which takes seconds: where one of them is beyond the limit, or both are and they differ. A cut that fits by both is
    taken, though one that is faster by a little may fit where estimates are too large.
    """
    by_estimates = type(balancer)(balancer.costs, balancer.ranks, candidates.estimated_need)
    for search in (by_estimates, balancer):
        found = search.relieved(bounds, limit) or search.fastest(limit) or search.smallest()
        pairs = [(e, size) for (_, e), (_, size) in zip(search.needs(found), balancer.needs(found), strict=True)]
        fits = all(e <= limit and size <= limit for e, size in pairs)
        agrees = all(abs(e - size) <= _SAME * size and (e <= limit) == (size <= limit) for e, size in pairs)
        if fits or agrees:
            break
    return found, search


_ESTIMATED = tuple(
    f"pipeline_parallel: the model could not be traced without data: {what}memory_limit counts no activations"
    for what in ("stages are balanced by their parameters, and ", "")
)  # of a cut that is decided here, and of one by hand


def _candidates(
    pipeline: Pipeline,
    model: nn.Module,
    flow: Dataflow | None,
    step: Step,
    strategy: Strategy,
    describe: Callable[[Cut], tuple[Block, ...]],
) -> CandidateStages:
    from meshwright.methods.pipeline.outer_parameters import place_stages
    from meshwright.methods.pipeline.stage_cut import block_list

    count = len(pipeline.blocks)
    path, _ = block_list(model, pipeline.method.blocks)
    finest = place_stages(model, path, tuple(range(count + 1)), tuple(range(count)), flow)
    step = step.replace(blocks=describe(finest), buffers=describe_buffers(model, finest), boundaries=())
    ranks = pipeline.method.ranks_of_stages(pipeline.ranks)
    uniform = all(method.is_uniform for method in in_phase_order(strategy))
    return CandidateStages(step, count, ranks, functools.partial(cost_of, strategy), uniform=uniform)


def _does_not_fit(
    balancer: Balancer,
    bounds: tuple[int, ...],
    limit: int,
    method: PipelineParallel,
    step: Step,
    strategy: Strategy,
) -> StrategyError:
    by_hand = method.split is not None
    rank, size = max(balancer.needs(bounds), key=lambda each: each[1])
    own = [stage for stage, owner in enumerate(balancer.ranks) if owner == rank]
    helps = ["more pipeline ranks", "smaller micro-batches"]
    recomputing = find_method(strategy, lambda each: each.role is Role.RECOMPUTATION)
    helps += [each.method_name for each in methods_for(Role.RECOMPUTATION) if recomputing is None]
    helps += ["fsdp over an axis zero"] if step.shard_axis is None else []
    helps += ["the schedule 1f1b"] if method.schedule == "gpipe" else []
    helps += ["no split"] if by_hand else []
    return StrategyError(
        "pipeline_parallel: the stages given do not fit into a rank's memory"
        if by_hand
        else "pipeline_parallel: no cut into stages fits into a rank's memory",
        expected=f"at most {readable_bytes(limit)} on every rank",
        got=f"{readable_bytes(size)} on pipeline rank {rank} (stage {' and '.join(map(str, own))})"
        + ("" if by_hand else f" where least is needed, with stages of {_sizes(bounds)} blocks")
        + ("" if balancer.is_exhaustive else " (of the cuts that were looked at)"),
        fix=f"use {', '.join(helps[:-1])} or {helps[-1]}; or set memory_limit to what there really is",
    )


def _sizes(bounds: tuple[int, ...]) -> str:
    from meshwright.methods.pipeline.stage_cut import block_counts

    return ", ".join(map(str, block_counts(bounds)))


def by_pipeline_rank(step: Step, cut: Cut | None, samples: int, parts: int, *, in_half: bool) -> list[Step]:
    """Return the step of every rank of the pipeline axis before any method.

    Args:
        step: Step of the whole model.
        cut: Where the model is cut; None: nowhere, and there is one step.
        samples: Samples of a micro-batch.
        parts: Number of parts of the tokens, of which a rank's blocks hand on one.
        in_half: Whether the model computes with parameters in half precision, and so are its hidden states.
    """
    if cut is None:
        return [step]
    step = step.replace(boundaries=tuple(_with_senders(each, cut) for each in step.boundaries))
    hidden = None
    if cut.boundary_bytes is not None:
        hidden = cut.boundary_bytes * samples // ((2 if in_half else 1) * parts)
    ranges, count = tuple(itertools.pairwise(cut.bounds)), cut.bounds[-1]
    return [step.replace(stages=Stages(cut.ranks, ranges, count, rank, hidden)) for rank in range(cut.num_ranks)]


def _with_senders(boundary: Boundary, cut: Cut) -> Boundary:
    """Return a collective with the ranks that send it, as often as they do: code before the blocks runs in each stage.

    The gradients of these runs go nowhere, except in the stages that depend on that code.
    """
    again = cut.stages_per_rank if boundary.moment == "forward" and cut.runs_in_each_stage(boundary.path) else 1
    return dataclasses.replace(
        boundary,
        on_ranks=_ranks_sending(boundary, cut),
        num_bytes=again * boundary.num_bytes,
        count=again * boundary.count,
    )


def _ranks_sending(boundary: Boundary, cut: Cut) -> tuple[int, ...]:
    if boundary.axis == "tensor" and not boundary.path:  # in no layer: sums of the loss over parts of the vocabulary
        return (cut.ranks[-1],)
    return cut.ranks_running(boundary.path)
