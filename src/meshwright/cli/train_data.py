"""Find and load the data that a training file names: a text corpus, or samples from the user's function."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch.utils.data import Dataset, IterableDataset, default_collate

from meshwright.cli.references import call_reference, resolve_reference, takes
from meshwright.cli.train_config import DataTable
from meshwright.data import (
    GlobalOrder,
    RepeatedStream,
    TokenDataset,
    Tokenizer,
    find_files,
    load_tokenizer,
    token_cache,
)
from meshwright.errors import ConfigError, DataError
from meshwright.nn.batches import usual_input_format
from meshwright.runtime import check_equal, rank, same_on_every_rank
from meshwright.runtime.terminal import PlainConsole


@dataclass(frozen=True)
class Loaded:
    """A dataset with the order of the whole run's samples, and what is known of a sample."""

    dataset: Dataset[Any]
    order: GlobalOrder | RepeatedStream
    tokens_per_sample: int | None
    sample_batch: Any = None
    """A batch of one sample, for predictions; None where ``dataset`` can be indexed."""
    model_input_format: str | None = None

    def start_at(self, samples_seen: int) -> None:
        """Skip the samples that the run has seen before."""
        self.order.start = samples_seen

    def loader_args(self, batch_size: int, num_workers: int = 0) -> dict[str, Any]:
        """Return the keywords for ``accelerate(dataloader_args=)``.

        Raises:
            ConfigError: When several processes would read a stream: each would read all of it.
        """
        given = {"batch_size": batch_size, "num_workers": num_workers}
        if isinstance(self.order, GlobalOrder):
            return given | {"sampler": self.order}
        if num_workers:
            raise ConfigError(
                "A stream cannot be read by several processes",
                expected="run.num_workers = 0, or a dataset with __getitem__ and __len__",
                got=f"run.num_workers = {num_workers}",
                fix="leave it out, or let the data function return a dataset that can be indexed",
            )
        return given


@dataclass(frozen=True)
class Samples:
    """A user's function that returns a dataset, with its arguments."""

    function: Callable[..., Any]
    reference: str
    arguments: Mapping[str, Any]
    seq_len: int | None
    vocab_size: None = None  # its samples need not be tokens

    def load(self, seed: int) -> Loaded:
        """Call the function; collective.

        Raises:
            DataError: On every rank, when it fails, returns no dataset, or the ranks' datasets differ in length.
        """
        with same_on_every_rank():
            made = self._made(seed)
            loaded = _indexed(made, seed) if _is_indexed(made) else _streamed(made, self.reference)
        length = str(len(made)) if _is_indexed(made) else "a stream"
        check_equal("The length of the dataset", length, fix="return the same samples on every rank")
        return loaded

    def _made(self, seed: int) -> Any:
        known = {"seed": seed} if takes(self.function, "seed") else {}
        known |= {"seq_len": self.seq_len} if self.seq_len is not None else {}
        return call_reference(
            self.function,
            self.reference,
            {**known, **self.arguments},
            key="data",
            expected="a torch Dataset, or an iterable of samples",
            error_cls=DataError,
        )


def find_samples(table: DataTable) -> Samples:
    """Find the function that ``data.source`` names, without calling it.

    Raises:
        ConfigError: When it does not exist.
    """
    assert table.function is not None
    function = resolve_reference(table.function, "data.source")
    return Samples(function, table.function, table.args, table.seq_len if takes(function, "seq_len") else None)


def _is_indexed(made: Any) -> bool:
    return isinstance(made, Sized) and hasattr(made, "__getitem__") and not isinstance(made, Mapping | IterableDataset)


def _indexed(made: Any, seed: int) -> Loaded:
    order = GlobalOrder(len(made), seed)
    batch = _batch_of_one(made[0])
    return Loaded(made, order, _tokens(batch), model_input_format=usual_input_format(batch))


def _streamed(made: Any, reference: str) -> Loaded:
    if not isinstance(made, Iterable) or isinstance(made, Mapping | str):
        raise DataError(
            f"The data function {reference} returned no samples",
            expected="a torch Dataset, or an iterable of samples",
            got=type(made).__name__,
            fix="return something with __getitem__ and __len__, or with __iter__",
        )
    stream = RepeatedStream(made)
    batch = _batch_of_one(next(iter(stream)))
    return Loaded(stream, stream, _tokens(batch), batch, usual_input_format(batch))


def _batch_of_one(sample: Any) -> Any:
    try:
        return default_collate([sample])
    except TypeError as error:
        raise DataError(
            "Samples of this kind cannot be put into batches",
            expected="tensors and numbers, alone or in dictionaries, tuples and lists",
            got=f"{type(sample).__name__}: {error}",
            fix="let the data function return such samples",
        ) from error


def _tokens(batch: Any) -> int | None:
    """Return the number of tokens per sample; None if samples are not tokens."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.dtype == torch.long:
        return ids.shape[1]
    return None


# --- Text: files, tokenizer and token cache


@dataclass(frozen=True)
class Corpus:
    """Text files, and the tokenizer and cache for them."""

    files: tuple[Path, ...]
    tokenizer: Tokenizer
    cache_dir: Path
    seq_len: int

    @property
    def vocab_size(self) -> int:
        """Return the number of the tokenizer's ids."""
        return self.tokenizer.vocab_size

    def load(self, seed: int) -> Loaded:
        """Return the text as sequences in an endless order; collective.

        Raises:
            DataError: On every rank, when it cannot be read or is shorter than one sequence.
        """
        dataset = tokenized(self, self.seq_len)
        return Loaded(dataset, GlobalOrder(len(dataset), seed), tokens_per_sample=self.seq_len)


def find_corpus(table: DataTable, folder: Path) -> Corpus:
    """Find the files and load the tokenizer, without tokenizing anything.

    Raises:
        DataError, ConfigError: When a file or the tokenizer does not exist.
    """
    cache_dir = _default_cache() if table.cache_dir is None else folder / Path(table.cache_dir).expanduser()
    files = tuple(find_files(table.source, folder))
    return Corpus(files, load_tokenizer(table.tokenizer, folder), cache_dir, table.seq_len)


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def tokenized(corpus: Corpus, seq_len: int) -> TokenDataset:
    """Return the corpus as sequences; one rank per machine tokenizes it unless a cache exists. Collective.

    Raises:
        DataError: On every rank, when it cannot be read or is shorter than one sequence.
    """
    with same_on_every_rank():
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            _build_cache(corpus)
    with same_on_every_rank():
        return TokenDataset(_build_cache(corpus), seq_len)  # finds what was built


def _build_cache(corpus: Corpus) -> Path:
    console = PlainConsole()
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # Only one rank may draw, and only on a terminal.
    visible = console.is_terminal and rank() == 0 and sys.stdout is not None
    with Progress(*columns, console=console, transient=True, disable=not visible) as progress:
        task = None

        def show(done_bytes: int, total_bytes: int) -> None:
            nonlocal task
            if task is None:
                task = progress.add_task("tokenizing", total=total_bytes)
            progress.update(task, completed=done_bytes)

        return token_cache(corpus.files, corpus.tokenizer, corpus.cache_dir, show)
