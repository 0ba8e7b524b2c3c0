"""Blocks of many tensors carried between ranks in one all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.optim.sharded.meeting import Meeting
from meshwright.optim.sharded.regions import Region


@dataclass(frozen=True, slots=True)
class Move:
    """A region on its way from one rank to another, or to a place of its own on the same one."""

    sender: int
    receiver: int
    part: int
    """What it belongs to: a number with a meaning to the caller."""
    region: Region


class Route:
    """The moves of one exchange: what this rank sends, receives and keeps.

    Args:
        moves: That this rank has to do with. Those between two ranks are in the same order on both.
        meeting: The ranks.
        travels: Whether any rank sends anything to another one.
    """

    def __init__(self, moves: Iterable[Move], meeting: Meeting, *, travels: bool) -> None:
        self._meeting = meeting
        me = meeting.rank
        sent: dict[int, list[Move]] = {rank: [] for rank in meeting.ranks}
        received: dict[int, list[Move]] = {rank: [] for rank in meeting.ranks}
        self._kept: list[Move] = []
        self._travels = travels
        for move in moves:
            if move.sender == move.receiver:
                self._kept.append(move)
            elif move.sender == me:
                sent[move.receiver].append(move)
            else:
                received[move.sender].append(move)
        self._sent, self._received = list(sent.values()), list(received.values())

    def begin(
        self, dtype: torch.dtype, read: Callable[[Move], torch.Tensor | None]
    ) -> Callable[[Callable[[Move, torch.Tensor | None], None]], None]:
        """Begins all moves. Collective over the meeting, unless nothing travels.

        Args:
            dtype: Of what travels.
            read: The region to send; None stands for zeros.

        Returns:
            A function that waits until all regions are here, and hands each to its argument: those that have arrived as
            views of memory that is not used again, those that stay on this rank as they were read.
        """
        kept = [(move, read(move)) for move in self._kept]
        if not self._travels:
            return lambda take: _hand_out(kept, take)
        flat, parts = self._buffer(self._sent, dtype)
        _copy([(part, read(move)) for move, part in parts])
        arrived, places = self._buffer(self._received, dtype)
        work = dist.all_to_all_single(
            arrived.view(torch.uint8),  # bytes: every backend sends them, whatever they mean
            flat.view(torch.uint8),
            _sizes(self._received, dtype.itemsize),
            _sizes(self._sent, dtype.itemsize),
            group=self._meeting.group,
            async_op=True,
        )

        def finish(take: Callable[[Move, torch.Tensor | None], None]) -> None:
            _hand_out(kept, take)
            work.wait()
            _hand_out(places, take)

        return finish

    def _buffer(
        self, moves: Sequence[Sequence[Move]], dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[tuple[Move, torch.Tensor]]]:
        """One flat tensor for regions from or to all ranks, and the view of each."""
        every = [move for of_rank in moves for move in of_rank]
        flat = torch.empty(sum(move.region.numel for move in every), dtype=dtype, device=self._meeting.device)
        views = flat.split([move.region.numel for move in every])
        return flat, [(move, view.view(move.region.size)) for move, view in zip(every, views, strict=False)]


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Writes every source into its target; zeros where there is none."""
    zeros = [target for target, source in pairs if source is None]
    filled = [(target, source) for target, source in pairs if source is not None]
    if zeros:
        torch._foreach_zero_(zeros)
    if filled:
        torch._foreach_copy_([target for target, _ in filled], [source for _, source in filled])


def _hand_out(
    regions: Iterable[tuple[Move, torch.Tensor | None]], take: Callable[[Move, torch.Tensor | None], None]
) -> None:
    for move, region in regions:
        take(move, region)


def _sizes(moves: Sequence[Sequence[Move]], itemsize: int) -> list[int]:
    return [sum(move.region.numel for move in of_rank) * itemsize for of_rank in moves]
