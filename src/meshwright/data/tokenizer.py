"""Text to token ids and back: bytes as they are, or the vocabulary of ``tokenizers`` or transformers."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.data.chat import fingerprint_of, is_tokenizer_folder, transformers_tokenizer
from meshwright.errors import ConfigError, DataError, did_you_mean

BYTES = "bytes"
"""The tokenizer name that stands for :class:`ByteTokenizer`."""

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
        name: ``"bytes"``, the path of a ``tokenizers`` JSON file, or a folder with a tokenizer of transformers. ``~``
            is expanded.
        base: Folder that a relative path starts at.

    Raises:
        ConfigError: When the file is absent or not a tokenizer, or the ``tokenizers`` library is not installed.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = base / Path(name).expanduser()
    if is_tokenizer_folder(path):
        return _of_folder(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"Tokenizer {name!r} cannot be read{did_you_mean(name, [BYTES])}",
            expected=f"{BYTES!r} or the path of a tokenizers JSON file",
            got=f"{error.strerror or error} at {path}",
            fix="correct the path; a relative one starts at the folder shown under 'got'",
        ) from error
    return _parse(content, "json-1-" + hashlib.sha256(content).hexdigest(), path)


def _of_folder(folder: Path) -> JsonTokenizer:
    found = transformers_tokenizer(folder)
    return JsonTokenizer(found.backend_tokenizer, "folder-1-" + fingerprint_of(folder), end_of_text=found.eos_token_id)


def _parse(content: bytes, fingerprint: str, path: Path) -> JsonTokenizer:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise ConfigError(
            f"Tokenizer {path} needs the tokenizers library, which is not installed",
            expected="an importable package 'tokenizers'",
            got=str(error),
            fix=f"pip install 'meshwright[hf]', or use the tokenizer {BYTES!r}, which needs nothing",
        ) from error
    try:
        return JsonTokenizer(Backend.from_str(content.decode("utf-8")), fingerprint)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception for files it cannot read, and panics
        raise ConfigError(
            f"{path} is not a tokenizer",
            expected="a JSON file as tokenizers.Tokenizer.save writes it",
            got=str(error),
            fix="name the tokenizer.json of a model, not its vocab.json or tokenizer_config.json",
        ) from error
