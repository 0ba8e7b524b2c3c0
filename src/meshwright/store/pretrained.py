"""Read pretrained weights by slices: of transformers' folders, our checkpoints, and torch's distributed checkpoints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import CheckpointError, join_names, readable_bytes
from meshwright.nn.fp8 import is_scaling_state
from meshwright.runtime import broadcast_object, rank, same_on_every_rank, world_size
from meshwright.runtime.torch_internals import checkpoint as keys
from meshwright.store.conversions import Plan, plan_for
from meshwright.store.dcp_folder import METADATA, open_dcp
from meshwright.store.derived_tensors import with_derived
from meshwright.store.entries import dtype_named
from meshwright.store.folder import INDEX, read_index
from meshwright.store.manifest import (
    MANIFEST,
    RECORD,
    TENSORS,
    check_contents,
    check_present,
    complete_checkpoints,
    is_first_of_host,
    read_manifest,
    read_record,
)
from meshwright.store.shards import INDEX as SHARD_INDEX
from meshwright.store.stored_shards import FolderIndex, OpenFiles
from meshwright.store.stored_tensors import Index, SafetensorsFile, StoredTensor, join_files
from meshwright.store.tensor_files import wait_for_saves

_SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MODEL = "model."
_COPY_AGAIN = "copy the weights again from their source, to every host"
_ALLOW = (
    "name weights that have them; or pass allow_missing_weights=True to accelerate (in a training file: "
    "model.allow_missing_weights = true), and the model's own initialisation fills them; or build it without them"
)
# The tensors that quantized layers keep beside, or in place of, their weights.
_QUANTIZED = re.compile(
    r"\.(weight_scale_inv|weight_scale|input_scale|qweight|qzeros|g_idx|SCB|weight_packed|weight_zero_point|absmax"
    r"|quant_map|weight\.(absmax|quant_map|quant_state\..*)|\w+_blocks)$"
)


class StoredWeights:
    """Weights on disk, under the names of a model.

    Each rank opens them for itself and reads its own parts. The bytes of a part go from the file into the tensor that
    is returned; nothing of the file is mapped or kept. Ranks of one host share the system's page cache, so each byte
    comes from the disk once per host, as long as the host has memory to keep it in between.
    """

    num_bytes: int
    """Size of everything that the model is filled from, as it is stored."""
    missing: tuple[str, ...]
    """Names of the model that the weights lack, for example of a head that is to be trained first."""
    unused: tuple[str, ...]
    """Stored names that a model of another class has, such as those of its head."""

    def __init__(
        self, path: Path, files: Sequence[SafetensorsFile | OpenFiles], plan: Plan, tied: Mapping[str, list[str]]
    ) -> None:
        self._path, self._files = path, files
        self._tensors = dict(plan.tensors)
        for group in tied.values():
            first = next((name for name in group if name in plan.tensors), None)
            if first is not None:
                self._tensors |= dict.fromkeys(group, plan.tensors[first])
        self.names = frozenset(self._tensors)
        self.num_bytes = sum(each.num_bytes for each in {id(each): each for each in self._tensors.values()}.values())
        self.missing = tuple(name for group in tied.values() for name in group if name not in self._tensors)
        self.unused = tuple(plan.extra)

    def __str__(self) -> str:
        """Return where the weights are, and their size."""
        count = sum(each.count if isinstance(each, OpenFiles) else 1 for each in self._files)
        files = f"{count} file{'s' if count != 1 else ''}, " if count else ""
        return f"{self._path} ({files}{readable_bytes(self.num_bytes)})"

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        allow_missing: bool = False,
        found: FoundWeights | None = None,
    ) -> StoredWeights:
        """Find the weights and match them with a model; only headers and indexes are read.

        Where a file holds both names of tensors that the model ties, each rank compares its share of their rows.

        Args:
            path: A folder of safetensors files as transformers' ``save_pretrained`` writes it, its index, or one
                safetensors file; a checkpoint of Meshwright, or the directory of a run, whose newest one is taken; or a
                folder of ``torch.distributed.checkpoint``.
            model: The whole plain model; its tensors may be on ``meta``. The names of a transformers model are
                converted as ``from_pretrained`` does.
            allow_missing: Accept weights that lack some of the model's. :attr:`missing` names them.
            found: What :func:`find_together` has found there; None looks itself.

        Raises:
            CheckpointError: Naming everything that is missing, too much or misshapen, or the file that cannot be read.
                The model is as it was.
        """
        wait_for_saves()
        found = _find(Path(path)) if found is None else found
        entries = {name: each for name, each in model.state_dict(keep_vars=True).items() if torch.is_tensor(each)}
        groups: dict[int, list[str]] = {}
        for name, tensor in entries.items():
            groups.setdefault(id(tensor), []).append(name)
        tied = {group[0]: group for group in groups.values()}
        _refuse_quantized(found, entries)
        plan = _planned(found, model, entries)
        weights = cls(found.path, found.files, plan, tied)
        weights._check(entries, plan, allow_missing)
        weights._check_tied(tied, plan)
        return weights

    def __contains__(self, name: object) -> bool:
        """Return whether there are values for an entry of the model."""
        return name in self._tensors

    def read(self, name: str, index: Index, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a part of an entry into a tensor on the host, reading only the bytes needed.

        Args:
            name: Name of a parameter or persistent buffer; of tied ones any.
            index: For every dim of the whole tensor a slice of step 1, or int64 positions.
            dtype: Type to cast to.
            out: Tensor of the part's shape and of this type to fill; None makes a new one.

        Raises:
            CheckpointError: When the file cannot be read any more.
        """
        try:
            return self._tensors[name].read(index, dtype, out)
        except OSError as error:
            raise CheckpointError(
                f"Reading {name} from {self._path} failed", got=str(error), fix=_COPY_AGAIN
            ) from error

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _check(self, entries: Mapping[str, torch.Tensor], plan: Plan, allow_missing: bool) -> None:
        """Refuse weights that do not fit, and keep the names that do not count out of :attr:`unused`."""
        misshapen, other_kind = [], []
        for name, stored in plan.tensors.items():
            entry = entries[name]
            if stored.shape != tuple(entry.shape):
                misshapen.append(f"{name}: {stored.shape} in the files, {tuple(entry.shape)} in the model")
            elif entry.is_floating_point() and not stored.dtype.is_floating_point:
                other_kind.append(f"{name}: {stored.dtype} in the files, {entry.dtype} in the model")
        missing, extra = _that_count(plan, self.missing)
        self.unused = tuple(extra)
        if allow_missing and self._tensors:
            missing = []
        # Another head is no mistake, as long as the rest fits.
        misfit = _misfits(plan, extra)
        if not (missing or misfit or misshapen or other_kind or plan.failed):
            return
        named = (("missing", missing), ("too much", extra), ("other shapes", misshapen), ("other types", other_kind))
        problems = [f"{what}: {join_names(names)}" for what, names in (*named, ("not converted", plan.failed)) if names]
        only_missing = self._tensors and not (misfit or misshapen or other_kind or plan.failed)
        raise CheckpointError(
            f"{self._path} does not fit the model; nothing was loaded",
            expected="the model's names and shapes",
            got="; ".join(problems),
            fix=_ALLOW if only_missing else "build the model that the weights were saved from, or name other weights",
        )

    def _check_tied(self, tied: Mapping[str, list[str]], plan: Plan) -> None:
        """Refuse different values for what is one tensor in the model; each rank looks at its share of the rows."""
        for group in tied.values():
            first, *others = [name for name in group if name in plan.tensors] or [""]
            for other in others:
                if not _same_values(plan.tensors[first], plan.tensors[other]):
                    raise CheckpointError(
                        f"{self._path} does not fit the model; nothing was loaded",
                        expected=f"one tensor for {first} and {other}, which the model ties",
                        got="two that differ",
                        fix="build the model with untied weights (tie_word_embeddings=False in its config)",
                    )


