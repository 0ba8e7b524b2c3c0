"""Agreement between ranks: the same error, the same values, the same bits and the same calls on each of them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import platform
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from meshwright.errors import LaunchError, MeshwrightError
from meshwright.runtime.device import read_together
from meshwright.runtime.processes import agreement_group, rank, world_size
from meshwright.runtime.rendezvous import absent_ranks, named_ranks
from meshwright.runtime.torch_internals.c10d import default_store, object_device
from meshwright.version import __version__


@contextlib.contextmanager
def same_on_every_rank(*, patient: bool = False) -> Iterator[None]:
    """Run a block on every rank and, when it failed on any of them, raise the first rank's error on all.

    The block itself must not communicate: a rank that failed would be missing from the collective. Costs one all-reduce
    of a number; errors travel only where there are some. Errors raised here carry ``agreed = True``, so that a program
    may print them once. ``patient`` waits for ranks that take longer in the block than a collective may.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if patient:
        first_over_store("a block", "")
    _raise_first(error)


def _raise_first(mine: Exception | None) -> None:
    """Raise the error of the first rank that has one on all ranks: its own with its traceback, a copy on the others."""
    size = world_size()
    first, all_failed = smallest([rank() if mine is not None else size, mine is not None])
    if first == size:
        return
    error: Exception = broadcast_object(portable_error(mine), first)
    if mine is not None and first == rank():
        error = mine
    elif not all_failed:
        error.add_note(f"(raised on rank {first})")
    error.agreed = True  # type: ignore[attr-defined]
    raise error


def gather_from(build: Callable[[], Any]) -> list[Any]:
    """Gather what ``build()`` returns on every rank; when it failed on any of them, raise the first rank's error.

    ``build`` must not communicate: see :func:`same_on_every_rank`.

    Returns:
        One value per rank, in rank order, equal on all ranks.
    """
    error: Exception | None = None
    value: Any = None
    try:
        value = build()
    except Exception as caught:
        error = caught
    _raise_first(error)
    return gather_objects(value)


def portable_error(error: Exception | None) -> Exception | None:
    """Return the error itself when it survives a journey to another rank, else its text."""
    try:
        return pickle.loads(pickle.dumps(error)) if error is not None else None
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


# --- [Note: agreement is cheap]
#
# What all ranks must agree on is compared by its digest, 32 bytes, of which :func:`smallest` finds the smallest in a
# logarithmic number of messages. Values of one rank are broadcast, along a tree. An error travels from the first rank
# that has one. Objects are gathered from all ranks only where each has something else to tell.


Number = TypeVar("Number", int, float)


