"""What can go wrong, as words: faults that strike a rank at a step, and damage to files.

``kill(rank, at_step)`` and the other functions make faults; a training program of the tests calls :meth:`Fault.strike`
before each step and each save.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

BEFORE_STEP, IN_STEP, BEFORE_SAVE, DURING_SAVE = "before step", "in step", "before save", "during save"


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one rank, once: at a step, at a moment of it."""

    kind: str
    rank: int
    at_step: int
    moment: str = BEFORE_STEP
    seconds: float = 0.0

    def is_due(self, rank: int, step: int, moment: str) -> bool:
        return (self.rank, self.at_step, self.moment) == (rank, step, moment)

    def strike(self, *tensors: torch.Tensor) -> None:
        """Does it to this process, or to tensors of a step."""
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind in ("hang", "slow"):
            time.sleep(self.seconds)
        elif self.kind == "disk_full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        elif self.kind == "nan":
            for tensor in tensors:
                tensor.detach().view(-1)[:1].fill_(float("nan"))
        elif self.kind == "flip":
            for tensor in tensors:
                tensor.data.view(torch.uint8).view(-1)[-1].bitwise_xor_(1)  # torch counts no version of .data
        else:
            raise ValueError(self.kind)


def kill(rank: int, at_step: int) -> Fault:
    """The process ends at once, as by the kernel's out-of-memory killer."""
    return Fault("kill", rank, at_step)


def kill_during_save(rank: int, at_step: int) -> Fault:
    """The same while the checkpoint of a step is being written."""
    return Fault("kill", rank, at_step, DURING_SAVE)


def hang(rank: int, at_step: int, seconds: float = 1e6) -> Fault:
    """The rank does not go on."""
    return Fault("hang", rank, at_step, seconds=seconds)


def stop(rank: int, at_step: int) -> Fault:
    """The whole process stands still, its threads too."""
    return Fault("stop", rank, at_step)


def slow(rank: int, seconds: float, num_steps: int) -> list[Fault]:
    """The rank takes so many seconds longer for each of its first steps."""
    return [Fault("slow", rank, step, seconds=seconds) for step in range(1, num_steps + 1)]


def nan(rank: int, at_step: int) -> Fault:
    """One number that the rank computes in a step is nan."""
    return Fault("nan", rank, at_step, IN_STEP)


def flip(rank: int, at_step: int) -> Fault:
    """One bit of a weight or a state changes in the rank's memory, and nothing tells."""
    return Fault("flip", rank, at_step)


def disk_full(rank: int, at_step: int) -> Fault:
    """From the save of a step on the rank can write no file of more than 64 bytes."""
    return Fault("disk_full", rank, at_step, BEFORE_SAVE)


def corrupt(file: Path, byte: int, bit: int = 0) -> None:
    """Flips one bit of a file."""
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


def truncate(file: Path, size: int) -> None:
    """Cuts a file off."""
    os.truncate(file, size)
