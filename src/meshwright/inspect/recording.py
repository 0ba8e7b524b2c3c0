"""Record tensors in a model's forward, and carry them out of recomputed, sharded and pipelined blocks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import InspectError
from meshwright.runtime import agreed
from meshwright.runtime.torch_internals.autograd import current_graph_task_id


@dataclasses.dataclass(frozen=True)
class Record:
    """One call of :func:`record_tensor`."""

    name: str
    group: str | None
    tensor: torch.Tensor
    """What a loss may be built from: the recorded tensor, or what a block returned in its place."""
    sources: tuple[torch.Tensor, ...]
    """What the model's code recorded and went on with: their gradients are the whole ones. One; in a pipeline one for
    each micro-batch on the stage that recorded them, and none on the others."""
    keeps_grad: bool
    gradient_factor: float = 1.0
    """What gradients of ``sources`` are multiplied by: those inside a pipeline have been divided by its ranks."""

    @property
    def source(self) -> torch.Tensor:
        """Return what this rank recorded, joined along dim 0."""
        if len(self.sources) == 1:
            return self.sources[0]
        return torch.cat([each.detach() for each in self.sources]) if self.sources else self.tensor.detach()[:0]

    @property
    def grad(self) -> torch.Tensor | None:
        """Return the gradient that backward left in ``source``, if it was asked for and has arrived."""
        if not self.keeps_grad or not self.sources:
            return None
        grads = [each.grad if each.requires_grad else None for each in self.sources]
        if len(grads) == 1 and grads[0] is None and self.tensor.requires_grad:
            grads = [self.tensor.grad]
        found = [each for each in grads if each is not None]
        if len(found) < len(grads):
            return None
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole if self.gradient_factor == 1.0 else whole * self.gradient_factor


@dataclasses.dataclass(frozen=True)
class StagePass:
    """What one pass of a model through the stages of a pipeline has recorded on this rank."""

    stages: dict[int, list[Record]]
    """By the number of every stage that this rank has run, also where it recorded nothing."""


# Innermost last: an inspector's list, then those of the captures inside it. Not a context variable: blocks run their
# forward where they were called, and the threads of backward must see that recording is on to keep out of it.
_sinks: list[list[Any]] = []


def recording_active() -> bool:
    """Return whether :func:`record_tensor` records now: someone inspects, and this is no recomputation.

    Recomputations are known by running inside a backward pass.
    """
    return bool(_sinks) and current_graph_task_id() == -1


def record_tensor(x: torch.Tensor, name: str, group: str | None = None, requires_grad: bool = True) -> torch.Tensor:
    """Record a tensor of the model's forward for the surrounding :func:`inspect_tensor`; without one, do nothing.

    In code that torch recomputes (``use_reentrant=False``) the tensor is recorded once. With torch's reentrant
    checkpoint the recorded tensor has no gradient, since its forward runs without autograd.

    Args:
        x: Any tensor but a parameter; each rank its own part of the batch. A DTensor is taken as the whole tensor.
        name: Its name; may repeat, as in a stack of layers.
        group: Optional name of a group, put before the name.
        requires_grad: Whether backward keeps its gradient for the statistics.

    Returns:
        ``x`` itself. Seed: BMTrain, which returns nothing.

    Raises:
        InspectError: When ``x`` is a parameter (use :func:`inspect_model`) or no tensor.
    """
    if isinstance(x, nn.Parameter) or not isinstance(x, torch.Tensor):
        raise InspectError(
            f"record_tensor cannot record {name!r}",
            expected="a tensor computed in the model's forward",
            got="a parameter" if isinstance(x, nn.Parameter) else type(x).__name__,
            fix="use inspect_model for parameters" if isinstance(x, nn.Parameter) else "record the tensors in it",
        )
    if recording_active():
        _append(Record(name, group, tensor=x, sources=(x,), keeps_grad=requires_grad))
    return x


def _append(record: Record) -> None:
    if record.keeps_grad and record.tensor.requires_grad:
        record.tensor.retain_grad()
    _sinks[-1].append(record)


@contextlib.contextmanager
def recording_into(records: list[Any]) -> Iterator[None]:
    """Send what is recorded inside to ``records``; the sinks are as before whatever happens inside."""
    depth = len(_sinks)
    _sinks.append(records)
    try:
        yield
    finally:
        del _sinks[depth:]


@contextlib.contextmanager
def captured() -> Iterator[list[Record]]:
    """Collect what is recorded inside instead of passing it on; empty when nothing is recorded now."""
    records: list[Record] = []
    with recording_into(records) if recording_active() else contextlib.nullcontext():
        yield records


def hand_over(records: Sequence[Record], tensors: Sequence[torch.Tensor]) -> None:
    """Pass captured records on to the inspector or the capture around this point.

    Args:
        records: As :func:`captured` collected them.
        tensors: One per record, of the same values: the record's own tensor, or what stands for it outside the block
            and carries gradients back into it.
    """
    for record, tensor in zip(records, tensors, strict=True):
        if recording_active():
            _append(dataclasses.replace(record, tensor=tensor))


def hand_over_stages(stages: dict[int, list[Record]]) -> None:
    """Pass on what this rank's stages have recorded in one pass of a pipeline; on all ranks of it.

    Args:
        stages: By number; {} on a rank that has run none.
    """
    if recording_active():
        _sinks[-1].append(StagePass(stages))


def refuse_nesting() -> None:
    """Refuse a second inspector inside the first.

    Raises:
        InspectError: When someone records already.
    """
    if _sinks:
        raise InspectError(
            "inspect_tensor() is already active",
            expected="one inspector at a time",
            got="a second one inside the first",
            fix="leave the first `with` block before the second, or read both from the first",
        )


# --- Passes through the stages of a pipeline: what each stage records, and the order in which all of it is one model's.

Place = tuple[int, int]
"""An event of an inspection, which all ranks have alike (a record, or a pass through stages), and the stage."""


Label = tuple[str, str]
"""``"group."``, or nothing, and a record's name."""


