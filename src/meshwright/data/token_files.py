"""Turn text files into a memory-mapped token file, and into windows of tokens for training."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.data import Dataset

from meshwright.data.records import BadLines, compression_of, holds_records, open_text, read_records, text_of
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import ConfigError, DataError

if sys.platform != "win32":
    import fcntl

STDLIB = "stdlib"
"""Source name of the Python standard library's own ``.py`` files."""

# Installed packages differ from machine to machine; tests and their data are poor training text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test"})
_GLOB_CHARACTERS = frozenset("*?[")


def find_files(source: str | Sequence[str], base: Path) -> list[Path]:
    """Find the files of a corpus.

    Args:
        source: ``"stdlib"``, a file path or a glob (``**`` crosses folders), or a sequence of these. ``~`` is expanded.
        base: Folder that relative paths and globs start at.

    Returns:
        Absolute paths in sorted order; a file reached in several ways is listed once.

    Raises:
        DataError: When there is no source, or one of them matches no file.
    """
    sources = [source] if isinstance(source, str) else list(source)
    if not sources:
        raise DataError(
            "The corpus has no files",
            expected=f"{STDLIB!r}, file paths or globs",
            got="an empty list",
            fix=f"name at least one file; {STDLIB!r} is on every machine",
        )
    found = sorted(path for each in sources for path in _match(each, base))
    distinct: dict[Path, Path] = {}
    for path in found:
        distinct.setdefault(path.resolve(), path)
    return list(distinct.values())


def _match(source: str, base: Path) -> list[Path]:
    if source == STDLIB:
        return _standard_library()
    pattern = os.path.abspath(base / Path(source).expanduser())
    # The base is no glob, and neither is a path that exists, even with glob characters in their names.
    escaped = os.path.abspath(glob.escape(os.path.abspath(base)) / Path(source).expanduser())
    names = [pattern] if os.path.exists(pattern) else glob.glob(escaped, recursive=True)
    # A folder is a source only where it is a dataset.
    files = [Path(name) for name in names if os.path.isfile(name) or holds_records(Path(name))]
    if not files:
        raise _nothing_found(source, pattern)
    for file in files:
        if compression_of(file) == "zip":
            raise DataError(
                "A file of the corpus is an archive",
                expected="text, or text that gzip, bzip2, xz or zstd has compressed",
                got=f"{file}, which is zip",
                fix="unpack it first",
            )
    return files


def _nothing_found(source: str, pattern: str) -> DataError:
    kind = "Glob" if _GLOB_CHARACTERS & set(source) else "File"
    if os.path.isdir(pattern):
        got, fix = f"the folder {pattern}", f"name its files, for example {source.rstrip('/')}/**/*.txt"
    else:
        got, fix = f"nothing at {pattern}", "correct the path; relative ones start at the folder shown under 'got'"
    return DataError(f"{kind} {source!r} matches no file", expected="one file or more", got=got, fix=fix)


def _standard_library() -> list[Path]:
    root = sysconfig.get_path("stdlib")
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise DataError(
            "This Python has no readable standard library",
            expected=f".py files under {root}",
            got="none: a frozen or zipped interpreter, most likely",
            fix="name text files of your own as the corpus",
        )
    return found


# --- The token cache: a corpus is tokenized once into one flat file that every rank maps into memory.

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) of text."""

_FORMAT_VERSION = 2
_DIGEST_LENGTH = 64
_TICK_NS = 2_000_000_000  # more than the coarsest clock of a file system
# Large files are tokenized in pieces that end with a line, so memory does not grow with the file.
# Part of the format: where pieces end decides which tokens a merging tokenizer makes there.
_PIECE_BYTES = 8 * 2**20


def token_cache(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    directory: Path,
    progress: Progress | None = None,
    *,
    text_key: str = "text",
    bad_lines: BadLines | None = None,
) -> Path:
    """Tokenize files into one ``.npy`` file, or find the one made earlier.

    The file's name is a hash of every file's content, of the tokenizer and of the format, so changed texts get a new
    file, and equal ones elsewhere find it. It gets its name only when complete; several processes may build it at once.
    A file with a wrong length or header is built again.

    Args:
        files: In the order of their tokens: text files, one document each, or files of records, one document per
            record; see :func:`meshwright.data.read_records`. Both may be compressed.
        tokenizer: Its ids are stored in the smallest unsigned type that holds its vocabulary.
        directory: Folder of the cache; made if absent.
        progress: Called after every piece while tokenizing; not called when the cache is found.
        text_key: The key of records that holds their text.
        bad_lines: What happens to lines that are no JSON objects; by default they raise.

    Returns:
        Path of the cache: a one-dimensional array, every document followed by the end-of-text id.

    Raises:
        DataError: When there are no files, one of them cannot be read, or nothing can be written into the folder.
    """
    if not files:
        raise DataError("There is nothing to tokenize", expected="one file or more", got="none", fix="name some files")
    path = directory / f"tokens-{_key(files, tokenizer, text_key, directory)}.npy"
    if _is_complete(path, _token_type(tokenizer)):
        return path
    partial = new_partial(path)
    try:
        with open(partial, "r+b") as out:
            mark_as_written(out)
            _build(out, files, tokenizer, progress or (lambda done_bytes, total_bytes: None), text_key, bad_lines)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def new_partial(path: Path, *, is_folder: bool = False) -> Path:
    """Make the empty file or folder under whose name a cache is built, and its directory.

    It is in the same directory, so that renaming is atomic; with a unique name, for several processes may build.

    Raises:
        DataError: When it cannot be made.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir() if is_folder else partial.touch(exist_ok=False)
    except OSError as error:
        raise DataError(
            "Nothing can be written into the cache of tokens",
            expected="a directory that this user may make, or write into",
            got=f"{path.parent}: {error.strerror or error}",
            fix="name another one: data.cache_dir of a training file, or XDG_CACHE_HOME",
        ) from error
    return partial


