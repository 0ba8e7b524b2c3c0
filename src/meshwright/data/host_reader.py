"""Read a stream once per host: one rank reads and decodes it, the others get their batches through shared memory.

[Note: one reader per host] A stream that cannot leave items out must be read whole to know which item comes next. The
first rank of a host reads it, with its DataLoader's workers, and makes the batches of all ranks of the host. Each batch
is written once, into memory without a name, whose descriptor travels over a Unix socket; the receiver maps it, and its
tensors lie there: they are not copied again, and nothing is left behind when a process dies. A rank takes one batch
when the reader makes one, so none is ahead of the others. A batch carries its epoch and number: a rank that walks the
loader otherwise than the reader gets an error, not other samples.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import secrets
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from meshwright.errors import DataError
from meshwright.runtime.agreement import any_rank, portable_error
from meshwright.runtime.processes import is_pretended, rank, settings, world_size
from meshwright.runtime.rank_reports import waits_for_others
from meshwright.runtime.torch_internals.c10d import default_store

# --- A batch in memory without a name.

_ALIGNMENT = 64  # bytes of a cache line
_WORD = 8


class _Pickler(pickle.Pickler):
    """Leaves the bytes of tensors on the host out of the pickle, as pickle itself does for numpy arrays."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.numel() == 0 or value.requires_grad:
            return NotImplemented
        if value.device.type != "cpu":
            raise pickle.PicklingError(f"a tensor on {value.device}")
        if value.layout != torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(flat.numpy().data), value.dtype, value.shape)


