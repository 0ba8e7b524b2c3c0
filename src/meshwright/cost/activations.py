"""Activations: what forward saves for backward on one rank, what recomputation makes of it, and what backward holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Placed = tuple[tuple[tuple[int, ...], int], ...]
"""Amounts, each with the places it belongs to: blocks of the list that a pipeline cuts, by their numbers; -1 is before
the list, and the number of its blocks is behind it. What belongs to several places is once in a stage with any."""


@functools.lru_cache(maxsize=512)
def sums_of(ranges: tuple[tuple[int, int], ...], num_blocks: int, amounts: Placed) -> tuple[int, ...]:
    """Sum amounts over the places of every pipeline stage.

    The first stage also has what is before the blocks, the last what is behind them. Cached, since every rank of a
    pipeline asks for the same.

    Args:
        ranges: First block and end of every stage.
        num_blocks: Blocks of the whole list.
        amounts: See ``Placed``.
    """
    stages: dict[int, list[int]] = {}
    for stage, (first, end) in enumerate(ranges):
        before = (-1,) if first == 0 < end else ()
        for place in (*before, *range(first, end + 1 if end == num_blocks else end)):
            stages.setdefault(place, []).append(stage)
    found = [0] * len(ranges)
    for places, size in amounts:
        for stage in {stage for place in places for stage in stages.get(place, ())}:
            found[stage] += size
    return tuple(found)


# --- Transient memory: gradients of activations and weights, and results on their way, beside what is saved.


class Instant(NamedTuple):
    """Memory held at one moment of a place's backward beside what forward saved up to there, for one micro-batch.

    Args:
        activations: Bytes that grow with the samples; negative where some of what is saved is free already.
        weights: Bytes of gradients of parameters that are not complete yet.
        gradients: Bytes of complete ones of this place.
    """

    activations: int
    weights: int
    gradients: int


class SplitBackward(NamedTuple):
    """Memory of one place whose backward runs in two parts, first for inputs and later for weights.

    Nothing that forward saved is free in between, and the gradients of what the weights' layers returned are held.

    Args:
        inputs: Instants of the first part, beside all that is saved and what later places keep.
        cut: The same where a pipeline cuts the model behind this place.
        kept: Bytes of gradients made here that are held until the second part.
        received: Bytes of the gradient that comes from the place behind, if that is held, too.
        freed: Bytes saved here that are free between the parts.
        weights: Instants of the second part, beside what is held as it begins here.
        change: Bytes that are held more when it has run here, beside gradients of weights; negative if it frees some.
        tail: Bytes saved here that are free between the parts, too, where a pipeline cuts the model behind this place.
    """

    inputs: tuple[Instant, ...]
    cut: tuple[Instant, ...]
    kept: int
    received: int
    freed: int
    weights: tuple[Instant, ...]
    change: int
    tail: int = 0


class Transient(NamedTuple):
    """Memory held for a moment at one place of a model: before its blocks, in one of them, or behind them.

    Args:
        place: See :data:`~meshwright.cost.activations.Placed`.
        instants: The instants at which most can be held, for some number of samples.
        gradients: Bytes of the parameters' gradients that its backward completes.
        forward: Behind the blocks, the same of forward as far as the model goes, without its loss; of the last block,
            of what hooks do behind it while its weights are there.
        returned: Bytes made here in forward that nobody saves and the model holds, such as keys and values it returns.
        left: The part of those that is held in backward, too.
        remains: Bytes that are not free when its backward has run.
        cut: The instants of a place behind which a pipeline cuts the model: what comes from there counts as received.
        far: Bytes of parameters' gradients from behind the blocks that wait for parts from before them.
        split: Of its backward in two parts, for schedules that split it; None: unknown.
        reentrant: The instants of a block whose results, made again, and their gradients are held until its backward
            has run, as torch's reentrant recomputation does.
        reentrant_cut: The same of a place behind which a pipeline cuts the model.
        running: Most bytes held while its forward runs, beside what it and those before it save.
        again: The same up to the last operator that makes something saved, where recomputation stops.
        output: Bytes that a block returns, whose gradient is held when it begins to run again.
    """

    place: int
    instants: tuple[Instant, ...]
    gradients: int
    forward: tuple[Instant, ...] = ()
    returned: int = 0
    left: int = 0
    remains: int = 0
    cut: tuple[Instant, ...] = ()
    far: int = 0
    split: SplitBackward | None = None
    reentrant: tuple[Instant, ...] = ()
    reentrant_cut: tuple[Instant, ...] = ()
    running: int = 0
    again: int = 0
    output: int = 0

    def most(
        self, *, with_gradients: bool, is_cut: bool = False, is_recomputed: bool = False, is_reentrant: bool = False
    ) -> int:
        """Return the most bytes held beside what is saved.

        Args:
            with_gradients: Whether complete gradients of this place are held, and not added to others.
            is_cut: Whether a pipeline cuts the model behind this place.
            is_recomputed: Whether the place has run forward again before.
            is_reentrant: Whether torch's reentrant implementation recomputes the place.
        """
        instants = self.cut if is_cut else self.instants
        if is_reentrant:
            instants = (self.reentrant_cut if is_cut else self.reentrant) or instants
        most = max(m.activations + m.weights + (m.gradients if with_gradients else 0) for m in instants)
        return max(most, self.again + (0 if is_cut else self.output)) if is_recomputed else most


def outermost_instants(every: Iterable[Instant]) -> tuple[Instant, ...]:
    """Return the instants that can be the fullest for some number of samples.

    Complete gradients may count or not.
    """
    instants = set(every)
    kept = {*_hull(instants, lambda m: m.weights + m.gradients), *_hull(instants, lambda m: m.weights)}
    return tuple(sorted(kept))


def _hull(instants: Iterable[Instant], constant: Callable[[Instant], int]) -> list[Instant]:
    """Return the upper right part of the convex hull over (what grows with the samples, what does not)."""
    best: dict[int, Instant] = {}
    for each in instants:
        other = best.get(each.activations)
        if other is None or (constant(each), each) > (constant(other), other):
            best[each.activations] = each
    hull: list[Instant] = []
    # The most activations first.
    for each in (best[size] for size in sorted(best, reverse=True)):
        if hull and constant(each) <= constant(hull[-1]):
            continue
        while len(hull) > 1 and _is_below(hull[-2], hull[-1], each, constant):
            hull.pop()
        hull.append(each)
    return hull


def _is_below(first: Instant, middle: Instant, last: Instant, constant: Callable[[Instant], int]) -> bool:
    run, rise = first.activations - last.activations, constant(last) - constant(first)
    return (constant(middle) - constant(first)) * run <= rise * (first.activations - middle.activations)


# --- Saved tensors, one by one, and what recomputation makes of them.

Running = tuple[int, ...]
"""The modules that run at some moment, by their numbers, outermost first; the model itself is left out."""

Recomputed = Mapping[int, frozenset[str]]
"""Modules that are recomputed, none inside another; and of each, the operators whose results it keeps."""


@dataclass(frozen=True)
class TracedModule:
    """A module of the traced model; others speak of it by its number in ``Activations.modules``."""

    path: str
    classes: tuple[str, ...]  # qualified names of its class and of the bases
    block: int | None = None  # the repeated block that it is or lies in, counted in the model's order
    working_bytes: int = 0  # what its backward needs, when it is recomputed, beside what it saves again
    runs: int = 1  # how often a forward pass runs it: each is recomputed by itself


Given = Literal["view", "copy"]
"""How the model's input is given: as views of the step's batch, or as copies of a micro-batch's part of it."""


