"""Write one rank's training state into a file of the host's memory, and read it back if it is whole.

[Note: snapshot files] A file is a header, the bytes of all tensors, and a text with everything else: three lines of
JSON, of which the last two are the same as long as the tensors are. It is mapped, so
that taking a snapshot is one copy; its pages are reserved first, for a process that writes into a mapping for which
there is no memory is ended without a word. The header is cleared before the first byte changes and written after the
last: a file whose process has died in between has none. It holds a sum over the bytes of the tensors, in which any
flipped bit shows, and a SHA-256 of the text and of the header itself.

[Note: copies beside training] What the update alone changes (weights, masters, optimizer states, averages) need not be
copied in the step: a thread does it while the next forward and backward run, and the update waits for it. The update is
the ``step`` of the optimizer, around which :class:`CopiesBesideTraining` puts itself. That nothing else changes them is
not taken on trust. The first snapshots of a process are copied in the step, and compared with the live tensors where
the next update begins: what differs by then is copied in the step from then on. Later the versions that autograd keeps
of tensors tell of a write while a copy was made: that snapshot is dropped, the one before it stays, and such a tensor
is copied in the step from then on. Tensors of a GPU, steps of :class:`~meshwright.optim.OuterOptimizer`, which sends
weights whenever it likes, and optimizers that can update within backward are copied in the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import mmap
import operator
import os
import struct
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.optim import OuterOptimizer, inner_optimizer, local_tensor
from meshwright.runtime.agreement import bit_sum
from meshwright.runtime.torch_internals.optim import foreach_copy_
from meshwright.runtime.torch_internals.tensors import version_of
from meshwright.store.entries import dtype_name, dtype_named
from meshwright.store.manifest import Record
from meshwright.store.shards import own_box

_MAGIC = b"MWSNAP01"
_HEADER = struct.Struct(
    "<8sQQq32s"
)  # magic, bytes of the tensors and of the text, sum of the first, digest of all else
_DATA = 4096  # where the tensors begin
_ALIGNED = 64
_TEXT_ROOM = 2**16  # the text grows a little from step to step

_R = TypeVar("_R")

Layout = dict[str, tuple[str, tuple[int, ...], int]]
"""By name: dtype, shape and offset of a tensor."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


# --- What stays from step to step: a snapshot after every step would take longer to name its tensors than to copy them


class Remembered(Generic[_R]):
    """A function of named tensors, computed anew only for others than the last time, or for the same in other memory.

    Args:
        function: Reads names, types, shapes and placements, and may keep views; not the values.
    """

    def __init__(self, function: Callable[[Mapping[str, torch.Tensor]], _R]) -> None:
        self._function = function
        self._of: dict[str, torch.Tensor] = {}
        self._addresses: list[object] = []
        self._result: _R | None = None

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> _R:
        """Return the function's result."""
        addresses = [_address_of(each) for each in tensors.values()]
        are_same = len(tensors) == len(self._of) and all(map(operator.is_, tensors.values(), self._of.values()))
        if self._result is None or not are_same or addresses != self._addresses or list(tensors) != list(self._of):
            self._of, self._addresses, self._result = dict(tensors), addresses, self._function(tensors)
        return self._result


def _address_of(tensor: torch.Tensor) -> object:
    try:
        return local_tensor(tensor).data_ptr()
    except RuntimeError:  # it wraps others, which may be replaced: nothing is equal to this
        return object()


class Parts:
    """The parts of a state's tensors that a rank has.

    Args:
        live: By stored name.
    """

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self.live = dict(live)
        self.local = {name: local_tensor(each.detach()) for name, each in live.items()}
        """Plain tensors in the same memory; there is room for others beside them."""
        starts = {name: own_box(each)[0] for name, each in live.items()}
        self.starts = {name: start for name, start in starts.items() if any(start)}
        """Where they lie in the whole tensors, if not at the beginning."""


