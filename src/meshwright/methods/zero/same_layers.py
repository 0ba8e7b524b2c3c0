"""Whether the ranks have run the same layers: where they are sharded, ranks exchange them by order alone."""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.errors import ModelError
from meshwright.methods.job import Job
from meshwright.methods.means import STEP_AXES, mean_over
from meshwright.nn import Exchanges

_EXACT = 2**24  # up to which fp32, in which numbers travel, has every integer


class _Met(NamedTuple):
    """What the ranks' numbers were on average, on its way from the device to the host."""

    mean: torch.Tensor
    arrived: torch.cuda.Event
    order: bytes


class SameLayers:
    """Compares the ranks by a number that goes along with the mean of their losses.

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

    def number(self) -> int:
        """Equal on ranks that have run the same layers since the last time."""
        self._order = self._exchanges.take()
        return self._number_of(self._order)

    def check(self, mean: torch.Tensor) -> None:
        """Looks at the mean of all ranks' numbers (0-dim); on a GPU at that of the last time, as not to wait for it.

        Raises:
            ModelError: On every rank, when they have run different layers.
        """
        if mean.device.type != "cuda":
            self._compare(float(mean), self._order, "in this step, which has changed no weight")
            return
        before, self._met = self._met, _sent_to_host(mean, self._order)
        if before is not None:
            before.arrived.synchronize()  # the device has all of this step to do meanwhile
            self._compare(float(before.mean), before.order, "in the last step, after which weights are wrong")

    def before_update(self) -> None:
        """Compares in loops written by hand, by an exchange of its own: they take no mean of the losses."""
        if self._exchanges.is_any():
            number = torch.full((), float(self.number()), device=self._job.device)
            self.check(mean_over(self._job, number, STEP_AXES))

    def _number_of(self, order: bytes) -> int:
        return zlib.crc32(order) % (_EXACT // self._num_ranks)  # the sum of equal ones is exact, and so is their mean

    def _compare(self, mean: float, order: bytes, when: str) -> None:
        if mean != self._number_of(order):
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


def _sent_to_host(mean: torch.Tensor, order: bytes) -> _Met:
    there = torch.empty_like(mean, device="cpu", pin_memory=True)
    there.copy_(mean, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return _Met(there, arrived, order)