def _tensor(memory: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def pack(value: Any) -> int:
    """Write a picklable value into memory without a name; return its descriptor, which the caller closes.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: When it cannot be pickled, or holds tensors on a device.
        OSError: When there is no memory for it.
    """
    buffers: list[pickle.PickleBuffer] = []
    text = io.BytesIO()
    _Pickler(text, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [text.getbuffer(), *(each.raw() for each in buffers)]
    sizes = np.array([len(parts), *map(len, parts)], dtype=np.int64)
    memory = os.memfd_create("meshwright-batch")
    try:
        for start, part in zip(_starts(sizes), (sizes.data.cast("B"), *parts), strict=True):
            _write(memory, part, start)
        # Mapped memory ends where the file does, and the last part may be empty.
        os.ftruncate(memory, max(os.fstat(memory).st_size, _ALIGNMENT))
    except BaseException:
        os.close(memory)
        raise
    return memory


def _starts(sizes: np.ndarray) -> list[int]:
    """Return where the table of sizes and the parts begin."""
    padded = -(-np.array([sizes.nbytes, *sizes[1:]]) // _ALIGNMENT) * _ALIGNMENT
    return [0, *np.cumsum(padded)[:-1].tolist()]


def _write(memory: int, part: memoryview, start: int) -> None:
    done = 0
    while done < len(part):
        done += os.pwrite(memory, part[done:], start + done)


def unpack(memory: int) -> Any:
    """Read what :func:`pack` wrote; its tensors lie in that memory, and writing to them changes this rank's alone."""
    mapped = memoryview(mmap.mmap(memory, 0, access=mmap.ACCESS_COPY))
    number = int(np.frombuffer(mapped[:_WORD], dtype=np.int64)[0])
    sizes = np.frombuffer(mapped[: _WORD * (number + 1)], dtype=np.int64)
    text, *buffers = (
        mapped[start : start + int(size)] for start, size in zip(_starts(sizes)[1:], sizes[1:], strict=True)
    )
    return pickle.loads(text, buffers=buffers)


# --- Messages between the reader and another rank of its host.

_HEADER = struct.Struct("=qqq")
_BATCH, _END, _ERROR, _READ_ALONE = range(4)


class _Line:
    """A connection between the reader and another rank.

    Args:
        connection: Keeps messages apart (``SOCK_SEQPACKET``).
        other: Rank at the other end.
    """

    def __init__(self, connection: socket.socket, other: int) -> None:
        self._connection, self.other = connection, other
        limit_s: float = default_store().timeout.total_seconds()  # type: ignore[attr-defined]
        connection.settimeout(limit_s)
        self._limit = f"{limit_s:.0f} s"

    @waits_for_others
    def send(self, kind: int, epoch: int, number: int, memory: int | None = None) -> None:
        """Send a message, with the descriptor of what goes with it."""
        given = [] if memory is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", memory))]
        try:
            self._connection.sendmsg([_HEADER.pack(kind, epoch, number)], given)
        except TimeoutError:
            raise self._silent("took no batch") from None
        except OSError as error:
            raise self._gone() from error

    @waits_for_others
    def receive(self) -> tuple[int, int, int, Any]:
        """Wait for a message; return its kind, its epoch and number, and what came with it."""
        try:
            data, given, _, _ = self._connection.recvmsg(_HEADER.size, socket.CMSG_SPACE(4))
        except TimeoutError:
            raise self._silent("sent no batch") from None
        except OSError as error:
            raise self._gone() from error
        if not data:
            raise self._gone()
        kind, epoch, number = _HEADER.unpack(data)
        value = None
        for _, _, descriptor in given:
            (memory,) = struct.unpack("=i", descriptor)
            try:
                value = unpack(memory)
            finally:
                os.close(memory)
        return kind, epoch, number, value

    def _silent(self, what: str) -> DataError:
        return DataError(
            f"Rank {self.other} {what}, and one rank of a host reads the stream for all of them",
            expected=f"every rank walks the dataloader alike, within {self._limit} (timeout_s of init_distributed)",
            got=f"nothing from rank {self.other}",
            fix="see what that rank does; do not walk the dataloader on some ranks alone",
        )

    def _gone(self) -> DataError:
        return DataError(
            f"Rank {self.other} walks the dataloader no more, and one rank of a host reads the stream for all of them",
            expected="every rank walks the dataloader alike",
            got=f"its process, its loader or its walk has ended on rank {self.other}",
            fix="look for an error of that rank above this one",
        )


# --- Both ends, as loaders.


class HostReader:
    """The rank that reads: it makes the batches of all ranks of its host.

    Args:
        replica: The replica of this rank.
        lines: The other ranks.
        replicas: Their replicas.
    """

    def __init__(self, replica: int, lines: Sequence[_Line], replicas: Sequence[int]) -> None:
        self.replicas = [replica, *replicas]
        """The replicas whose batches it makes; one may stand there several times."""
        self._lines = list(lines)
        self.reads_nothing = False

    def loader(self, rounds: IterableDataset[Any], collate: Any, options: Mapping[str, Any]) -> HostReader:
        """Make the loader of all batches, with its workers.

        Args:
            rounds: Yields items in lists, of each of ``replicas`` one.
            collate: Makes a batch of the items of one replica.
            options: Arguments of torch's DataLoader.
        """
        self._pins = bool(options.get("pin_memory"))
        given = {**options, "collate_fn": _ByReplica(collate), "pin_memory": False}  # only the own batch is pinned
        self._rounds: DataLoader[Any] = DataLoader(rounds, **given)
        return self

    def batches(self, epoch: int, generator: torch.Generator | None) -> Iterator[Any]:
        """Iterate over the batches of this rank, and send the others theirs.

        Args:
            epoch: Its number, equal on all ranks.
            generator: Seeds the workers.
        """
        self._rounds.generator = generator
        return _pinned(self._sending(iter(self._rounds), epoch), self._pins)

    def _sending(self, rounds: Iterator[Sequence[Any]], epoch: int) -> Iterator[Any]:
        number = 0
        try:
            for round_ in rounds:
                self._send(round_, epoch, number)
                yield round_[0]
                number += 1
        except Exception as error:
            self._tell(error, epoch, number)
            raise
        for line in self._lines:
            line.send(_END, epoch, number)

    def _send(self, round_: Sequence[Any], epoch: int, number: int) -> None:
        packed: dict[int, int] = {}  # by replica: its ranks get the same memory
        try:
            for line, replica, batch in zip(self._lines, self.replicas[1:], round_[1:], strict=False):
                if replica not in packed:
                    packed[replica] = pack(batch)
                line.send(_BATCH, epoch, number, packed[replica])
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            if number > 0 or packed:
                raise
            self._let_go(epoch, error)
        finally:
            for memory in packed.values():
                os.close(memory)

    def _let_go(self, epoch: int, error: Exception) -> None:
        """Let every rank read for itself, before any has got a batch."""
        lines, self._lines = self._lines, []
        for line in lines:
            line.send(_READ_ALONE, epoch, 0)
        text = f"every rank reads the whole stream, for one cannot pass its batches on: {error}"
        print(f"meshwright: {text}", file=sys.stderr, flush=True)

    def _tell(self, error: Exception, epoch: int, number: int) -> None:
        memory = pack(portable_error(error))
        for line in self._lines:
            with contextlib.suppress(DataError):  # it has gone, or is the reason
                line.send(_ERROR, epoch, number, memory)
        os.close(memory)


class HostListener:
    """A rank that gets its batches from the reader of its host.

    Args:
        replica: The replica of this rank.
        line: The reader.
    """

    def __init__(self, replica: int, line: _Line) -> None:
        self.replicas, self._line = [replica], line
        self.reads_nothing = False
        """Whether the reader has told every rank to read for itself."""

    def loader(self, rounds: IterableDataset[Any], collate: Any, options: Mapping[str, Any]) -> HostListener:
        """Take what the reader's loader makes; this rank starts no worker, and does not iterate ``rounds``."""
        self._pins = bool(options.get("pin_memory"))
        return self

    def batches(self, epoch: int, generator: torch.Generator | None) -> Iterator[Any]:
        """Iterate over the batches of this rank, none where the reader lets go; arguments as the reader's."""
        return _pinned(self._received(epoch), self._pins)

    def _received(self, epoch: int) -> Iterator[Any]:
        number = 0
        while (message := self._next(epoch, number)) is not None:
            yield message[0]
            number += 1

    def _next(self, epoch: int, number: int) -> tuple[Any] | None:
        """Return the batch of this number; None at the end."""
        while True:
            kind, of_epoch, of_number, value = self._line.receive()
            if kind == _ERROR:
                value.add_note(f"(raised on rank {self._line.other}, which reads the stream for its host)")
                raise value
            if kind == _READ_ALONE:
                self.reads_nothing = True
                return None
            if (of_epoch, of_number) == (epoch, number):
                return (value,) if kind == _BATCH else None
            # What is from a walk of the reader alone, or of one that this rank broke off, is passed over.
            if (of_epoch, of_number) > (epoch, number):
                raise DataError(
                    "The ranks of a host do not walk the dataloader alike, and one of them reads the stream for all",
                    expected=f"batch {number} of epoch {epoch}, which this rank comes to",
                    got=f"batch {of_number} of epoch {of_epoch} from rank {self._line.other}",
                    fix="walk it on all ranks or on none (who looks at the data alone takes dataloader.dataset)",
                )


HostLoader = HostReader | HostListener


@dataclass(frozen=True)
class _ByReplica:
    """Collates the items of several replicas apart."""

    collate: Any

    def __call__(self, rounds: Sequence[Sequence[Any]]) -> list[Any]:
        return [self.collate(list(items)) for items in zip(*rounds, strict=True)]


class _Batches(IterableDataset[Any]):
    """Batches as a dataset, which torch pins."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _pinned(batches: Iterator[Any], pin_memory: bool) -> Iterator[Any]:
    """Iterate over batches, page-locked if ``pin_memory``, as torch's loaders do."""
    if not pin_memory:
        return batches
    # With a generator of its own: torch draws a seed from it, else from the process's.
    return iter(DataLoader(_Batches(batches), batch_size=None, pin_memory=True, generator=torch.Generator()))


# --- The ranks of a host find each other.


def join_host(replica: int) -> HostLoader | None:
    """Connect the ranks of this host, so that the first of them reads for all; collective.

    Args:
        replica: The replica of this rank.

    Returns:
        This rank's end. None on all ranks of a host where there is one rank, where they cannot reach each other (as in
        containers of their own), or where the system lacks what it takes.
    """
    size, local_rank = settings().local_world_size, int(os.environ.get("LOCAL_RANK", "0"))
    if world_size() == 1 or is_pretended():
        return None
    able = size > 1 and hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX") and rank() >= local_rank
    if not any_rank(able):
        return None
    first, store = rank() - local_rank, default_store()
    keys = f"meshwright/stream/{store.add(f'meshwright/stream/{rank()}', 1)}/{first}"
    listening = _listening(store, keys, size) if able and local_rank == 0 else None
    if able:
        store.add(f"{keys}/present", 1)
    any_rank(False)  # all that are present have said so
    # A launcher that spreads ranks otherwise than torchrun does is found out here.
    whole = able and store.add(f"{keys}/listens", 0) == 1 and store.add(f"{keys}/present", 0) == size
    calling = _called(store.get(f"{keys}/address").decode(), replica) if whole and listening is None else None
    if calling is not None:
        store.add(f"{keys}/connected", 1)
    any_rank(False)
    if not whole or store.add(f"{keys}/connected", 0) != size - 1:
        return None
    if calling is not None:
        return HostListener(replica, _Line(calling, first))
    assert listening is not None
    with listening:
        return _answered(listening, replica, size - 1)


def _listening(store: Any, keys: str, size: int) -> socket.socket | None:
    """Listen for the other ranks of the host, and publish where; None where that fails."""
    # The kernel's own names: no file is left behind.
    address = f"\0meshwright-{secrets.token_hex(16)}"
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.bind(address)
        made.listen(size)
    except OSError:
        made.close()
        return None
    store.set(f"{keys}/address", address)
    store.add(f"{keys}/listens", 1)
    return made


_GREETING = struct.Struct("=qq")


def _called(address: str, replica: int) -> socket.socket | None:
    """Connect with the reader, and tell it this rank and its replica; None where it cannot be reached."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.connect(address)
        made.send(_GREETING.pack(rank(), replica))
    except OSError:
        made.close()
        return None
    return made


def _answered(listening: socket.socket, replica: int, number: int) -> HostReader:
    """Accept the other ranks, which have connected, in their order."""
    found: dict[int, tuple[_Line, int]] = {}
    while len(found) < number:
        connection, _ = listening.accept()
        user = struct.unpack("=iii", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if user != os.getuid():  # the names of such sockets can be seen by all users of the host
            connection.close()
            continue
        other, of_replica = _GREETING.unpack(connection.recv(_GREETING.size))
        found[other] = _Line(connection, other), of_replica
    order = [found[other] for other in sorted(found)]
    return HostReader(replica, [line for line, _ in order], [each for _, each in order])
