"""Find and load the files that a training file names: texts and conversations, one source or a mixture of several."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch.utils.data import ConcatDataset, Dataset, Subset

from meshwright.cli.train_config import DataTable, EvalTable
from meshwright.cli.train_data import Loaded
from meshwright.data import (
    BadLines,
    ChatEncoder,
    GlobalOrder,
    MixedOrder,
    Record,
    SampleRows,
    TokenDataset,
    Tokenizer,
    Tokens,
    find_files,
    load_tokenizer,
    read_records,
    sample_cache,
    token_cache,
    trained_labels,
)
from meshwright.data.chat import is_conversation, is_tokenizer_folder
from meshwright.data.records import holds_records, open_text, text_of
from meshwright.data.token_files import remove_leftovers
from meshwright.data.tokenizer import BYTES
from meshwright.errors import ConfigError, DataError
from meshwright.runtime import number_from, print_rank, rank, same_on_every_rank
from meshwright.runtime.terminal import PlainConsole


@dataclass(frozen=True)
class Part:
    """One source of a corpus."""

    name: str
    files: tuple[Path, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Corpus:
    """Files of texts or conversations, and the tokenizer, cache and layout for them."""

    parts: tuple[Part, ...]
    table: DataTable
    tokenizer: Tokenizer
    chat: ChatEncoder | None
    """Encodes conversations; None where there are none."""
    cache_dir: Path
    layout: Literal["windows", "packed", "padded"]

    @property
    def seq_len(self) -> int:
        """Return the tokens of a sequence."""
        return self.table.seq_len

    @property
    def vocab_size(self) -> int:
        """Return the number of the tokenizer's ids."""
        return self.tokenizer.vocab_size if self.chat is None else self.chat.vocab_size

    def load(self, seed: int, holdout: float | None = None) -> Loaded:
        """Return the samples in an endless order; collective.

        Args:
            seed: Of the order.
            holdout: Share of each source that is kept aside.

        Raises:
            DataError: On every rank, when they cannot be read, or are shorter than one sequence.
        """
        sources = self.sources()
        hashes = [_hash_of(source) for _, source in sources]
        kept: list[tuple[str, Dataset[Any]]] = []
        if holdout is not None:
            divided = [_divided(name, source, holdout) for name, source in sources]
            sources = [(name, rest) for (name, _), (rest, _) in zip(sources, divided, strict=True)]
            kept = [(name, aside) for (name, _), (_, aside) in zip(sources, divided, strict=True)]
        datasets: list[Any] = [source for _, source in sources]
        whole = datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)
        lengths = [len(each) for each in datasets]
        found = zip((name for name, _ in sources), lengths, hashes, strict=True)
        weights = [part.weight for part in self.parts]
        order = GlobalOrder(lengths[0], seed) if len(lengths) == 1 else MixedOrder(lengths, weights, seed)
        in_rows = self.layout != "windows"
        return Loaded(
            whole,
            order,
            tokens_per_sample=self.seq_len,
            model_input_format="unpack_dict" if in_rows else None,
            loss_weight=trained_labels if in_rows else None,
            kept_aside=tuple(kept),
            contents=tuple({"name": name, "sequences": length, "hash": own} for name, length, own in found),
        )

    def sources(self) -> list[tuple[str, Dataset[Any]]]:
        """Return each source by its name, as sequences; one rank per machine tokenizes what no cache has. Collective.

        Raises:
            DataError: On every rank, when one cannot be read, or is shorter than one sequence.
        """
        made = self._windows if self.layout == "windows" else self._rows
        with same_on_every_rank(patient=True):  # a large corpus takes hours
            if number_from("LOCAL_RANK", 0) == 0:
                remove_leftovers(self.cache_dir)
                for part in self.parts:
                    made(part)
        with same_on_every_rank():
            # This finds what was made.
            found: list[tuple[str, Dataset[Any]]] = [(part.name, made(part)) for part in self.parts]
        for name, source in found:
            if isinstance(source, SampleRows):
                _tell(name, source.samples.counts, self.seq_len, self.table.too_long)
        return found

    def _windows(self, part: Part) -> TokenDataset:
        bad_lines = BadLines(self.table.bad_lines)
        with _progress() as show:
            path = token_cache(
                part.files, self.tokenizer, self.cache_dir, show, text_key=self.table.text_key, bad_lines=bad_lines
            )
        _tell(part.name, {"bad_lines": sum(bad_lines.skipped.values())}, self.seq_len, self.table.too_long)
        return TokenDataset(path, self.seq_len)

    def _rows(self, part: Part) -> SampleRows:
        encoder = self.chat.fingerprint if self.chat is not None else self.tokenizer.fingerprint
        bad_lines = BadLines(self.table.bad_lines)
        samples = sample_cache(
            part.files,
            lambda: self._encoded(part, bad_lines),
            self.cache_dir,
            fingerprint=f"{encoder}-{self.table.text_key}",
            seq_len=self.seq_len,
            too_long=self.table.too_long,
            bad_lines=bad_lines,
        )
        pad_id = self.chat.pad_id if self.chat is not None else self.tokenizer.end_of_text
        return SampleRows(samples, self.seq_len, packed=self.layout == "packed", pad_id=pad_id)

    def _encoded(self, part: Part, bad_lines: BadLines) -> Iterator[Tokens]:
        with _progress() as show:
            total = sum(_size(path) for path in part.files)
            done = 0
            for path in part.files:
                for record in _records(path, self.table.text_key, bad_lines):
                    yield self._sample(record)
                done += _size(path)
                show(done, total)

    def _sample(self, record: Record) -> Tokens:
        if self.chat is not None and is_conversation(record.value):
            return self.chat.encode(record)
        text = text_of(record, self.table.text_key, "a conversation")
        ids = np.append(self.tokenizer.encode(text.encode()).astype(np.int64), self.tokenizer.end_of_text)
        return Tokens(ids, np.ones(len(ids), dtype=bool))


