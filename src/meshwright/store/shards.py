"""Write each rank's shards of tensors into a file of its own, and one index that says where everything is.

[Note: shards and their index] A folder of shards holds one safetensors file for every rank that has something to write,
and ``shards.json``, the index: for every tensor its type, its shape and the number of its layout; for every layout how
it cuts a tensor, and which file has each part. The index grows with the number of tensors and with the number of ranks,
never with their product. Where a shard lies inside of a file, the file's own header says.

- **Saving.** Ranks that hold the same names in the same way, as in most jobs, find that with one small all-reduce. Then
  each computes the whole index alone, from the placements of its own tensors. Where ranks hold different names, as
  pipeline ranks do, the first rank of each kind tells all others its list. Of replicas one is written. Which one
  is decided by a rule that all ranks compute alike: tensors are dealt out, the largest first, so that each replica
  writes as many bytes; but no rank is given less than 16 MiB, since thousands of small files are slower than a few.
- **Loading.** Rank 0 reads the index and broadcasts it. Each rank opens the files that hold parts of its own shards.
- **Older checkpoints** have no index: rank 0 makes one from the headers of their files.

The files are those of torch's distributed checkpoint (DCP) in safetensors: its ``HuggingFaceStorageReader`` reads them.
"""

from __future__ import annotations

import heapq
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.errors import CheckpointError
from meshwright.optim.dtensors import local_tensor
from meshwright.runtime import agreed, rank, same_on_every_rank, world_size
from meshwright.runtime.agreement import gather_distinct, gather_numbers
from meshwright.runtime.torch_internals import checkpoint as keys
from meshwright.runtime.torch_internals.dtensor import StridedShard
from meshwright.store.entries import dtype_name, dtype_named
from meshwright.store.manifest import storage_errors, wait_until_seen, write_durably

INDEX = "shards.json"
SCHEMA = 1
_LEAST_BYTES = 2**24  # that a rank is given of what other ranks hold, too

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: where it begins, and its shape."""


def shard_file(number: int) -> str:
    """Return the name of the file that a rank writes."""
    # The name that torch's own writer gives it.
    return f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"


# --- The index


def _cut(size: int, parts: int, number: int) -> tuple[int, int]:
    """Return where a part begins and its size, as ``torch.chunk`` cuts: the last ones may be shorter, or empty."""
    full = -(-size // parts)
    first = min(full * number, size)
    return first, min(full, size - first)


@dataclass(frozen=True)
class Layout:
    """A way of cutting tensors, and the files of their parts."""

    cuts: tuple[tuple[int, int], ...]
    """Dim and number of parts of each cut, in the order of cutting."""
    files: tuple[int, ...]
    """Number of the file of each part, in row-major order of the cuts."""

    def part(self, number: int, shape: Sequence[int]) -> Box:
        """Return one part of a tensor."""
        begins, sizes = [0] * len(shape), list(shape)
        numbers = np.unravel_index(number, [parts for _, parts in self.cuts]) if self.cuts else ()
        for (dim, parts), each in zip(self.cuts, numbers, strict=True):
            first, sizes[dim] = _cut(sizes[dim], parts, int(each))
            begins[dim] += first
        return tuple(begins), tuple(sizes)

    def parts_in(self, shape: Sequence[int], start: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[str, Box]]:
        """Yield the parts that a box touches, each with the name of its file."""
        end = [first + length for first, length in zip(start, sizes, strict=True)]
        yield from self._descend(start, end, 0, 0, [0] * len(shape), shape)

    def _descend(
        self, start: Sequence[int], end: Sequence[int], level: int, number: int, at: list[int], shape: Sequence[int]
    ) -> Iterator[tuple[str, Box]]:
        if level == len(self.cuts):
            yield shard_file(self.files[number]), (tuple(at), tuple(shape))
            return
        dim, parts = self.cuts[level]
        full = max(1, -(-shape[dim] // parts))
        first = max(0, start[dim] - at[dim]) // full
        last = min(parts, -(-min(end[dim] - at[dim], shape[dim]) // full))
        for each in range(first, last):
            begin, size = _cut(shape[dim], parts, each)
            moved = [*at[:dim], at[dim] + begin, *at[dim + 1 :]]
            cut = [*shape[:dim], size, *shape[dim + 1 :]]
            yield from self._descend(start, end, level + 1, number * parts + each, moved, cut)


class Entry(NamedTuple):
    """One tensor of an index."""

    dtype: str
    shape: tuple[int, ...]
    layout: int


@dataclass(frozen=True)
class ShardIndex:
    """All tensors of a folder and their places; see [Note: shards and their index]."""

    layouts: list[Layout]
    tensors: dict[str, Entry]

    def to_json(self) -> str:
        """Return JSON text."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}) + "\n"


