"""Text to token ids and back: bytes as they are, or the vocabulary of ``tokenizers``, transformers or tiktoken."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.data.chat import fingerprint_of, is_tokenizer_folder, transformers_tokenizer
from meshwright.errors import ConfigError, DataError, did_you_mean
from meshwright.runtime.lazy import optional_library

BYTES = "bytes"
"""The tokenizer name that stands for :class:`ByteTokenizer`."""

TIKTOKEN = "tiktoken:"
"""Beginning of the names of tiktoken's vocabularies, before the path of a local file."""

# The end-of-text tokens of published vocabularies: GPT-2 and GPT-NeoX, Llama 3, Llama 2 and T5, Gemma, Qwen, BERT.
_END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Interface of tokenizers."""

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: all are in ``range(vocab_size)``."""

    @property
    def end_of_text(self) -> int:
        """Return the id that follows every document."""

    @property
    def fingerprint(self) -> str:
        """Return a string that differs for tokenizers that encode any text differently; names cached tokens."""

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a text, integers of shape (num_tokens,), without the end-of-text id."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without end-of-text ids."""


class ByteTokenizer:
    """One id per byte, and one for the end of a text.

    The vocabulary is 257, not rounded up; a model may have more rows than a tokenizer has ids.
    """

    vocab_size = 257
    end_of_text = 256
    fingerprint = "bytes-1"

    def encode(self, text: bytes) -> np.ndarray:
        """Return the bytes themselves, uint8 of shape (num_bytes,), read-only."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids without end-of-text; bytes that are not UTF-8 become the replacement character.

        Raises:
            DataError: When an id is outside the vocabulary.
        """
        values = [int(each) for each in ids]
        outside = [value for value in values if not 0 <= value < self.vocab_size]
        if outside:
            raise DataError(
                "Ids outside the byte vocabulary cannot be decoded",
                expected=f"ids from 0 to {self.vocab_size - 1}",
                got=str(outside[0]),
                fix="mask the logits of a model that has more rows than the tokenizer has ids",
            )
        return bytes(value for value in values if value != self.end_of_text).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer of the ``tokenizers`` library, such as the ``tokenizer.json`` beside a published model.

    Truncation and padding in the file are switched off: they are for single inputs, not for corpora. If the vocabulary
    has no end-of-text token of a known name, one id is added after its last.

    Args:
        backend: A ``tokenizers.Tokenizer``.
        fingerprint: Hash of its file.
        end_of_text: The id that ends a text, where it is known.
    """

    def __init__(self, backend: Any, fingerprint: str, end_of_text: int | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        # A document that contains the text "<|endoftext|>" must not end there.
        backend.encode_special_tokens = True
        self._backend = backend
        self.fingerprint = fingerprint
        names = backend.get_vocab(with_added_tokens=True)
        num_ids = max(names.values(), default=-1) + 1  # ids may have gaps
        known = [names[name] for name in _END_OF_TEXT_NAMES if name in names]
        self.end_of_text: int = end_of_text if end_of_text is not None else known[0] if known else num_ids
        self.vocab_size: int = max(num_ids, self.end_of_text + 1)

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a text, int64 of shape (num_tokens,); invalid UTF-8 becomes the replacement character.

        Raises:
            DataError: When the tokenizer's parts do not fit together.
        """
        with _explained("encode a text"):
            encoding = self._backend.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens and ids outside the vocabulary.

        Raises:
            DataError: When the tokenizer's parts do not fit together.
        """
        with _explained("decode ids"):
            text: str = self._backend.decode([int(each) for each in ids], skip_special_tokens=True)
        return text


class TiktokenTokenizer:
    """A vocabulary of the ``tiktoken`` library, such as ``cl100k_base``, read from a local file.

    Args:
        encoding: A ``tiktoken.Encoding``.
        fingerprint: Hash of its file and of the encoding's name.
    """

    def __init__(self, encoding: Any, fingerprint: str) -> None:
        self._encoding = encoding
        self.fingerprint = fingerprint
        self.vocab_size: int = encoding.n_vocab
        self.end_of_text: int = encoding.eot_token

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a text, int64 of shape (num_tokens,); names of special tokens in it are ordinary text."""
        with _explained("encode a text"):
            ids = self._encoding.encode_ordinary(text.decode("utf-8", errors="replace"))
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without end-of-text ids and those of no token."""
        special = {self._encoding.encode_single_token(each) for each in self._encoding.special_tokens_set}
        parts = []
        for each in map(int, ids):
            if each not in special:
                with contextlib.suppress(KeyError, OverflowError):  # ids of no token
                    parts.append(self._encoding.decode_single_token_bytes(each))
        return b"".join(parts).decode("utf-8", errors="replace")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn errors of the library into DataError: it raises bare Exception, and panics, for inconsistent files."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise DataError(
            f"The tokenizer cannot {what}",
            expected="a file whose model, pre-tokenizer and decoder fit together",
            got=f"{type(error).__name__}: {error}",
            fix="name another tokenizer.json, or write it again with tokenizers",
        ) from error


def load_tokenizer(name: str, base: Path) -> Tokenizer:
    """Load a tokenizer by name.

    Args:
        name: ``"bytes"``, the path of a ``tokenizers`` JSON file, a folder with a tokenizer of transformers, or
            ``"tiktoken:FILE"``, whose name is the encoding's (``cl100k_base.tiktoken``). ``~`` is expanded.
        base: Folder that a relative path starts at.

    Raises:
        ConfigError: When the file is absent or not a tokenizer, or the ``tokenizers`` library is not installed.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = base / Path(name.removeprefix(TIKTOKEN)).expanduser()
    if not name.startswith(TIKTOKEN) and is_tokenizer_folder(path):
        return _of_folder(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"Tokenizer {name!r} cannot be read{did_you_mean(name, [BYTES])}",
            expected=f"{BYTES!r}, the path of a tokenizers JSON file, or {TIKTOKEN}FILE",
            got=f"{error.strerror or error} at {path}",
            fix="correct the path; a relative one starts at the folder shown under 'got'",
        ) from error
    if name.startswith(TIKTOKEN):
        return _of_tiktoken(content, path)
    return _parse(content, "json-1-" + hashlib.sha256(content).hexdigest(), path)