def gather_objects(value: Any) -> list[Any]:
    """Gather one picklable object per rank; a list in rank order, equal on all ranks."""
    if world_size() == 1:
        return [value]
    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, value, group=_living_group())
    return every


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Return the ``value`` of one rank, ``source``, on every rank; what the others pass is ignored. Picklable."""
    if world_size() == 1:
        return value
    sent = [value]
    dist.broadcast_object_list(sent, group_src=source, group=_living_group())
    return sent[0]


def gather_on_first(value: Any) -> list[Any]:
    """Gather one picklable object per rank on rank 0, in rank order; return an empty list on the other ranks."""
    if world_size() == 1:
        return [value]
    every: list[Any] = [None] * world_size() if rank() == 0 else []
    dist.gather_object(value, every or None, dst=0, group=_living_group())
    return every


def send_bytes(data: bytes, to: int) -> None:
    """Send bytes to one rank, which calls :func:`receive_bytes`."""
    group = _living_group()
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(object_device(group))
    dist.send(torch.tensor([len(packed)], device=packed.device), to, group)
    dist.send(packed, to, group)


def receive_bytes(source: int) -> bytes:
    """Receive what one rank sends with :func:`send_bytes`."""
    group = _living_group()
    length = torch.zeros(1, dtype=torch.int64, device=object_device(group))
    dist.recv(length, source, group)
    packed = torch.empty(int(length), dtype=torch.uint8, device=length.device)
    dist.recv(packed, source, group)
    return packed.cpu().numpy().tobytes()


def gather_numbers(numbers: Sequence[Number]) -> list[list[Number]]:
    """Gather numbers of 64 bits from every rank, in rank order: equally many, all integers or all floats."""
    if world_size() == 1:
        return [list(numbers)]
    group = _living_group()
    own = torch.tensor(numbers, dtype=_dtype_of(numbers[0]), device=object_device(group))
    every = own.new_empty(world_size(), len(own))
    dist.all_gather(list(every), own, group=group)
    return every.tolist()


def gather_distinct(value: Any, key: str) -> list[tuple[list[int], Any]]:
    """Gather one picklable object for every set of ranks that have the same key; equal on all ranks.

    Costs one all-reduce where all keys are equal. Otherwise each rank sends 16 bytes, and the first rank of each set
    broadcasts its object: the bytes that a rank receives grow with what differs, not with the number of ranks.

    Args:
        value: The same on all ranks with this key.
        key: Text that tells different values apart.

    Returns:
        The ranks of each set, ascending, and the object; sets are ordered by their first ranks.
    """
    if all_equal(key.encode()):
        return [(list(range(world_size())), value)]
    sets: dict[tuple[int, ...], list[int]] = {}
    for number, words in enumerate(gather_numbers(_digest(key.encode()))):
        sets.setdefault(tuple(words), []).append(number)
    return [(ranks, broadcast_object(value, ranks[0])) for ranks in sets.values()]


def smallest(numbers: Sequence[Number]) -> list[Number]:
    """Return the smallest number of any rank at each place; see [Note: agreement is cheap].

    Args:
        numbers: Of 64 bits; equally many on every rank, all integers or all floats.
    """
    if world_size() == 1 or not numbers:
        return list(numbers)
    group = _living_group()
    found = torch.tensor(numbers, dtype=_dtype_of(numbers[0]), device=object_device(group))
    if found.device.type == "cpu":
        _disseminate(found, group)
    else:
        dist.all_reduce(found, dist.ReduceOp.MIN, group)
    return found.tolist()


def _disseminate(found: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace each number by the smallest of any rank; gloo's all-reduce would go around all ranks, twice.

    Each rank sends what it knows to ranks ahead at distances of 1, 2, 4, …: it has heard of twice as many each time.
    """
    size, own, distance = dist.get_world_size(group), dist.get_rank(group), 1
    while distance < size:
        heard = found.clone()
        sent = dist.isend(found, group=group, group_dst=(own + distance) % size)
        dist.recv(heard, group=group, group_src=(own - distance) % size)
        if sent is not None:
            sent.wait()
        found.copy_(torch.minimum(found, heard))
        distance *= 2


def largest(numbers: Sequence[Number]) -> list[Number]:
    """Return the largest number of any rank at each place, as :func:`smallest` does."""
    return [-each for each in smallest([-each for each in numbers])]


def _dtype_of(number: float) -> torch.dtype:
    return torch.float64 if isinstance(number, float) else torch.int64


