"""Record tensors in a model's forward, also inside recomputed, sharded and pipelined blocks.

Recorded tensors must leave a block as outputs, so that FSDP2's hooks see them: the block captures records
(:func:`captured`), and hands them over outside (:func:`hand_over`) with the tensors that stand for them there. A
pipeline hands over the records of its stages, which are merged into the order of the model in one process.
"""

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
    """The tensor that a loss may use: the recorded one, or the output of a block that stands for it."""
    sources: tuple[torch.Tensor, ...]
    """The tensors that the model computed with, which have the whole gradients. One; in a pipeline one per micro-batch
    on the stage that recorded them, and none on others."""
    keeps_grad: bool
    gradient_factor: float = 1.0
    """Factor for gradients of ``sources``: those inside a pipeline have been divided by its number of ranks."""

    @property
    def source(self) -> torch.Tensor:
        """Return this rank's recorded tensor, micro-batches concatenated along dim 0."""
        if len(self.sources) == 1:
            return self.sources[0]
        return torch.cat([each.detach() for each in self.sources]) if self.sources else self.tensor.detach()[:0]

    @property
    def grad(self) -> torch.Tensor | None:
        """Return the gradient of ``source``, if it is kept and backward has computed it."""
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
    """Records of this rank in one pass through the stages of a pipeline."""

    stages: dict[int, list[Record]]
    """Records by the number of every stage that this rank has run, also of those without any."""


# An inspector's list, then those of the captures inside it, innermost last. Not a context variable, for the threads of
# backward must see it, too.
_sinks: list[list[Any]] = []


def recording_active() -> bool:
    """Return whether :func:`record_tensor` records: an inspector is active, and backward is not recomputing."""
    return bool(_sinks) and current_graph_task_id() == -1


def record_tensor(x: torch.Tensor, name: str, group: str | None = None, requires_grad: bool = True) -> torch.Tensor:
    """Record a tensor of the model's forward for the surrounding ``inspect_tensor``; without one, do nothing.

    In code that torch recomputes (``use_reentrant=False``) the tensor is recorded once. With torch's reentrant
    checkpoint the recorded tensor has no gradient, since its forward runs without autograd.

    Args:
        x: Any tensor but a parameter, on each rank that of its part of the batch. A DTensor counts as a whole tensor.
        name: Its name; may repeat, as in a stack of layers.
        group: Optional name of a group, a prefix of the name.
        requires_grad: Whether to keep its gradient for the statistics.

    Returns:
        ``x`` itself. Seed: BMTrain, which returns nothing.

    Raises:
        InspectError: When ``x`` is a parameter (use ``inspect_model``) or no tensor.
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
    """Append records made inside the context to ``records``."""
    depth = len(_sinks)
    _sinks.append(records)
    try:
        yield
    finally:
        del _sinks[depth:]


@contextlib.contextmanager
def captured() -> Iterator[list[Record]]:
    """Capture records made inside the context; none if no inspector is active."""
    records: list[Record] = []
    with recording_into(records) if recording_active() else contextlib.nullcontext():
        yield records


def hand_over(records: Sequence[Record], tensors: Sequence[torch.Tensor]) -> None:
    """Pass captured records on to the surrounding inspector or capture.

    Args:
        records: Records from :func:`captured`.
        tensors: One per record, with equal values: the record's own tensor, or the block's output that stands for it
            and carries gradients into the block.
    """
    for record, tensor in zip(records, tensors, strict=True):
        if recording_active():
            _append(dataclasses.replace(record, tensor=tensor))


def hand_over_stages(stages: dict[int, list[Record]]) -> None:
    """Pass on the records of this rank's stages in one pass of a pipeline; on all its ranks.

    Args:
        stages: Records by the stage's number; {} on a rank that has run none.
    """
    if recording_active():
        _sinks[-1].append(StagePass(stages))


def refuse_nesting() -> None:
    """Check that no inspector is active.

    Raises:
        InspectError: When one is.
    """
    if _sinks:
        raise InspectError(
            "inspect_tensor() is already active",
            expected="one inspector at a time",
            got="a second one inside the first",
            fix="leave the first `with` block before the second, or read both from the first",
        )


# --- Records of pipeline stages, and the order of all ranks' records.
#
# An inspection is a sequence of events, the same on all ranks: a record, or a pass through stages. A record's place is
# the number of its event and of its stage, so sorting places gives the order of the model in one process.

Place = tuple[int, int]
"""Number of an event, and of a stage; stage 0 outside of pipelines."""

Label = tuple[str, str]
"""``"group."``, or nothing, and a record's name."""


@dataclass(frozen=True)
class Recorded:
    """Labels and places of one rank's records, without the tensors."""

    labels: list[Label]
    """One per record."""
    places: list[Place]
    """One per record."""
    events: list[tuple[int, ...] | None]
    """Stages that this rank has run in each pass; None for a record outside of passes."""


