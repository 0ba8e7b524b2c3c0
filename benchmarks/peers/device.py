"""The device of this rank, as torchrun's environment gives it."""

from __future__ import annotations

import os

import torch


def local_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
