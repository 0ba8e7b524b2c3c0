"""Run the kernels, collectives, host copies and small steps that a calibration times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.comm.bandwidth import BENCHMARK_OPS, benchmark_operation
from meshwright.comm.transport import Members, members_of
from meshwright.cost import HALF, Link, Op
from meshwright.methods.base import half_dtype, torch_dtype
from meshwright.planner.measure.timing import LinkSample, Sample, Timing, slowest, time_of, time_together
from meshwright.planner.trace.aten_kernels import kernels_of
from meshwright.runtime import Settings, largest, synchronize, synchronize_device, world_size
from meshwright.runtime.torch_internals.fake_tensors import TorchDispatchMode

# Per fp32 element, as ``cost.device_time.update_s`` counts: weight and two states read and written, the gradient
# three times.
UPDATE_BYTES = 36
_CHAIN = 32  # kernels


@dataclass(frozen=True)
class Sizes:
    """Sizes of the kernels on one type of device."""

    products: tuple[tuple[int, int, int], ...]  # m, n, k
    moved: tuple[int, ...]  # elements
    attention: tuple[tuple[int, int, int], ...]  # samples x heads, tokens, width
    updated: tuple[int, ...]  # elements of the tensors that one update takes together


_ON_CPU = Sizes(
    products=(
        (128, 256, 256),
        (256, 256, 256),
        (512, 768, 256),
        (512, 256, 1024),
        (512, 1024, 256),
        (1024, 1024, 512),
        (512, 4096, 256),
    ),
    moved=(2**17, 2**19, 2**21),
    attention=((16, 128, 64), (8, 256, 64), (16, 128, 32)),
    updated=(2**20, 2**18, 2**18, 2**16, 2**10),
)
_ON_CUDA = Sizes(
    products=((4096, 1024, 1024), (8192, 4096, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 4096)),
    moved=(2**22, 2**25, 2**27),
    attention=((32, 2048, 128), (16, 4096, 128), (64, 1024, 64)),
    updated=(2**26, 2**24, 2**24, 2**20),
)


def kernel_probes(device: torch.device) -> Iterator[Sample]:
    """Yield the kernels to time one by one, so that their tensors live no longer than each sample."""
    sizes = _ON_CUDA if device.type == "cuda" else _ON_CPU
    yield _gaps(device)
    yield from _moves(sizes, device)
    yield from _functions(sizes, device)
    for dtype in _dtypes(device):
        yield from _products(sizes, dtype, device)
    for dtype in _dtypes(device):
        yield from _attentions(sizes, dtype, device)
    yield _update(sizes, device)


def num_probes(device: torch.device) -> int:
    """Return the number of kernels to time."""
    sizes, dtypes = _ON_CUDA if device.type == "cuda" else _ON_CPU, len(_dtypes(device))
    return 2 + 5 * len(sizes.moved) + 2 * dtypes * (len(sizes.products) + len(sizes.attention))


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    # On CUDA without bf16 (before Ampere), half precision is fp16.
    return torch.float32, torch_dtype(half_dtype(device))


def _name(dtype: torch.dtype) -> str:
    return "fp32" if dtype == torch.float32 else HALF


def _gaps(device: torch.device) -> Sample:
    """Return a sample of kernels so small that only launching them takes time.

    On a CPU these are the kernels of a transformer block, forward and backward: views, modules and autograd's records
    take time there, too. On CUDA the host runs ahead of the device with all that, as in training.
    """
    if device.type == "cuda":
        x = torch.ones(16, device=device)

        def launch() -> None:
            for _ in range(_CHAIN):
                x.mul_(1.0)

        return Sample("gap", "between kernels", Op("move", count=_CHAIN), run=launch)
    block, hidden = SmallBlock(), torch.randn(2, 8, SmallBlock.width)
    parameters = list(block.parameters())

    def step() -> None:
        torch.autograd.grad(block(hidden).sum(), parameters)

    with _Kernels() as kernels:
        step()
    return Sample("gap", "between kernels", Op("move", count=kernels.count), run=step)


class SmallBlock(nn.Module):
    """A pre-norm transformer block with almost no arithmetic."""

    width = 16

    def __init__(self) -> None:
        super().__init__()
        width = self.width
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Apply attention with two heads, and the MLP."""
        batch, tokens, width = x_BTD.shape
        qkv = self.qkv(self.norms[0](x_BTD)).view(batch, tokens, 3, 2, width // 2)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True)  # type: ignore[misc]
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        mixed: torch.Tensor = x_BTD + self.mlp(self.norms[1](x_BTD))
        return mixed


class _Kernels(TorchDispatchMode):
    """Counts kernels as a model's trace does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += len(kernels_of(func, args, kwargs or {}, result))
        return result


def _moves(sizes: Sizes, device: torch.device) -> Iterator[Sample]:
    for numel in sizes.moved:
        x, y = torch.ones(numel, device=device), torch.ones(numel, device=device)
        yield Sample("memory", f"add {numel:,}", Op("move", num_bytes=12 * numel), run=lambda x=x, y=y: x + y)  # type: ignore[misc]
        copy = Op("move", num_bytes=8 * numel)
        yield Sample("memory", f"copy {numel:,}", copy, run=lambda x=x, y=y: y.copy_(x))  # type: ignore[misc]


def _functions(sizes: Sizes, device: torch.device) -> Iterator[Sample]:
    width = 256
    for numel in sizes.moved:
        x = torch.randn(numel // width, width, device=device, requires_grad=True)
        for label, functions, function in (
            ("gelu", 3, lambda x: F.gelu(x, approximate="tanh")),
            ("layer norm", 1, lambda x: F.layer_norm(x, (width,))),
            ("softmax", 1, lambda x: F.log_softmax(x, -1)),
        ):
            op = Op("move", num_bytes=8 * numel, backward_bytes=12 * numel, functions=functions * numel)
            run = _with_backward(function, (x,))
            yield Sample("functions", f"{label} {numel:,}", op, backward=True, run=run)


def _products(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    part = f"{_name(dtype)} products"
    for m, n, k in sizes.products:
        x = torch.randn(m, k, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(n, k, dtype=dtype, device=device, requires_grad=True)
        op = Op("matmul", m=m, n=n, k=k, dtype=_name(dtype))  # type: ignore[arg-type]
        plain = (x.detach(), weight.detach())
        yield Sample(part, f"{m} x {n} x {k}", op, run=lambda plain=plain: F.linear(*plain))  # type: ignore[misc]
        yield Sample(part, f"{m} x {n} x {k} and back", op, backward=True, run=_with_backward(F.linear, (x, weight)))


def _attentions(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    for batch, tokens, width in sizes.attention:
        make = torch.randn(3, 1, batch, tokens, width, dtype=dtype, device=device)
        qkv = tuple(part.clone().requires_grad_() for part in make)
        op = Op(
            "attention", m=tokens, n=tokens, k=width, batch=batch, causal=True,
            dtype=_name(dtype),  # type: ignore[arg-type]
        )  # fmt: skip
        part, label = f"{_name(dtype)} attention", f"{batch} x {tokens} x {width}"

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        yield Sample(part, label, op, run=lambda make=make: forward(*make))  # type: ignore[misc]
        yield Sample(part, f"{label} and back", op, backward=True, run=_with_backward(forward, qkv))


def _update(sizes: Sizes, device: torch.device) -> Sample:
    parameters = [torch.nn.Parameter(torch.ones(numel, device=device)) for numel in sizes.updated]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optim = torch.optim.AdamW(parameters, fused=True)

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1e9)
        optim.step()

    return Sample("update", "clip and AdamW", Op("move", num_bytes=UPDATE_BYTES * sum(sizes.updated)), run=run)


def _with_backward(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    upstream = torch.ones_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, upstream)


# --- Collectives, by kind and size, inside nodes and between them

_SIZES_CPU = (2**8, 2**14, 2**18, 2**20, 2**22, 2**24)
_SIZES_CUDA = (2**10, 2**16, 2**20, 2**23, 2**26, 2**28)


@dataclass(frozen=True)
class Tier:
    """The ranks that one tier of links joins, seen from one of them."""

    name: str
    members: Members


def tiers_of(settings: Settings) -> list[Tier]:
    """Return the ranks of this node, and those of equal local rank on all nodes; none for one rank. Collective."""
    local, world = settings.local_world_size, world_size()
    if world == 1:
        return []
    if world <= local or world % local:
        return [Tier("intra", members_of(None))]
    mesh = init_device_mesh(settings.device.type, (world // local, local), mesh_dim_names=("node", "local"))
    inter = Tier("inter", members_of(mesh["node"]))
    return [Tier("intra", members_of(mesh["local"])), inter] if local > 1 else [inter]


def link_sizes(device: torch.device) -> tuple[int, ...]:
    """Return the sizes of the messages in bytes."""
    return _SIZES_CUDA if device.type == "cuda" else _SIZES_CPU


def link_samples(tier: Tier, device: torch.device, *, window_s: float) -> Iterator[LinkSample]:
    """Time every kind of collective in every size; collective. Yields the slowest rank's times, equal on every rank."""
    size = tier.members.size
    for op in BENCHMARK_OPS:
        for num_bytes in link_sizes(device):
            message = torch.ones(max(num_bytes // 4 // size, 1) * size, device=device)
            run = benchmark_operation(op, message, tier.members)
            timing = slowest([time_together(run, device, window_s=window_s)])[0]
            kind = "send" if op == "send_recv" else op  # as ``Traffic`` names it; it counts bytes alike
            yield LinkSample(tier.name, kind, message.nbytes, timing)


# --- Computing beside a collective, copies to the host, and a minimal step

_COPY_BYTES = (2**16, 2**28)
_TINY_PARAMETERS = 24


def beside_collective(device: torch.device, rounds: int = 5) -> tuple[float, float, float]:
    """Return the seconds of matrix products alone, of an all-reduce alone, and of both at once; collective.

    The products take about as long as the all-reduce, so that they overlap most of the time.
    """
    cuda = device.type == "cuda"
    size, numel = (4096, 2**26) if cuda else (512, 2**21)
    left, message = torch.ones(size, size, device=device), torch.ones(numel, device=device)

    def products(count: int) -> None:
        for _ in range(count):
            left @ left

    def seconds(count: int, *, reduce: bool) -> float:
        synchronize()
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
    """Return the fastest of several turns, each on its slowest rank."""
    return min(largest(times))


def host_copies(device: torch.device) -> Link | None:
    """Return the link from a CUDA device to pinned host memory in its slower direction; None on a CPU. Collective."""
    if device.type != "cuda":
        return None
    times = []
    for num_bytes in _COPY_BYTES:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        there_s = time_of(lambda a=host, b=there: b.copy_(a, non_blocking=True), device).wall_s  # type: ignore[misc]
        back_s = time_of(lambda a=host, b=there: a.copy_(b, non_blocking=True), device).wall_s  # type: ignore[misc]
        times += largest([max(there_s, back_s)])
    small_s, large_s = times
    rate = (_COPY_BYTES[1] - _COPY_BYTES[0]) / max(large_s - small_s, 1e-9)
    return Link(rate, max(small_s - _COPY_BYTES[0] / rate, 1e-7))


def small_step_s(device: torch.device) -> Timing:
    """Time a step's work that does not grow with the model: calls of optimizer and clipping, reading the loss."""
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