def first_text(text: str | None) -> str:
    """Return the text of the first rank that has one, on every rank; empty where none has."""
    size = world_size()
    (first,) = smallest([rank() if text else size])
    return "" if first == size else str(broadcast_object(text, first))


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank; the same on every rank."""
    return not smallest([not flag])[0]


def all_equal(data: bytes) -> bool:
    """Return whether all ranks hold the same bytes, by a digest of 128 bits; the same on every rank.

    See [Note: agreement is cheap].
    """
    words = _digest(data)
    # A number that is the smallest, and whose complement is the smallest complement, is the largest too.
    claimed = [*words, *(~word for word in words)]
    return smallest(claimed) == claimed


def _digest(data: bytes) -> tuple[int, ...]:
    return struct.unpack("2q", hashlib.blake2b(data, digest_size=16).digest())


def _living_group() -> dist.ProcessGroup | None:
    """Return the group over which this thread agrees (None: the world), which must not have ended."""
    group = agreement_group()
    if group is not None:
        _check_alive(group)
    return group


def _check_alive(group: dist.ProcessGroup) -> None:
    """Refuse to agree in the background once the world has ended: a checkpoint without the other ranks is none."""
    try:
        dist.get_rank(group)
    except ValueError as error:
        raise LaunchError(
            "The ranks have left each other before a save in the background was done",
            expected="a process group until it is on the disk",
            got=str(error),
            fix="end with meshwright.shutdown_distributed(), which waits for it, in place of "
            "torch.distributed.destroy_process_group(), or wait for the save before that",
        ) from error


def check_equal(what: str, value: str, fix: str) -> None:
    """Raise on every rank unless all ranks hold the same ``value``.

    Raises:
        LaunchError: Naming the ranks that differ from rank 0 as the first of them does.
    """
    check_all_equal((what, value, fix))


def check_all_equal(*claims: tuple[str, str, str]) -> None:
    """Make several checks as :func:`check_equal` does, with one digest for all.

    Args:
        claims: What, value and fix of each, in the order in which they are reported.
    """
    own = [value for _, value, _ in claims]
    if all_equal(repr(own).encode()):
        return
    theirs = broadcast_object(own)
    at = next((place for place, value in enumerate(own) if value != theirs[place]), len(own))
    place, other = divmod(smallest([at * world_size() + rank()])[0], world_size())
    expected, got = theirs[place], broadcast_object(own[place], other)
    kind = 0 if own[place] == expected else 1 if own[place] == got else 2
    holders = [each for (each,) in gather_numbers([kind])]
    what, _, fix = claims[place]
    raise agreed(
        LaunchError(
            f"{what} differs between ranks",
            expected=f"{expected} ({_holders(holders, 0)})",
            got=f"{got} ({_holders(holders, 1)})",
            fix=fix,
        )
    )


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FEW = 16  # numbers of a tensor that are worth comparing


def value_text(value: Any) -> str:
    """Return a value as text that is equal for equal values in different processes.

    Functions and classes are named, tensors of a few numbers are written out, and of devices only the type is.
    """
    if isinstance(value, functools.partial):
        return f"{value_text(value.func)}({value_text([*value.args, value.keywords])})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{value_text(key)}: {value_text(each)}" for key, each in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(value_text, value))) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, torch.Tensor):
        few = value.numel() <= _FEW and not value.is_meta and not isinstance(value, DTensor)
        return f"{value.detach().tolist()}" if few else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, torch.device):
        return value.type
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return _ADDRESS.sub("", repr(value))


def _holders(values: Sequence[int], value: int) -> str:
    return named_ranks([rank for rank, each in enumerate(values) if each == value])


def agreed(error: MeshwrightError) -> MeshwrightError:
    """Mark an error that every rank raises alike, so that a program may print it once."""
    error.agreed = True  # type: ignore[attr-defined]
    return error


# --- Collective entry: a rank that enters a call alone reports it before it waits in a collective for the others.

_PATIENCE_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


def wait_for_all_ranks(what: str) -> None:
    """Wait until every rank has entered a call, and name those that stay away for long.

    The ranks meet in their store. In a collective, a call that is made on rank 0 only (as under DDP a model is saved)
    would meet whatever the others do next: gloo then aborts the process, and NCCL waits without a word.

    Args:
        what: The call, as users know it.

    Raises:
        LaunchError: When the others have not come within the time limit of the ranks.
    """
    if world_size() == 1:
        return
    store, key = default_store(), f"meshwright/together/{what}"
    number = store.add(f"{key}/{rank()}", 1)
    store.add(key, 1)
    began_s, pause_s, has_warned = time.monotonic(), _FIRST_PAUSE_S, False
    while store.add(key, 0) < number * world_size():
        waited_s = time.monotonic() - began_s
        limit_s = store.timeout.total_seconds() if has_warned else _PATIENCE_S  # type: ignore[attr-defined]
        if waited_s > limit_s:
            _report_absent(what, store, key, number, waited_s, is_over=has_warned)
            has_warned = True
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, _longest_pause_s())


def first_over_store(what: str, text: str, patience_s: float | None = None) -> str | None:
    """Return a text that any rank brings, the same on all of them; the store does no harm to ranks in a collective.

    Args:
        what: The occasion; ranks come to it equally often.
        text: Text of this rank; empty for none.
        patience_s: Seconds to wait for the others; None waits for all of them.

    Returns:
        The text of the first rank that brought one, empty if none did; None when ranks have not come in time.
    """
    if world_size() == 1:
        return text
    store, key = default_store(), f"meshwright/told/{what}"
    number = store.add(f"{key}/{rank()}", 1)
    if text and store.add(f"{key}/{number}/texts", 1) == 1:
        store.set(f"{key}/{number}", text)
    store.add(key, 1)
    began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while store.add(key, 0) < number * world_size():
        if patience_s is not None and time.monotonic() - began_s >= patience_s:
            return None
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, _longest_pause_s())
    return store.get(f"{key}/{number}").decode() if store.add(f"{key}/{number}/texts", 0) else ""


def _longest_pause_s() -> float:
    """Return the longest pause between two questions to the store, so that all ranks ask 10,000 a second at most."""
    return max(_LONGEST_PAUSE_S, world_size() / 10_000)


def _report_absent(what: str, store: Any, key: str, number: int, waited_s: float, *, is_over: bool) -> None:
    """Raise, or warn on the first rank that has waited long, about ranks that have not entered a call."""
    fix = "call it on every rank, without `if rank == 0:` around it"
    if is_over:
        raise LaunchError(
            f"{what} was not called on every rank",
            expected=f"all of them within {waited_s:.0f} s",
            got=f"nothing of {named_ranks(absent_ranks(store, key, number, world_size()))}",
            fix=fix,
        )
    if store.add(f"{key}/warned/{number}", 1) > 1:
        return
    absent = [each for each in range(world_size()) if store.add(f"{key}/{each}", 0) < number]
    if absent:
        text = f"rank {rank()} has waited {waited_s:.0f} s in {what} for {named_ranks(absent)}; if it stays so: {fix}"
        print(f"meshwright: {text}", file=sys.stderr, flush=True)


# --- Checksums that show whether tensors of several ranks hold the same bits.
#
# [Note: equal weights]
#
# ``accelerate`` compares the weights of the ranks once, and methods rely on the answer: equal weights are not sent
# again. Of a model of up to 8 GiB every byte counts. That takes some 0.07 s for each GiB of host memory, and would take
# half a minute for the weights of a 70B model. Of a larger one, tensors above 1 MiB are sampled: of every 61 lines of
# 64 bytes one is read, at a place that moves on by one line from group to group. So a run of 4 KiB in which all
# elements differ is always found, wherever it begins, and a block of columns in some rows; so are weights of other
# seeds, of other files, in another precision, and rows that one rank has added or not loaded. What may escape is a few
# single elements, such as a flipped bit, in a tensor above 1 MiB of a model above 8 GiB. Where replicas hold that
# tensor whole, ``weight_vote`` finds it, since votes sum up every byte. Where it is sharded, each element comes from
# one rank alone, and all ranks train the same model.

_WORD = 8  # bytes
_ROWS = 64  # parts of a tensor whose order counts
_ODD = 0x5851F42D4C957F2D  # Knuth's multiplier of MMIX


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's bytes in the order of its elements: a view if it is contiguous, else of a copy."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    # A single element may have any stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _words_ahead(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes for a view as words, which have to begin where the storage begins."""
    each_byte = flat_bytes(tensor)
    return each_byte.clone() if each_byte.storage_offset() % _WORD else each_byte


