"""The device a rank computes on: its memory, its speed, and its random number generators."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshwright.errors import LaunchError

# Spreads neighbouring (seed, replica) pairs over the 63-bit range (the golden-ratio constant of SplitMix64).
_SPREAD = 0x9E3779B97F4A7C15


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy and random alike on every rank, so that models are made equal."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_replica(seed: int, replica: int) -> None:
    """Seed the generators for training: each data-parallel replica draws its own dropout masks.

    Args:
        seed: The run's seed.
        replica: Index of this rank's data-parallel replica; ranks that share a batch share it.
    """
    seed_everything(spread_seed(seed, replica))


def spread_seed(seed: int, index: int) -> int:
    """Return a separate seed for each of several that share one."""
    return (seed + (index + 1) * _SPREAD) % 2**63


def seed_in_use(seed: int) -> None:
    """Seed as :func:`seed_everything` does, but fast: of CUDA devices only the current one, once it is used."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def compute_deterministically() -> None:
    """Let torch compute with deterministic algorithms alone; before the first kernel of cuBLAS.

    An operator that has none raises torch's error, which names it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@dataclass(frozen=True)
class GeneratorState:
    """State of torch's, numpy's and random's generators; of CUDA devices, only the current one's."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> GeneratorState:
        """Capture the present state."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Restore the captured state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Leave torch's, numpy's and random's generators as they were before the block."""
    before = GeneratorState.now()
    try:
        yield
    finally:
        before.restore()


# --- The device, its name and its memory.


def choose_device(backend: str | None, local_rank: int) -> torch.device:
    """Choose this rank's device: CUDA where there is one, the CPU otherwise or when ``backend`` is ``"gloo"``.

    Raises:
        LaunchError: When more local ranks than CUDA devices were started.
    """
    if backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"Local rank {local_rank} has no CUDA device of its own",
            expected=f"at most {torch.cuda.device_count()} processes on this machine",
            got=f"local rank {local_rank}",
            fix="start fewer processes, or train on the CPU with init_distributed(backend='gloo'); where each process "
            "sees one device alone (Slurm's --gpus-per-task), set LOCAL_RANK=0 in all of them",
        )
    return torch.device("cuda", local_rank)


def machine_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with its cores, to tell figures of one machine from another's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {_num_cores()} cores"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_share_of_cores(local_world_size: int) -> int | None:
    """Let this rank compute on its part of the cores where torchrun alone has chosen one, as it does without a word.

    Returns:
        The number of threads; None where nothing was changed.
    """
    is_torchruns = os.environ.get("OMP_NUM_THREADS") == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    threads = _num_cores() // max(local_world_size, 1)
    if not is_torchruns or local_world_size < 2 or threads < 2 or torch.get_num_threads() != 1:
        return None
    torch.set_num_threads(threads)
    return threads


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            names = (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
            return next(names, "") or platform.machine()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()


_imitates_gpu = False


@contextlib.contextmanager
def imitated_gpu() -> Iterator[None]:
    """Let code that takes another way on GPUs take it on the CPU: in a pass without data that predicts their memory."""
    global _imitates_gpu
    before, _imitates_gpu = _imitates_gpu, True
    try:
        yield
    finally:
        _imitates_gpu = before


def computes_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU, or on the CPU in a pass that imitates one."""
    return tensor.is_cuda or _imitates_gpu


COMMUNICATOR_BYTES = 2**29
"""Device memory that NCCL takes for each communicator, at its first collective and beside torch's allocator.

544 MB for two ranks and 688 MB for four were measured on A100s with NVLink (NVIDIA/nccl#964).
"""

_WORKSPACE_BYTES = 2**29  # kernels' workspaces, and code that is loaded when it first runs


def memory_limit_bytes(device: torch.device, local_world_size: int) -> int:
    """Return the bytes that one rank's tensors may take, as things are now.

    On CUDA that is what the driver says is free, which leaves out what other processes and this one's context take,
    and what this process's tensors hold already; less what the communicator of all ranks and kernels will take. It is
    no more than the share of the device that ``torch.cuda.set_per_process_memory_fraction`` allows. On the CPU it is
    the rank's share of the free memory of its host.
    """
    if device.type != "cuda":
        return host_share_bytes(local_world_size)
    free, total = torch.cuda.mem_get_info(device)
    obtainable = free + torch.cuda.memory_reserved(device) - COMMUNICATOR_BYTES
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(min(obtainable, allowed) - _WORKSPACE_BYTES, 1)


def host_share_bytes(local_world_size: int) -> int:
    """Return one rank's share of the free memory of its node."""
    return _available_host_bytes() // max(local_world_size, 1)


def _available_host_bytes() -> int:
    try:
        with open("/proc/meminfo") as meminfo:
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: all of the memory is the best that can be said
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes so far: from the CUDA allocator, or the resident size of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def synchronize_device(device: torch.device) -> None:
    """Wait for the work queued on ``device``; return at once on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_flops_per_s(device: torch.device, duration_s: float = 0.1) -> float:
    """Measure the best rate of fp32 matrix products in FLOP/s within ``duration_s``.

    The best and not the mean: a peak is what the device can do when nothing else disturbs it.
    """
    size = 1024 if device.type == "cpu" else 8192
    left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    best_s, end_s = float("inf"), time.perf_counter() + duration_s
    # The first product starts threads and loads kernels.
    left @ right
    while True:
        synchronize_device(device)
        start_s = time.perf_counter()
        left @ right
        synchronize_device(device)
        now_s = time.perf_counter()
        best_s = min(best_s, now_s - start_s)
        if now_s > end_s:
            return 2 * size**3 / best_s


class HostCopy:
    """A copy of a tensor on its way to the host, which is waited for only when it is read.

    Args:
        tensor: Small; one on the CPU is not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._arrived = tensor, None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tolist(self) -> Any:
        """Return the numbers, once they have arrived: a list, or one number of a 0-dim tensor."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.tolist()


def read_together(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return int64 numbers that may lie on several devices as one tensor on the host, which waits once for each."""
    found = torch.zeros(len(numbers), dtype=torch.int64)
    for device in {each.device for each in numbers}:
        own = [place for place, each in enumerate(numbers) if each.device == device]
        found[own] = torch.stack([numbers[place] for place in own]).cpu()
    return found