# --- Which part of a tensor a rank holds


def _cuts_of(tensor: DTensor) -> list[tuple[int, int]]:
    """Return mesh dim and tensor dim of each cut, in the order of cutting."""
    order: list[tuple[int, int]] = []
    for mesh_dim in reversed(range(tensor.device_mesh.ndim)):
        placement = tensor.placements[mesh_dim]
        if not isinstance(placement, Shard | StridedShard):
            continue
        place = 0
        if isinstance(placement, StridedShard):
            # It cuts what later mesh dims have cut before.
            left = placement.split_factor
            while left > 1 and place < len(order):
                left //= tensor.device_mesh.size(order[place][0]) if order[place][1] == placement.dim else 1
                place += 1
        order.insert(place, (mesh_dim, placement.dim))
    return order


def own_box(tensor: torch.Tensor) -> Box:
    """Return the part of the whole tensor that this rank holds.

    Raises:
        CheckpointError: When a DTensor's shard is not of the size that its placements say.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    mesh, cuts = tensor.device_mesh, _cuts_of(tensor)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of its own meshes only"
    layout = Layout(tuple((dim, mesh.size(mesh_dim)) for mesh_dim, dim in cuts), ())
    number = 0
    for mesh_dim, _ in cuts:
        number = number * mesh.size(mesh_dim) + coordinate[mesh_dim]
    box = layout.part(number, tensor.shape)
    if (got := tuple(local_tensor(tensor).shape)) != box[1]:
        raise CheckpointError(
            "A tensor is not sharded as its placements say, so that no checkpoint can hold it",
            expected=f"a shard of shape {box[1]} of {tuple(tensor.shape)} under {tensor.placements} on this rank",
            got=f"shape {got}",
            fix="make the DTensor with distribute_tensor",
        )
    return box


# --- Which rank writes what: computed on every rank alike


class _Spot(NamedTuple):
    """The layout of a tensor on ranks that hold the same names."""

    dtype: str
    shape: tuple[int, ...]
    mesh: int
    """Number of the mesh among those of the rank; -1: every rank holds it whole."""
    mesh_shape: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]
    """See :func:`_cuts_of`."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize


class _Meshes:
    """The different meshes of a rank's tensors, numbered."""

    def __init__(self) -> None:
        self.ranks: list[list[int]] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[DeviceMesh] = []  # an identity is good as long as its object lives

    def number(self, mesh: DeviceMesh) -> int:
        """Return the number of a mesh; equal ones have one number."""
        if id(mesh) not in self._numbers:
            ranks = mesh.mesh.flatten().tolist()
            if ranks not in self.ranks:
                self.ranks.append(ranks)
            self._numbers[id(mesh)] = self.ranks.index(ranks)
            self._kept.append(mesh)
        return self._numbers[id(mesh)]


def _spots(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, _Spot], _Meshes]:
    spots, meshes = {}, _Meshes()
    for name, tensor in tensors.items():
        form = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if not isinstance(tensor, DTensor):
            spots[name] = _Spot(*form, -1, (), ())
        elif tensor.device_mesh.get_coordinate() is not None:
            mesh = tensor.device_mesh
            spots[name] = _Spot(*form, meshes.number(mesh), tuple(mesh.shape), tuple(_cuts_of(tensor)))
    return spots, meshes


