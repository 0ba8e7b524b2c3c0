"""Keep tokenized samples in memory-mapped files, and lay them out in rows of one length: packed or padded."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from meshwright.data.chat import Tokens
from meshwright.data.records import BadLines
from meshwright.data.token_files import identity_of, mark_as_written, new_partial, write_header
from meshwright.errors import DataError

IGNORED = -100
"""The label of a token that is not trained, as torch's cross-entropy takes it."""
_FORMAT_VERSION = 1
_COUNTS = "counts.json"

TooLong = Literal["cut", "split", "refuse"]
"""What happens to samples that are longer than a row: the rest is dropped, or becomes samples of its own, or raises."""


class SampleFiles:
    """Samples of different lengths, mapped into memory: ids, which of them are trained, and where each sample starts.

    Args:
        folder: As :func:`sample_cache` writes it.

    Raises:
        DataError: When a file in it is absent or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open()

    def _open(self) -> None:
        try:
            self._ids, self._trained, self._starts = (
                np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                for name in ("ids", "trained", "starts")
            )
            self.counts: dict[str, int] = json.loads((self.folder / _COUNTS).read_text())
            if len(self._ids) != len(self._trained) or self._starts[-1] != len(self._ids):
                raise ValueError(f"{len(self._ids)} ids, {len(self._trained)} marks, {self._starts[-1]} tokens in all")
        except Exception as error:  # numpy reads headers as Python, and fails as its parser does
            raise DataError(
                f"{self.folder} holds no complete samples",
                expected="ids.npy, trained.npy and starts.npy, as sample_cache writes them",
                got=f"{type(error).__name__}: {error}",
                fix="delete the folder: it is made again",
            ) from error

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample: int64 of shape (num_samples,)."""
        return np.diff(self._starts)

    @property
    def trained_counts(self) -> np.ndarray:
        """Return how many tokens of each sample a loss is the mean over: int64 of shape (num_samples,).

        The first of a sample is predicted from nothing, and does not count.
        """
        counts = np.add.reduceat(self._trained, self._starts[:-1], dtype=np.int64)
        return counts - self._trained[self._starts[:-1]]

    def tokens(self, index: int) -> Tokens:
        """Return one sample."""
        part = slice(int(self._starts[index]), int(self._starts[index + 1]))
        return Tokens(self._ids[part].astype(np.int64), np.asarray(self._trained[part]))

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}  # a pickled memory map would include the whole file

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def sample_cache(
    files: Sequence[Path],
    encoded: Callable[[], Iterable[Tokens]],
    directory: Path,
    *,
    fingerprint: str,
    seq_len: int,
    too_long: TooLong = "cut",
    bad_lines: BadLines | None = None,
) -> SampleFiles:
    """Encode samples into files, or find those made earlier.

    The folder's name is a hash of every file's content, of the fingerprint and of the format.
    It gets its name only when complete; several processes may build it at once.

    Args:
        files: What is encoded.
        encoded: Called when nothing is found; returns the samples in order.
        directory: Folder of the cache; made if absent.
        fingerprint: Differs for encoders that encode anything differently.
        seq_len: Tokens of a row; longer samples are treated as ``too_long`` says.
        too_long: See :data:`TooLong`. What is left of a sample without a trained token is left out.
        bad_lines: What ``encoded`` reads with; its count is kept with the others.

    Raises:
        DataError: When a file cannot be read, a sample is too long and shall be refused, none is left, or the folder
            cannot be written into.
    """
    contents = [identity_of(path, directory) for path in files]
    identity = json.dumps([_FORMAT_VERSION, fingerprint, seq_len, too_long, contents])
    folder = directory / f"samples-{hashlib.sha256(identity.encode()).hexdigest()[:20]}"
    if (folder / _COUNTS).is_file():
        return SampleFiles(folder)
    partial = new_partial(folder, is_folder=True)
    try:
        _write(partial, encoded(), seq_len, too_long, bad_lines or BadLines())
        try:
            os.rename(partial, folder)
        except OSError:
            if not (folder / _COUNTS).is_file():  # otherwise another process was faster
                raise
        return SampleFiles(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, samples: Iterable[Tokens], seq_len: int, too_long: TooLong, bad_lines: BadLines) -> None:
    counts, starts = {"samples": 0, "too_long": 0, "untrained": 0}, [0]
    with _flat(folder / "ids.npy", np.dtype(np.uint32)) as ids, _flat(folder / "trained.npy", np.dtype(np.bool_)) as on:
        for sample in samples:
            counts["samples"] += 1
            counts["too_long"] += len(sample.ids) > seq_len
            for part in _fitting(sample, seq_len, too_long, counts["samples"]):
                if not part.trained[1:].any():  # the first token is predicted from nothing
                    counts["untrained"] += 1
                    continue
                ids(part.ids)
                on(part.trained)
                starts.append(starts[-1] + len(part.ids))
    if len(starts) == 1:
        raise DataError(
            "There is nothing to train on",
            expected="a sample with a trained token within the length of a row",
            got=f"{counts['samples']} samples, {counts['untrained']} of them without one in {seq_len} tokens",
            fix="add samples, make data.seq_len larger, or look at the assistant's messages in them",
        )
    np.save(folder / "starts.npy", np.array(starts, dtype=np.int64))
    counts["bad_lines"] = sum(bad_lines.skipped.values())
    (folder / _COUNTS).write_text(json.dumps(counts))