def layout_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Layout, int]:
    """Return where each of some plain tensors lies in a file, and their bytes in all."""
    layout: Layout = {}
    offset = 0
    for name, tensor in tensors.items():
        layout[name] = dtype_name(tensor.dtype), tuple(tensor.shape), offset
        offset = _aligned(offset + tensor.nbytes)
    return layout, offset


def _views(buffer: Any, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the tensors that lie in a buffer, without a copy."""
    views = {}
    for name, (type_name, shape, offset) in layout.items():
        dtype = dtype_named(type_name)
        size = dtype.itemsize * torch.Size(shape).numel()
        flat = _bytes_of(buffer, _DATA + offset, size)
        views[name] = flat.view(dtype).view(shape)
    return views


def _bytes_of(buffer: Any, start: int, size: int) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=start)


class DamagedSnapshot(Exception):
    """A file is no whole snapshot."""


@dataclass(frozen=True)
class Contents:
    """A snapshot that was read."""

    tensors: dict[str, torch.Tensor]
    """Views of the file's bytes."""
    about: dict[str, Any]
    """Everything else, in JSON types; the record of the training state as JSON text."""


class SnapshotFile:
    """A file that one process writes, again and again; see [Note: snapshot files].

    Args:
        path: In memory that the host keeps; made with the first snapshot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._tensors: object = None
        self._layout: Layout = {}
        self._data_bytes = 0
        self._described: object = None
        self._description = b""
        self._targets: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor], late: Collection[str] = ()) -> None:
        """Copy plain tensors into the file, which holds no snapshot until :meth:`finish`.

        Args:
            tensors: Everything that the file is to hold. The same dictionary has tensors of the same shapes as before.
            late: Names of those for which there is only room yet: :meth:`copy_late` copies them.

        Raises:
            OSError: When the host has no room for it.
        """
        self.clear()
        if tensors is not self._tensors or len(tensors) != len(self._layout) or self._map is None:
            layout, data_bytes = layout_of(tensors)
            if layout != self._layout or self._map is None:
                self._reserve(_DATA + data_bytes + _TEXT_ROOM)
                self._layout, self._data_bytes, self._targets = layout, data_bytes, _views(self._map, layout)
            self._tensors, self._described = tensors, None
        self._fill({name: tensor for name, tensor in tensors.items() if name not in late})

    @torch.no_grad()
    def copy_late(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors that :meth:`copy` has left out."""
        self._fill(tensors)

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if tensors:  # in one call: a thread that makes it waits once, not for each tensor, until it may go on
            foreach_copy_([self._targets[name] for name in tensors], list(tensors.values()))

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of tensors that are not what the file holds; one with nan counts as such."""
        return {name for name, tensor in tensors.items() if not torch.equal(self._targets[name], tensor)}

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write everything else, and the header.

        Args:
            about: In JSON types, but for the record of the training state. If the record's ``tensors`` are the object
                of the last snapshot, their text is, too.

        Raises:
            OSError: When the host has no room for it.
        """
        record: Record = about["record"]
        if self._described is not record.tensors:
            texts = json.dumps(self._layout), json.dumps(record.tensors, default=vars)
            self._described, self._description = record.tensors, "\n".join(texts).encode()
        rest = dataclasses.replace(record, tensors={}).to_json(indent=None)
        text = json.dumps({**about, "record": rest}).encode() + b"\n" + self._description
        end = _DATA + self._data_bytes + len(text)
        assert self._map is not None, "tensors were copied"
        if end > len(self._map):
            self._reserve(end + _TEXT_ROOM)
            self._targets = _views(self._map, self._layout)
        self._map[_DATA + self._data_bytes : end] = text
        total = _sum_of(self._map, self._data_bytes)
        numbers = struct.pack("<QQq", self._data_bytes, len(text), total)
        digest = hashlib.sha256(numbers + text).digest()
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, self._data_bytes, len(text), total, digest)
        os.utime(self.path)  # writing into a mapping does not say when

    def take_over(self, whole: Any) -> None:
        """Replace the file by the bytes of another one, whose header comes last.

        Raises:
            OSError: When the host has no room for it.
        """
        self.clear()
        if self._map is None or len(self._map) < len(whole):
            self._reserve(len(whole))
        assert self._map is not None
        # Not by a slice, which would hold up every other thread until all of it is copied.
        size = len(whole) - _HEADER.size
        _bytes_of(self._map, _HEADER.size, size).copy_(_bytes_of(whole, _HEADER.size, size))
        self._map[: _HEADER.size] = whole[: _HEADER.size]
        os.utime(self.path)

    def whole(self) -> memoryview:
        """Return the bytes of the finished snapshot."""
        assert self._map is not None, "there is a snapshot"
        _, data_bytes, text_bytes, _, _ = _HEADER.unpack(self._map[: _HEADER.size])
        return memoryview(self._map)[: _DATA + data_bytes + text_bytes]

    def clear(self) -> None:
        """Let the file hold no snapshot."""
        if self._map is not None:
            self._map[: _HEADER.size] = bytes(_HEADER.size)
        elif self.path.exists():
            with self.path.open("r+b") as file:
                file.write(bytes(_HEADER.size))

    def _reserve(self, size: int) -> None:
        """Map the file with so many bytes, all of which the host has set aside."""
        self._targets, self._layout, self._map = {}, {} if self._map is None else self._layout, None
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, max(size, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Delete the file."""
        self._targets, self._map = {}, None
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def _sum_of(buffer: Any, data_bytes: int) -> int:
    return int(bit_sum(_bytes_of(buffer, _DATA, data_bytes))) if data_bytes else 0


def read_bytes(path: Path) -> Any:
    """Return the bytes of a file as a private mapping.

    Raises:
        DamagedSnapshot: When there are none.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise DamagedSnapshot(str(error)) from None


def read_about(buffer: Any) -> dict[str, Any]:
    """Return everything but the tensors, which are not looked at, and their descriptions, which are JSON text still.

    Raises:
        DamagedSnapshot: When it is not whole.
    """
    if len(buffer) < _HEADER.size:
        raise DamagedSnapshot("it is cut off")
    magic, data_bytes, text_bytes, total, digest = _HEADER.unpack(bytes(buffer[: _HEADER.size]))
    if magic != _MAGIC:
        raise DamagedSnapshot("it was not finished")
    text = bytes(buffer[_DATA + data_bytes : _DATA + data_bytes + text_bytes])
    if hashlib.sha256(struct.pack("<QQq", data_bytes, text_bytes, total) + text).digest() != digest:
        raise DamagedSnapshot("its text is not what was written")
    about, layout, described = text.split(b"\n")
    return {**json.loads(about), "layout": layout, "described": described}


def read_snapshot(buffer: Any) -> Contents:
    """Read and verify a whole snapshot.

    Raises:
        DamagedSnapshot: When any bit of it has changed.
    """
    about = read_about(buffer)
    _, data_bytes, _, total, _ = _HEADER.unpack(bytes(buffer[: _HEADER.size]))
    if _sum_of(buffer, data_bytes) != total:
        raise DamagedSnapshot("its tensors are not what was written")
    places = json.loads(about.pop("layout"))
    layout = {name: (dtype, tuple(shape), offset) for name, (dtype, shape, offset) in places.items()}
    about["record"] = json.dumps({**json.loads(about["record"]), "tensors": json.loads(about.pop("described"))})
    return Contents(_views(buffer, layout), about)


# --- Copies beside training

_COMPARED = 2  # snapshots whose tensors are compared with the live ones before any is copied beside training


@dataclass(frozen=True)
class LateCopies:
    """Tensors that are still to be copied into a file, and the versions that they had in the step."""

    file: SnapshotFile
    tensors: Mapping[str, torch.Tensor]
    live: Mapping[str, torch.Tensor]
    """The same, which may be DTensors."""
    versions: Sequence[int]

    @classmethod
    def of(cls, file: SnapshotFile, live: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]) -> LateCopies:
        """Note tensors, and their local parts, as they are now."""
        return cls(file, {name: local[name] for name in live}, live, _versions(live))

    def make(self) -> set[str]:
        """Copy them; return the names of those that have changed meanwhile."""
        self.file.copy_late(self.tensors)
        names = [*self.live, *(name for name, each in self.live.items() if isinstance(each, DTensor))]
        now = _versions(self.live)
        return {name for name, before, after in zip(names, self.versions, now, strict=True) if before != after}


