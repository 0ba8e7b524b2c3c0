"""Fused recurrent layers as the products that they are: of all tokens with the first weights, and token by token."""

from __future__ import annotations

from typing import Any

import torch

RECURRENT = frozenset(
    {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward"},
)


def recurrent_products(name: str, args: tuple[Any, ...]) -> list[tuple[int, int, int, int]]:
    """``(m, n, k, batch)`` of every product of one call; backward has two for each.

    A layer multiplies what it is given by ``[gates * hidden, in]`` for all tokens at once, and its state by
    ``[gates * hidden, hidden]`` (a projection: by more) token by token.

    Args:
        name: The operator, one of ``RECURRENT``.
        args: Of the call: tokens ``[length, samples, in]``, then weights.
    """
    length, samples = _length_and_samples(name, args)
    found = []
    for of_state, weight in _weights(name, args):
        n, k = weight.shape
        rows, times = (samples, length) if of_state else (length * samples, 1)
        found.append((int(rows), int(n), int(k), int(times)))
    return found * (2 if name.endswith("backward") else 1)


def _length_and_samples(name: str, args: tuple[Any, ...]) -> tuple[int, int]:
    given = args[0].shape
    if not name.startswith("_cudnn"):
        return given[0], given[1]
    sizes = args[18 if name.endswith("backward") else 14]
    if sizes:  # packed: how many samples are as long
        return len(sizes), given[0] // len(sizes)
    return (given[1], given[0]) if args[14 if name.endswith("backward") else 10] else (given[0], given[1])


def _weights(name: str, args: tuple[Any, ...]) -> list[tuple[bool, torch.Tensor]]:
    """Matrices, and whether the state is multiplied by them."""
    if not name.startswith("_cudnn"):  # one layer in one direction
        return [(False, args[1]), (True, args[2])]
    every, stride = args[1], args[2]
    return [(index % stride > 0, weight) for index, weight in enumerate(every) if weight.dim() == 2]