def plan_shards(tensors: Mapping[str, torch.Tensor]) -> ShardIndex:
    """Decide which rank writes which part of every tensor; collective, equal on every rank.

    Args:
        tensors: This rank's: plain tensors, equal on all ranks that have them, or DTensors.
    """
    spots, meshes = _spots(tensors)
    sets = gather_distinct(spots, repr(list(spots.items())))
    places = _places_in_meshes(sets, meshes)
    holders: dict[str, list[int]] = {}
    for number, (_, its) in enumerate(sets):
        for name in its:
            holders.setdefault(name, []).append(number)
    # Tensors that lie alike have the same replicas, which are dealt out together.
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, numbers in holders.items():
        first = sets[numbers[0]][1][name]
        where = [(n, spot.mesh) for n in numbers if (spot := sets[n][1][name])[3:] == first[3:]]
        alike.setdefault((first.mesh_shape, first.cuts, *where), []).append(name)
    layouts: list[Layout] = []
    entries: dict[str, Entry] = {}
    for (mesh_shape, cuts, *where), names in alike.items():
        found = {name: next(its[name] for _, its in sets if name in its) for name in names}
        if places is None and mesh_shape:
            every = np.array([meshes.ranks[where[0][1]]])
        else:
            every = _meshes_of(where, sets, places, math.prod(mesh_shape))
        if not every.size:
            raise agreed(_in_part(names[0]))
        rows = _rows(every, mesh_shape, cuts)
        counts = tuple((dim, mesh_shape[mesh_dim]) for mesh_dim, dim in cuts)
        of_row: dict[int, int] = {}
        for name, row in _deal_out(found, *rows.shape).items():
            if row not in of_row:
                of_row[row] = len(layouts)
                layouts.append(Layout(counts, tuple(rows[row].tolist())))
            entries[name] = Entry(found[name].dtype, found[name].shape, of_row[row])
    return ShardIndex(layouts, {name: entries[name] for name in holders})


def _places_in_meshes(sets: Sequence[tuple[list[int], Mapping[str, _Spot]]], meshes: _Meshes) -> np.ndarray | None:
    """Return the first rank of every rank's meshes, and its place in each; None if each covers the world. Collective.

    From these every rank knows all meshes, also those of other ranks.
    """
    if len(sets) == 1 and all(len(ranks) == world_size() for ranks in meshes.ranks):
        return None
    count = max(1, *(1 + spot.mesh for _, its in sets for spot in its.values()))
    own = [number for ranks in meshes.ranks for number in (ranks[0], ranks.index(rank()))]
    return np.array(gather_numbers([*own, *[-1] * (2 * count - len(own))])).reshape(world_size(), count, 2)


def _meshes_of(
    where: Sequence[tuple[int, int]], sets: Sequence[tuple[list[int], Any]], places: np.ndarray | None, size: int
) -> np.ndarray:
    """Return the meshes over which tensors lie that are alike, one in each row; of plain tensors, the ranks.

    Args:
        where: Numbers of sets of ranks, and of the mesh among those of the ranks.
        sets: See :func:`gather_distinct`.
        places: See :func:`_places_in_meshes`.
        size: Of each mesh.
    """
    found: dict[int, list[int]] = {}
    for number, mesh in where:
        for each in sets[number][0]:
            first, place = (each, 0) if mesh < 0 or places is None else places[each, mesh].tolist()
            found.setdefault(first, [-1] * size)[place] = each
    # A mesh that some of its ranks do not use for these tensors has not all parts of them.
    return np.array([ranks for _, ranks in sorted(found.items()) if -1 not in ranks])


def _in_part(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} cannot be saved: not all ranks of its mesh have it",
        expected="a name under which every rank of a DTensor's mesh holds its shard",
        got="some of the ranks only",
        fix="give the parameter or buffer the same name on all ranks of its mesh",
    )