class Inputs(NamedTuple):
    """The model's input in device memory, which the caller holds beside what forward saves.

    Args:
        viewed_bytes: Bytes of a micro-batch that are views of the step's batch, which is whole until the step ends.
        copied_bytes: Bytes of a micro-batch that were made from the batch.
        batch_bytes: Bytes of a micro-batch in the batch of which only copies are given.
        samples: Samples of a micro-batch; of one with the most, where they differ.
        step_samples: Samples of a step on this rank.
        copies: Micro-batches whose copies are held at once: all of them in a pipeline.
    """

    viewed_bytes: int = 0
    copied_bytes: int = 0
    batch_bytes: int = 0
    samples: int = 1
    step_samples: int = 1
    copies: int = 1

    def held_with(self, num_bytes: int, given: Given) -> int:
        """Return the bytes that are held at once because so many of a micro-batch's input are saved."""
        return num_bytes * self.step_samples // self.samples if given == "view" else num_bytes * self.copies

    @property
    def batch(self) -> int:
        """Return the bytes of the step's batch."""
        return self.step_samples * (self.viewed_bytes + self.batch_bytes) // self.samples

    @property
    def held(self) -> int:
        """Return the bytes held while forward and backward run."""
        return self.batch + self.copies * self.copied_bytes


PRODUCTS = frozenset(
    {
        "aten.addmm", "aten.convolution", "aten.mm", "aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_mm",
        "transformers.grouped_mm_fallback",
    }
)  # fmt: skip
"""Operators that multiply by weights."""