def _versions(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    # A DTensor counts its own writes, not those into its local part.
    sharded = [local_tensor(each) for each in tensors.values() if isinstance(each, DTensor)]
    return [*map(version_of, tensors.values()), *map(version_of, sharded)]


class CopiesBesideTraining:
    """Chooser of what is copied while the next forward and backward run; see [Note: copies beside training].

    Args:
        wait: Waits for the snapshot that is being made; called where an update begins.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._optimizer: Optimizer | None = None
        self.changing: set[str] = set()
        """Names of tensors that something else than the update changes."""
        self._num_compared = 0
        self._compared: tuple[SnapshotFile, dict[str, torch.Tensor]] | None = None
        self._has_updated = self._is_on = True
        self._chosen: dict[str, torch.Tensor] = {}
        self._chosen_of: Mapping[str, torch.Tensor] | None = None
        self._chosen_by = (0, 0)

    def candidates(self, optimizer: Optimizer | None, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that only the update changes, as far as one can tell.

        Args:
            optimizer: The one whose ``step`` makes the updates, with all its wrappers.
            live: Everything of a training state, by stored name. For the same object the answer is remembered.
        """
        self._is_on = self._is_on and self._has_updated  # otherwise something else updates
        if not self._is_on or optimizer is None or isinstance(optimizer, OuterOptimizer):
            return {}
        if hasattr(inner_optimizer(optimizer), "step_in_backward"):
            return {}
        if optimizer is not self._optimizer:
            self._optimizer, self._num_compared = optimizer, 0
            self._come_before(optimizer)
        updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
        numbers = len(updated), len(self.changing)  # which only grow
        if self._chosen_of is not live or numbers != self._chosen_by:
            self._chosen_of, self._chosen_by = live, numbers
            self._chosen = {
                name: each
                for name, each in live.items()
                if name not in self.changing and _is_state(name, each, id(each) in updated)
            }
        return self._chosen

    def copy(
        self, file: SnapshotFile, tensors: Mapping[str, torch.Tensor], candidates: Mapping[str, torch.Tensor]
    ) -> LateCopies:
        """Copy into a file what is not copied beside training, and return the rest.

        Args:
            file: The snapshot's.
            tensors: Everything that it holds, as plain tensors.
            candidates: See :meth:`candidates`.

        Raises:
            OSError: When the host has no room for it.
        """
        self._compared, self._has_updated = None, True
        compares = self._num_compared < _COMPARED
        late = {} if compares else candidates
        file.copy(tensors, late)
        if compares:
            self._compared = file, {name: tensors[name] for name in candidates}
        self._has_updated = not candidates
        return LateCopies.of(file, late, tensors)

    def _come_before(self, optimizer: Optimizer) -> None:
        step = optimizer.step

        @functools.wraps(step)  # schedulers mark it
        def stepped(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if optimizer is self._optimizer:
                self._update()
            return step(*args, **kwargs)

        optimizer.step = types.MethodType(stepped, optimizer)  # type: ignore[method-assign]

    def _update(self) -> None:
        if self._has_updated:
            return
        self._has_updated = True
        self._wait()
        compared, self._compared = self._compared, None
        if compared is not None:
            file, tensors = compared
            self.changing |= file.differing(tensors)
            self._num_compared += 1

    def end(self) -> None:
        """Let updates begin without this."""
        self._optimizer, self._compared, self._has_updated = None, None, True


def _is_state(name: str, tensor: torch.Tensor, is_updated: bool) -> bool:
    """Return whether a tensor is a weight, a master, an average or a state, in plain memory of the host."""
    is_state = not name.startswith("model.") or is_updated or isinstance(tensor, nn.Parameter)
    return is_state and tensor.device.type == "cpu" and not tensor.is_inference() and local_tensor(tensor).numel() > 0
