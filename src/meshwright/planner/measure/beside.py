"""What is neither a kernel nor a collective alone: both at once, copies to the host, a step of next to nothing."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from meshwright.cost import Link
from meshwright.planner.measure.timing import Timing, time_of, together
from meshwright.runtime import gather_objects, synchronize_device

_COPY_BYTES = (2**16, 2**28)
_TINY_PARAMETERS = 24


def beside_collective(device: torch.device, rounds: int = 5) -> tuple[float, float, float]:
    """Seconds of matrix products alone, of an all-reduce alone, and of both begun together; collective.

    The products take about as long as the all-reduce, so that each runs beside the other for most of its time.
    """
    cuda = device.type == "cuda"
    size, numel = (4096, 2**26) if cuda else (512, 2**21)
    left, message = torch.ones(size, size, device=device), torch.ones(numel, device=device)

    def products(count: int) -> None:
        for _ in range(count):
            left @ left

    def seconds(count: int, *, reduce: bool) -> float:
        together()
        synchronize_device(device)
        start_s = time.perf_counter()
        work = dist.all_reduce(message, async_op=True) if reduce else None
        products(count)
        if work is not None:
            work.wait()
        synchronize_device(device)
        return time.perf_counter() - start_s

    seconds(1, reduce=True)
    once_s = _fastest([seconds(1, reduce=False)])
    count = max(1, round(_fastest([seconds(0, reduce=True) for _ in range(3)]) / once_s))
    kinds = ((count, False), (0, True), (count, True))
    turns = [[seconds(times, reduce=reduce) for times, reduce in kinds] for _ in range(rounds)]
    alone, link, both = (_fastest(list(each)) for each in zip(*turns, strict=True))
    return alone, link, both


def _fastest(times: list[float]) -> float:
    """Of several turns, as the slowest rank saw each."""
    return min(max(of_one) for of_one in zip(*gather_objects(times), strict=True))


def host_copies(device: torch.device) -> Link | None:
    """The link between a CUDA device and pinned host memory, the slower direction; None on a CPU. Collective."""
    if device.type != "cuda":
        return None
    times = []
    for num_bytes in _COPY_BYTES:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        there_s = time_of(lambda a=host, b=there: b.copy_(a, non_blocking=True), device).wall_s  # type: ignore[misc]
        back_s = time_of(lambda a=host, b=there: a.copy_(b, non_blocking=True), device).wall_s  # type: ignore[misc]
        times.append(max(gather_objects(max(there_s, back_s))))
    small_s, large_s = times
    rate = (_COPY_BYTES[1] - _COPY_BYTES[0]) / max(large_s - small_s, 1e-9)
    return Link(rate, max(small_s - _COPY_BYTES[0] / rate, 1e-7))


def small_step_s(device: torch.device) -> Timing:
    """A step's work that does not grow with the model: the optimizer's and the clipping's calls, reading the loss."""
    parameters = [torch.nn.Parameter(torch.ones(8, device=device)) for _ in range(_TINY_PARAMETERS)]
    optim = torch.optim.AdamW(parameters, fused=True)

    def run() -> None:
        optim.zero_grad()
        loss = sum((parameter.sum() for parameter in parameters), torch.zeros((), device=device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optim.step()
        loss.item()

    return time_of(run, device)