@torch.no_grad()
def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit checksum of a tensor's bits: int64, 0-dim, on its device.

    The bits are read as 64-bit integers and added up modulo 2^64, in one pass at the speed of memory: any flipped bit,
    and any change within one word, changes the sum. NaN and -0.0 count by their bits, too. 64 parts of the tensor are
    weighted by odd numbers, so that most exchanges of places are found. No float is computed, so the number is the same
    on every device and with every number of threads.

    Args:
        tensor: Plain, of any type: of a DTensor, the local part.
    """
    each_byte = _words_ahead(tensor)
    words = each_byte[: each_byte.numel() // _WORD * _WORD].view(torch.int64)
    whole = words.numel() // _ROWS * _ROWS
    sums = words[:whole].view(_ROWS, -1).sum(1)
    total = (sums * torch.arange(1, 2 * _ROWS, 2, device=words.device)).sum() + words[whole:].sum() * _ODD
    rest = each_byte[words.numel() * _WORD :].to(torch.int64)
    return total + (rest << torch.arange(0, 8 * rest.numel(), 8, device=words.device)).sum()


def bit_sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the :func:`bit_sum` of each tensor; int64 on the host, which waits once for each device."""
    return read_together([bit_sum(tensor) for tensor in tensors])


_COMPARED_WHOLE_BYTES = 8 * 2**30  # of all tensors together; see [Note: equal weights]
_LARGE_BYTES = 2**20
_LINE = 64  # bytes that memory delivers at once, and more than the largest element
_PERIOD = 61  # lines; a prime, so that no row length of a matrix keeps step with it


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return one of every 61 lines of a tensor's bytes, as int64; see [Note: equal weights].

    Of the first 61 lines the first, of the next 61 the second, and so on: no column of a matrix is always left out.
    What is left at the end is taken whole.
    """
    each_byte = _words_ahead(tensor)
    covered = each_byte.numel() // (_PERIOD**2 * _LINE) * _PERIOD**2 * _LINE
    lines = each_byte[:covered].view(torch.int64).view(-1, _PERIOD, _PERIOD, _LINE // _WORD)
    rest = each_byte[covered:]
    rest = F.pad(rest, (0, -rest.numel() % _WORD)).view(torch.int64)
    return torch.cat([lines.diagonal(dim1=1, dim2=2).transpose(1, 2).reshape(-1), rest])


def _fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum of each tensor: of all of its bytes, or of samples where the tensors are large together."""
    # By sizes alone, which are equal on all ranks: sums of whole tensors and of samples cannot be compared.
    whole = sum(tensor.nbytes for tensor in tensors) <= _COMPARED_WHOLE_BYTES
    every = (each if whole or each.nbytes <= _LARGE_BYTES else sampled(each) for each in tensors)
    return bit_sums(every).tolist()


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between ranks that ought to hold the same."""

    name: str
    """The first such tensor."""
    odd: tuple[int, ...]
    """Ranks that differ from most of the others; all of them where there is no majority."""
    majority: tuple[int, ...]
    """The ranks that agree; empty where there is no majority."""
    others: tuple[str, ...] = ()
    """Further such tensors."""

    def __str__(self) -> str:
        more = f" and {len(self.others)} more" if self.others else ""
        if not self.majority:
            return f"{self.name}{more} on {named_ranks(self.odd)}, of which no majority holds the same"
        return f"{self.name}{more} on {named_ranks(self.odd)}, while {named_ranks(self.majority)} hold the same"


def outvoted(values: Mapping[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide ranks into the majority and those that differ from it.

    Args:
        values: Values by rank.

    Returns:
        Ranks that differ from the majority, and the majority: more than half of all. Without one, all ranks and none.
        Where all agree, none and all.
    """
    value, votes = Counter(values.values()).most_common(1)[0]
    if 2 * votes <= len(values):
        return tuple(values), ()
    return tuple(rank for rank in values if values[rank] != value), tuple(r for r in values if values[r] == value)


