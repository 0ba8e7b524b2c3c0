"""Blocks of many tensors carried between ranks in one all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.optim.sharded.meeting import Meeting
from meshwright.optim.sharded.regions import Block


@dataclass(frozen=True, slots=True)
class Move:
    """A block on its way from one rank to another, or to a place of its own on the same one."""

    sender: int
    receiver: int
    part: int
    """What it belongs to: a number with a meaning to the caller."""
    block: Block


class Route:
    """The moves of one exchange: what this rank sends, receives and keeps.

    Args:
        moves: Of all ranks, in the same order on each.
        meeting: The ranks.
    """

    def __init__(self, moves: Iterable[Move], meeting: Meeting) -> None:
        self._meeting = meeting
        me = meeting.rank
        sent: dict[int, list[Move]] = {rank: [] for rank in meeting.ranks}
        received: dict[int, list[Move]] = {rank: [] for rank in meeting.ranks}
        self._kept: list[Move] = []
        self.travels = False
        """Whether any rank sends anything to another one."""
        for move in moves:
            if move.block.numel == 0:
                continue
            if move.sender == move.receiver:
                if move.sender == me:
                    self._kept.append(move)
                continue
            self.travels = True
            if move.sender == me:
                sent[move.receiver].append(move)
            elif move.receiver == me:
                received[move.sender].append(move)
        self._sent, self._received = list(sent.values()), list(received.values())

    def carry(
        self,
        dtype: torch.dtype,
        read: Callable[[Move], torch.Tensor | None],
        take: Callable[[Move, torch.Tensor | None], None],
    ) -> None:
        """Does all moves. Collective over the meeting, unless nothing travels.

        Args:
            dtype: Of what travels.
            read: The block to send; None stands for zeros.
            take: Is handed every block that arrives, a view of memory that is not used again, and every block that
                stays on this rank as it was read.
        """
        for move in self._kept:
            take(move, read(move))
        if not self.travels:
            return
        flat, parts = self._buffer(self._sent, dtype)
        _copy([(part, read(move)) for move, part in parts])
        arrived, places = self._buffer(self._received, dtype)
        dist.all_to_all_single(
            arrived.view(torch.uint8),  # bytes: every backend sends them, whatever they mean
            flat.view(torch.uint8),
            _sizes(self._received, dtype.itemsize),
            _sizes(self._sent, dtype.itemsize),
            group=self._meeting.group,
        )
        for move, place in places:
            take(move, place)

    def _buffer(
        self, moves: Sequence[Sequence[Move]], dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[tuple[Move, torch.Tensor]]]:
        """One flat tensor for blocks from or to all ranks, and the view of each."""
        every = [move for of_rank in moves for move in of_rank]
        flat = torch.empty(sum(move.block.numel for move in every), dtype=dtype, device=self._meeting.device)
        views = flat.split([move.block.numel for move in every])
        return flat, [(move, view.view(move.block.size)) for move, view in zip(every, views, strict=False)]


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Writes every source into its target; zeros where there is none."""
    zeros = [target for target, source in pairs if source is None]
    filled = [(target, source) for target, source in pairs if source is not None]
    if zeros:
        torch._foreach_zero_(zeros)
    if filled:
        torch._foreach_copy_([target for target, _ in filled], [source for _, source in filled])


def _sizes(moves: Sequence[Sequence[Move]], itemsize: int) -> list[int]:
    return [sum(move.block.numel for move in of_rank) * itemsize for of_rank in moves]