def _rows(meshes: np.ndarray, mesh_shape: Sequence[int], cuts: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the replicas of a whole tensor, one in each row: the ranks with its parts, in the order of a Layout."""
    cutting = [mesh_dim for mesh_dim, _ in cuts]
    others = [dim for dim in range(len(mesh_shape)) if dim not in cutting]
    grid = meshes.reshape(len(meshes), *mesh_shape).transpose(0, *(1 + dim for dim in (*others, *cutting)))
    return grid.reshape(-1, math.prod(mesh_shape[dim] for dim in cutting))


def _deal_out(spots: Mapping[str, _Spot], num_replicas: int, ranks_each: int) -> dict[str, int]:
    """Return which replica writes each tensor: as many bytes each, but not less than a file is worth."""
    total = sum(spot.num_bytes for spot in spots.values())
    used = max(1, min(num_replicas, total // (ranks_each * _LEAST_BYTES)))
    loads = [(0, number) for number in range(used)]
    dealt = {}
    for name in sorted(spots, key=lambda name: -spots[name].num_bytes):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + spots[name].num_bytes, number))
        dealt[name] = number * num_replicas // used  # neighbours are on one host
    return dealt


# --- Writing; collective


def writable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as safetensors takes them: contiguous, and no two of them sharing memory.

    Raises:
        CheckpointError: For a sparse tensor.
    """
    seen: set[int] = set()
    writable: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise CheckpointError(
                f"{name} cannot be saved: files hold dense tensors only",
                expected="dense tensors in the model and its optimizer",
                got=f"{tensor.layout} of shape {tuple(tensor.shape)}",
                fix="register a buffer that can be built anew with persistent=False, or keep it as dense tensors of "
                "indices and values",
            )
        tensor = tensor.detach().contiguous()
        address = local_tensor(tensor).untyped_storage().data_ptr()
        # Two parameters over one memory are stored twice, and both names load.
        writable[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return writable


def save_shards(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write tensors into a folder: a file per rank that has something to write, and the index; collective.

    Args:
        tensors: This rank's: plain tensors, equal on all ranks that have them, or DTensors; see
            :func:`writable`.
        folder: Made if it is missing; all ranks share it.

    Raises:
        CheckpointError: On every rank, when any of them cannot write.
    """
    index = plan_shards(tensors)
    fix = "make room on the disk, and check who may write there"
    with same_on_every_rank(), storage_errors(f"Writing tensors into {folder} failed (rank {rank()})", fix):
        if rank() == 0:
            folder.mkdir(exist_ok=True)
    with same_on_every_rank(), storage_errors(f"Writing tensors into {folder} failed (rank {rank()})", fix):
        own = _own_parts(index, tensors)
        if own:
            wait_until_seen(folder)
            write_shards(own, tensors, folder / shard_file(rank()))
        if rank() == 0:
            write_durably(folder / INDEX, index.to_json().encode())


def _own_parts(index: ShardIndex, tensors: Mapping[str, torch.Tensor]) -> dict[str, Box]:
    """Return what this rank is to write."""
    layouts = {n: each for n, each in enumerate(index.layouts) if rank() in each.files}
    numbers = {n: each.files.index(rank()) for n, each in layouts.items()}
    own = {}
    for name, tensor in tensors.items():
        if name in index.tensors and (layout := index.tensors[name].layout) in layouts:
            box = own_box(tensor)
            assert box == layouts[layout].part(numbers[layout], tensor.shape), "a rank writes its own part"
            if math.prod(box[1]):
                own[name] = box
    return own


def write_shards(own: Mapping[str, Box], tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write parts of tensors into one file, and wait until the disk has it."""
    save_file(
        {name: local_tensor(tensors[name]).detach().cpu().contiguous() for name in own},
        path,
        {  # in the form that torch's reader looks for
            keys.CUSTOM_METADATA_KEY: json.dumps({name: {keys.SAVED_OFFSETS_KEY: at} for name, (at, _) in own.items()}),
            keys.DCP_VERSION_KEY: str(keys.HF_DCP_VERSION),
            keys.FORMAT_KEY: keys.FORMAT_VALUE,
        },
    )
    with path.open("rb") as written:
        os.fsync(written.fileno())
