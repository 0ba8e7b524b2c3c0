"""BMTrain's small tools: framed prints, memory reports, running averages, gathered results, sizes and versions."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import torch

from meshwright.comm.message_header import Header, check_alike, exchange
from meshwright.comm.transport import Group, gathered, members_of

# ``meshwright.utils`` is ColossalAI's ``utils``, too.
from meshwright.compat.colossalai.environment import get_current_device as get_current_device, set_seed as set_seed
from meshwright.errors import ConfigError
from meshwright.runtime import (
    peak_memory_bytes,
    print_rank,
    require_distributed,
    settings,
    tensor_rank,
    tensor_size,
)

_COLUMNS = 60


def print_block(title: str, text: str | None = None, file: TextIO | None = None) -> None:
    """Print text between two rules of 60 columns, the upper with the title in its middle; on rank 0 only.

    Args:
        title: A few words; longer ones are not cut.
        text: The text; None prints the title alone.
        file: Where to print; None means standard output.
    """
    lines = [f" {title} ".center(_COLUMNS, "=")]
    lines += [text, "=" * _COLUMNS] if text is not None else []
    print_rank("\n".join(lines), file=file or sys.stdout)


def print_dict(title: str, content: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print one line ``name: value`` per entry as a block, the values aligned; on rank 0 only.

    Args:
        title: See :func:`print_block`.
        content: The entries.
        file: Where to print; None means standard output.
    """
    width = max((len(str(name)) for name in content), default=0) + 1
    print_block(title, "\n".join(f"{f'{name}:':<{width}} {value}" for name, value in content.items()), file)


# --- Memory reports.

_GIB = 2**30
_STATUS_FIELDS = ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem", "VmSwap")


