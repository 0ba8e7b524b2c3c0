"""Decide where a model is cut into pipeline stages, and which ranks hold its parameters.

A :class:`Cut` is made in four steps: :func:`block_list` finds the blocks; a :class:`Balancer` chooses the bounds of the
stages, given the time and memory of blocks (:func:`parameter_costs` estimates the time where nothing better is known;
the planner passes simulated times and bytes instead); :func:`place_stages` assigns the parameters outside the blocks to
ranks, by the data flow that ``outer_parameters.py`` finds. ``splice.py`` then applies it to the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from meshwright.errors import ModelError, StrategyError, did_you_mean, join_names
from meshwright.methods.pipeline.outer_parameters import Dataflow
from meshwright.nn import find_blocks, has_forward
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
        return tuple(end - first for first, end in itertools.pairwise(self.bounds))

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


def _index_in(path: str, name: str) -> int | None:
    """Return the index of the block that contains a name; None if no block does."""
    return int(name[len(path) + 1 :].partition(".")[0]) if name.startswith(path + ".") else None


# --- Finding the blocks


def block_list(model: nn.Module, named: str | None) -> tuple[str, nn.ModuleList]:
    """Find the list of blocks to cut: the one named, or the only one whose modules hold parameters.

    Raises:
        StrategyError: When ``named`` is not such a list.
        ModelError: When none is named and there is none, or several; or when its entries are containers.
    """
    seen: dict[str, nn.ModuleList] = {}
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for path, _ in find_blocks(model):
        outermost = next(each for each in lists if path.startswith(each + "."))
        seen[outermost] = lists[outermost]
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
                fix="name the nn.ModuleList that the model's forward loops over",
            )
        return named, seen[named]
    if len(seen) != 1:
        raise ModelError(
            "pipeline_parallel: it is unclear which blocks of the model to cut",
            expected="one nn.ModuleList that the model's forward loops over",
            got=f"{len(seen)} that hold parameters ({join_names(seen)}); all lists: {join_names(lists)}",
            fix=f"name it: ('pipeline_parallel', {{'blocks': {list(seen)[-1]!r}}})"
            if seen
            else "put the model's layers into an nn.ModuleList; or train it with fsdp, which needs no such list",
        )
    return next(iter(seen.items()))


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
# The slowest stage sets the pace of a pipeline. So the search minimises the time of the slowest stage, among the cuts
# whose ranks fit into memory: a binary search over that time, with a depth-first search for a cut within both limits.

Range = tuple[int, int]
"""Blocks of a stage: the first, and the end (excluded)."""

Need = Callable[[int, tuple[Range, ...]], int]
"""``need(rank, ranges)``: bytes that a pipeline rank holds when its first stages, in order, compute these blocks. It
must grow with every block."""

_MOST_VISITS = 10_000  # nodes of one depth-first search; only ranks with several stages come near


class Balancer:
    """Searches for cuts into consecutive non-empty stages that balance time and fit into memory.

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
        """Find the cut that fits whose slowest stage is the fastest, and return its bounds; None if no cut fits."""
        blocks = range(len(self.costs))
        bounds = sorted({self._sums[end + 1] - self._sums[first] for first in blocks for end in blocks[first:]})
        best = self._within(bounds[-1], limit_bytes)
        low, high = 0, len(bounds) - 1
        while best is not None and low < high:  # the more time, the more cuts fit
            middle = (low + high) // 2
            found = self._within(bounds[middle], limit_bytes)
            best, low, high = (found, low, middle) if found is not None else (best, middle + 1, high)
        return best

    def relieved(self, bounds: tuple[int, ...], limit_bytes: int) -> tuple[int, ...] | None:
        """Take blocks from ranks that hold too much to stages beside theirs; None where these have no time or room.

        The slowest stage takes no longer than before, and stages stay as even as they can.
        """
        most = max(self._takes(bounds))
        while excess := self._excess(bounds, limit_bytes):
            moved = [each for each in self._lighter(bounds, limit_bytes) if max(self._takes(each)) <= most]
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
        return [self._sums[end] - self._sums[first] for first, end in itertools.pairwise(bounds)]

    def _excess(self, bounds: Sequence[int], limit_bytes: int) -> int:
        return sum(max(size - limit_bytes, 0) for _, size in self.needs(bounds))

    def smallest(self) -> tuple[int, ...]:
        """Return the bounds of the cut with the lowest peak memory over ranks, within 0.1 %."""
        best = (*range(self.num_stages), len(self.costs))
        low, high = 0, self._most(best)
        while high - low > high // 1000:
            found = self._within(float("inf"), middle := (low + high) // 2)
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

    def _within(self, most_time: float, most_bytes: int) -> tuple[int, ...] | None:
        """Return the first cut, in the order of its bounds, within a time per stage and memory per rank; else None."""
        fewest = self._fewest_stages(most_time)
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
            if state in dead:
                return None
            self._visits += 1
            if self._visits > _MOST_VISITS:
                self.is_exhaustive = False
                return None
            number = numbers[stage]
            last = len(self.costs) - left + 1
            for end in range(last if left == 1 else first + 1, last + 1):
                own = (*owned[number], (first, end))
                takes, holds = self._sums[end] - self._sums[first], self._need(ranks[number], own)
                if takes > most_time or holds > most_bytes:
                    break  # more blocks take and hold more
                found = complete((*ends, end), (*owned[:number], own, *owned[number + 1 :]))
                if found is not None:
                    return found
            dead.add(state)
            return None

        found = complete((), ((),) * len(ranks))
        return (0, *found) if found is not None else None

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


def balanced_bounds(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the bounds of consecutive non-empty stages that minimise the time of the slowest, and are most even then.

    Where a rank has several stages, their sum is more even so, too.

    Args:
        costs: Time of every block, in any unit; the first and last include what is around the blocks.
        stages: Number of stages.
    """
    bounds = Balancer(costs, range(stages), lambda rank, ranges: 0).fastest(0)
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
    return best[len(costs)][1]


def parameter_costs(model: nn.Module, blocks: list[nn.Module], flow: Dataflow | None) -> list[int]:
    """Estimate the time of every block by its parameters: a matrix costs in proportion to its elements.

    Parameters used before the blocks count with the first, those used after them with the last. Looking up an embedding
    costs next to nothing.
    """
    costs = [sum(p.numel() for p in block.parameters()) for block in blocks]
    if flow is None:
        return costs
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    looked_up = {name for name, p in model.named_parameters() if id(p) in tables}
    costs[0] += sum(sizes[name] for name in flow.uses[0] - looked_up - (flow.tail if len(blocks) == 1 else set()))
    costs[-1] += sum(sizes[name] for name in flow.tail)
    return costs


# --- Placing what lies outside the blocks
#
# A parameter outside the blocks is trained on the ranks whose blocks depend on it. Other ranks still run the code
# around it (see [Note: splicing] in splice.py), so something must take its place there.

Replacement = Literal["gone", "stands in", "buffer"]
"""What takes a parameter's place on a rank that does not train it: None, where its module does not run there; a module
that returns a tensor of the right shape (:data:`STAND_INS`); or a buffer with its first value."""

STAND_INS = (nn.Embedding.forward, nn.LayerNorm.forward, nn.RMSNorm.forward)
"""Forwards whose output has a known shape, so that it can be replaced without the parameters."""


def replacements_of(
    model: nn.Module, parameter: nn.Parameter, late: frozenset[str]
) -> Iterator[tuple[nn.Module, str, Replacement]]:
    """Yield each module that owns a parameter, its name there, and what replaces it where it is not trained.

    Args:
        model: The whole model.
        parameter: One outside the blocks.
        late: Names of parameters whose modules run after the blocks only.
    """
    for path, module in model.named_modules():
        for name, own in module.named_parameters(recurse=False):
            if own is not parameter:
                continue
            if (f"{path}.{name}" if path else name) in late:
                yield module, name, "gone"
            elif type(module).forward in STAND_INS:
                yield module, name, "stands in"
            else:
                yield module, name, "buffer"


def place_stages(
    model: nn.Module, path: str, bounds: tuple[int, ...], ranks: tuple[int, ...], flow: Dataflow | None
) -> Cut:
    """Make the cut with these stages: decide which ranks hold the parameters outside the blocks.

    Args:
        model: The whole model.
        path: Path of the list of blocks.
        bounds: Stage s computes blocks ``bounds[s]`` … ``bounds[s + 1] - 1``.
        ranks: The pipeline rank of every stage.
        flow: What each block depends on; None: unknown, so every rank trains every parameter outside the blocks.
    """
    blocks = list(model.get_submodule(path).children())
    owners = [ranks[stage] for stage, (first, end) in enumerate(itertools.pairwise(bounds)) for _ in range(first, end)]
    outside = tuple(_place_outside(model, blocks, owners, flow))
    if flow is None:
        return Cut(path, bounds, ranks, outside)
    return Cut(path, bounds, ranks, outside, flow.late, flow.boundary_bytes)


def _place_outside(
    model: nn.Module, blocks: list[nn.Module], owners: list[int], flow: Dataflow | None
) -> Iterator[Outside]:
    inside = {parameter for block in blocks for parameter in block.parameters()}
    everyone = set(owners)
    for name, parameter in model.named_parameters():
        if parameter in inside:
            continue
        if flow is None:
            yield Outside(name, tuple(sorted(everyone)))
            continue
        # A parameter that nothing uses must be stored somewhere: on the last rank.
        trained = {rank for rank, uses in zip(owners, flow.uses, strict=True) if name in uses} or {owners[-1]}
        needs_buffer = any(kind == "buffer" for _, _, kind in replacements_of(model, parameter, flow.late))
        yield Outside(name, tuple(sorted(trained)), tuple(sorted(everyone - trained)) if needs_buffer else ())
