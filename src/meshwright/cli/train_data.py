"""Load the samples of a training file's function, and say what a loaded dataset is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from meshwright.cli.references import call_reference, resolve_reference, takes
from meshwright.cli.train_config import DataTable
from meshwright.data import GlobalOrder, IndexOrder, MixedOrder, RepeatedStream
from meshwright.errors import ConfigError, DataError
from meshwright.nn.batches import usual_input_format
from meshwright.runtime import check_equal, same_on_every_rank


@dataclass(frozen=True)
class Loaded:
    """A dataset with the order of the whole run's samples, and what is known of a sample."""

    dataset: Dataset[Any]
    order: IndexOrder | RepeatedStream
    tokens_per_sample: int | None
    sample_batch: Any = None
    """A batch of one sample, for predictions; None where ``dataset`` can be indexed."""
    model_input_format: str | None = None
    loss_weight: Callable[[Any], Any] | None = None
    """As in ``accelerate``, where samples hold different numbers of trained tokens."""
    kept_aside: tuple[tuple[str, Dataset[Any]], ...] = ()
    """By the name of each source, the part of it to validate on."""
    contents: tuple[dict[str, Any], ...] = ()
    """Name, number of sequences and hash of each source, by which a run that is resumed knows whether it changed."""

    def start_at(self, samples_seen: int) -> None:
        """Skip the samples that the run has seen before."""
        self.order.start = samples_seen

    def num_sequences(self) -> int | None:
        """Return the sequences of all sources together, an epoch; None for a stream without a length."""
        if isinstance(self.order, MixedOrder):
            return sum(each.num_samples for each in self.order.orders)
        if isinstance(self.order, GlobalOrder):
            return self.order.num_samples
        return len(self.order.source) if isinstance(self.order.source, Sized) else None

    def loader_args(self, batch_size: int, num_workers: int = 0) -> dict[str, Any]:
        """Return the keywords for ``accelerate(dataloader_args=)``.

        Raises:
            ConfigError: When several processes would read a stream: each would read all of it.
        """
        given = {"batch_size": batch_size, "num_workers": num_workers}
        if isinstance(self.order, IndexOrder):
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
            DataError: On every rank, when it fails, returns no dataset, or one that can be read only once, or the
                ranks' datasets differ in length.
        """
        with same_on_every_rank(patient=True):  # the first rank that calls it may have to download, or tokenize
            made = self._made(seed)
            loaded = _indexed(made, seed) if _is_indexed(made) else _streamed(made, self.reference)
        length = str(len(made)) if _is_indexed(made) else "a stream"
        check_equal("The length of the dataset", length, fix="return the same samples on every rank")
        contents = ({"name": self.reference, "sequences": loaded.num_sequences()},)
        return replace(loaded, contents=contents)

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
    if _is_read_once(made):
        raise DataError(
            f"The data function {reference} returned what can be read only once",
            expected="samples that can be read again: for a look at the first one, every epoch and every resume",
            got=f"an iterator ({type(made).__name__})",
            fix="return a list or a torch Dataset, or an object whose __iter__ makes a new iterator each time",
        )
    stream = RepeatedStream(made)
    batch = _batch_of_one(next(iter(stream)))
    return Loaded(stream, stream, _tokens(batch), batch, usual_input_format(batch))


def _is_read_once(made: Any) -> bool:
    """Return whether samples are an iterator: a generator, for one; a class's own ``__iter__`` may begin anew."""
    begins: Any = getattr(type(made), "__iter__", None)
    return isinstance(made, Iterator) and (begins is Iterator.__iter__ or not isinstance(begins, FunctionType))


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
