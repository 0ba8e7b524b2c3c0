"""Start one program of an upstream suite; on a machine without a GPU, ``cuda`` stands for the CPU in it.

``python on_cpu.py FILE [ARGS]`` or ``python on_cpu.py -m MODULE [ARGS]``. Upstream's tests ask for CUDA in every second
line. Here ``.cuda()`` gives the tensor back, a device of type ``cuda`` is the CPU, and NCCL is gloo; everything else,
numbers among it, is the program's own.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode


class OnCPU(TorchFunctionMode):
    """Read a CUDA device as the CPU in every call of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(on_cpu, args[1:]))
        return func(*args, **kwargs)


def on_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device or its index, and anything else as it is."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    return device


def stand_in_for_cuda() -> None:
    """Replace what a program asks of ``torch.cuda`` and NCCL by what the CPU has."""
    cuda = torch.cuda
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "ipc_collect",
    ):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed  # type: ignore[assignment]
    cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    cuda.memory_summary = lambda *args, **kwargs: "no GPU"  # type: ignore[assignment]
    for name in ("FloatTensor", "HalfTensor", "LongTensor", "IntTensor"):
        setattr(cuda, name, getattr(torch, name))
    cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    cuda.device_count = lambda: 8
    cuda.get_device_capability = lambda *args: (8, 0)
    cuda.device = lambda *args, **kwargs: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.is_cuda = property(lambda self: _asked_by_program())  # type: ignore[assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    start = torch.distributed.init_process_group

    def with_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return start("gloo" if backend is None or "nccl" in backend else backend, *args, **kwargs)

    torch.distributed.init_process_group = with_gloo


def _asked_by_program() -> bool:
    # FSDP2 would look for the properties of a GPU.
    asking = sys._getframe(2).f_globals.get("__name__", "")
    return asking.partition(".")[0] not in ("torch", "meshwright")


def main() -> None:
    """Run the program named on the command line."""
    sys.argv = sys.argv[1:]
    standing_in: contextlib.AbstractContextManager = contextlib.nullcontext()
    if not torch.cuda.is_available():
        stand_in_for_cuda()
        standing_in = OnCPU()
    with standing_in:
        if sys.argv[0] == "-m":
            sys.argv, sys.path[0] = sys.argv[1:], os.getcwd()
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # as Python itself does
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
