"""Deal tokens to ranks, and replace attention in blocks that see only a part of them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from meshwright.errors import ModelError


@dataclass(frozen=True)
class TokenOrder:
    """The distribution of a sequence's tokens over the ranks of an axis, from the view of one rank."""

    method: str
    """The method that distributes them, for errors."""
    size: int
    index: int
    balanced: bool = False
    """Zig-zag: of 2 n chunks, rank r has r and 2 n - 1 - r, which see equally many earlier tokens on every rank."""
    within: int = 1
    """Number of parts into which other axes divide this rank's tokens once more."""
    multiple: int = 1
    """Each rank has a multiple of so many tokens, padding included."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """This rank's chunks, ascending."""
        return (self.index, 2 * self.size - 1 - self.index) if self.balanced else (self.index,)

    @property
    def num_chunks(self) -> int:
        """Number of equal chunks of a sequence."""
        return self.size * len(self.chunks)

    def chunk_size(self, tokens: int) -> int:
        """Return the size of a chunk of a sequence; the last chunks are filled up with padding."""
        least, step = -(-tokens // self.num_chunks), self._step
        return -(-least // step) * step

    @property
    def _step(self) -> int:
        """Return the number of tokens of which every chunk has a multiple."""
        return self.multiple // math.gcd(self.multiple, len(self.chunks))

    def padded(self, tokens: int) -> int:
        """Return the number of tokens of all ranks together, padding included."""
        return self.chunk_size(tokens) * self.num_chunks

    def real(self, tokens: int) -> int:
        """Return how many of this rank's tokens, the first ones, are no padding."""
        size = self.chunk_size(tokens)
        return sum(min(max(tokens - chunk * size, 0), size) for chunk in self.chunks)

    def at(self, index: int) -> TokenOrder:
        """Return the same distribution from the view of another rank."""
        return dataclasses.replace(self, index=index)

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Copy this rank's tokens along ``dim``; a view would keep all tokens alive.

        Padding repeats the last token, so that no code computes with values that are not a token's.
        """
        missing = self.padded(whole.shape[dim]) - whole.shape[dim]
        if missing:
            last = whole.detach().narrow(dim, whole.shape[dim] - 1, 1)
            whole = torch.cat([whole, *[last] * missing], dim)
        chunks = whole.chunk(self.num_chunks, dim)
        mine = [chunks[chunk] for chunk in self.chunks]
        return torch.cat(mine, dim) if len(mine) > 1 else mine[0].clone()

    def in_order(self, parts: torch.Tensor, dim: int) -> torch.Tensor:
        """Sort the concatenated parts of all ranks along ``dim`` into the order of the tokens."""
        if not self.balanced:
            return parts
        chunks = parts.chunk(self.num_chunks, dim)
        order = [chunk for rank in range(self.size) for chunk in self.at(rank).chunks]
        return torch.cat([chunks[order.index(chunk)] for chunk in range(self.num_chunks)], dim)

    def check(self, tokens: int, *, equally: bool = False) -> None:
        """Refuse numbers of tokens that cannot be distributed.

        Args:
            tokens: Number of tokens of a sequence.
            equally: Whether no rank may have padding.

        Raises:
            ModelError: On every rank of the axis.
        """
        chunks = self.num_chunks * self._step
        # A single query looks like generation, which has no causal mask.
        if tokens < 2 * self.size or (equally and tokens % chunks):
            raise ModelError(
                f"{self.method}: the axis does not divide the tokens into "
                + ("two chunks per rank" if self.balanced else "parts of two or more")
                + (", equal ones, as stages of a pipeline take them" if equally else ""),
                expected=(f"a multiple of {chunks} tokens, " if equally else "") + f"{2 * self.size} tokens or more",
                got=str(tokens),
                fix="pad the sequences" + (", or set balance=False" if self.balanced else ""),
            )


# --- Attention calls of blocks that run on a part of the tokens

Attend = Callable[..., torch.Tensor]


class TokenRanks(ABC):
    """The ranks along one axis that hold the parts of one sequence."""

    axis: ClassVar[str]
    order: TokenOrder
    tokens: int | None = None
    """Number of tokens of the sequence that runs; ``token_split.py`` sets it. None: the ranks have equal parts."""

    def whole(self, part: int) -> int:
        """Return the number of tokens of all ranks, without padding, where each rank has ``part``."""
        every = part * self.order.size
        return self.tokens if self.tokens is not None and self.order.padded(self.tokens) == every else every

    @abstractmethod
    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather (batch, tokens / n, features) to all tokens, in order; backward sums gradients and scatters them."""

    @property
    def place(self) -> tuple[int, int]:
        """This rank's index along the axis, and the axis' size."""
        return self.order.index, self.order.size

    @abstractmethod
    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over the axis; backward sums gradients, too."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Compute ``scaled_dot_product_attention`` of this rank's queries over the keys and values of all ranks.

        Args:
            query: (batch, heads, tokens / n, features).
            key: (batch, heads, tokens / n, features); fewer heads with ``enable_gqa``.
            value: Like ``key``.
            attn_mask: Mask for all tokens, as on one device: (…, tokens or 1, tokens).
            dropout_p: As in torch.
            is_causal: As in torch.
            scale: As in torch.
            enable_gqa: As in torch.

        Returns:
            (batch, heads, tokens / n, features of ``value``).

        Raises:
            ModelError: When it is not attention among these tokens; on every rank of the axis.
        """


class AttentionCalls(TorchFunctionMode):
    """Calls ``attend`` in place of ``scaled_dot_product_attention`` wherever it is called inside.

    Attributes:
        count: Number of such calls.
    """

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace attention; run any other function as it is."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return self._attend(*args, **(kwargs or {}))


@contextlib.contextmanager
def grouped_keys() -> Iterator[None]:
    """Let transformers pass grouped keys and values to attention, so that they are sent without repetition.

    Otherwise it repeats their heads if there is a mask, as there always is in a pass over fake tensors.
    """
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def answering(path: str, ranks: TokenRanks) -> Callable[..., Any]:
    """Return the wrapper of a block's forward in which ``ranks`` compute attention over all tokens."""

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls = AttentionCalls(ranks.attend)
        with grouped_keys(), calls:
            output = forward(*args, **kwargs)
        if not calls.count:
            raise cannot_intercept(path, ranks.order.method)
        return output

    return run


def cannot_intercept(path: str, method: str) -> ModelError:
    """Return the error for a block that calls no attention that can be replaced."""
    return ModelError(
        f"{method}: {path} calls no attention that can be replaced",
        expected="calls of torch.nn.functional.scaled_dot_product_attention in every block",
        got="none",
        fix='use it in the block; load a transformers model with attn_implementation="sdpa"',
    )


def check_among_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, method: str) -> None:
    """Refuse attention that is not among the tokens that the ranks divide, such as cross-attention.

    Raises:
        ModelError: On every rank of the axis, since their parts have the same shape.
    """
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes) or len({(shape[0], shape[2]) for shape in shapes}) > 1:
        raise ModelError(
            f"{method}: attention is not among the tokens that the ranks divide",
            expected="queries, keys and values (batch, heads, tokens, features) of the same tokens",
            got=", ".join(map(str, shapes)),
            fix="use fsdp or tensor_parallel; cross-attention is not covered",
        )


def check_mask(mask: torch.Tensor, tokens: int, method: str) -> None:
    """Refuse masks that do not cover all ``tokens``.

    Raises:
        ModelError: On every rank of the axis.
    """
    if mask.shape[-1] != tokens or (mask.dim() > 1 and mask.shape[-2] not in (1, tokens)):
        raise ModelError(
            f"{method}: an attention mask does not cover all tokens",
            expected=f"a mask (…, {tokens} or 1, {tokens}), made outside the blocks or for all tokens",
            got=str(tuple(mask.shape)),
            fix="make the mask before the first block, or use is_causal=True",
        )
