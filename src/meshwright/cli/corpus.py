"""The data of a training file: files, tokenizer, and the token cache, built where everybody can see it grow."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from meshwright.cli.config import DataTable
from meshwright.cli.samples import Loaded
from meshwright.data import GlobalOrder, TokenDataset, Tokenizer, find_files, load_tokenizer, token_cache
from meshwright.runtime import rank, same_on_every_rank
from meshwright.utils.terminal import PlainConsole


@dataclass(frozen=True)
class Corpus:
    """Text files and how they become tokens."""

    files: tuple[Path, ...]
    tokenizer: Tokenizer
    cache_dir: Path
    seq_len: int

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer."""
        return self.tokenizer.vocab_size

    def load(self, seed: int) -> Loaded:
        """Sequences of the text in an endless order. Collective.

        Raises:
            DataError: On every rank, when it cannot be read or is shorter than one sequence.
        """
        dataset = tokenized(self, self.seq_len)
        return Loaded(dataset, GlobalOrder(len(dataset), seed), tokens_per_sample=self.seq_len)


def find_corpus(table: DataTable, folder: Path) -> Corpus:
    """Finds the files and loads the tokenizer; tokenizes nothing yet.

    Raises:
        DataError, ConfigError: When a file or the tokenizer is not there.
    """
    cache_dir = _default_cache() if table.cache_dir is None else folder / Path(table.cache_dir).expanduser()
    files = tuple(find_files(table.source, folder))
    return Corpus(files, load_tokenizer(table.tokenizer, folder), cache_dir, table.seq_len)


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def tokenized(corpus: Corpus, seq_len: int) -> TokenDataset:
    """The corpus as sequences; one rank of each machine tokenizes it if nobody has before. Collective.

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
    # Without a terminal a bar is noise; and only one rank may draw.
    visible = console.is_terminal and rank() == 0 and sys.stdout is not None
    with Progress(*columns, console=console, transient=True, disable=not visible) as progress:
        task = None

        def show(done_bytes: int, total_bytes: int) -> None:
            nonlocal task
            if task is None:
                task = progress.add_task("tokenizing", total=total_bytes)
            progress.update(task, completed=done_bytes)

        return token_cache(corpus.files, corpus.tokenizer, corpus.cache_dir, show)
