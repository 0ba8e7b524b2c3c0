"""The factored second moment of Adafactor and CAME: row and column means of squares in place of a matrix of them.

For matrices of shape ``(…, H, W)``, dims before the last two counting matrices, the mean of the squares V is kept as ::

    R = β R + (1 − β) · mean_W(V)    (…, H)        V̂ = R Cᵀ / mean(R)    (…, H, W)
    C = β C + (1 − β) · mean_H(V)    (…, W)

(Shazeer & Stern 2018, arXiv 1804.04235, §3, with means for sums). V itself is never needed: 1/√V̂ is the product of one
factor per row and one per column. Everything here is of a whole chunk, ``(n, …)`` for n parameters of equal shape.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from meshwright.optim.sharded import Block, Chunk, Kept, Layout, Sum, TensorList, bad_value, blocks, stack


class FactoredMoment:
    """The row and column means of one kind of squares in a chunk: asks for their sums, then gives the factors.

    Args:
        chunk: Parameters of at least two dims and one :func:`matrix_variant`.
        name: Of the states, before ``_row`` and ``_col``.
        decay: β.
        floor: Added to every square.
        scale: Of the squares that are counted, before that.
    """

    def __init__(self, chunk: Chunk, name: str, decay: float, floor: float, scale: float = 1.0) -> None:
        self._chunk, self._decay, self._floor, self._scale = chunk, decay, floor * (1 - decay), scale * (1 - decay)
        self._row_states = chunk.states[f"{name}_row"]
        self._col_states = chunk.states[f"{name}_col"]
        shape = (len(chunk), *chunk.weights.tensors[0].shape)
        self._row_sums = torch.zeros(shape[:-1], device=chunk.device)
        self._col_sums = torch.zeros((*shape[:-2], shape[-1]), device=chunk.device)
        self.row_factors = self.col_factors = torch.empty(0)
        """1/√V̂ of an element is the factor of its row, ``(n, …, H)``, times that of its column, ``(n, …, W)``."""

    def add(self, block: Block, squares: torch.Tensor) -> None:
        """Counts the squares of a block, ``(k, …, h, W)``; of every block once."""
        torch.sum(squares, -1, out=block.of_rows(self._row_sums))
        block.of_members(self._col_sums).add_(squares.sum(-2))

    def requests(self) -> list[Sum]:
        """What must be summed over ranks."""
        asked = [Sum(self._row_sums, over=(-1,)), Sum(self._col_sums, over=(-2,))]
        if self._is_split_both_ways():
            # V̂ needs the mean of the new R. Where one dim is whole on a rank, so is R, or C, which has the same mean:
            # both average V. Here each rank will hold parts of both, and waiting for the new R would cost a round:
            # so the old R is summed now, and the mean moved by the mean of V as R is.
            old = stack(self._row_states.tensors)
            asked += [Sum(old.sum(-1), over=(-2,)), Sum(self._row_sums.sum(-1), over=(-2, -1))]
        return asked

    def take(self, answers: list[torch.Tensor]) -> None:
        """Moves the states by the whole sums that :meth:`requests` asked for, and sets the factors."""
        height, width = self._chunk.layout.shape[-2:]
        rows = self._moved(self._row_states.tensors, answers[0], width)
        cols = self._moved(self._col_states.tensors, answers[1], height)
        if self._is_split_both_ways():
            means = answers[2] * (self._decay / height) + answers[3] * (self._scale / (height * width))
            means = (means + self._floor).unsqueeze(-1)
        else:
            whole = rows if self._chunk.layout.is_whole(-2) else cols
            means = whole.mean(-1, keepdim=True)
        self.row_factors = (rows / means).rsqrt_()
        self.col_factors = cols.rsqrt()

    def scale_rows_(self, sizes: torch.Tensor) -> None:
        """Multiplies the row factors, and with them all that is scaled later, by one number per parameter, ``(n,)``."""
        self.row_factors.mul_(sizes.view(-1, *[1] * (self.row_factors.dim() - 1)))

    def scaled(self, block: Block, values: torch.Tensor) -> torch.Tensor:
        """Values of a block, ``(k, …, h, W)``, times their rows' and columns' factors."""
        return self._by_rows(block, values).mul_(self._cols(block))

    def difference(self, block: Block, start: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``start`` − :meth:`scaled` values."""
        by_rows = self._by_rows(block, values)
        return torch.addcmul(start, by_rows, self._cols(block), value=-1.0, out=by_rows)

    def subtract(self, block: Block, targets: list[torch.Tensor], values: torch.Tensor) -> None:
        """Subtracts :meth:`scaled` values of a block from tensors, in place."""
        if len(targets) == 1:  # one pass less, but no multi-tensor kernel broadcasts
            targets[0].addcmul_(self._by_rows(block, values)[0], self._cols(block)[0], value=-1.0)
        else:
            torch._foreach_sub_(targets, self.scaled(block, values).unbind())

    def _by_rows(self, block: Block, values: torch.Tensor) -> torch.Tensor:
        return values * block.of_rows(self.row_factors).unsqueeze(-1)

    def _cols(self, block: Block) -> torch.Tensor:
        return block.of_members(self.col_factors).unsqueeze(-2)

    def _moved(self, states: list[torch.Tensor], sums: torch.Tensor, count: int) -> torch.Tensor:
        """The states, stacked, after they were moved towards the means of ``count`` squares."""
        stacked = stack(states)
        stacked.mul_(self._decay).add_(sums, alpha=self._scale / count).add_(self._floor)
        if len(states) > 1:
            torch._foreach_copy_(states, stacked.unbind())
        return stacked

    def _is_split_both_ways(self) -> bool:
        layout = self._chunk.layout
        return not (layout.is_whole(-2) or layout.is_whole(-1))