TO_LOW_RANK, FROM_LOW_RANK = "product to a low rank", "product from a low rank"
"""Products with matrices of low rank, as of LoRA, which take no turn in ``EVERY_SECOND``: what one makes is narrow, and
worth to be kept; what the other makes is as large as a layer's result, and costs as little as a sum of two."""

EVERY_SECOND = "every second product"
"""Among the operators whose results a module keeps: of products only the first, the third and so on are kept."""


def keeps(kept: frozenset[str], operator: str, turn: int) -> bool:
    """Return whether a recomputed module keeps the result of a call.

    Args:
        kept: Operators whose results it keeps.
        operator: The operator.
        turn: Of a product: how many products have run before it since the module began; their parity will do.
    """
    return operator in kept and not (turn % 2 and operator in PRODUCTS and EVERY_SECOND in kept)


class OperatorResult(NamedTuple):
    """The call of an operator whose result recomputation may keep."""

    operator: str
    running: Running
    num_needed: int  # so many of these, from the outermost, save something after it and come to it as they run again
    turns: tuple[int, ...] = ()  # of a product: the parity of its turn in each of these modules

    def keeper(self, recomputed: Recomputed) -> int | None:
        """Return the recomputed module that keeps the result, or None."""
        module = _cover(self.running, recomputed)
        if module is None:
            return None
        turn = self.turns[self.running.index(module)] if self.turns else 0
        return module if keeps(recomputed[module], self.operator, turn) else None


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that forward saves for backward, or that recomputation may keep instead."""

    num_bytes: int
    savers: tuple[Running, ...]  # for every time that it is saved; none: only recomputation may keep it
    inputs_of: tuple[int, ...] = ()  # modules that take it as an argument
    results: tuple[OperatorResult, ...] = ()  # whose result it is, where recomputation may keep that
    places: tuple[int, ...] = ()  # see Placed
    needed_from: int = -1  # the first place whose backward needs it: when that has run, it is free
    given: Given | None = None  # part of the model's input, which lives however long it is saved
    returned_by: tuple[int, ...] = ()  # the blocks that return it, by their places
    is_handed_on: bool = False  # by the stage of a pipeline that made it, which keeps it until its backward has run
    when_fused: Literal["", "gone", "kept"] = ""  # what compiled code makes of it; "kept": in place of what is gone

    def fused(self) -> SavedTensor:
        """Return the tensor as compiled code saves it, which computes some of what it needs again."""
        if self.when_fused == "gone":
            return dataclasses.replace(self, savers=(), inputs_of=())
        if self.when_fused == "kept" and not self.savers:
            savers = tuple(result.running for result in self.results) or tuple((each,) for each in self.inputs_of)
            return dataclasses.replace(self, savers=savers)
        return self

    def is_kept(self, recomputed: Recomputed) -> bool:
        """Return whether the tensor lives from forward to backward while these modules are recomputed."""
        return self.is_handed_on or self.is_saved(recomputed) or self.is_kept_result(recomputed)

    def is_saved(self, recomputed: Recomputed) -> bool:
        """Return whether autograd saves the tensor while these modules are recomputed.

        It saves what other modules save, and the inputs of the recomputed ones.
        """
        # A plain loop: a search asks this of thousands of tensors for every plan.
        for running in self.savers:
            if _cover(running, recomputed) is None:
                return True
        return not recomputed.keys().isdisjoint(self.inputs_of)

    def is_kept_result(self, recomputed: Recomputed) -> bool:
        """Return whether a recomputed module keeps the tensor as the result of an operator that it does not rerun."""
        return any(result.keeper(recomputed) is not None for result in self.results)

    def in_stage(self, has: Callable[[tuple[int, ...]], bool]) -> SavedTensor:
        """Return the tensor as the stage of a pipeline holds it that has some places."""
        is_last = any(has((place,)) and not has((place + 1,)) for place in self.returned_by)
        return dataclasses.replace(self, is_handed_on=True) if is_last else self

    def taken_in(self, recomputed: Recomputed) -> int | None:
        """Return the recomputed module that keeps the tensor until it runs again, and saves it no more then; or None.

        Torch's checkpoint gives a kept result away when it comes to its operator. What lies behind the last saved
        tensor stays.
        """
        if self.savers or self.is_handed_on or self.is_saved(recomputed):
            return None
        for result in self.results:
            module = result.keeper(recomputed)
            if module is not None:
                return module if module in result.running[: result.num_needed] else None
        return None


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one operator inside the same modules, in forward."""

    operator: str
    running: Running
    num_needed: int  # so many of these, from the outermost, save something after it: they stop recomputing behind it
    flops: int
    place: int = -1
    turns: tuple[int, ...] = ()  # see OperatorResult

    def is_recomputed(self, recomputed: Recomputed, *, to_the_end: bool) -> bool:
        """Return whether recomputation runs the operator again.

        Without ``to_the_end``, recomputation stops at the last saved tensor.
        """
        module = _cover(self.running if to_the_end else self.running[: self.num_needed], recomputed)
        if module is None:
            return False
        return not keeps(recomputed[module], self.operator, self.turns[self.running.index(module)] if self.turns else 0)


