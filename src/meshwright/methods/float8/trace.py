"""What predictions need: the model for a while as ``fp8`` will make it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from meshwright.methods.float8.torchao_layers import filled_up
from meshwright.nn import wrap_method
from meshwright.nn.fp8 import Fp8Linear, Fp8Options, to_fp8, to_plain

if TYPE_CHECKING:
    from meshwright.cost import Scaling


class Fp8Trace:
    """Lets a plain model run as one whose layers multiply in 8 bits.

    Args:
        layers: By name.
        options: Of delayed scaling; None for torchao's layers, which save what they would anyway, and cast it again.
        num_weights: The weights, with the number of layers that share each.
        rows: What torchao's layers fill rows up to.
        scaling: The recipe: how tensors are scaled.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Linear],
        options: Fp8Options | None,
        num_weights: Mapping[nn.Parameter, int],
        rows: int,
        scaling: Scaling,
    ) -> None:
        self.layers, self.scaling = layers, scaling
        self._options, self.num_weights, self._rows = options, num_weights, rows

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around one forward; leaves the model as it was."""
        try:
            for layer in self.layers.values():
                if self._options is not None:
                    to_fp8(layer, self._options)
                else:
                    wrap_method(layer, "forward", functools.partial(filled_up, self._rows))
            yield
        finally:
            for layer in self.layers.values():
                if isinstance(layer, Fp8Linear):
                    to_plain(layer)
                layer.__class__ = nn.Linear
