"""DDP's averages in few bits, through its communication hook.

Every gradient of a bucket is cut into equal pieces, one for every rank. Owners add their pieces up in fp32; the means,
quantised once more, go to all, who decode the same bytes.
"""

# DDP reads the hook's annotations, which must be types: no `from __future__ import annotations`.
import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from meshwright.cost import Wire
from meshwright.distributed.packing import Packing
from meshwright.distributed.two_level import Route, gathered_messages, reduced_row


def quantise_averages(model: DistributedDataParallel, wire: Wire, way: Route, device: torch.device) -> None:
    """Averages the buckets of a model in few bits from now on.

    Args:
        model: Over the ranks of ``way``.
        wire: In how many bits gradients travel.
        way: The ranks that average, and their nodes.
        device: Where the model is.
    """
    if wire.reduce is not None or way.nodes is not None:
        model.register_comm_hook(None, _Averages(wire, way, device).average)


class _Averages:
    def __init__(self, wire: Wire, way: Route, device: torch.device) -> None:
        self._wire, self._way, self._device = wire, way, device
        # Beside the computation; DDP waits for it by the future's events.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def average(
        self,
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Replaces the gradients of a bucket by their means over ranks; equal bits on all of them."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[] if self._stream is None else [self._device]
        )
        with self._aside():
            average_in_place([gradient.view(-1) for gradient in bucket.gradients()], self._wire, self._way)
            future.set_result(bucket.buffer())
        return future

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


def average_in_place(gradients: Sequence[torch.Tensor], wire: Wire, way: Route) -> None:
    """Replaces flat gradients of one type by their means over ranks."""
    pieces = [-(-gradient.numel() // way.size) for gradient in gradients]
    packing = Packing(tuple(pieces), tuple(each.numel() >= wire.min_numel for each in gradients), wire.reduce)
    rows = gradients[0].new_zeros(way.size, sum(pieces))
    for gradient, part in zip(gradients, rows.split(pieces, dim=1), strict=True):
        for target, source in _runs(part, gradient):
            target.copy_(source)
    mean = reduced_row(rows, packing, way).div_(way.size).to(rows.dtype)
    messages = gathered_messages(packing.pack(mean.view(1, -1)).view(-1), way)
    packing.unpack(messages, rows.dtype, rows)
    for gradient, part in zip(gradients, rows.split(pieces, dim=1), strict=True):
        for source, target in _runs(part, gradient):
            target.copy_(source)


def _runs(part: torch.Tensor, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Where the elements of a flat tensor lie in its pieces ``(ranks, piece)``: in full ones, and in a shorter one."""
    piece = part.shape[1]
    full, rest = divmod(flat.numel(), piece) if piece else (0, 0)
    if full:
        yield part[:full], flat[: full * piece].view(full, piece)
    if rest:
        yield part[full, :rest], flat[full * piece :]