@dataclass(frozen=True)
class Recorded:
    """What one rank has recorded, without the tensors."""

    labels: list[Label]
    """Of every record."""
    places: list[Place]
    """Of every record."""
    events: list[tuple[int, ...] | None]
    """The stages that this rank has run in a pass; None for a record outside of any."""


@dataclass(frozen=True)
class Watched:
    """A record and the last gradient that came by, without adding up: split backward passes come by twice."""

    record: Record
    grads: list[torch.Tensor]  # empty before backward

    @classmethod
    def of(cls, record: Record) -> Watched:
        """Watches a record's tensor, before its backward."""
        watched = cls(record, [])
        if record.keeps_grad and record.source.requires_grad:
            record.source.register_hook(watched._see)
        return watched

    def _see(self, gradient: torch.Tensor) -> None:
        self.grads[:] = [gradient.detach()]


def hand_over_micro_batches(stages: Mapping[int, Sequence[Sequence[Watched]]]) -> None:
    """Pass on what a rank's stages have recorded in a pass whose backward is through, micro-batches put together.

    Args:
        stages: For every stage of this rank, one list of records per micro-batch.
    """
    hand_over_stages({stage: _together(parts) for stage, parts in stages.items()})


def _together(micro_batches: Sequence[Sequence[Watched]]) -> list[Record]:
    """One record for those of the same name and number in every micro-batch, in the order of the first."""
    same: dict[tuple[str | None, str, int], list[Watched]] = {}
    for records in micro_batches:
        seen: Counter[tuple[str | None, str]] = Counter()
        for watched in records:
            key = watched.record.group, watched.record.name
            same.setdefault((*key, seen[key]), []).append(watched)
            seen[key] += 1
    return [_joined(parts) for parts in same.values()]


