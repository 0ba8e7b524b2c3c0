"""Check the options of commands that start ranks, count these ranks, and show their progress."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from meshwright.errors import ConfigError, did_you_mean

DEVICES = ("auto", "cpu")


def check_choice(option: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value of an option that is not among the known ones.

    Raises:
        ConfigError: Naming the option.
    """
    if value not in known:
        raise ConfigError(
            f"{option} is not known{did_you_mean(value, known)}",
            expected=f"one of {', '.join(known)}",
            got=repr(value),
            fix="correct the name, or leave it out",
        )


def num_ranks(asked: int | None, *, on_cuda: bool, otherwise: int, option: str, use_cpu: str) -> int:
    """Return the ranks to start on this machine: as asked, else one per CUDA device.

    Args:
        asked: What the user has set; None: nothing.
        on_cuda: Whether ranks may use CUDA devices.
        otherwise: Ranks where nothing was asked for and there are no devices.
        option: The option that sets the number, for errors.
        use_cpu: How to run on the CPU instead, for errors.

    Raises:
        ConfigError: When there are fewer CUDA devices than ranks.
    """
    devices = torch.cuda.device_count() if on_cuda else 0
    if devices and asked is not None and asked > devices:
        raise ConfigError(
            "There are more processes than CUDA devices",
            expected=f"at most {devices}",
            got=str(asked),
            fix=f"use a smaller {option}, or {use_cpu}",
        )
    return asked or devices or otherwise


def check_launched(option: str, asked: int | None) -> None:
    """Refuse another number of ranks than the launcher of this process has started.

    Raises:
        ConfigError: Naming the option.
    """
    started = os.environ.get("WORLD_SIZE", "1")
    if asked is not None and "RANK" in os.environ and str(asked) != started:
        raise ConfigError(
            f"{option} differs from what the launcher started",
            expected=started,
            got=str(asked),
            fix=f"leave {option} out under a launcher",
        )