def _hash_of(source: Dataset[Any]) -> str:
    """Return the name of the cache of a source, which is a hash of its content and of how it is tokenized."""
    return source.path.stem if isinstance(source, TokenDataset) else source.samples.folder.name  # type: ignore[attr-defined]


def _divided(name: str, source: Any, share: float) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return a source without a share of its sequences, and that share; which ones depends on their number alone."""
    count = max(round(len(source) * share), 1)
    if count >= len(source):
        raise DataError(
            f"{name} is too small to keep a part of it aside",
            expected=f"2 sequences or more, of which {share:.3g} are kept",
            got=f"{len(source)}",
            fix="name data of its own in eval.source, or add some to this one",
        )
    order = GlobalOrder(len(source), seed=0).permutation_of_epoch(0)
    return Subset(source, sorted(order[count:].tolist())), Subset(source, sorted(order[:count].tolist()))


def _records(path: Path, text_key: str, bad_lines: BadLines) -> Iterator[Record]:
    if holds_records(path):
        yield from read_records(path, bad_lines)
        return
    with open_text(path) as (text, _):
        yield Record({text_key: text.read().decode(errors="replace")}, str(path))


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size


def _tell(name: str, counts: dict[str, int], seq_len: int, too_long: str) -> None:
    """Say on rank 0 what of a source is not trained as it stands."""
    done = {"cut": f"cut to {seq_len} tokens", "split": f"split into pieces of {seq_len} tokens"}.get(too_long, "")
    for key, text in (
        ("too_long", f"of {counts.get('samples', 0)} samples were longer, and are {done} (data.too_long)"),
        ("untrained", f"had nothing to train within {seq_len} tokens, and are left out"),
        ("bad_lines", "lines were no JSON objects, and are left out (data.bad_lines)"),
    ):
        if counts.get(key):
            print_rank(f"meshwright: {name}: {counts[key]} {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar over bytes; only one rank may draw, and only on a terminal."""
    console = PlainConsole()
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    visible = console.is_terminal and rank() == 0 and sys.stdout is not None
    with Progress(*columns, console=console, transient=True, disable=not visible) as progress:
        task = None

        def show(done_bytes: int, total_bytes: int) -> None:
            nonlocal task
            if task is None:
                task = progress.add_task("tokenizing", total=total_bytes)
            progress.update(task, completed=done_bytes)

        yield show


# --- What a training file names


