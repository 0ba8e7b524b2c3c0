"""The accelerator that the loops of Hugging Face's libraries talk to, with a distributed job behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from meshwright.nn.batches import first_samples, map_tree
from meshwright.optim.guarded_step import guard_of
from meshwright.training.accelerated import Accelerated


class Repeats(dict):
    """A batch of samples that fill up the last one of an epoch: run, since all ranks do alike, and never counted."""


class StrategyAccelerator(Accelerator):
    """The face of a distributed job that transformers' loop knows: ``accelerate.Accelerator``."""

    job: Accelerated | None
    data_seed: int
    _share = 1.0

    @property
    def num_replicas(self) -> int:
        """Number of replicas; 1 before the strategy is applied."""
        return self.job.num_replicas if self.job is not None else 1

    def prepare(self, *objects: Any, **_: Any) -> Any:
        """Divide data loaders among replicas; return all else unchanged, since a strategy has prepared it."""
        found = [self._divided(each) if isinstance(each, DataLoader) else each for each in objects]
        return found[0] if len(found) == 1 else tuple(found)

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the model unchanged."""
        return model

    def _divided(self, loader: DataLoader) -> Any:
        replica, count = (self.job.replica, self.job.num_replicas) if self.job is not None else (0, 1)
        if isinstance(loader.dataset, IterableDataset) and count > 1:
            # Each replica reads the whole stream: shards of unequal lengths would give them unequal numbers of steps.
            stream = IterableDatasetShard(loader.dataset, loader.batch_size, loader.drop_last, count, replica)
            loader = DataLoader(
                stream, loader.batch_size, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory, drop_last=loader.drop_last,
            )  # fmt: skip
            replica, count = 0, 1
        return prepare_data_loader(
            loader, self.device, num_processes=count, process_index=replica, put_on_device=True, rng_types=None,
            dispatch_batches=False, use_seedable_sampler=self.use_seedable_sampler, data_seed=self.data_seed,
            non_blocking=self.non_blocking, use_stateful_dataloader=self.use_stateful_dataloader,
        )  # fmt: skip

    def own_samples(self, batch: Any) -> tuple[Any, float]:
        """Return a batch without samples that fill up the last one, and its weight in the mean over replicas.

        Must be called before the next batch is read.
        """
        division = self._last_division()
        if division is None:
            return batch, 1.0
        size, total = division
        own = min(max(total - self.job.replica * size, 0), size) if self.job is not None else size
        found = first_samples(batch, own)
        if found is None:  # it cannot be told what belongs to a sample
            return batch, 1.0
        return (found[0] if own else Repeats(batch)), own * self.num_replicas / total

    def _last_division(self) -> tuple[int, int] | None:
        """Return a replica's batch size and all samples of the last batch of an epoch; None if it is not filled up."""
        loader = self.gradient_state.active_dataloader
        if self.num_replicas == 1 or loader is None or not self.gradient_state.end_of_dataloader:
            return None
        sampler = loader.batch_sampler
        while sampler is not None and not isinstance(sampler, BatchSamplerShard):
            sampler = getattr(sampler, "batch_sampler", None)
        if sampler is None or sampler.drop_last:
            return None
        total = len(loader.dataset) % (sampler.batch_size * self.num_replicas)
        return (sampler.batch_size, total) if total else None

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all replicas in the order of the samples, without repeats."""
        if self.num_replicas == 1 or self.job is None:
            total = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else -1
            return map_tree(lambda leaf: leaf[:total] if total > 0 and leaf.dim() else leaf, input_data)
        division = self._last_division()
        rows = division[0] if division is not None else None
        gathered = self.job.gather_for_metrics(map_tree(lambda leaf: _padded(leaf, rows), input_data))
        total = division[1] if division is not None else None
        return map_tree(lambda leaf: _in_blocks(leaf, self.num_replicas)[:total], gathered)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients inside, which the next backward outside averages."""
        assert self.job is not None, "training begins with a strategy"
        with self.job.no_sync():
            yield

    @contextlib.contextmanager
    def scaling(self, share: float) -> Iterator[None]:
        """Multiply losses of ``backward`` inside."""
        self._share = share
        try:
            yield
        finally:
            self._share = 1.0

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run backward of the loss, with the loss scale of fp16."""
        loss = loss * self._share if self._share != 1 else loss
        guard = guard_of(self.job.optim) if self.job is not None else None
        (loss if guard is None else guard.scaled(loss)).backward(**options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradients of the whole model; return their norm before."""
        assert self.job is not None, "training begins with a strategy"
        return self.job.clip_grad_norm(max_norm, float(norm_type))

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether the last step left the weights as they were."""
        guard = guard_of(self.job.optim) if self.job is not None else None
        return guard is not None and guard.step_was_skipped


def _padded(leaf: Any, rows: int | None) -> Any:
    """Return a tensor with this many rows, so that all replicas have equally many."""
    if not isinstance(leaf, torch.Tensor) or rows is None or leaf.dim() == 0 or len(leaf) >= rows:
        return leaf[:rows] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
    return torch.cat([leaf, leaf[-1:].expand(rows - len(leaf), *leaf.shape[1:])])


def _in_blocks(leaf: Any, num_replicas: int) -> Any:
    """Put rows that alternate between replicas into blocks, as accelerate divides batches."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return leaf
    return leaf.unflatten(0, (-1, num_replicas)).transpose(0, 1).flatten(0, 1)