def squared_gradients(chunk: Chunk, name: str, decay: float, floor: float) -> FactoredMoment:
    """The factored moment of the gradients, ready to ask."""
    moment = FactoredMoment(chunk, name, decay, floor)
    for block in blocks(chunk):
        gradients = block.stacked(chunk.gradients)
        moment.add(block, gradients * gradients)
    return moment


def scaled_gradient_squares(chunk: Chunk, moment: FactoredMoment) -> torch.Tensor:
    """Σu² over this rank's shard of every parameter for u = g / √V̂, shape ``(n,)``.

    It is r²ᵀ (g∘g) c² in the factors r and c of rows and columns, so u is not made; and g∘g is made again, as keeping
    it would mean keeping it of all parameters until the ranks have met.
    """
    col_squares = moment.col_factors.square().unsqueeze(-1)
    sums = torch.zeros(len(chunk), device=chunk.device)
    for block in blocks(chunk):
        gradients = block.stacked(chunk.gradients)
        by_row = ((gradients * gradients) @ block.of_members(col_squares)).squeeze(-1)
        factors = block.of_rows(moment.row_factors)
        # Twice the factor: its square can exceed fp32 where a row never had a gradient.
        block.of_members(sums).add_((by_row * factors).mul_(factors).flatten(1).sum(1))
    return sums


def direction_of_vectors(chunk: Chunk, decay: float, floor: float) -> TensorList:
    """u = g / √v of tensors whose squares are kept whole, after v = decay · v + (1 − decay) · (g² + floor)."""
    moments, gradients = chunk.states["exp_avg_sq"], chunk.gradients
    moments.mul_(decay).addcmul_(gradients, gradients, value=1.0 - decay).add_(floor * (1.0 - decay))
    return moments.rsqrt().mul_(gradients)


def is_factored(layout: Layout) -> bool:
    """Whether the squares are kept as rows and columns: vectors and scalars keep them all."""
    return layout.ndim >= 2


def kept_means(layout: Layout, name: str) -> dict[str, Kept]:
    """The states of a factored moment: rows without the last dim, columns without the last but one."""
    rows, cols = list(range(layout.ndim)), list(range(layout.ndim))
    del rows[-1], cols[-2]
    return {
        f"{name}_{kind}": Kept(tuple(layout.shape[dim] for dim in dims), tuple(dims))
        for kind, dims in (("row", rows), ("col", cols))
    }


def matrix_variant(layout: Layout) -> Hashable:
    """What parameters share in a chunk: matrices their shape, so that their means can be computed with at once."""
    return (layout.shape, layout.placements) if is_factored(layout) else layout.ndim


def step_sizes(
    sizes: torch.Tensor | float, square_sums: torch.Tensor, numels: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Step sizes divided by max(1, RMS(u) / threshold), where Σu² and the number of elements of each u are given."""
    rms = (square_sums / numels).sqrt_()
    return sizes / (rms / threshold).clamp_(min=1.0)


def check_floors(group: dict[str, Any]) -> None:
    """Refuses an ``eps`` that leaves rows without gradients at 0 / 0.

    Raises:
        ConfigError: With it.
    """
    eps = group["eps"]
    if len(eps) != 2 or not float(eps[0]) > 0 or not float(eps[1]) >= 0:
        raise bad_value("eps", eps, "two numbers, the first above 0 and the second 0 or more")


def check_clip_threshold(group: dict[str, Any]) -> None:
    """Refuses to clip everything to nothing.

    Raises:
        ConfigError: With the threshold.
    """
    if not float(group["clip_threshold"]) > 0:
        raise bad_value("clip_threshold", group["clip_threshold"], "more than 0")
