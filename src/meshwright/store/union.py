"""One checkpoint of a model whose ranks hold different parts of it by name, as pipeline stages do."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.errors import CheckpointError, join_names
from meshwright.runtime import gather_objects
from meshwright.store.record import GroupRecord, OptimizerRecord, Record


class Others(NamedTuple):
    """Names that other ranks hold and this one does not."""

    entries: frozenset[str] = frozenset()  # of the model
    updated: frozenset[str] = frozenset()  # parameters that the optimizer updates


def names_of_others(entries: Iterable[str], updated: Iterable[str]) -> Others:
    """What the rest of the ranks hold; collective. Costs one small gather where all hold the same.

    Args:
        entries: This rank's names in the model.
        updated: The parameters that its optimizer updates.
    """
    own = (sorted(entries), sorted(updated))
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    if len(set(gather_objects(digest))) == 1:
        return Others()
    every = gather_objects(own)
    return Others(
        frozenset(name for names, _ in every for name in names).difference(own[0]),
        frozenset(name for _, names in every for name in names).difference(own[1]),
    )


def refuse_parts(names: Iterable[str], what: str) -> None:
    """Refuses what would write or fill one rank's part as if it were the whole; collective, one small gather.

    Raises:
        CheckpointError: On every rank, when ranks hold tensors of different names.
    """
    every: list[list[str]] = gather_objects(sorted(names))
    if any(each != every[0] for each in every):
        apart = sorted(set().union(*every) - set(every[0]).intersection(*every))
        raise CheckpointError(
            f"{what} does not join what ranks hold under names of their own",
            expected="the same names on every rank",
            got=f"listed experts or pipeline stages, such as {join_names(apart, 3)}",
            fix="use a CheckpointStore, which does",
        )


def united(record: Record) -> Record:
    """The record of what all ranks hold together; collective, equal on every rank."""
    digest = hashlib.sha256(repr(sorted(record.tensors)).encode()).hexdigest()
    if len(set(gather_objects(digest))) == 1:
        return record
    every: list[Record] = gather_objects(record)
    optimizers = [each.optimizer for each in every if each.optimizer is not None]
    return dataclasses.replace(
        record,
        tensors={name: told for each in every for name, told in each.tensors.items()},
        model_values={name: told for each in every for name, told in each.model_values.items()},
        optimizer=united_optimizer(optimizers) if optimizers else None,
    )


def united_optimizer(every: Sequence[OptimizerRecord]) -> OptimizerRecord:
    """The optimizers of all ranks as one.

    Groups of equal hyperparameters are one group; a parameter that several ranks update is in it once.
    """
    groups: list[GroupRecord] = []
    for record in every:
        for group in record.groups:
            same = next((known for known in groups if known.values == group.values), None)
            if same is None:
                groups.append(GroupRecord(list(group.parameters), group.values))
            else:
                same.parameters.extend(name for name in group.parameters if name not in same.parameters)
    return OptimizerRecord(
        every[0].kind,
        groups,
        {name: keys for record in every for name, keys in record.tensor_keys.items()},
        {name: values for record in every for name, values in record.values.items()},
    )
