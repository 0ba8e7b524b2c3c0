"""The factored second moment of Adafactor and CAME, computed over cache-sized blocks of matrices.

For matrices of shape ``(…, H, W)``, where dims before the last two count matrices, the mean of the squares V is stored
as row and column means::

    R = β R + (1 − β) · mean_W(V)    (…, H)        V̂ = R Cᵀ / mean(R)    (…, H, W)
    C = β C + (1 − β) · mean_H(V)    (…, W)

(Shazeer & Stern 2018, arXiv 1804.04235, §3, with means for sums). V itself is never needed: 1/√V̂ is the product of one
factor per row and one per column. All tensors here are of whole chunks, ``(n, …)`` for n parameters of equal shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from meshwright.optim.sharded import Chunk, Kept, Layout, Sum, TensorList, bad_value
from meshwright.runtime.torch_internals.optim import foreach_copy_

# Elements of a block. On a CPU a block stays in a core's cache with weight, gradient and a temporary. On an accelerator
# it keeps the device busy, while no temporary is as large as the largest parameters.
_BLOCK_ELEMENTS = {"cpu": 1 << 17, "other": 1 << 24}


class Blocks:
    """A chunk cut into blocks: of several small parameters each, or of some rows of one large parameter.

    Shapes of the chunk are written ``(n, …, H, W)`` here, those of a block ``(k, …, h, W)``. Values per row or column
    are split and joined for all blocks at once, as small operations cost much beside passes over blocks.

    Args:
        chunk: Parameters of one local shape, with two or more dims.
    """

    def __init__(self, chunk: Chunk) -> None:
        limit = _BLOCK_ELEMENTS["cpu" if chunk.device.type == "cpu" else "other"]
        shard = chunk.weights.tensors[0]
        elements, height = max(1, shard.numel()), shard.shape[-2]
        self._num_members = len(chunk)
        self._members_each = max(1, min(len(chunk), limit // elements))
        self._rows_each = height if elements <= limit else max(1, limit * height // elements)
        self._parts = max(1, -(-height // max(1, self._rows_each)))
        """Number of blocks of a parameter."""

    def of(self, tensors: TensorList) -> Iterator[list[torch.Tensor]]:
        """Yield for each block a view ``(…, h, W)`` of the part of each of its k parameters."""
        for first in range(0, self._num_members, self._members_each):
            members = tensors.tensors[first : first + self._members_each]
            if self._parts == 1:
                yield members
            else:
                yield from ([part] for part in members[0].split(self._rows_each, -2))

    def per_row(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Split ``(n, …, H, 1)`` into views ``(k, …, h, 1)``, one for each block."""
        members = values.split(self._members_each)
        if self._parts == 1:
            return list(members)
        return [part for member in members for part in member.split(self._rows_each, -2)]

    def per_col(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Split ``(n, …)`` without rows into views ``(k, …)``, one for each block."""
        return [member for member in values.split(self._members_each) for _ in range(self._parts)]

    def rows_joined(self, values: Sequence[torch.Tensor], dim: int = -1) -> torch.Tensor:
        """Join values ``(k, …, h)`` of the rows of each block to ``(n, …, H)``, with H at ``dim``."""
        return _joined([_joined(parts, dim) for parts in self._by_parameter(values)], 0)

    def cols_added(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add values ``(k, …, W)`` for the columns of each block up to ``(n, …, W)``."""
        every = self._by_parameter(values)
        return _joined([parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0) for parts in every], 0)

    def _by_parameter(self, values: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        return [values[first : first + self._parts] for first in range(0, len(values), self._parts)]


def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Stack tensors along a new first dim; a single one without a copy."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _joined(values: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return values[0] if len(values) == 1 else torch.cat(list(values), dim)


# --- The factored moment

BLOCKED_CHUNK_ELEMENTS = 1 << 21
"""Elements of a chunk on a CPU, and of squares that are cached. Blocks keep passes in the cache, so the chunk can be so
large that the small operations on rows and columns cost little."""


class FactoredMoment:
    """Row and column means of one kind of squares in a chunk, and the factors computed from them.

    The factor of an element, 1/√V̂, is that of its row, ``(n, …, H)``, times that of its column, ``(n, …, W)``.

    Args:
        chunk: Parameters of at least two dims and one :func:`matrix_variant`.
        name: Name of the states, before ``_row`` and ``_col``.
        decay: β.
        floor: Added to every square.
        scale: Factor of the squares that are added, before the floor.
    """

    def __init__(self, chunk: Chunk, name: str, decay: float, floor: float, scale: float = 1.0) -> None:
        self._chunk, self._decay, self._floor, self._scale = chunk, decay, floor * (1 - decay), scale * (1 - decay)
        self._row_states = chunk.states[f"{name}_row"]
        self._col_states = chunk.states[f"{name}_col"]
        self._blocks = Blocks(chunk)
        self._row_sums: list[torch.Tensor] = []
        self._col_sums: list[torch.Tensor] = []
        self._row_factors = self._col_factors = torch.empty(0)

    def add(self, squares: torch.Tensor) -> None:
        """Add the squares of the next block, ``(k, …, h, W)``."""
        self._row_sums.append(squares.sum(-1))
        self._col_sums.append(squares.sum(-2))

    def requests(self) -> list[Sum]:
        """Return the sums over ranks that the means need."""
        rows, cols = self._blocks.rows_joined(self._row_sums), self._blocks.cols_added(self._col_sums)
        asked = [Sum(rows, over=(-1,)), Sum(cols, over=(-2,))]
        if self._is_split_both_ways():
            # V̂ needs the mean of the new R. Where a rank has one dim whole, it also has R whole, or C, whose mean is
            # the same, as both average V. Here ranks have parts of both, and waiting for the new R would cost a round:
            # the old R is summed now, and its mean moves by the mean of V as R itself does.
            old = stack(self._row_states.tensors)
            asked += [Sum(old.sum(-1), over=(-2,)), Sum(rows.sum(-1), over=(-2, -1))]
        return asked

    def take(self, answers: list[torch.Tensor]) -> None:
        """Update the states by the answers to :meth:`requests`, and compute the factors."""
        height, width = self._chunk.layout.shape[-2:]
        rows = self._moved(self._row_states.tensors, answers[0], width)
        cols = self._moved(self._col_states.tensors, answers[1], height)
        if self._is_split_both_ways():
            means = answers[2] * (self._decay / height) + answers[3] * (self._scale / (height * width))
            means = (means + self._floor).unsqueeze(-1)
        else:
            whole = rows if self._chunk.layout.is_whole(-2) else cols
            means = whole.mean(-1, keepdim=True)
        self._row_factors = (rows / means).rsqrt_()
        self._col_factors = cols.rsqrt()

    def scale_(self, sizes: torch.Tensor | float) -> None:
        """Multiply the factors by one number, or by one per parameter, ``(n,)``."""
        if isinstance(sizes, torch.Tensor):
            sizes = sizes.view(-1, *[1] * (self._row_factors.dim() - 1))
        self._row_factors.mul_(sizes)

    def factors(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield for each block the factors of its k parameters, ``(…, h, W)``, in new memory."""
        rows = self._blocks.per_row(self._row_factors.unsqueeze(-1))
        cols = self._blocks.per_col(self._col_factors.unsqueeze(-2))
        for row, col in zip(rows, cols, strict=True):
            yield (row * col).unbind()

    def scaled_sums(self, squares: BlockedSquares) -> torch.Tensor:
        """Return Σ x²/V̂ over this rank's shard of every parameter, shape ``(n,)``, from the squares of x.

        It is rᵀ (x∘x) c with the squared factors r and c of rows and columns, so x/√V̂ is never computed.
        """
        cols = self._blocks.per_col(self._col_factors.square().unsqueeze(-1))
        by_row = [torch.matmul(part, col) for part, col in zip(squares, cols, strict=True)]
        # Twice the factor: its square can exceed fp32 where a row never had a gradient.
        scaled = self._blocks.rows_joined(by_row, -2).squeeze(-1) * self._row_factors
        return scaled.mul_(self._row_factors).flatten(1).sum(1)

    def _moved(self, states: list[torch.Tensor], sums: torch.Tensor, count: int) -> torch.Tensor:
        """Move the states towards the means of ``count`` squares, and return them stacked."""
        stacked = stack(states)
        stacked.mul_(self._decay).add_(sums, alpha=self._scale / count).add_(self._floor)
        if len(states) > 1:
            foreach_copy_(states, stacked.unbind())
        return stacked

    def _is_split_both_ways(self) -> bool:
        layout = self._chunk.layout
        return not (layout.is_whole(-2) or layout.is_whole(-1))


class BlockedSquares:
    """Squared gradients of a chunk, block by block, ``(k, …, h, W)``; read once for means and once to scale them.

    They are cached in between only for parameters that no axis splits. Of others, all chunks wait for their sums at the
    same time, and the squares of all would exist at once: these are computed twice.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        elements = sum(tensor.numel() for tensor in chunk.gradients)
        self._caches = chunk.is_local and elements <= BLOCKED_CHUNK_ELEMENTS
        self._cache: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self._cache:
            yield from self._cache
            return
        for views in Blocks(self._chunk).of(self._chunk.gradients):
            gradients = stack(views)
            part = gradients * gradients
            if self._caches:
                self._cache.append(part)
            yield part


def direction_of_vectors(chunk: Chunk, decay: float, floor: float) -> TensorList:
    """Return u = g / √v of tensors with whole second moments, after v = decay · v + (1 − decay) · (g² + floor)."""
    moments, gradients = chunk.states["exp_avg_sq"], chunk.gradients
    moments.mul_(decay).addcmul_(gradients, gradients, value=1.0 - decay).add_(floor * (1.0 - decay))
    return moments.rsqrt().mul_(gradients)


def is_factored(layout: Layout) -> bool:
    """Return whether second moments are stored as rows and columns: not those of vectors and scalars."""
    return layout.ndim >= 2


def kept_means(layout: Layout, name: str) -> dict[str, Kept]:
    """Return the states of a factored moment: rows without the last dim, columns without the last but one."""
    rows, cols = list(range(layout.ndim)), list(range(layout.ndim))
    del rows[-1], cols[-2]
    return {
        f"{name}_{kind}": Kept(tuple(layout.shape[dim] for dim in dims), tuple(dims))
        for kind, dims in (("row", rows), ("col", cols))
    }


def matrix_variant(layout: Layout) -> Hashable:
    """Return the key of a chunk: matrices need one shape, so that their means can be stacked."""
    return (layout.shape, layout.placements) if is_factored(layout) else layout.ndim


def clips(square_sums: torch.Tensor, numels: torch.Tensor | float, threshold: float) -> torch.Tensor:
    """Return max(1, RMS(u) / threshold), the divisor of each u, from Σu² and the number of elements of each."""
    return (square_sums / (numels * threshold**2)).clamp_(min=1.0).sqrt_()


def numels(chunk: Chunk) -> torch.Tensor | float:
    """Return the number of elements of each whole parameter; one number for matrices, which have one shape."""
    return float(chunk.layout.numel) if is_factored(chunk.layout) else chunk.numels()


def check_floors(group: dict[str, Any]) -> None:
    """Refuse values of ``eps`` with which rows without gradients would be 0 / 0.

    Raises:
        ConfigError: With the values.
    """
    eps = group["eps"]
    if not isinstance(eps, tuple | list) or len(eps) != 2 or not float(eps[0]) > 0 or not float(eps[1]) >= 0:
        raise bad_value("eps", eps, "two numbers, the first above 0 and the second 0 or more")


def check_clip_threshold(group: dict[str, Any]) -> None:
    """Refuse clip thresholds that are not above 0.

    Raises:
        ConfigError: With the threshold.
    """
    if not float(group["clip_threshold"]) > 0:
        raise bad_value("clip_threshold", group["clip_threshold"], "more than 0")