# A process that is killed while it builds a cache leaves a part of one behind, as large as a corpus. Who writes has the
# file locked, until it ends in whatever way. Some file systems have locks within one host alone: what was written to
# within the hour stays, too.
_STALE_S = 3600.0


def mark_as_written(file: BinaryIO) -> None:
    """Keep :func:`remove_leftovers` of other processes from a file while it is open."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_leftovers(directory: Path) -> None:
    """Remove the unfinished caches of processes that were killed."""
    for partial in directory.glob(".*.partial"):
        if not _is_left(partial / "ids.npy" if partial.is_dir() else partial):
            continue
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)


def _is_left(written: Path) -> bool:
    """Return whether nobody writes to a file any more; False where that cannot be known."""
    try:
        if sys.platform == "win32" or time.time() - written.stat().st_mtime < _STALE_S:
            return False
        with open(written, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # locked, of another user, or gone meanwhile
        return False


def open_tokens(path: Path) -> np.ndarray:
    """Map a token file into memory, read-only: unsigned integers of shape (num_tokens,).

    Raises:
        DataError: When the file is absent, cut short, or not a token file.
    """
    try:
        dtype, num_tokens, offset = _header(path)
        # A longer file could be mapped, but it is not the one that was written.
        if os.path.getsize(path) != offset + num_tokens * dtype.itemsize:
            raise ValueError(f"{os.path.getsize(path)} bytes for {num_tokens} tokens")
        return np.memmap(path, dtype, "r", offset, (num_tokens,))
    except Exception as error:  # numpy reads headers as Python, and fails as its parser does
        raise DataError(
            f"{path} is not a complete token file",
            expected="a flat .npy file of unsigned integers, as token_cache writes it",
            got=str(error),
            fix="delete it and call token_cache again",
        ) from error


def _header(path: Path) -> tuple[np.dtype, int, int]:
    """Return the type of tokens, their number and their offset in bytes.

    These are checked before mapping: a type without a size would crash numpy's C code (a division by zero).
    """
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version} of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        offset = file.tell()
    if len(shape) != 1 or dtype.kind != "u" or dtype.itemsize == 0:
        raise ValueError(f"an array of shape {shape} and type {dtype}")
    return dtype, shape[0], offset


def _is_complete(path: Path, token_type: np.dtype) -> bool:
    try:
        return path.exists() and open_tokens(path).dtype == token_type
    except DataError:
        return False


def _token_type(tokenizer: Tokenizer) -> np.dtype:
    return np.min_scalar_type(tokenizer.vocab_size - 1)


def identity_of(path: Path, directory: Path) -> list[str]:
    """Return what a cache knows a file or a folder of data by: how it is read, and its content.

    Args:
        path: The file, or a folder of files.
        directory: Folder of the cache, where hashes of files are remembered.
    """
    if not path.is_dir():
        return [path.suffix.lower() if holds_records(path) else "text", _content_of(path, directory)]
    files = sorted(each for each in path.rglob("*") if each.is_file())
    return ["folder", *(text for each in files for text in (each.name, _content_of(each, directory)))]


def _content_of(path: Path, directory: Path) -> str:
    """Return the hash of a file's content.

    It is remembered while nothing has written to the file: its inode, size and times are as they were, of which no
    program can set back that of the last change. A file that was changed just now could change again in the same tick.
    """
    known = directory / "contents" / hashlib.sha256(repr(_state_of(path)).encode()).hexdigest()[:32]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        digest = known.read_text()
        if len(digest) == _DIGEST_LENGTH:
            return digest
    before, started_ns = _state_of(path), time.time_ns()
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if before == _state_of(path) and path.stat().st_ctime_ns < started_ns - _TICK_NS:
        partial = known.with_name(f".{known.name}.{uuid.uuid4().hex}.partial")
        with contextlib.suppress(OSError):  # a cache that cannot be written may hold the tokens all the same
            known.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(digest)
            os.replace(partial, known)
    return digest


def _state_of(path: Path) -> tuple[str | int, ...]:
    found = path.stat()
    return str(path.absolute()), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _key(files: Sequence[Path], tokenizer: Tokenizer, text_key: str, directory: Path) -> str:
    with _readable(files):
        contents = [identity_of(path, directory) for path in files]
    key = [text_key] if any(map(holds_records, files)) else []
    identity = json.dumps([_FORMAT_VERSION, tokenizer.fingerprint, tokenizer.end_of_text, contents, *key])
    return hashlib.sha256(identity.encode()).hexdigest()[:20]


def _build(
    out: BinaryIO,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    progress: Progress,
    text_key: str,
    bad_lines: BadLines | None,
) -> None:
    token_type = _token_type(tokenizer)
    write_header(out, token_type, num_tokens=0)
    start = out.tell()
    end_of_text = np.array([tokenizer.end_of_text], dtype=token_type)
    with _readable(files):
        total_bytes = sum(path.stat().st_size for path in files)
        before_bytes = 0
        for path in files:
            size_bytes = path.stat().st_size
            for document in _documents(path, text_key, bad_lines or BadLines()):
                for piece, share in document:
                    out.write(tokenizer.encode(piece).astype(token_type).tobytes())
                    progress(before_bytes + int(share * size_bytes), total_bytes)
                out.write(end_of_text.tobytes())
            before_bytes += size_bytes
            if holds_records(path):
                progress(before_bytes, total_bytes)
    num_tokens = (out.tell() - start) // token_type.itemsize
    out.seek(0)
    write_header(out, token_type, num_tokens)
    assert out.tell() == start, "numpy pads headers so that a longer shape fits"
    out.flush()
    os.fsync(out.fileno())  # after a power cut, a renamed file must have all its bytes


def write_header(out: BinaryIO, token_type: np.dtype, num_tokens: int) -> None:
    """Write the header of a flat ``.npy`` file; one of the same size replaces it when the length is known."""
    description = np.lib.format.dtype_to_descr(token_type)
    header = {"descr": description, "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(out, header)


_Piece = tuple[bytes, float]
"""A part of a document, and the share of its file that has been read with it."""


def _documents(path: Path, text_key: str, bad_lines: BadLines) -> Iterator[Iterator[_Piece]]:
    """Iterate over the documents of a file, each in pieces: a text file is one, each of a file's records is one."""
    if not holds_records(path):
        yield _pieces(path)
        return
    for record in read_records(path, bad_lines):
        yield iter([(text_of(record, text_key).encode(), 0.0)])


