"""What this rank has gathered since its last step: on ranks that gather other things, weights come out mixed."""

from __future__ import annotations

import torch

_MODULUS = 2**20  # exact in fp32, in which the number travels

_order = 0


def note_gathered(place: int) -> None:
    """Counts something that all ranks gather together, by a number that it has on all of them."""
    global _order
    if not torch.compiler.is_compiling():
        _order = (_order * 31 + place + 1) % _MODULUS


def take_order() -> int:
    """A number for what was gathered since the last call, and in which order; equal on ranks that gathered the same."""
    global _order
    taken, _order = _order, 0
    return taken