def difference_between_ranks(tensors: Mapping[str, torch.Tensor]) -> Difference | None:
    """Find the first tensor that differs between ranks; None where all are equal. Collective.

    Costs one all-reduce, and more only where something differs. Tensors on ``meta`` have no values that could differ.
    See [Note: equal weights] for what is found in large tensors.

    Args:
        tensors: Dense; the same names, shapes and types on every rank, and all on ``meta`` or none.
    """
    if world_size() == 1 or any(tensor.is_meta for tensor in tensors.values()):
        return None
    sums = _fingerprints(list(tensors.values()))
    if all_equal(repr(sums).encode()):
        return None
    # A sum differs where the smallest is not the largest, whose complement is the smallest complement.
    low_and_high = smallest([*sums, *(~each for each in sums)])
    differing = [
        place for place, low in enumerate(low_and_high[: len(sums)]) if low != ~low_and_high[place + len(sums)]
    ]
    every = gather_numbers([sums[differing[0]]])
    odd, majority = outvoted({number: found for number, (found,) in enumerate(every)})
    names = list(tensors)
    return Difference(names[differing[0]], odd, majority, tuple(names[place] for place in differing[1:]))


# --- The code that this process runs: ranks that run different code must not train together.

_SOURCES = Path(__file__).parents[1]


@functools.cache
def own_versions() -> str:
    """Return the :func:`code_versions` of this process, for which every source file is read once."""
    return code_versions()


def code_versions(sources: Path = _SOURCES) -> str:
    """Return the versions of Meshwright, torch and Python, and a digest of Meshwright's own source files.

    The digest tells two states of a source tree apart that carry one version number.

    Args:
        sources: The folder of the package.
    """
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
    python = platform.python_version()
    return f"meshwright {__version__} ({digest.hexdigest()[:12]}), torch {torch.__version__}, Python {python}"