def find_corpus(table: DataTable, folder: Path, model_folder: Path | None = None) -> Corpus:
    """Find the files and load the tokenizer, without tokenizing anything.

    Args:
        table: The table ``[data]``.
        folder: The training file's folder, which relative paths start at.
        model_folder: The folder of a pretrained model, whose tokenizer is meant by ``auto``.

    Raises:
        DataError, ConfigError: When a file or the tokenizer does not exist, or they do not fit together.
    """
    parts = _parts(table, folder)
    talks = _hold_conversations(parts, BadLines(table.bad_lines))
    name = tokenizer_name(table, model_folder)
    tokenizer_folder = folder / Path(name).expanduser()
    chat = None
    if talks:
        if not is_tokenizer_folder(tokenizer_folder):
            raise ConfigError(
                "Conversations need a tokenizer with a chat template",
                expected="data.tokenizer: a folder with a tokenizer of transformers",
                got=f"data.tokenizer = {name!r}",
                fix="name the folder of the model, or of an instruction-tuned one with the same vocabulary",
            )
        chat = ChatEncoder(tokenizer_folder)
    layout: Any = table.layout if table.layout != "auto" else "packed" if talks else "windows"
    if talks and layout == "windows":
        raise ConfigError(
            "Conversations cannot be cut into windows",
            expected="data.layout = 'packed' or 'padded'",
            got="data.layout = 'windows'",
            fix="leave it out: conversations are packed by default",
        )
    cache_dir = _default_cache() if table.cache_dir is None else folder / Path(table.cache_dir).expanduser()
    return Corpus(tuple(parts), table, load_tokenizer(name, folder), chat, cache_dir, layout)


def find_validation(table: EvalTable, data: DataTable, corpus: Corpus, folder: Path) -> Corpus | None:
    """Find what ``[eval]`` names, to be laid out as the training data are; None where it names no files.

    Raises:
        DataError: When a file does not exist.
        ConfigError: When training data are samples of a function.
    """
    if table.source is None and not table.mixture:
        return None
    parts = _parts(table, folder)
    if _hold_conversations(parts, BadLines(data.bad_lines)) and corpus.chat is None:
        raise ConfigError(
            "Texts are trained, and conversations shall validate them",
            expected="eval.source of the same kind as data.source",
            got="conversations",
            fix="name texts, or keep a part of the training data aside with eval.holdout",
        )
    return Corpus(tuple(parts), corpus.table, corpus.tokenizer, corpus.chat, corpus.cache_dir, corpus.layout)


def _parts(table: DataTable | EvalTable, folder: Path) -> list[Part]:
    if table.source is not None and not table.mixture:
        return [_part(table.source, folder, None, 1.0)]
    found = [_part(each.source, folder, each.name, each.weight) for each in table.mixture]
    names = [part.name for part in found]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            "Two sources of the mixture have one name",
            expected="a name for each, under which its figures are told",
            got=f"{repeated!r} twice",
            fix="give them names: {source = …, weight = …, name = …}",
        )
    return found


def _part(source: str | list[str], folder: Path, name: str | None, weight: float) -> Part:
    files = tuple(find_files(source, folder))
    default = source if isinstance(source, str) and source == "stdlib" else files[0].name.partition(".")[0]
    return Part(name or default, files, weight)


def _hold_conversations(parts: list[Part], bad_lines: BadLines) -> bool:
    """Return whether the first record of any source is a conversation."""
    firsts = (
        next(iter(itertools.islice(read_records(path, bad_lines), 1)), None)
        for part in parts
        for path in part.files[:1]
        if holds_records(path)
    )
    return any(first is not None and is_conversation(first.value) for first in firsts)


def find_prompts(table: EvalTable, folder: Path) -> tuple[str, ...]:
    """Return the prompts that ``eval.samples`` lists, or the lines of the file that it names.

    Raises:
        DataError: When the file cannot be read, or has no line.
    """
    if table.samples is None or isinstance(table.samples, list):
        return tuple(table.samples or ())
    path = folder / Path(table.samples).expanduser()
    try:
        found = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, ValueError) as error:
        found, got = (), getattr(error, "strerror", None) or str(error)
    else:
        got = "none"
    if not found:
        raise DataError(
            f"eval.samples: there are no prompts in {path}", expected="a text file with a prompt on each line", got=got,
            fix="correct the path, or write samples = ['a prompt', …]",
        )  # fmt: skip
    return found


def tokenizer_name(table: DataTable, model_folder: Path | None) -> str:
    """Return the tokenizer that ``data.tokenizer`` means, of a model in a folder, if it lies in one."""
    if table.tokenizer != "auto":
        return table.tokenizer
    return str(model_folder) if model_folder is not None and is_tokenizer_folder(model_folder) else BYTES


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