def see_memory(message: str, detail: bool = False) -> dict[str, int]:
    """Print rank 0's memory, and reset CUDA's peak, so that the next call reports the peak since this one (BMTrain).

    Args:
        message: A heading, such as what has just been done.
        detail: Print the CUDA allocator's own summary, or on the CPU the kinds of the process's memory, instead of two
            numbers.

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
    """Return this process's memory in bytes by Linux's names of its kinds; empty on other systems."""
    try:
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status)
    except OSError:
        return {}
    return {name: int(fields[name].split()[0]) * 1024 for name in _STATUS_FIELDS if name in fields}


class AverageRecorder:
    """Exponential moving average of what is recorded, right from the first record on.

    Each record ``x`` makes ``v = alpha * v + (1 - alpha) * x``, from ``v = 0`` on. ``value`` after ``n`` records is
    ``v / (1 - alpha^n)``: the bias correction of Adam (Kingma & Ba 2015), as in BMTrain.

    Args:
        alpha: Share of the past that each record keeps, in [0, 1).
        start_value: ``value`` before the first record; it has no influence afterwards. (BMTrain starts ``v`` with it
            but corrects as if ``v`` had started with 0: with 1 and alpha 0.9, a first record of 2 would read 11.)

    Raises:
        ConfigError: When ``alpha`` is outside [0, 1).
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0.0) -> None:
        _check_alpha(alpha)
        self.alpha, self.start_value = alpha, start_value
        self._decayed_sum = 0.0
        # 1 - alpha^n by the same recursion as the sum, so that a constant series reads exactly as itself.
        self._weight = 0.0

    def record(self, value: float) -> None:
        """Record one value; a tensor of one element is read from its device."""
        self._decayed_sum = self.alpha * self._decayed_sum + (1 - self.alpha) * float(value)
        self._weight = self.alpha * self._weight + (1 - self.alpha)

    @property
    def value(self) -> float:
        """Return the average so far."""
        return self._decayed_sum / self._weight if self._weight else self.start_value

    def state_dict(self) -> dict[str, float]:
        """Return all state that ``value`` depends on."""
        return {
            "alpha": self.alpha,
            "start_value": self.start_value,
            "decayed_sum": self._decayed_sum,
            "weight": self._weight,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state of another recorder.

        Raises:
            ConfigError: When the state is not one of a recorder; nothing is changed then.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise ConfigError(
                "The state is not that of an AverageRecorder",
                expected=", ".join(self.state_dict()),
                got=f"no {', '.join(missing)}",
                fix="pass what state_dict() returned",
            )
        _check_alpha(state["alpha"])
        self.alpha, self.start_value = state["alpha"], state["start_value"]
        self._decayed_sum, self._weight = state["decayed_sum"], state["weight"]


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha < 1:
        raise ConfigError(
            "alpha is not a share of the past", expected="0 <= alpha < 1", got=repr(alpha), fix="use 0.9 if in doubt"
        )


def gather_result(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Concatenate the results of all ranks along dim 0, on every rank (BMTrain).

    It has no gradient: it is for predictions and measurements. In training use ``all_gather``.

    Args:
        x: Tensor on any device, contiguous or not, of one dtype and shape on all ranks but for dim 0. A scalar counts
            as ``(1,)``.
        group: Process group or DeviceMesh of one axis; None means the world.

    Returns:
        A new tensor ``(sum of all ranks' x.shape[0], *x.shape[1:])`` on the device of ``x``, in the order of the group.

    Raises:
        LaunchError: On every rank, when dtypes or other dims differ; before ``init_distributed``.
    """
    members = members_of(group)
    headers = exchange(Header.of("gather_result", x), members)
    check_alike(headers, ("call", "dtype", "row_shape"), members)
    rows = x.detach().reshape(1) if x.dim() == 0 else x.detach()
    lengths = [header.shape[0] if header.shape else 1 for header in headers]
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    # A group without a CPU backend communicates CUDA tensors only.
    sent = padded if members.backend(x.device) else padded.to(members.host_device)
    every = gathered(sent, members).to(x.device)
    return torch.cat([part[:length] for part, length in zip(every, lengths, strict=True)])


# --- Sizes, versions, and the pace of the host.


def round_up(x: int, d: int) -> int:
    """Return the lowest multiple of ``d`` that is not below ``x``."""
    return -(-x // d) * d


def tp_split_tensor(tensor: torch.Tensor, split_dim: int) -> torch.Tensor:
    """Copy this tensor rank's piece of a tensor that all ranks have whole.

    Args:
        tensor: Of a size along ``split_dim`` that ``tp_size`` divides.
        split_dim: The dim to split.

    Raises:
        ConfigError: When ``tp_size`` does not divide that size.
    """
    if tensor.shape[split_dim] % tensor_size():
        raise ConfigError(
            "The tensor cannot be split over the tensor group",
            expected=f"a multiple of {tensor_size()} along dim {split_dim}",
            got=f"shape {tuple(tensor.shape)}",
            fix="pad it, or choose another tp_size",
        )
    return tensor.chunk(tensor_size(), dim=split_dim)[tensor_rank()].clone(memory_format=torch.contiguous_format)


def check_torch_version(version_str: str) -> int:
    """Return how much newer than ``"x.y.z"`` torch is, with x·10000 + y·100 + z for a version; below 0 it is older."""
    numbers = [[int(part) for part in re.findall(r"\d+", text)[:3]] for text in (torch.__version__, version_str)]
    here, wanted = (
        sum(number * weight for number, weight in zip(each, (10000, 100, 1), strict=True)) for each in numbers
    )
    return here - wanted


_reached: torch.cuda.Event | None = None


def wait_loader() -> None:
    """Wait until the device has done what was queued before the last call; it keeps the host one call ahead at most."""
    global _reached
    require_distributed("wait_loader")
    if settings().device.type != "cuda":
        return  # the host computes by itself, and is never ahead
    if _reached is None:
        _reached = torch.cuda.Event()
    _reached.synchronize()
    _reached.record()