@contextlib.contextmanager
def _flat(path: Path, kind: np.dtype) -> Iterator[Callable[[np.ndarray], None]]:
    """Write a flat ``.npy`` file piece by piece, with the function that it yields."""
    length = 0

    def append(values: np.ndarray) -> None:
        nonlocal length
        file.write(values.astype(kind).tobytes())
        length += len(values)

    with open(path, "wb") as file:
        mark_as_written(file)
        write_header(file, kind, 0)
        yield append
        file.seek(0)
        write_header(file, kind, length)
        file.flush()
        os.fsync(file.fileno())


def _fitting(sample: Tokens, seq_len: int, too_long: TooLong, number: int) -> Iterator[Tokens]:
    length = len(sample.ids)
    if length > seq_len and too_long == "refuse":
        raise DataError(
            "A sample is longer than a row",
            expected=f"at most {seq_len} tokens (data.seq_len)",
            got=f"{length} tokens in sample {number}",
            fix="make data.seq_len larger, or let data.too_long be 'cut' or 'split'",
        )
    ends = length if too_long == "split" else min(length, seq_len)
    for start in range(0, ends, seq_len):
        part = slice(start, min(start + seq_len, ends))
        yield Tokens(sample.ids[part], sample.trained[part])


# --- Rows


class SampleRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of equal length for a model of transformers: one sample each, padded, or as many as fit.

    Item ``i`` is a dictionary of int64 tensors of shape (seq_len,): ``input_ids``; ``labels``, which are
    :data:`IGNORED` at tokens that are not trained and at the first token of every sample; and ``position_ids``, which
    begin at 0 in every sample, where rows are packed, or ``attention_mask``, which is 0 behind the sample.

    Args:
        samples: None of which is longer than ``seq_len``.
        seq_len: Tokens per row.
        packed: Whether a row takes several samples.
        pad_id: The id behind the last sample of a row.
    """

    def __init__(self, samples: SampleFiles, seq_len: int, *, packed: bool, pad_id: int = 0) -> None:
        self.samples, self.seq_len, self.is_packed, self.pad_id = samples, seq_len, packed, pad_id
        lengths = samples.lengths
        self.rows = pack(lengths, seq_len) if packed else [(index,) for index in range(len(lengths))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = np.full(self.seq_len, self.pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORED, dtype=np.int64)
        # What is behind the last sample is a document of its own.
        positions, end = np.zeros(self.seq_len, dtype=np.int64), 0
        for each in self.rows[index]:
            sample = self.samples.tokens(each)
            part, start = slice(end, end + len(sample.ids)), end
            end = part.stop
            ids[part], positions[part] = sample.ids, np.arange(end - start)
            labels[part] = np.where(sample.trained, sample.ids, IGNORED)
            labels[start] = IGNORED
        positions[end:] = np.arange(self.seq_len - end)
        rest = positions if self.is_packed else (np.arange(self.seq_len) < end).astype(np.int64)
        row = {"input_ids": ids, "labels": labels, "position_ids" if self.is_packed else "attention_mask": rest}
        return {name: torch.from_numpy(values) for name, values in row.items()}

    def blank(self) -> dict[str, torch.Tensor]:
        """Return a row in which nothing is trained, to fill a batch."""
        return {**self[0], "labels": torch.full((self.seq_len,), IGNORED)}

    def num_trained(self) -> list[int]:
        """Return how many labels of each row a loss is the mean over."""
        counts = self.samples.trained_counts
        return [int(counts[list(row)].sum()) for row in self.rows]


def pack(lengths: np.ndarray, size: int) -> list[tuple[int, ...]]:
    """Return which samples share a row: best fit, longest first.

    Each sample goes into the fullest row that has room for it (Johnson 1973); rows take at most 11/9 of the fewest
    possible. The result depends on the lengths alone.

    Args:
        lengths: Tokens of each sample, shape (num_samples,), none above ``size``.
        size: Tokens of a row.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by the room that is left
    rooms: list[int] = []  # the keys of with_room, in order
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        else:
            row, room = len(rows), size
            rows.append([])
        rows[row].append(index)
        left = room - length
        if left:
            if left not in with_room:
                with_room[left] = []
                bisect.insort(rooms, left)
            with_room[left].append(row)
    return [tuple(row) for row in rows]


def trained_labels(inputs: Any) -> torch.Tensor:
    """Return the number of labels that the loss of a model of transformers is the mean over.

    For ``accelerate(loss_weight=)``: it predicts each label from the tokens before it, so the first does not count.
    """
    return (inputs["labels"][:, 1:] != IGNORED).sum()
