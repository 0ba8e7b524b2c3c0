"""What memory a rank holds, told aloud."""

from __future__ import annotations

import torch

from meshwright.runtime import peak_memory_bytes, print_rank

_GIB = 2**30
_STATUS_FIELDS = ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem", "VmSwap")


def see_memory(message: str, detail: bool = False) -> dict[str, int]:
    """Prints rank 0's memory, and forgets CUDA's peak so that the next call tells of what came between (BMTrain).

    Args:
        message: What has just been done.
        detail: Print the CUDA allocator's own summary, or the kinds of the process's memory on the CPU, instead of
            two numbers.

    Returns:
        On every rank, its own numbers: ``allocated_bytes`` and ``max_allocated_bytes`` since the last call where the
        process computes on CUDA; else ``resident_bytes`` (Linux) and ``max_resident_bytes`` of the process so far.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        numbers = {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "max_allocated_bytes": peak_memory_bytes(device),
        }
        details = torch.cuda.memory_summary(device) if detail else ""
        torch.cuda.reset_peak_memory_stats(device)
    else:
        status = _process_status()
        resident = {"resident_bytes": status["VmRSS"]} if "VmRSS" in status else {}
        numbers = {**resident, "max_resident_bytes": peak_memory_bytes(torch.device("cpu"))}
        details = _lines(status) if detail else ""
    print_rank(f"{message}\n{details or _lines(numbers)}")
    return numbers


def _lines(numbers: dict[str, int]) -> str:
    return "\n".join(f"  {name.removesuffix('_bytes')}: {size / _GIB:.3f} GiB" for name, size in numbers.items())


def _process_status() -> dict[str, int]:
    """The kinds of memory of this process in bytes, as Linux lists them; empty elsewhere."""
    try:
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status)
    except OSError:
        return {}
    return {name: int(fields[name].split()[0]) * 1024 for name in _STATUS_FIELDS if name in fields}
