"""The buckets of a step, updated by a thread behind the backward pass."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from meshwright.errors import ModelError
from meshwright.optim.adam.buckets import Bucket
from meshwright.optim.adam.update import BucketUpdate, Flight


class BackwardUpdate:
    """Between ``__enter__`` and ``__exit__`` every bucket is updated as soon as all its gradients are there.

    Args:
        updates: The whole step, over all trainable parameters.
        scale: What gradients are multiplied by.
    """

    def __init__(self, updates: Sequence[BucketUpdate], scale: float) -> None:
        self._updates = updates
        self._scale = scale
        self._owner = {id(parameter): update for update in updates for parameter in update.parameters}
        self._buckets: dict[int, list[Bucket]] = {key: [] for key in self._owner}  # per parameter, those not begun
        self._awaited: dict[int, set[int]] = {}  # per bucket not begun, the parameters whose gradients are missing
        for update in updates:
            for bucket in update.buckets:
                self._awaited[id(bucket)] = {id(piece.parameter) for piece in bucket}
                for key in self._awaited[id(bucket)]:
                    self._buckets[key].append(bucket)
        self._done: set[int] = set()  # parameters whose step has been counted
        self._flights: queue.SimpleQueue[tuple[BucketUpdate, Flight] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="update-behind-backward", daemon=True)
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for update in self._updates:
            for parameter in update.parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        self._thread.start()

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        try:
            if kind is None and self._error is None:
                self._begin_the_rest()
        finally:
            self._flights.put(None)
            self._thread.join()
            for update in self._updates:
                update.link.join()
        if kind is None and self._error is not None:
            raise self._error

    @torch.no_grad()
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._done:
            raise ModelError(
                "A parameter got a second gradient after it was updated",
                expected="one backward in the block, in which every gradient is complete when it arrives",
                got=f"two gradients for a parameter of shape {tuple(parameter.shape)}",
                fix="run earlier micro-batches before the block, or use step() for modules that run twice under FSDP2",
            )
        self._count(parameter)
        for bucket in list(self._buckets[id(parameter)]):
            awaited = self._awaited[id(bucket)]
            awaited.discard(id(parameter))
            if not awaited:
                self._begin(self._owner[id(parameter)], bucket)
        if not self._buckets[id(parameter)]:
            parameter.grad = None  # an empty shard is in no bucket

    def _count(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ModelError(
                "A gradient is sparse",
                expected="dense gradients",
                got=f"{gradient.layout} for a parameter of shape {tuple(parameter.shape)}",
                fix="build the embedding with sparse=False",
            )
        self._done.add(id(parameter))
        self._owner[id(parameter)].advance(parameter)

    def _begin(self, update: BucketUpdate, bucket: Bucket) -> None:
        """Sends a bucket's gradients off, and frees those that no other bucket needs."""
        flight = update.start([piece for piece in bucket if piece.parameter.grad is not None])
        self._flights.put((update, flight))
        del self._awaited[id(bucket)]
        for piece in bucket:
            waiting = self._buckets[id(piece.parameter)]
            waiting[:] = [other for other in waiting if other is not bucket]
            if not waiting:
                piece.parameter.grad = None

    def _begin_the_rest(self) -> None:
        for update in self._updates:
            for parameter in update.parameters:
                if parameter.grad is not None and id(parameter) not in self._done:
                    self._count(parameter)
            for bucket in update.buckets:
                if id(bucket) in self._awaited:
                    self._begin(update, bucket)

    @torch.no_grad()
    def _work(self) -> None:
        while (job := self._flights.get()) is not None:
            update, flight = job
            try:
                if self._error is None:
                    update.finish(flight, self._scale)
                    continue
            except BaseException as error:
                self._error = error
            update.link.drop(flight.ticket)  # backward may be waiting for the slot
