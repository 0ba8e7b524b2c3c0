"""Save and load a model's weights as one ordinary state dict, in one file or a folder, from and into any layout."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.errors import CheckpointError, join_names
from meshwright.nn.fp8 import is_scaling_state
from meshwright.optim.loaded_weights import masters_of, weights_were_loaded
from meshwright.optim.mixed_precision import MasterWeights
from meshwright.runtime import broadcast_object, rank, require_distributed, same_on_every_rank, wait_for_all_ranks
from meshwright.store.entries import ModelEntries, in_model_order, model_entries, stored_name, to_rank_order_
from meshwright.store.folder import configs_of, is_folder, read_folder, write_folder
from meshwright.store.optimizer_state import refuse_parts
from meshwright.store.tensor_files import (
    check_tensors,
    failed_before,
    make_folder,
    read_file,
    wait_for_saves,
    write_file,
    write_later,
)
from meshwright.store.transfer import OwnedTensor, WholeEntries, collect_named, entries_with_stages, refuse_stages


class LoadedKeys(NamedTuple):
    """The names that ``load(strict=False)`` skipped; the same two fields as of torch's ``load_state_dict``."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def save(model: nn.Module, file: str | os.PathLike[str], non_blocking: bool = False) -> None:
    """Write all weights and buffers of a model into one file, with plain names and full shapes; collective.

    Plain torch loads it: ``torch.load(file)``, or safetensors when the name ends in ``.safetensors``. The tensors are
    gathered one by one; rank 0 keeps them and writes. The file appears under its name when it is complete.

    Args:
        model: Plain, DDP, FSDP2, made of Blocks, cut by ``pipeline_parallel``, or any of these compiled.
        file: Where to write; missing folders are made.
        non_blocking: Write in the background. The next ``save`` or ``load``, :func:`wait_for_saves` and the end of the
            program wait for it. When it fails, the next ``save`` warns of that and writes at once; the others raise it.

    Raises:
        CheckpointError: On every rank, when the file cannot be written.
    """
    require_distributed("save")
    wait_for_all_ranks("save")
    path = Path(file)
    non_blocking = not failed_before() and non_blocking
    with same_on_every_rank():
        if rank() == 0:
            make_folder(path.parent)
    state_dict = whole_state_dict(model)
    with same_on_every_rank():
        if rank() == 0 and non_blocking:
            write_later(path, state_dict)
        elif rank() == 0:
            write_file(path, state_dict)


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Copy what :func:`save` writes to the host of rank 0; return an empty dict elsewhere; collective.

    Args:
        model: As for :func:`save`.
    """
    with same_on_every_rank():
        entries, on_stages = entries_with_stages(model)
    return _gathered(entries, _whole(entries, on_stages, "save"))


def save_folder(
    model: nn.Module,
    folder: str | os.PathLike[str],
    prefix: str | None = None,
    shard_bytes: int = 2**30,
    non_blocking: bool = False,
    tokenizer: Any = None,
) -> None:
    """Write what :func:`save` writes into a folder of safetensors files with an index; collective.

    :func:`load` reads it, and transformers' ``from_pretrained``: beside the files of its models lie their configs.
    Ranks take turns with the files: none holds more than one of them. An earlier folder stays until all are written.

    Args:
        model: As for :func:`save`.
        folder: Made if it is missing.
        prefix: Files are named ``prefix.model-00001-of-….safetensors``; None leaves it out.
        shard_bytes: Largest size of a file in bytes; a larger tensor has a file of its own.
        non_blocking: Write in the background, as :func:`save` does. Each rank then holds all of its files at once.
        tokenizer: A tokenizer or processor, whose files and chat template ``save_pretrained`` writes beside.

    Raises:
        CheckpointError: On every rank, when the folder cannot be written, or the model holds more than tensors.
    """
    require_distributed("save_folder")
    wait_for_all_ranks("save_folder")
    non_blocking = not failed_before() and non_blocking
    with same_on_every_rank():
        refuse_stages(model, "save_folder")
        entries = model_entries(model)
        check_tensors(Path(folder), entries.raw)
        beside = [*configs_of(entries.module), *([tokenizer] if tokenizer is not None else [])]
    whole = _whole(entries, {}, "save_folder")
    own, owners = in_model_order(entries, entries.tensors), whole.owners
    outlines = {name: owner.empty("meta") for name, owner in owners.items()} or own
    stem = f"{prefix}.model" if prefix else "model"
    write_folder(
        {name: outlines[whole.first[name]] for name in whole.names},
        Path(folder),
        stem,
        shard_bytes=shard_bytes,
        metadata={"format": "pt"},
        non_blocking=non_blocking,
        beside=beside,
        gather=lambda name, to: collect_named(whole.first[name], own, owners, to),
    )


def _whole(entries: ModelEntries, on_stages: Mapping[str, OwnedTensor], what: str) -> WholeEntries:
    """Collect the entries of all ranks, and refuse parts that are not of a pipeline; collective."""
    whole = WholeEntries.of(entries, on_stages)
    if not whole.in_parts:
        refuse_parts(entries.raw, what)
    return whole


def _gathered(entries: ModelEntries, whole: WholeEntries) -> dict[str, Any]:
    """Copy all entries to the host of rank 0; return an empty dict elsewhere, where one tensor at a time is whole."""
    own = in_model_order(entries, entries.tensors)
    copies = {name: collect_named(name, own, whole.owners) for name in whole.tensors()}
    found = {name: copies[first] for name, first in whole.first.items()} | whole.values
    return {name: found[name] for name in whole.names} if rank() == 0 else {}


def load(model: nn.Module, file: str | os.PathLike[str], strict: bool = True) -> LoadedKeys:
    """Load weights and buffers from a file of :func:`save`, or any state dict of plain torch; collective.

    Only rank 0 reads, without holding the whole file in memory; the other ranks receive their parts tensor by tensor.
    An optimizer that ``accelerate`` or a booster has built takes the weights over, whatever copies it keeps; its states
    stay. One with master weights that was built by hand must be built after loading.

    Args:
        model: As for :func:`save`; its values are replaced in place, in its dtypes.
        file: Read as safetensors when the name ends in ``.safetensors``, else as ``torch.save`` writes. A pickle is
            read with ``weights_only=True``: it cannot run code. Or a folder of several files with an index, as
            :func:`save_folder` and transformers write it.
        strict: Every name of the model must be in the file and the other way round. Of names that are tied one is
            enough, and all that are there must be equal.

    Returns:
        The names passed over; none if ``strict``.

    Raises:
        CheckpointError: On every rank, naming all missing, unexpected and misshapen entries at once; the model is then
            as it was.
    """
    require_distributed("load")
    wait_for_all_ranks("load")
    path = Path(file)
    found: dict[str, Any] = {}
    with same_on_every_rank():
        wait_for_saves()
        entries, on_stages = entries_with_stages(model)
        if rank() == 0:
            found = read_folder(path)[0] if is_folder(path) else read_file(path)
    own = {name: tuple(value.shape) if isinstance(value, torch.Tensor) else None for name, value in found.items()}
    floats = [n for n, value in found.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    wide = {name for name in floats if found[name].dtype.itemsize > 2}
    stored, wide = broadcast_object((own, wide))
    # Values that half precision cannot hold go into the masters; the weights are rounded from these afterwards.
    masters = masters_of(model)
    if masters is not None:
        entries = _finest(entries, masters, wide)
    whole = _whole(entries, on_stages, "load")
    tied = whole.tied()
    if strict:
        with same_on_every_rank():
            _check_tied(path, found, tied)
    keys = _compare(path, whole.shapes, stored, tied, strict)
    _fill(entries, whole, found, stored)
    if masters is not None:
        masters.write_back()
    weights_were_loaded(model)
    return keys


def _finest(entries: ModelEntries, masters: MasterWeights, wide: Set[str]) -> ModelEntries:
    """Replace weights by their fp32 masters, where the file holds more than half precision."""
    finer = {id(v): masters.of[v] for n, v in entries.tensors.items() if n in wide and v in masters.of}
    raw = {name: finer.get(id(value), value) for name, value in entries.raw.items()}
    tensors = {name: finer.get(id(value), value) for name, value in entries.tensors.items()}
    return dataclasses.replace(entries, raw=raw, tensors=tensors)


def _compare(
    path: Path,
    wanted: Mapping[str, tuple[int, ...] | None],
    stored: Mapping[str, tuple[int, ...] | None],
    tied: Mapping[str, Sequence[str]],
    strict: bool,
) -> LoadedKeys:
    # transformers stores tied tensors under one of their names.
    missing = [name for name in wanted if not any(each in stored for each in (name, *tied.get(name, ())))]
    unexpected = [name for name in stored if name not in wanted]
    misshapen = [
        f"{name}: {stored[name]} in the file, {shape} in the model"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    problems = [f"other shapes: {join_names(misshapen)}"] if misshapen else []
    for what, names in (("missing", missing), ("unexpected", unexpected)) if strict else ():
        wrong = [name for name in names if not is_scaling_state(name)]  # fp8 may come and go
        problems += [f"{what}: {join_names(wrong)}"] if wrong else []
    if problems:
        raise CheckpointError(
            f"{path} does not fit the model; nothing was loaded",
            expected="the model's names and shapes",
            got="; ".join(problems),
            fix="build the model it was saved from" + ("" if misshapen else ", or pass strict=False to load the rest"),
        )
    return LoadedKeys(missing, unexpected)


@torch.no_grad()
def _fill(entries: ModelEntries, whole: WholeEntries, found: Mapping[str, Any], stored: Container[str]) -> None:
    """Send every tensor from rank 0 into its place, tied ones once, and then everything else."""
    tied = whole.tied()
    for name in whole.tensors():
        given = next((each for each in (name, *tied[name]) if each in stored), None)
        if given is None:
            continue
        target = entries.tensors.get(name)
        whole.spread(name, found.get(given), target)
        if target is not None:
            to_rank_order_(entries, {name: target})
    if whole.values:
        values = broadcast_object({name: found[name] for name in whole.values if name in found})
        own = {name: values[stored_name(name)] for name in entries.raw if stored_name(name) in values}
        if own:
            entries.module.load_state_dict(entries.raw | own)


def _check_tied(path: Path, found: Mapping[str, Any], tied: Mapping[str, Sequence[str]]) -> None:
    """Refuse a file with different tensors for what is one in the model: all but one would be lost.

    Raises:
        CheckpointError: Naming the first two that differ.
    """
    for name, others in tied.items():
        for other in others:
            if name < other and name in found and other in found and not _equal(found[name], found[other]):
                raise CheckpointError(
                    f"{path} does not fit the model; nothing was loaded",
                    expected=f"one tensor for {name} and {other}, which the model ties",
                    got="two that differ",
                    fix="build the model with untied weights, or pass strict=False to load the first",
                )


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)