def _pieces(path: Path) -> Iterator[_Piece]:
    size_bytes = max(path.stat().st_size, 1)
    with open_text(path) as (text, position):
        while piece := text.read(_PIECE_BYTES):
            yield piece if piece.endswith(b"\n") else piece + text.readline(), position() / size_bytes


@contextlib.contextmanager
def _readable(files: Sequence[Path]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is None or Path(error.filename) not in files:
            raise  # an error of writing the cache: a full or read-only disk
        raise DataError(
            "A file of the corpus cannot be read",
            expected="readable files",
            got=str(error),
            fix="leave it out, or make it readable for this user",
        ) from error


class TokenDataset(Dataset[torch.Tensor]):
    """Non-overlapping windows of a token file; the tokens stay on disk until they are asked for.

    Item ``i`` is an int64 tensor of shape (seq_len,): tokens ``i * seq_len`` to ``(i + 1) * seq_len``. Tokens after the
    last whole window are left out. DataLoader workers may be forked or spawned.

    Args:
        path: Token file of :func:`token_cache`.
        seq_len: Tokens per window.

    Raises:
        ConfigError: When ``seq_len`` is not a positive count.
        DataError: When the file is damaged, or shorter than one window.
    """

    def __init__(self, path: Path, seq_len: int) -> None:
        if seq_len < 1:
            raise ConfigError(
                "seq_len is not a count", expected="1 or more", got=repr(seq_len), fix="give the tokens per sample"
            )
        self.path = Path(path)
        self.seq_len = seq_len
        self._tokens: np.ndarray = open_tokens(self.path)
        if len(self) == 0:
            raise DataError(
                "The corpus is shorter than one sequence",
                expected=f"at least {seq_len} tokens (seq_len)",
                got=f"{self.num_tokens} tokens, kept in {self.path}",
                fix="add text, or train on shorter sequences" if self.num_tokens else "see whether the files are empty",
            )

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in the file, also those after the last whole window."""
        return int(self._tokens.size)

    def __len__(self) -> int:
        return self.num_tokens // self.seq_len

    def __getitem__(self, index: int) -> torch.Tensor:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = (index % len(self)) * self.seq_len
        return torch.from_numpy(self._tokens[start : start + self.seq_len].astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would include the whole file; the other process maps the file itself.
        return {key: value for key, value in vars(self).items() if key != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = open_tokens(self.path)
