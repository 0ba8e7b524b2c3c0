"""Whether the ranks have run the same layers: where they are sharded, ranks exchange them by order alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.errors import ModelError
from meshwright.methods.job import Job
from meshwright.methods.means import STEP_AXES, mean_over
from meshwright.nn import Exchanges

_EXACT = 2**24  # up to which fp32, in which numbers travel, has every integer
_HOW_MANY = 3  # of many ranks numbers are small, and one of them would be equal by chance now and then


class _Met(NamedTuple):
    """What the ranks' numbers were on average, on their way from the device to the host."""

    means: torch.Tensor
    arrived: torch.cuda.Event
    order: bytes


class SameLayers:
    """Compares the ranks by numbers that go along with the mean of their losses.

    They would get each other's weights and gradients, where the counts are equal, without a word. Where they are not,
    ranks wait for each other, or their collectives fail.

    Args:
        job: Its ranks.
        exchanges: What they gather and reduce.
    """

    def __init__(self, job: Job, exchanges: Exchanges) -> None:
        self._job, self._exchanges = job, exchanges
        self._num_ranks = math.prod(job.size(axis) for axis in STEP_AXES)
        self._order = b""
        self._met: _Met | None = None  # on a GPU: of the last time

    def forget(self) -> None:
        """Leaves out of the comparison what has been run until now."""
        self._exchanges.take()

    def numbers(self) -> list[int]:
        """Equal on ranks that have run the same layers since the last time; always as many."""
        self._order = self._exchanges.take()
        return self._numbers_of(self._order)

    def check(self, means: torch.Tensor) -> None:
        """Looks at the means of all ranks' numbers (1-dim); on a GPU at those of last time, as not to wait for them.

        Raises:
            ModelError: On every rank, when they have run different layers.
        """
        if means.device.type != "cuda":
            self._compare(means.tolist(), self._order, "in this step, which has changed no weight")
            return
        before, self._met = self._met, _sent_to_host(means, self._order)
        if before is not None:
            before.arrived.synchronize()  # the device has all of this step to do meanwhile
            self._compare(before.means.tolist(), before.order, "in the last step, after which weights are wrong")

    def before_update(self) -> None:
        """Compares in loops written by hand, by an exchange of its own: they take no mean of the losses."""
        if self._exchanges.is_any():
            numbers = torch.tensor(self.numbers(), dtype=torch.float32, device=self._job.device)
            self.check(mean_over(self._job, numbers, STEP_AXES))

    def _numbers_of(self, order: bytes) -> list[int]:
        digest = hashlib.blake2b(order, digest_size=4 * _HOW_MANY).digest()
        limit = _EXACT // self._num_ranks  # the sum of equal ones is exact, and so is their mean
        return [int.from_bytes(digest[at : at + 4]) % limit for at in range(0, len(digest), 4)]

    def _compare(self, means: Sequence[float], order: bytes, when: str) -> None:
        if list(means) != self._numbers_of(order):
            raise ModelError(
                "The ranks have run different layers, and got each other's weights and gradients",
                expected="the same layers in the same order on every rank: all of them exchange each one together",
                got=f"{self._where_apart(order)}, {when}",
                fix="let all ranks decide alike which layers run, by a torch.Generator of one seed (a transformers "
                "model: layerdrop=0 in its config); or leave the sharding method out, and set "
                "find_unused_parameters=True",
            )

    def _where_apart(self, order: bytes) -> str:
        """The first exchange in which ranks had different things; collective."""
        every = {dist.get_rank(): order}
        for axis in STEP_AXES:
            if self._job.size(axis) > 1:
                given: list[dict[int, bytes]] = [{}] * self._job.size(axis)
                dist.all_gather_object(given, every, group=self._job.require_mesh().get_group(axis))
                every = {rank: each for part in given for rank, each in part.items()}
        names = {rank: self._exchanges.names(each) for rank, each in sorted(every.items())}
        at = 0
        while len({tuple(each[at : at + 1]) for each in names.values()}) == 1:
            at += 1
        first = {(each[at] if at < len(each) else "nothing"): rank for rank, each in reversed(names.items())}
        told = [f"{name} on rank {rank}" for name, rank in sorted(first.items(), key=lambda each: each[1])]
        return " and ".join(told[:4]) + f" as exchange {at + 1}"


def _sent_to_host(means: torch.Tensor, order: bytes) -> _Met:
    there = torch.empty_like(means, device="cpu", pin_memory=True)
    there.copy_(means, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return _Met(there, arrived, order)
