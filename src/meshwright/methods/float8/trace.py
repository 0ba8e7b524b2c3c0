"""What predictions need: the model for a while as ``fp8`` will make it, and the products that it moves to 8 bits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.methods.float8.torchao_layers import filled_up
from meshwright.nn import wrap_method
from meshwright.nn.fp8 import Fp8Linear, Fp8Options, to_fp8, to_plain

_PRODUCTS = 3  # of a layer in forward and backward, each as large as the one of forward


class Fp8Trace:
    """Lets a plain model run as one whose layers multiply in 8 bits.

    Args:
        layers: By name.
        options: Of delayed scaling; None for torchao's layers, which save what they would anyway, and cast it again.
        num_weights: The weights, with the number of layers that share each.
        rows: What torchao's layers fill rows up to.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Linear],
        options: Fp8Options | None,
        num_weights: Mapping[nn.Parameter, int],
        rows: int,
    ) -> None:
        self._layers, self._options, self.num_weights, self._rows = layers, options, num_weights, rows
        self.flops = 0
        """Of the products in 8 bits while the model ran last, forward and backward."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around one forward; leaves the model as it was."""
        self.flops = 0
        hooks = [layer.register_forward_pre_hook(self._count) for layer in self._layers.values()]
        try:
            for layer in self._layers.values():
                if self._options is not None:
                    to_fp8(layer, self._options)
                else:
                    wrap_method(layer, "forward", functools.partial(filled_up, self._rows))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer in self._layers.values():
                if isinstance(layer, Fp8Linear):
                    to_plain(layer)
                layer.__class__ = nn.Linear

    def _count(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        features: torch.Tensor = args[0]
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        self.flops += _PRODUCTS * 2 * (features.numel() // weight.shape[1]) * weight.numel()
