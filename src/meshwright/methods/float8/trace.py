"""What predictions need: the model for a while as ``fp8`` will make it, and the products that it moves to 8 bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.nn.fp8 import Fp8Options, to_fp8, to_plain

_PRODUCTS = 3  # of a layer in forward and backward, each as large as the one of forward


class Fp8Trace:
    """Lets a plain model run as one whose layers multiply in 8 bits.

    Args:
        layers: By name.
        options: Of delayed scaling; None where the layers save what they would anyway (torchao's do: they cast again).
        num_weights: The weights, with the number of layers that share each.
    """

    def __init__(
        self, layers: Mapping[str, nn.Linear], options: Fp8Options | None, num_weights: Mapping[nn.Parameter, int]
    ) -> None:
        self._layers, self._options, self.num_weights = layers, options, num_weights
        self.flops = 0
        """Of the products in 8 bits while the model ran last, forward and backward."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around one forward; leaves the model as it was."""
        self.flops = 0
        changed = []
        hooks = [layer.register_forward_pre_hook(self._count) for layer in self._layers.values()]
        try:
            for layer in self._layers.values() if self._options is not None else ():
                changed.append(to_fp8(layer, self._options))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for each in changed:
                to_plain(each)

    def _count(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        features: torch.Tensor = args[0]
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        self.flops += _PRODUCTS * 2 * (features.numel() // weight.shape[1]) * weight.numel()
