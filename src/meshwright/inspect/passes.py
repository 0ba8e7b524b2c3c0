"""Passes through the stages of a pipeline: what each stage records, and the order in which all of it is one model's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.errors import InspectError
from meshwright.inspect.recording import Record, StagePass, hand_over_stages
from meshwright.runtime import agreed

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


def hand_over_micro_batches(stages: Mapping[int, Sequence[Sequence[Record]]]) -> None:
    """Passes on what a rank's stages have recorded in a pass, micro-batches put together.

    Args:
        stages: For every stage of this rank, one list of records per micro-batch.
    """
    hand_over_stages({stage: _together(parts) for stage, parts in stages.items()})


def _together(micro_batches: Sequence[Sequence[Record]]) -> list[Record]:
    """One record for those of the same name and number in every micro-batch, in the order of the first."""
    same: dict[tuple[str | None, str, int], list[Record]] = {}
    for records in micro_batches:
        seen: Counter[tuple[str | None, str]] = Counter()
        for record in records:
            key = record.group, record.name
            same.setdefault((*key, seen[key]), []).append(record)
            seen[key] += 1
    return [_joined(parts) for parts in same.values()]


@torch.no_grad()
def _joined(parts: list[Record]) -> Record:
    """Records of micro-batches as one of the batch, with the gradients that backward has left by now."""
    if len(parts) == 1:
        return parts[0]
    whole = _cat([record.source.detach() for record in parts])
    grads = [record.grad for record in parts]
    if parts[0].keeps_grad and any(record.source.requires_grad for record in parts):
        whole.requires_grad_()
        if any(grad is not None for grad in grads):
            every = zip(parts, grads, strict=True)
            found = [torch.zeros_like(record.source) if grad is None else grad for record, grad in every]
            whole.grad = _cat(found) if whole.dim() else torch.stack(found).sum()
    return Record(parts[0].name, parts[0].group, whole, whole, parts[0].keeps_grad)


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