@dataclass(frozen=True)
class Watched:
    """A record, and the last gradient that backward computed for it; a split backward computes it twice."""

    record: Record
    grads: list[torch.Tensor]
    """The gradient; empty before backward."""

    @classmethod
    def of(cls, record: Record) -> Watched:
        """Watch a record's tensor, before its backward."""
        watched = cls(record, [])
        if record.keeps_grad and record.source.requires_grad:
            record.source.register_hook(watched._see)
        return watched

    def _see(self, gradient: torch.Tensor) -> None:
        self.grads[:] = [gradient.detach()]


def hand_over_micro_batches(stages: Mapping[int, Sequence[Sequence[Watched]]]) -> None:
    """Pass on the records of a rank's stages in a pass whose backward is done, micro-batches merged.

    Args:
        stages: For every stage of this rank, one list of records per micro-batch.
    """
    hand_over_stages({stage: _merged(parts) for stage, parts in stages.items()})


def _merged(micro_batches: Sequence[Sequence[Watched]]) -> list[Record]:
    """Merge the k-th records of a name of all micro-batches into one, in the order of the first micro-batch."""
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
    """Concatenate the records of micro-batches, and their gradients."""
    first, sources = parts[0].record, [part.record.source.detach() for part in parts]
    whole = _cat(sources)
    if any(part.grads for part in parts):
        every = zip(parts, sources, strict=True)
        grads = [part.grads[0] if part.grads else torch.zeros_like(source) for part, source in every]
        whole.requires_grad_()
        whole.grad = _cat(grads) if whole.dim() else torch.stack(grads).sum()
    return Record(first.name, first.group, whole, (whole,), first.keeps_grad)


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate along dim 0; average 0-dim tensors, and flatten those that differ in other dims."""
    if not tensors[0].dim():
        every = torch.stack(tensors)
        return every.mean() if every.is_floating_point() else every.sum()
    if any(tensor.shape[1:] != tensors[0].shape[1:] for tensor in tensors):
        return torch.cat([tensor.flatten() for tensor in tensors])
    return torch.cat(tensors)


def place_records(entries: Sequence[Record | StagePass]) -> tuple[Recorded, list[Record]]:
    """Return the labels and places of this rank's records, and the records, in order."""
    found, records = Recorded([], [], []), []
    for event, entry in enumerate(entries):
        stages = {0: [entry]} if isinstance(entry, Record) else dict(sorted(entry.stages.items()))
        found.events.append(None if isinstance(entry, Record) else tuple(stages))
        for stage, of_stage in stages.items():
            found.labels.extend((f"{each.group}." if each.group is not None else "", each.name) for each in of_stage)
            found.places.extend([(event, stage)] * len(of_stage))
            records.extend(of_stage)
    return found, records


def number_names(labels: Sequence[Label]) -> list[str]:
    """Return the names ``"{group.}{k}.{name}"`` of labels, for the k-th of its name and group."""
    seen: Counter[str] = Counter()
    names = []
    for prefix, name in labels:
        names.append(f"{prefix}{seen[prefix + name]}.{name}")
        seen[prefix + name] += 1
    return names


def order_names(every: Sequence[Recorded]) -> tuple[list[str], list[list[str]]]:
    """Return all names in the order of one process, and the names of every rank's records.

    Raises:
        InspectError: When ranks that ran the same stage recorded different names.
    """
    reference: dict[Place, tuple[int, list[int]]] = {}  # the first rank that has a place, and its records there
    for rank, recorded in enumerate(every):
        for place, here in _rows_by_place(recorded).items():
            _check_alike(every, reference.setdefault(place, (rank, here)), (rank, here))
    order = sorted(reference)
    for rank, recorded in enumerate(every):
        for place in order:
            if place[0] >= len(recorded.events):  # all ranks must have all events
                _check_alike(every, reference[place], (rank, []))
    labels = [every[reference[place][0]].labels[row] for place in order for row in reference[place][1]]
    names, start, first_of = number_names(labels), 0, {}
    for place in order:
        first_of[place] = start
        start += len(reference[place][1])
    return names, [_names_here(recorded, names, first_of) for recorded in every]


def _rows_by_place(recorded: Recorded) -> dict[Place, list[int]]:
    rows: dict[Place, list[int]] = {
        (event, stage): []
        for event, stages in enumerate(recorded.events)
        for stage in ((0,) if stages is None else stages)
    }
    for row, place in enumerate(recorded.places):
        rows[place].append(row)
    return rows


def _names_here(recorded: Recorded, names: list[str], first_of: Mapping[Place, int]) -> list[str]:
    seen: defaultdict[Place, int] = defaultdict(int)
    found = []
    for place in recorded.places:
        found.append(names[first_of[place] + seen[place]])
        seen[place] += 1
    return found


def _check_alike(every: Sequence[Recorded], first: tuple[int, list[int]], other: tuple[int, list[int]]) -> None:
    wanted, given = ([every[r].labels[row] for row in there] for r, there in (first, other))
    if wanted == given:
        return
    named = [[number_names(every[r].labels)[row] for row in there] for r, there in (first, other)]
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
