"""What ColossalAI's tests import from ``colossalai.testing``: parameters, workers and comparisons, written anew."""

from __future__ import annotations

import contextlib
import functools
import gc
import socket
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.multiprocessing
from torch.testing import assert_close

from .on_cpu import OnCPU, stand_in_for_cuda


def parameterize(argument: str, values: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call the function for each of the values, one after the other in one process."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            for value in values:
                function(*args, **{**kwargs, argument: value})

        # pytest must not take the arguments for fixtures.
        del call.__wrapped__  # type: ignore[attr-defined]
        return call

    return decorate


def _plain_decorator(*_: Any, **__: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda function: function


rerun_if_address_is_in_use = rerun_on_exception = skip_if_not_enough_gpus = _plain_decorator


def clear_cache_before_run() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Collect garbage before each call."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            gc.collect()
            return function(*args, **kwargs)

        return call

    return decorate


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(function: Callable[..., Any], nprocs: int = 1, **kwargs: Any) -> None:
    """Run ``function(rank=, world_size=, port=, **kwargs)`` on worker processes."""
    torch.multiprocessing.spawn(_work, (function, nprocs, free_port(), kwargs), nprocs=nprocs)


def _work(rank: int, function: Callable[..., Any], nprocs: int, port: int, kwargs: dict[str, Any]) -> None:
    standing_in: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not torch.cuda.is_available():
        stand_in_for_cuda()
        # As long as a tensor says that it is on the CPU, none of its methods asks CUDA.
        standing_in = unittest.mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: False))
    with standing_in, OnCPU() if not torch.cuda.is_available() else contextlib.nullcontext():
        function(rank=rank, world_size=nprocs, port=port, **kwargs)


class DummyDataloader:
    """Yield what a function makes, a number of times."""

    def __init__(self, data_gen_fn: Callable[[], Any], length: int = 10) -> None:
        self.make, self.length = data_gen_fn, length

    def __iter__(self) -> Iterator[Any]:
        return (self.make() for _ in range(self.length))

    def __len__(self) -> int:
        return self.length


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    """Compare two tensors to the bit."""
    assert torch.equal(a, b), f"{a} differs from {b}"


def assert_close_loose(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    """Compare two tensors with ColossalAI's tolerance."""
    assert_close(a, b, rtol=rtol, atol=atol)


def check_state_dict_equal(
    d1: Mapping[Any, Any], d2: Mapping[Any, Any], ignore_device: bool = True, ignore_dtype: bool = False
) -> None:
    """Compare two state dicts, nested ones among them, to the bit."""
    assert len(d1) == len(d2), f"{len(d1)} entries and {len(d2)}"
    for key, first in d1.items():
        second = d2[key]
        if isinstance(first, Mapping):
            check_state_dict_equal(first, second, ignore_device, ignore_dtype)
        elif isinstance(first, torch.Tensor):
            second = second.to(first.dtype) if ignore_dtype else second
            assert_close(first, second.to(first.device) if ignore_device else second, rtol=0, atol=0)
        elif isinstance(first, list):
            check_state_dict_equal(dict(enumerate(first)), dict(enumerate(second)), ignore_device, ignore_dtype)
        else:
            assert first == second, f"{key}: {first!r} and {second!r}"


def seed_all(seed: int, cuda_deterministic: bool = False) -> None:
    """Seed this process."""
    torch.manual_seed(seed)