BackwardPart = Literal["both", "inputs", "weights"]
"""What backward computes gradients of."""


class BackwardAt(NamedTuple):
    """A moment at which a micro-batch runs backward in one stage of a pipeline rank, whose stages count from 0."""

    stage: int
    held: tuple[int, ...]  # micro-batches of each stage that are kept
    accumulated: tuple[bool, ...]  # whether each stage has gradients of micro-batches before
    sent: tuple[int, ...] = ()  # gradients that each stage has sent to another rank, and that may not have arrived
    part: BackwardPart = "both"
    halfway: tuple[int, ...] = ()  # of ``held``, those with gradients of inputs alone; none: nothing is split
    after: int = -1  # the stage whose forward has just run; -1: another backward came between, or it is not known
    posted: int = 0  # hidden states and gradients that are being received meanwhile


@dataclass(frozen=True)
class Activations:
    """Bytes that forward saves for backward on one rank: of a micro-batch, or of all in flight in a pipeline.

    The tensors, modules and work behind these bytes are left out of hashes: there are thousands of them.
    """

    saved_bytes: int
    modules: tuple[TracedModule, ...] = field(default=(), hash=False)
    blocks: tuple[int, ...] = field(default=(), hash=False)  # the model's repeated blocks, by their numbers
    stages: tuple[tuple[SavedTensor, ...], ...] = field(
        default=((),), hash=False
    )  # of a micro-batch, by the rank's stages
    in_flight: tuple[tuple[int, ...], ...] = ((1,),)  # micro-batches of each stage that are kept at one time
    backward_at: tuple[BackwardAt, ...] = ()  # of a pipeline: the moments of backward at which most is held
    work: tuple[Work, ...] = field(default=(), hash=False)
    recomputed: Recomputed = field(default_factory=dict, hash=False)
    to_the_end: bool = False  # whether they run their whole forward again, as torch's reentrant implementation does
    in_one_part: bool = False  # whether no gradients of weights can wait for later, as in compiled blocks
    working_bytes: int = 0  # of the module being recomputed, and what passes
    passing_bytes: int = 0  # that backward of a block makes and frees, beside what is saved; of families
    holds_messages: bool = False  # whether stages keep what they send and receive as torch's do; of families
    flops_at: Placed = ()  # of forward and backward, where a pipeline cuts the model
    loss_bytes: int = 0  # beside what is saved, while the loss runs backward: the gradient of the logits
    outside_bytes: int = 0  # of ``saved_bytes``: behind the last block, freed before the blocks run backward
    offloaded_blocks: int = 0  # from the first, whose saved tensors are copied to the host
    prefetched_blocks: int = 0  # whose tensors come back ahead of their backward
    copied_at: tuple[int, ...] = ()  # bytes of each of these blocks that are copied
    transients: tuple[Transient, ...] = field(default=(), hash=False)  # beside all of these; empty: unknown
    kept_at: tuple[Placed, ...] = field(default=(), hash=False)  # of a micro-batch, by stages: by the first place
    working_at: Placed = field(default=(), hash=False)  # of the module that needs most there when it is recomputed
    taken_at: Placed = field(default=(), hash=False)  # of that module: kept results that it no longer saves by then
    inputs: Inputs = field(default_factory=Inputs)
    results_bytes: int = 0  # of a block and micro-batch: gradients that wait with weights' where backward is split

    def recompute(self, recomputed: Recomputed, *, to_the_end: bool = False) -> tuple[Activations, int]:
        """Return the activations with these modules recomputed, and the FLOPs that a micro-batch runs again.

        Args:
            recomputed: Modules of this rank among others.
            to_the_end: Whether they run their whole forward, and do not stop at the last saved tensor.
        """
        again = sum(work.flops for work in self.work if work.is_recomputed(recomputed, to_the_end=to_the_end))
        return dataclasses.replace(self, recomputed=recomputed, to_the_end=to_the_end).settled(), again

    def fused(self) -> Activations:
        """Return the activations of compiled blocks."""
        stages = tuple(tuple(tensor.fused() for tensor in stage) for stage in self.stages)
        return dataclasses.replace(self, stages=stages).settled()

    def at_once(self) -> Activations:
        """Return the activations where no schedule splits backward: all is done in the turn of the inputs."""
        moments: list[BackwardAt] = []
        for now in self.backward_at:
            if now.part == "inputs":
                whole = tuple(held - half for held, half in zip(now.held, now.halfway, strict=True))
                moments.append(now._replace(held=whole, halfway=(), part="both"))
            elif now.part == "both":
                moments.append(now)
        return dataclasses.replace(self, backward_at=tuple(moments), in_one_part=True)

    @property
    def splits_backward(self) -> bool:
        """Return whether a schedule runs backward in two parts, and what either holds is known.

        Where anything is recomputed, the engine runs both parts at once.
        """
        in_blocks = [each for each in self.transients if each.place >= 0]
        known = bool(in_blocks) and all(each.split is not None for each in in_blocks)
        return known and not self.recomputed and any(now.part != "both" for now in self.backward_at)

    def settled(self) -> Activations:
        """Return the activations with all sums recomputed from tensors and modules."""
        working: dict[int, int] = {}
        taken: dict[int, int] = {}  # of kept results, by the recomputed module that takes them
        places: dict[int, int] = {}  # where the recomputed modules are
        kept: list[dict[int, int]] = []
        given: dict[int, int] = {}  # of the input, which several stages of a rank may save
        gone, copied = self._offloaded()
        for tensors in self.stages:
            here: dict[int, int] = {}
            kept.append(here)
            for tensor in tensors:
                place = tensor.needed_from
                if tensor.given is not None:
                    if tensor.is_kept(self.recomputed):
                        given[id(tensor)] = self.inputs.held_with(tensor.num_bytes, tensor.given)
                    continue
                if id(tensor) in gone:
                    continue
                if tensor.is_kept(self.recomputed):
                    here[place] = here.get(place, 0) + tensor.num_bytes
                    if (module := tensor.taken_in(self.recomputed)) is not None:
                        taken[module] = taken.get(module, 0) + tensor.num_bytes
                    continue
                for module in {_cover(running, self.recomputed) for running in tensor.savers}:
                    assert module is not None, "it would be kept"
                    working[module], places[module] = working.get(module, 0) + tensor.num_bytes, place
        working, taken = self._of_a_run(working), self._of_a_run(taken)
        again = {module: self.modules[module].working_bytes + size for module, size in working.items()}
        # The module that adds most at each place.
        fullest: dict[int, int] = {}
        for module in sorted(again, key=lambda module: again[module] - taken.get(module, 0)):
            fullest[places[module]] = module
        known = bool(self.transients)
        return dataclasses.replace(
            self,
            saved_bytes=self._at_most([sum(here.values()) for here in kept]) + sum(given.values()),
            kept_at=tuple(_placed(here) for here in kept) if known else (),
            working_bytes=max(again.values(), default=0) + self.passing_bytes,
            working_at=_placed({place: again[module] for place, module in fullest.items()}) if known else (),
            taken_at=_placed({place: taken.get(module, 0) for place, module in fullest.items()}) if known else (),
            copied_at=copied,
        )

    def _of_a_run(self, sizes: Mapping[int, int]) -> dict[int, int]:
        """Return the bytes of each module's single run."""
        return {module: -(-size // self.modules[module].runs) for module, size in sizes.items()}

    def _at_most(self, stages: Sequence[int]) -> int:
        """Return the most that is held at one time, given what one micro-batch saves in every stage."""
        most = max(sum(count * size for count, size in zip(held, stages, strict=True)) for held in self.in_flight)
        # Of traced models ``SplitBackward`` knows more.
        if not self.results_bytes or self.recomputed or self.transients:
            return most
        # What two blocks hand on is in the stages of both, and what one saves alone says where that is.
        places = [{place for t in tensors for place in t.places if len(t.places) == 1} for tensors in self.stages]
        blocks = [sum(0 <= place < len(self.blocks) for place in here) for here in places]
        for now in self.backward_at:
            if now.halfway:
                held = sum(count * size for count, size in zip(now.held, stages, strict=True))
                waiting = sum(count * number for count, number in zip(now.halfway, blocks, strict=True))
                most = max(most, held + waiting * self.results_bytes)
        return most

    def given(self, inputs: Inputs) -> Activations:
        """Return the activations of a step that holds its input so."""
        return dataclasses.replace(self, inputs=inputs).settled()

    def cut(
        self,
        stages: tuple[Callable[[tuple[int, ...]], bool], ...],
        in_flight: tuple[tuple[int, ...], ...],
        backward_at: tuple[BackwardAt, ...] = (),
    ) -> Activations:
        """Return the activations of one pipeline rank.

        Args:
            stages: For each stage of this rank, whether it has any of some places.
            in_flight: See the attribute.
            backward_at: See the attribute.
        """
        every = [tensor for stage in self.stages for tensor in stage]
        # There are few places, and many tensors.
        places = {tensor.places for tensor in every} | {(work.place,) for work in self.work}
        held = [{each for each in places if has(each)} for has in stages]
        return dataclasses.replace(
            self,
            stages=tuple(
                tuple(tensor.in_stage(has) for tensor in every if tensor.places in here)
                for has, here in zip(stages, held, strict=True)
            ),
            in_flight=in_flight,
            backward_at=backward_at,
            work=tuple(work for work in self.work if any((work.place,) in here for here in held)),
            transients=tuple(each for each in self.transients if any(has((each.place,)) for has in stages)),
        ).settled()

    def offload(self, blocks: int, prefetched: int) -> Activations:
        """Return the activations where what the first blocks save is copied to the host.

        Args:
            blocks: How many blocks.
            prefetched: Blocks whose activations come back ahead of their backward.
        """
        return dataclasses.replace(self, offloaded_blocks=blocks, prefetched_blocks=prefetched).settled()

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes that are copied to the host."""
        return sum(self.copied_at)

    def returned_at(self, place: int) -> int:
        """Return the bytes of copies that are on the device, coming or leaving, while a place runs backward."""
        return sum(self.copied_at[max(place - max(self.prefetched_blocks, 1), 0) : max(place + 1, 0)])

    def _offloaded(self) -> tuple[set[int], tuple[int, ...]]:
        """Return which tensors lie on the host alone, and the bytes of each block that are copied.

        More are copied than leave where something is saved outside of these blocks, too.
        """
        count, gone = self.offloaded_blocks, set[int]()
        copied = [0] * len(self.blocks)
        for tensor in (tensor for stage in self.stages for tensor in stage) if count else ():
            places = self._savers_in_blocks(tensor)
            inside = [place for place in places if place is not None]
            if not inside:
                continue
            copied[min(inside)] += tensor.num_bytes
            is_free = None not in places and tensor.given is None and not tensor.is_kept_result(self.recomputed)
            if is_free and max(inside) < count:
                gone.add(id(tensor))
        return gone, tuple(copied[:count])

    def _savers_in_blocks(self, tensor: SavedTensor) -> set[int | None]:
        """Return the blocks in which autograd saves the tensor; None stands for anything outside the blocks."""
        found: set[int | None] = set()
        for running in tensor.savers:
            if _cover(running, self.recomputed) is None:
                inside = [place for module in running if (place := self.modules[module].block) is not None]
                found.add(inside[0] if inside else None)
        return found | {self.modules[module].block for module in tensor.inputs_of if module in self.recomputed}


def _placed(amounts: Mapping[int, int]) -> Placed:
    return tuple(((place,), amounts[place]) for place in sorted(amounts))


def _cover(running: Running, recomputed: Recomputed) -> int | None:
    """Return the recomputed module among those that run, or None."""
    for module in running:
        if module in recomputed:
            return module
    return None
