"""Decide where a model is cut into pipeline stages, and which ranks hold its parameters.

A :class:`Cut` is made in four steps: :func:`block_list` finds the blocks; a :class:`Balancer` chooses the bounds of the
stages, given the time and memory of blocks (``parameter_costs`` estimates the time where nothing better is known; the
planner passes FLOPs and simulated bytes instead); ``place_stages`` assigns the parameters outside the blocks to ranks,
by the data flow that ``outer_parameters.py`` finds. ``splice.py`` then applies it to the model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from torch import nn

from meshwright.errors import ModelError, StrategyError, did_you_mean, join_names
from meshwright.nn import find_blocks, has_forward
from meshwright.nn.module_structure import in_sequence
from meshwright.runtime.torch_internals.modules import compiled_call_of


@dataclass(frozen=True)
class Outside:
    """A parameter outside the blocks, and the pipeline ranks that hold it."""

    name: str
    trained_on: tuple[int, ...]
    buffer_on: tuple[int, ...] = ()  # these ranks compute with a buffer of its first value, but discard the result


@dataclass(frozen=True)
class Cut:
    """A model's pipeline stages, as plain data: rank 0 decides it, and every rank follows."""

    path: str  # of the block list
    bounds: tuple[int, ...]  # stage s computes blocks bounds[s] … bounds[s + 1] - 1
    ranks: tuple[int, ...]  # the pipeline rank of every stage
    outside: tuple[Outside, ...]  # each by its first name
    late: frozenset[str] = frozenset()  # names of parameters whose modules run after the blocks only
    boundary_bytes: int | None = None  # hidden state of one sample between two blocks; None: unknown

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline axis."""
        return max(self.ranks) + 1

    @property
    def stages_per_rank(self) -> int:
        """Number of stages on each rank."""
        return self.num_stages // self.num_ranks

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of blocks of every stage."""
        return block_counts(self.bounds)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of one pipeline rank, ascending."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def stage_of_block(self, index: int) -> int:
        """Return the stage that computes a block."""
        return next(stage for stage in range(self.num_stages) if index < self.bounds[stage + 1])

    def stage_of(self, name: str) -> int | None:
        """Return the stage of the block that contains a parameter, buffer or module; None if no block does."""
        index = _index_in(self.path, name)
        return self.stage_of_block(index) if index is not None else None

    def rank_of(self, name: str) -> int | None:
        """Return the pipeline rank of a parameter, buffer or module; None outside the list."""
        stage = self.stage_of(name)
        return self.ranks[stage] if stage is not None else None

    def ranks_running(self, path: str) -> tuple[int, ...]:
        """Return the pipeline ranks that run a module with parameters."""
        rank = self.rank_of(path)
        if rank is not None:
            return (rank,)
        if any(name.rpartition(".")[0] == path for name in self.late):
            return (self.ranks[-1],)
        own = next((item for item in self.outside if item.name.rpartition(".")[0] == path), None)
        return tuple(range(self.num_ranks)) if own is None else own.trained_on + own.buffer_on

    def runs_in_each_stage(self, path: str) -> bool:
        """Return whether a module runs before the blocks, as it then does in every stage of a rank."""
        is_late = any(name.rpartition(".")[0] == path for name in self.late)
        return bool(path) and self.stage_of(path) is None and not is_late

    def rank_of_block(self, index: int) -> int:
        """Return the pipeline rank that holds a block."""
        return self.ranks[self.stage_of_block(index)]