def _of_folder(folder: Path) -> JsonTokenizer:
    found = transformers_tokenizer(folder)
    return JsonTokenizer(found.backend_tokenizer, "folder-1-" + fingerprint_of(folder), end_of_text=found.eos_token_id)


def _parse(content: bytes, fingerprint: str, path: Path) -> JsonTokenizer:
    fix = f"pip install 'meshwright[hf]', or use the tokenizer {BYTES!r}, which needs nothing"
    library: Any = optional_library("tokenizers", f"Tokenizer {path}", fix)
    try:
        return JsonTokenizer(library.Tokenizer.from_str(content.decode("utf-8")), fingerprint)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception for files it cannot read, and panics
        raise ConfigError(
            f"{path} is not a tokenizer",
            expected="a JSON file as tokenizers.Tokenizer.save writes it",
            got=str(error),
            fix="name the tokenizer.json of a model, not its vocab.json or tokenizer_config.json",
        ) from error


def _of_tiktoken(content: bytes, path: Path) -> TiktokenTokenizer:
    """Build the encoding that the file's name says, without tiktoken's loaders, which would ask the network."""
    tiktoken: Any = optional_library("tiktoken", f"Tokenizer {TIKTOKEN}{path}", "pip install 'meshwright[data]'")
    from tiktoken_ext import openai_public

    # The library's own definitions, in which the ranks come from this file: its loader copies even local ones.
    defined: dict[str, Any] = dict(vars(openai_public))
    for each, make in openai_public.ENCODING_CONSTRUCTORS.items():
        defined[each] = types.FunctionType(make.__code__, defined)
    defined["load_tiktoken_bpe"] = lambda *_, **__: _ranks_of(content)
    known = [each for each in openai_public.ENCODING_CONSTRUCTORS if each != "gpt2"]  # whose file has another form
    if path.stem not in known:
        raise ConfigError(
            f"{path} is of no encoding that tiktoken defines{did_you_mean(path.stem, known)}",
            expected=f"a file named after one, such as {known[0]}.tiktoken: the name tells how texts are split",
            got=path.name,
            fix="rename the file, or use the tokenizer.json of the model",
        )
    try:
        encoding = tiktoken.Encoding(**defined[path.stem]())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # assertions, and panics of its parts in Rust
        raise ConfigError(
            f"{path} is not the vocabulary of {path.stem}",
            expected="lines of a token in base64 and its rank, as tiktoken publishes them",
            got=f"{type(error).__name__}: {error}",
            fix="download the file again, or correct its name",
        ) from error
    return TiktokenTokenizer(encoding, f"tiktoken-1-{path.stem}-{hashlib.sha256(content).hexdigest()}")


def _ranks_of(content: bytes) -> dict[bytes, int]:
    pairs = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