def _that_count(plan: Plan, missing: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return missing and extra names without those that mean nothing."""
    model, new = plan.transformers_model, set(plan.new)
    missing = [name for name in missing if not is_scaling_state(name) and name not in new]  # fp8 may come and go
    extra = [name for name in plan.extra if not is_scaling_state(name)]
    if model is None:
        return missing, extra
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
    missing = [name for name in missing if not any(re.search(pattern, name) for pattern in ignored)]
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    # Buffers that older versions stored, and that models now compute.
    computed = {name.rpartition(".")[2] for name, _ in model.named_buffers()} & {"inv_freq", "position_ids"}
    extra = [name for name in extra if not any(re.search(pattern, name) for pattern in ignored)]
    return missing, [name for name in extra if name.rpartition(".")[2] not in computed]


def _misfits(plan: Plan, extra: list[str]) -> list[str]:
    """Return the extra names that do not stand apart, as another head does: of further layers, or inside of layers."""
    if plan.transformers_model is None:
        return extra
    base = f"{plan.transformers_model.base_model_prefix}."

    def path(name: str) -> list[str]:
        return ["*" if part.isdigit() else part for part in name.removeprefix(base).split(".")]

    own = {tuple(path(name)[:end]) for name in plan.names for end in (-1, None)} - {()}
    containers = {()} | {module[:end] for module in own for end in range(len(module))}
    found = []
    for name in extra:
        parts = path(name)
        ancestor = next(each for end in range(len(parts), -1, -1) if (each := tuple(parts[:end])) in own | containers)
        if ancestor in own or "*" in ancestor:
            found.append(name)
    return found


def _same_values(one: StoredTensor, other: StoredTensor) -> bool:
    if one is other or one.shape != other.shape or not one.shape:
        return one is other or one.shape == other.shape
    rows = one.shape[0]
    first, end = rows * rank() // world_size(), rows * (rank() + 1) // world_size()
    step = max(1, 2**22 * rows // max(1, one.num_bytes))
    for at in range(first, end, step):
        index = (slice(at, min(at + step, end)), *(slice(0, size) for size in one.shape[1:]))
        if not torch.equal(one.read(index, one.dtype), other.read(index, other.dtype).to(one.dtype)):
            return False
    return True


# --- Where the weights are


def check_weights(path: str | os.PathLike[str]) -> None:
    """Refuse a path where no weights can be read, without a model; only headers and indexes are read.

    Raises:
        CheckpointError: Saying what is wrong with it.
    """
    for file in _find(Path(path)).files:
        file.close()


def find_together(path: str | os.PathLike[str] | None) -> FoundWeights | None:
    """Let rank 0 read the headers of safetensors files for all ranks; collective.

    The others then open the files alone that they read from. Checkpoints and torch's distributed checkpoints have
    indexes, which each rank reads.

    Args:
        path: As for :meth:`StoredWeights.open`; None where there are no weights.

    Returns:
        What was found; None where this rank has to look itself.

    Raises:
        CheckpointError: On every rank, when rank 0 cannot read the weights.
    """
    if world_size() == 1:
        return None
    with same_on_every_rank():
        found = None
        if rank() == 0 and path is not None:
            wait_for_saves()
            found = _find(Path(path))
            if not found.files or not all(isinstance(file, SafetensorsFile) for file in found.files):
                found = None
    asked, found = broadcast_object((str(path), found))
    return found if asked == str(path) else None


@dataclass
class FoundWeights:
    """Tensors on disk, by their names there."""

    path: Path
    tensors: dict[str, StoredTensor]
    files: Sequence[SafetensorsFile | OpenFiles] = ()
    config: dict[str, Any] = field(default_factory=dict)
    """``config.json`` beside them."""
    in_state: bool = False
    """Whether they may be a part of a larger state, under a prefix."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the headers of the files, of which the tensors are made again."""
        joined = join_files([file for file in self.files if isinstance(file, SafetensorsFile)])
        return {**self.__dict__, "tensors": None if joined.keys() == self.tensors.keys() else list(self.tensors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        joined = join_files([file for file in self.files if isinstance(file, SafetensorsFile)])
        self.tensors = {name: joined[name] for name in state["tensors"] or joined}


def _find(path: Path) -> FoundWeights:
    if path.is_file():
        return _in_index(path) if path.name.endswith(INDEX) else _in_file(path)
    if not path.is_dir():
        raise CheckpointError(
            f"There are no weights at {path}",
            expected="a folder of weights, or a safetensors file, that every host can see",
            got="no such file or folder",
            fix="check the path; put the weights on a file system that all hosts share, or on each",
        )
    if (path / MANIFEST).is_file():
        return _in_checkpoint(path)
    # ``meshwright train`` makes a folder of its own for them.
    if complete := complete_checkpoints(path) or complete_checkpoints(path / "checkpoints"):
        return _in_checkpoint(complete[-1][1])
    if (path / METADATA).is_file():
        return FoundWeights(path, open_dcp(path), in_state=True)
    # The order of from_pretrained.
    for name in ("model.safetensors", f"model.safetensors{INDEX}"):
        if (path / name).is_file():
            return _find(path / name)
    return _in_folder(path)


def _in_folder(path: Path) -> FoundWeights:
    """Look for weights under other names than transformers'."""
    indices = sorted(path.glob(f"*{_SUFFIX}{INDEX}"))
    singles = [file for file in sorted(path.glob(f"*{_SUFFIX}")) if "optimizer" not in file.name]
    if len(indices) == 1:
        return _in_index(indices[0])
    if not indices and len(singles) == 1:
        return _in_file(singles[0])
    files = [] if indices else [SafetensorsFile(file) for file in singles]
    if files and all(keys.CUSTOM_METADATA_KEY in file.metadata for file in files):
        return FoundWeights(path, join_files(files), files, _config(path), in_state=True)
    pickles = [file for file in sorted(path.iterdir()) if file.suffix in _PICKLES and file.name != "training_args.bin"]
    if pickles and not singles:
        raise _pickle(pickles[0])
    raise CheckpointError(
        f"{path} holds {'more than one set of weights' if singles or indices else 'no weights'}",
        expected=f"model.safetensors, or an index (*{_SUFFIX}{INDEX})",
        got=join_names(sorted(file.name for file in path.iterdir()) or ["an empty folder"]),
        fix="name the file to read" if singles or indices else "check the path",
    )


def _in_file(path: Path) -> FoundWeights:
    if path.suffix in _PICKLES:
        raise _pickle(path)
    if path.suffix != _SUFFIX:
        raise CheckpointError(
            f"{path} is of a kind that cannot be read by slices", expected=f"a file that ends in {_SUFFIX}",
            got=path.suffix or "no suffix", fix="convert it to safetensors",
        )  # fmt: skip
    file = SafetensorsFile(path)
    return FoundWeights(path, join_files([file]), [file], _config(path.parent))


def _pickle(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle, which cannot be read by slices, and could run code",
        expected="weights in safetensors files",
        got=f"a file that ends in {path.suffix}",
        fix="convert it once: from_pretrained and then save_pretrained write safetensors, or "
        "safetensors.torch.save_model",
    )


def _in_index(path: Path) -> FoundWeights:
    weight_map, _ = read_index(path)
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (path.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{path} names files that are absent", expected=f"{len(names)} files beside it",
            got=f"none of the name {join_names(absent)}", fix=_COPY_AGAIN,
        )  # fmt: skip
    if any(Path(name).suffix in _PICKLES for name in names):
        raise _pickle(path.parent / names[0])
    files = [SafetensorsFile(path.parent / name) for name in names]
    tensors = join_files(files)
    lacking = sorted(weight_map.keys() - tensors.keys())
    if lacking:
        raise CheckpointError(
            f"{path} does not fit its files", expected="files with all tensors that it names",
            got=f"none of the name {join_names(lacking)}", fix=_COPY_AGAIN,
        )  # fmt: skip
    return FoundWeights(path.parent, {name: tensors[name] for name in weight_map}, files, _config(path.parent))


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _in_checkpoint(path: Path) -> FoundWeights:
    tensors, files = checkpoint_tensors(path)
    return FoundWeights(path, tensors, [files])


def checkpoint_tensors(path: Path) -> tuple[dict[str, StoredTensor], OpenFiles]:
    """Open the weights and buffers in a checkpoint of Meshwright, by the model's names.

    The sizes of its files are checked; the hashes of the tensors would cost reading all of them.

    Returns:
        The tensors, and their files.

    Raises:
        CheckpointError: When the checkpoint is damaged.
    """
    manifest = read_manifest(path)
    # Each rank asks for its share of the sizes: a server of n ranks would get n² questions else.
    check_present(path, manifest, sorted(manifest)[rank() :: world_size()], listing=is_first_of_host())
    check_contents(path, manifest, [name for name in (RECORD, f"{TENSORS}/{SHARD_INDEX}") if name in manifest])
    record = read_record(path)
    stored, files = FolderIndex.read(path / TENSORS).open(path / TENSORS)
    tensors = {}
    for name, entry in record.tensors.items():
        if name.startswith(_MODEL):
            found = stored.get(name)
            if found is None or found.shape != entry.shape or found.dtype != dtype_named(entry.dtype):
                raise CheckpointError(f"{path} is damaged: {name} is not as its record says", fix=_COPY_AGAIN)
            tensors[name.removeprefix(_MODEL)] = found
    return tensors, files


# --- Which of them fill the model


def _planned(found: FoundWeights, model: nn.Module, entries: Mapping[str, torch.Tensor]) -> Plan:
    tensors = _of_the_model(found.tensors, entries) if found.in_state else found.tensors
    plan = plan_for(model, tensors, entries)
    plan.tensors = with_derived(model, plan.tensors, entries)
    return plan


def _of_the_model(stored: Mapping[str, StoredTensor], entries: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the model's part of a larger state: what lies under one prefix, without optimizer and the like."""
    names = sorted(entries, key=len, reverse=True)
    found = ({each.removesuffix(name) for each in stored if f".{each}".endswith(f".{name}")} for name in names)
    prefixes = next((each for each in found if each), {""})
    prefix = max(sorted(prefixes, key=len), key=lambda each: sum(each + name in stored for name in names))
    inside = {name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}
    tops = {name.partition(".")[0] for name in names}
    return {name: each for name, each in inside.items() if prefix or name.partition(".")[0] in tops}


def _refuse_quantized(found: FoundWeights, entries: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not the model's values but codes for them."""
    config = found.config.get("quantization_config") or {}
    names = [name for name in found.tensors if _QUANTIZED.search(name) and name not in entries]
    if not (config or names):
        return
    raise CheckpointError(
        f"{found.path} holds quantized weights, which cannot be trained further",
        expected="weights in fp32, bf16 or fp16",
        got=f"{config.get('quant_method', 'another')} quantization (tensors such as {join_names(names, 3)})",
        fix="name the folder of the original weights, or dequantize them once with transformers and save that",
    )