def block_counts(bounds: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks of every stage."""
    return tuple(end - first for first, end in itertools.pairwise(bounds))


def _index_in(path: str, name: str) -> int | None:
    """Return the index of the block that contains a name; None if no block does."""
    return int(name[len(path) + 1 :].partition(".")[0]) if name.startswith(path + ".") else None


# --- Finding the blocks


BlockList = nn.ModuleList | nn.Sequential


def block_list(model: nn.Module, named: str | None) -> tuple[str, BlockList]:
    """Find the list of blocks to cut: the one named, or the only one whose modules hold parameters.

    An ``nn.Sequential`` is one if all of its entries are blocks.

    Raises:
        StrategyError: When ``named`` is not such a list.
        ModelError: When none is named and there is none, or several; or when its entries are containers.
    """
    seen: dict[str, BlockList] = {}
    lists = {path: module for path, module in model.named_modules() if path and _is_list(module)}
    for path, _ in find_blocks(model):
        around = next((each for each in lists if path.startswith(each + ".")), None)
        if around is not None:
            seen[around] = lists[around]
    chosen = named if named in seen else next(iter(seen)) if len(seen) == 1 else None
    entries = seen[chosen].children() if chosen is not None else ()
    containers = [type(entry).__name__ for entry in entries if not has_forward(entry)]
    if containers:
        raise ModelError(
            f"pipeline_parallel: the entries of {chosen} are containers, whose parts the model calls by itself",
            expected="modules with a forward, which the model calls one after the other",
            got=join_names(dict.fromkeys(containers)),
            fix="make each entry a module whose forward calls its parts; or train it with fsdp, which cuts nothing",
        )
    if named is not None:
        if named not in seen:
            raise StrategyError(
                f"pipeline_parallel: blocks names no list of blocks{did_you_mean(named, seen)}",
                expected=f"one of {join_names(seen)}",
                got=repr(named),
                fix="name the nn.ModuleList or nn.Sequential of blocks that the model's forward runs",
            )
        return named, seen[named]
    if len(seen) != 1:
        raise ModelError(
            "pipeline_parallel: it is unclear which blocks of the model to cut",
            expected="one nn.ModuleList or nn.Sequential of nothing but blocks, which the model's forward runs",
            got=f"{len(seen)} that hold parameters ({join_names(seen)}); all lists: {join_names(lists)}",
            fix=f"name it: ('pipeline_parallel', {{'blocks': {list(seen)[-1]!r}}})"
            if seen
            else "put the layers into an nn.ModuleList or nn.Sequential of their own; or use fsdp, which needs no list",
        )
    return next(iter(seen.items()))


def _is_list(module: nn.Module) -> TypeGuard[BlockList]:
    entries = in_sequence("", module)
    return isinstance(module, nn.ModuleList) or 0 < len(entries) == len([*module.children()])


def check_apart(model: nn.Module, path: str) -> None:
    """Refuse parameters that a block shares with another block or the model around: the copies would diverge.

    Raises:
        ModelError: Naming one.
    """
    seen: dict[nn.Parameter, tuple[str, int | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        index = _index_in(path, name)
        first, place = seen.setdefault(parameter, (name, index))
        if place != index:
            raise ModelError(
                "pipeline_parallel: a parameter is shared between blocks, or with the model around them",
                expected="parameters that are shared within one block, or outside all blocks",
                got=f"{first}, which is also {name}",
                fix="give every block parameters of its own, or train this model with fsdp",
            )


def check_not_compiled(model: nn.Module, named: str | None) -> None:
    """Refuse a model on which ``Module.compile`` was called on or around blocks: no stage could end inside.

    Raises:
        ModelError: Naming one.
    """
    path, blocks = block_list(model, named)
    around = {f"{path}.{index}" for index in range(len(blocks))} | set(
        itertools.accumulate(path.split("."), "{}.{}".format)
    )
    compiled = [each for each in ("", *sorted(around)) if compiled_call_of(model.get_submodule(each)) is not None]
    if compiled:
        raise ModelError(
            "pipeline_parallel: the model is compiled already, so that it cannot be run in stages",
            expected="a plain model; parts of blocks may be compiled",
            got=f"compile() was called on {compiled[0] or 'the model'}",
            fix="leave that out, and add the method compile to the strategy",
        )


def given_bounds(split: Sequence[int], blocks: int, stages: int) -> tuple[int, ...]:
    """Turn a user's numbers of blocks per stage into bounds.

    Raises:
        StrategyError: When the numbers do not add up.
    """
    if len(split) != stages or sum(split) != blocks or min(split) < 1:
        raise StrategyError(
            "pipeline_parallel: split does not divide the blocks",
            expected=f"{stages} numbers of 1 or more, one for every stage, that add up to {blocks}",
            got=str(list(split)),
            fix="correct the numbers, or leave split out",
        )
    return (0, *itertools.accumulate(split))


def check_enough(blocks: int, stages: int) -> None:
    """Refuse more stages than blocks.

    Raises:
        ModelError: With both numbers.
    """
    if blocks < stages:
        raise ModelError(
            "pipeline_parallel: there are fewer blocks than stages",
            expected=f"at least {stages} blocks, one for every stage",
            got=f"{blocks}",
            fix="use a smaller pipeline axis, or fewer stages on a rank",
        )


# --- Choosing the bounds
#
# The slowest rank sets the pace of a pipeline: one that is full waits for it, and as it fills and runs empty for the
# slowest stage. So the search minimises the time of the slowest rank, and then that of the slowest stage, among the
# cuts whose ranks fit into memory: binary searches over both, with a depth-first search for a cut within all limits.

Range = tuple[int, int]
"""Blocks of a stage: the first, and the end (excluded)."""

Need = Callable[[int, tuple[Range, ...]], int]
"""``need(rank, ranges)``: bytes that a pipeline rank holds when its first stages, in order, compute these blocks. It
must grow with every block."""

_MOST_VISITS = 10_000  # nodes of one depth-first search; only ranks with several stages come near
_NEAR = 1e-3  # share by which binary searches over times of ranks, and over memory, end beyond the best
_ROUNDING = 1e-9  # of sums of times


@dataclass(frozen=True)
class Limits:
    """Keep what a cut may take at most: the time of a stage, that of all stages of a rank, and the memory of a rank."""

    num_bytes: int
    stage: float = math.inf
    rank: float = math.inf


class Balancer:
    """Search for cuts into consecutive non-empty stages that balance time and fit into memory.

    Args:
        costs: Time of every block, in any unit.
        ranks: The pipeline rank of every stage.
        need: Memory of a rank; see :data:`Need`.

    Attributes:
        costs: As given.
        ranks: As given.
        is_exhaustive: Whether every search so far has seen all cuts.
    """

    def __init__(self, costs: Sequence[float], ranks: Sequence[int], need: Need) -> None:
        self.costs, self.ranks = list(costs), tuple(ranks)
        self._sums: list[float] = [0, *itertools.accumulate(costs)]
        self._ask = need
        self._known: dict[tuple[int, tuple[Range, ...]], int] = {}
        self._visits = 0
        self.is_exhaustive = True

    def fastest(self, limit_bytes: int) -> tuple[int, ...] | None:
        """Find the cut that fits whose slowest rank is the fastest, and then its slowest stage; return its bounds.

        The result is None if no cut fits. Where ranks have several stages, theirs is the least time within 0.1 %.
        """
        best = self.in_least_time(limit_bytes)
        if best is None:
            return None
        return self.evened(best, Limits(limit_bytes, max(self._takes(best)), max(self._rank_takes(best))))

    def in_least_time(self, limit_bytes: int) -> tuple[int, ...] | None:
        """Return the bounds of a cut as :meth:`fastest` finds it, but with the first that takes as little time."""
        best = self._within(Limits(limit_bytes))
        if best is None:
            return None
        if self.num_stages > self._num_ranks:
            best = self._for_ranks(best, limit_bytes)
        slowest, blocks = max(self._rank_takes(best)), range(len(self.costs))
        bounds = sorted({self._sums[end + 1] - self._sums[first] for first in blocks for end in blocks[first:]})
        low, high = 0, len(bounds) - 1
        while low < high:  # the more time, the more cuts fit
            middle = (low + high) // 2
            found = self._within(Limits(limit_bytes, bounds[middle], slowest))
            best, low, high = (found, low, middle) if found is not None else (best, middle + 1, high)
        return best

    def evened(self, bounds: tuple[int, ...], most: Limits) -> tuple[int, ...]:
        """Hand blocks on from slow ranks and stages to fast ones within limits, while that makes them more even.

        The slowest takes as long as before. But costs are estimates: where FLOPs are the costs, a head that takes
        little time for its many seems to be the slowest, and what is behind it would be left as it was found.
        """
        for _ in self.costs:  # mostly far fewer times: a block goes a long way at once
            better = next((cut for cut in self._more_even(bounds) if self._keeps(cut, most)), None)
            if better is None:
                break
            bounds = better
        return bounds

    def _more_even(self, bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield cuts with a block less in one stage and one more in another, those that even out ranks most first."""
        takes, of_ranks = self._takes(bounds), dict(zip(sorted(set(self.ranks)), self._rank_takes(bounds), strict=True))

        def gain(pair: tuple[int, int]) -> tuple[float, float]:
            giver, taker = pair
            return of_ranks[self.ranks[giver]] - of_ranks[self.ranks[taker]], takes[giver] - takes[taker]

        def is_worth(pair: tuple[int, int]) -> bool:
            of_rank, of_stage = gain(pair)
            return of_rank > least or (of_stage > least and self.ranks[pair[0]] == self.ranks[pair[1]])

        givers, least = [stage for stage, size in enumerate(block_counts(bounds)) if size > 1], min(self.costs)
        pairs = filter(is_worth, itertools.product(givers, range(self.num_stages)))
        before = self._unevenness(bounds)
        # Of equal stages the latest takes it: schedules have the fewest micro-batches in flight there.
        for giver, taker in sorted(pairs, key=lambda pair: (*gain(pair), pair[1]), reverse=True):
            between, by = range(min(giver, taker) + 1, max(giver, taker) + 1), 1 if taker < giver else -1
            cut = tuple(bound + by * (place in between) for place, bound in enumerate(bounds))
            if self._unevenness(cut) < before:
                yield cut

    def _unevenness(self, bounds: Sequence[int]) -> tuple[float, float]:
        return sum(takes**2 for takes in self._rank_takes(bounds)), sum(takes**2 for takes in self._takes(bounds))

    def _keeps(self, bounds: Sequence[int], most: Limits) -> bool:
        """Return whether a cut keeps to limits."""
        in_time = max(self._takes(bounds)) <= most.stage and max(self._rank_takes(bounds)) <= most.rank
        return in_time and all(size <= most.num_bytes for _, size in self.needs(bounds))

    def _for_ranks(self, best: tuple[int, ...], limit_bytes: int) -> tuple[int, ...]:
        """Return the cut that fits whose slowest rank is the fastest, given one that fits."""
        low, high = self._sums[-1] / self._num_ranks, max(self._rank_takes(best))
        while high - low > _NEAR * high:
            found = self._within(Limits(limit_bytes, rank=(middle := (low + high) / 2)))
            if found is None:
                low = middle
            else:
                best, high = found, max(self._rank_takes(found))
        return best

    def relieved(self, bounds: tuple[int, ...], limit_bytes: int) -> tuple[int, ...] | None:
        """Take blocks from ranks that hold too much to stages beside theirs; None where these have no time or room.

        The slowest stage and the slowest rank take no longer than before, and stages stay as even as they can.
        """
        stage, rank = max(self._takes(bounds)), max(self._rank_takes(bounds))
        while excess := self._excess(bounds, limit_bytes):
            cuts = self._lighter(bounds, limit_bytes)
            moved = [each for each in cuts if max(self._takes(each)) <= stage and max(self._rank_takes(each)) <= rank]
            squares = {each: sum(takes**2 for takes in self._takes(each)) for each in moved}
            best = min(moved, key=lambda each: (self._excess(each, limit_bytes), squares[each]), default=bounds)
            if self._excess(best, limit_bytes) >= excess:
                return None
            bounds = best
        return bounds

    def _lighter(self, bounds: tuple[int, ...], limit_bytes: int) -> Iterator[tuple[int, ...]]:
        """Yield cuts with the first or the last block of one stage, whose rank holds too much, in the stage beside."""
        full = {rank for rank, size in self.needs(bounds) if size > limit_bytes}
        for stage, (first, end) in enumerate(itertools.pairwise(bounds)):
            if self.ranks[stage] in full and end - first > 1:
                if stage > 0:
                    yield (*bounds[:stage], first + 1, *bounds[stage + 1 :])
                if stage + 1 < self.num_stages:
                    yield (*bounds[: stage + 1], end - 1, *bounds[stage + 2 :])

    def _takes(self, bounds: Sequence[int]) -> list[float]:
        return [self._time(each) for each in itertools.pairwise(bounds)]

    def _time(self, blocks: Range) -> float:
        return self._sums[blocks[1]] - self._sums[blocks[0]]

    def _rank_takes(self, bounds: Sequence[int]) -> list[float]:
        ranges = list(itertools.pairwise(bounds))
        return [sum(map(self._time, self._of(rank, ranges))) for rank in sorted(set(self.ranks))]

    @property
    def _num_ranks(self) -> int:
        return len(set(self.ranks))

    def _excess(self, bounds: Sequence[int], limit_bytes: int) -> int:
        return sum(max(size - limit_bytes, 0) for _, size in self.needs(bounds))

    def smallest(self) -> tuple[int, ...]:
        """Return the bounds of the cut with the lowest peak memory over ranks, within 0.1 %."""
        best = (*range(self.num_stages), len(self.costs))
        low, high = 0, self._most(best)
        while high - low > _NEAR * high:
            found = self._within(Limits(middle := (low + high) // 2))
            best, low, high = (found, low, self._most(found)) if found is not None else (best, middle + 1, high)
        return best

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.ranks)

    def _most(self, bounds: Sequence[int]) -> int:
        return max(size for _, size in self.needs(bounds))

    def needs(self, bounds: Sequence[int]) -> list[tuple[int, int]]:
        """Return ``(rank, bytes)`` of every rank under a cut."""
        ranges = list(itertools.pairwise(bounds))
        every = sorted(set(self.ranks))
        return [(rank, self._need(rank, self._of(rank, ranges))) for rank in every]

    def _of(self, rank: int, ranges: Sequence[Range]) -> tuple[Range, ...]:
        return tuple(each for each, owner in zip(ranges, self.ranks, strict=False) if owner == rank)

    def _need(self, rank: int, ranges: tuple[Range, ...]) -> int:
        if (rank, ranges) not in self._known:
            self._known[rank, ranges] = self._ask(rank, ranges)
        return self._known[rank, ranges]

    def _within(self, most: Limits) -> tuple[int, ...] | None:
        """Return the first cut, in the order of its bounds, within limits; else None."""
        fewest = self._fewest_stages(min(most.stage, most.rank))
        # Only blocks on ranks with stages still to come matter from a stage on.
        ranks = sorted(set(self.ranks))
        still = [tuple(rank in self.ranks[stage:] for rank in ranks) for stage in range(self.num_stages)]
        numbers = [ranks.index(rank) for rank in self.ranks]
        dead: set[tuple[int, int, tuple[tuple[Range, ...], ...]]] = set()
        self._visits = 0

        def complete(ends: tuple[int, ...], owned: tuple[tuple[Range, ...], ...]) -> tuple[int, ...] | None:
            stage, first = len(ends), ends[-1] if ends else 0
            left = len(self.ranks) - stage
            if left == 0:
                return ends if first == len(self.costs) else None
            if first + left > len(self.costs) or fewest[first] > left:
                return None
            state = stage, first, tuple(itertools.compress(owned, still[stage]))
            if state in dead or self._has_no_time(first, state[-1], most):
                return None
            self._visits += 1
            if self._visits > _MOST_VISITS:
                self.is_exhaustive = False
                return None
            number = numbers[stage]
            last = len(self.costs) - left + 1
            for end in range(last if left == 1 else first + 1, last + 1):
                own = (*owned[number], (first, end))
                if self._takes_too_long(own, most) or self._need(ranks[number], own) > most.num_bytes:
                    break  # more blocks take and hold more
                found = complete((*ends, end), (*owned[:number], own, *owned[number + 1 :]))
                if found is not None:
                    return found
            dead.add(state)
            return None

        found = complete((), ((),) * len(ranks))
        return (0, *found) if found is not None else None

    def _takes_too_long(self, own: tuple[Range, ...], most: Limits) -> bool:
        return self._time(own[-1]) > most.stage or sum(map(self._time, own)) > most.rank

    def _has_no_time(self, first: int, owned: tuple[tuple[Range, ...], ...], most: Limits) -> bool:
        """Return whether the blocks from one on take longer than ranks with stages to come have left."""
        if most.rank == math.inf:
            return False
        left = sum(most.rank - sum(map(self._time, own)) for own in owned)
        return self._time((first, len(self.costs))) > left * (1 + _ROUNDING)

    def _fewest_stages(self, most_time: float) -> list[int]:
        """Return for every block the fewest stages that all blocks from it on take."""
        count = len(self.costs)
        fewest = [0] * (count + 1)
        for first in reversed(range(count)):
            end = first
            while end < count and self._sums[end + 1] - self._sums[first] <= most_time:
                end += 1
            fewest[first] = fewest[end] + 1 if end > first else count + 1
        return fewest


def balanced_bounds(costs: Sequence[float], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the bounds of consecutive non-empty stages that minimise the time of the slowest, and are most even then.

    Where ranks have several stages, blocks go from one to another until their sums are as even as that makes them, too.

    Args:
        costs: Time of every block, in any unit; the first and last include what is around the blocks.
        ranks: The pipeline rank of every stage.
    """
    bounds, most = _even_stages(costs, len(ranks))
    if len(set(ranks)) == len(ranks):
        return bounds
    return Balancer(costs, ranks, lambda rank, ranges: 0).evened(bounds, Limits(0, most))


def _even_stages(costs: Sequence[float], stages: int) -> tuple[tuple[int, ...], float]:
    """Return the bounds of stages that minimise the time of the slowest, and are most even then; and that time."""
    balancer = Balancer(costs, range(stages), lambda rank, ranges: 0)
    bounds = balancer.in_least_time(0)
    assert bounds is not None, "there are as many blocks as stages"
    sums = [0, *itertools.accumulate(costs)]
    most = max(sums[end] - sums[first] for first, end in itertools.pairwise(bounds))
    # Of the blocks before each: the least sum of squares, and the bounds of the stages that have it.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(stages):
        further: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (squares, before) in best.items():
            for end in range(first + 1, len(costs) - (stages - stage - 1) + 1):
                takes = sums[end] - sums[first]
                if takes > most:
                    break
                found = squares + takes**2, (*before, end)
                further[end] = min(found, further.get(end, found))
        best = further
    return best[len(costs)][1], most