@torch.no_grad()
def _joined(parts: list[Watched]) -> Record:
    """Record of micro-batches as one of the batch, with the gradients that backward has left by now."""
    first, sources = parts[0].record, [part.record.source.detach() for part in parts]
    whole = _cat(sources)
    if any(part.grads for part in parts):
        every = zip(parts, sources, strict=True)
        grads = [part.grads[0] if part.grads else torch.zeros_like(source) for part, source in every]
        whole.requires_grad_()
        whole.grad = _cat(grads) if whole.dim() else torch.stack(grads).sum()
    return Record(first.name, first.group, whole, (whole,), first.keeps_grad)


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Along the samples; numbers are averaged, and what differs in other dims is a vector of all elements."""
    if not tensors[0].dim():
        every = torch.stack(tensors)
        return every.mean() if every.is_floating_point() else every.sum()
    if any(tensor.shape[1:] != tensors[0].shape[1:] for tensor in tensors):
        return torch.cat([tensor.flatten() for tensor in tensors])
    return torch.cat(tensors)


def placed(entries: Sequence[Record | StagePass]) -> tuple[Recorded, list[Record]]:
    """This rank's records in order, and where they stand among all ranks'."""
    told, records = Recorded([], [], []), []
    for event, entry in enumerate(entries):
        stages = {0: [entry]} if isinstance(entry, Record) else dict(sorted(entry.stages.items()))
        told.events.append(None if isinstance(entry, Record) else tuple(stages))
        for stage, found in stages.items():
            told.labels.extend(_label(record) for record in found)
            told.places.extend([(event, stage)] * len(found))
            records.extend(found)
    return told, records


def _label(record: Record) -> Label:
    return (f"{record.group}." if record.group is not None else ""), record.name


def numbered(labels: Sequence[Label]) -> list[str]:
    """Names: ``"{group.}{k}.{name}"`` for the k-th of its name and group."""
    seen: Counter[str] = Counter()
    names = []
    for prefix, name in labels:
        names.append(f"{prefix}{seen[prefix + name]}.{name}")
        seen[prefix + name] += 1
    return names


def in_order(every: Sequence[Recorded]) -> tuple[list[str], list[list[str]]]:
    """All names in the order of one process, and those of every rank's records.

    Raises:
        InspectError: When ranks that ran the same recorded different names.
    """
    reference: dict[Place, tuple[int, list[int]]] = {}  # the first rank that ran it, and its records there
    for rank, told in enumerate(every):
        for place, here in _rows_by_place(told).items():
            _check_alike(every, reference.setdefault(place, (rank, here)), (rank, here))
    order = sorted(reference)
    for rank, told in enumerate(every):
        for place in order:
            if place[0] >= len(told.events):  # every rank has all events, and of passes the stages that it runs
                _check_alike(every, reference[place], (rank, []))
    labels = [every[reference[place][0]].labels[row] for place in order for row in reference[place][1]]
    names, start, first_of = numbered(labels), 0, {}
    for place in order:
        first_of[place] = start
        start += len(reference[place][1])
    return names, [_names_here(told, names, first_of) for told in every]


def _rows_by_place(told: Recorded) -> dict[Place, list[int]]:
    rows: dict[Place, list[int]] = {
        (event, stage): [] for event, stages in enumerate(told.events) for stage in ((0,) if stages is None else stages)
    }
    for row, place in enumerate(told.places):
        rows[place].append(row)
    return rows


def _names_here(told: Recorded, names: list[str], first_of: Mapping[Place, int]) -> list[str]:
    seen: defaultdict[Place, int] = defaultdict(int)
    found = []
    for place in told.places:
        found.append(names[first_of[place] + seen[place]])
        seen[place] += 1
    return found


def _check_alike(every: Sequence[Recorded], first: tuple[int, list[int]], other: tuple[int, list[int]]) -> None:
    wanted, given = ([every[r].labels[row] for row in there] for r, there in (first, other))
    if wanted == given:
        return
    named = [[numbered(every[r].labels)[row] for row in there] for r, there in (first, other)]
    pairs = zip([*named[0], "nothing more"], [*named[1], "nothing more"], strict=False)
    expected, got = next(pair for pair in pairs if pair[0] != pair[1])
    raise agreed(
        InspectError(
            "Ranks recorded different tensors",
            expected=f"{expected} (rank {first[0]})",
            got=f"{got} (rank {other[0]})",
            fix="record the same names in the same order on every rank",
        )
    )
