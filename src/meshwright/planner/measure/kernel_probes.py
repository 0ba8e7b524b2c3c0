"""The kernels that a calibration runs: those of a transformer's step, in sizes that fit the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.cost import Op
from meshwright.methods.dtypes import half_dtype, torch_dtype
from meshwright.planner.measure.samples import Sample
from meshwright.planner.profile.operators import kernels_of

# Of an fp32 element as ``cost.update`` counts them: weight and two states read and written, the gradient three times.
UPDATE_BYTES = 36
_CHAIN = 32  # kernels


@dataclass(frozen=True)
class Sizes:
    """Of the kernels, by device."""

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
    """Every kernel to time, made one at a time: their tensors live no longer than the sample."""
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
    """How many there are."""
    sizes, dtypes = _ON_CUDA if device.type == "cuda" else _ON_CPU, len(_dtypes(device))
    return 2 + 5 * len(sizes.moved) + 2 * dtypes * (len(sizes.products) + len(sizes.attention))


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """On CUDA without bf16 (before Ampere), half precision is fp16."""
    return torch.float32, torch_dtype(half_dtype(device))


def _name(dtype: torch.dtype) -> str:
    return "fp32" if dtype == torch.float32 else "half"


def _gaps(device: torch.device) -> Sample:
    """Kernels so small that only launching them takes time.

    On a CPU those of a transformer's block, forward and backward: views, modules and autograd's records take time
    there, too. On CUDA the host keeps all that ahead of the device, as it does in training.
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
    """A pre-norm transformer block of next to no arithmetic."""

    width = 16

    def __init__(self) -> None:
        super().__init__()
        width = self.width
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Attention of two heads, and the MLP."""
        batch, tokens, width = x_BTD.shape
        qkv = self.qkv(self.norms[0](x_BTD)).view(batch, tokens, 3, 2, width // 2)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True)  # type: ignore[misc]
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        mixed: torch.Tensor = x_BTD + self.mlp(self.norms[1](x_BTD))
        return mixed


class _Kernels(TorchDispatchMode):
    """Counts them as the profile of a model does."""

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
