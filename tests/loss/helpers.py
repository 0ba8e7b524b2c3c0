"""What the tests of the cross entropies share."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

HALF = (torch.float16, torch.bfloat16)
EPSILON = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24, torch.float64: 2**-53}
"""Largest relative error of rounding to a type."""


def distance(actual, reference):
    """Largest difference, over the largest value of the reference."""
    return ((actual.double() - reference.double()).abs().max() / reference.double().abs().max()).item()


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make: bytes alive now, at most, and the largest tensor."""

    def __init__(self):
        super().__init__()
        self.alive = WeakIdKeyDictionary()
        self.peak = self.largest_numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in given:
                self.alive[leaf.untyped_storage()] = leaf.untyped_storage().nbytes()
                self.largest_numel = max(self.largest_numel, leaf.numel())
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def live_bytes(function):
    """Runs a function; returns its peak of live bytes and the largest number of elements of a tensor it made."""
    with LiveBytes() as mode:
        function()
    return mode.peak, mode.largest_numel


class Doubled(torch.autograd.Function):
    """A function whose backward is its own: it gives back a gradient of what it was given."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2
