"""Build dynamically scaled 8-bit layers with torchao, and put them into a model while it is traced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from meshwright.errors import StrategyError
from meshwright.nn import wrap_method
from meshwright.nn.fp8 import Fp8Layer, Fp8Options, to_fp8, to_plain
from meshwright.nn.module_structure import features, is_transposed
from meshwright.runtime.torch_internals.dtensor import LOCAL_SHARD
from meshwright.runtime.torch_internals.fsdp import PRECOMPUTED_SCALE

if TYPE_CHECKING:
    from meshwright.cost import Scaling


_MODULES = {"mxfp8": "torchao.prototype.moe_training.mxfp8_linear"}  # torchao has it in its prototypes only


def require_torchao(recipe: str) -> Any:
    """Return the torchao module of a recipe.

    Raises:
        StrategyError: When torchao is not installed, or too old or too new for the recipe.
    """
    name = _MODULES.get(recipe, "torchao.float8")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise StrategyError(
            f"fp8: the recipe {recipe!r} needs torchao",
            expected="the package torchao, of a version that the extra 'fp8' names",
            got=str(error),
            fix='install it: pip install "meshwright[fp8]"; or use the recipe "delayed", which needs no package',
        ) from error


def to_torchao(layers: Iterable[nn.Module], recipe: str, *, rows: int, emulate: bool, all_gather: bool) -> None:
    """Convert layers in place to multiply in 8 bits by a recipe of torchao.

    Args:
        layers: Layers of the class ``nn.Linear`` itself, or, but for ``mxfp8``, transformers' Conv1D.
        recipe: ``tensorwise``, ``rowwise`` or ``mxfp8``.
        rows: Input rows are padded with zeros to a multiple of this number.
        emulate: Multiply in the input's type.
        all_gather: Let FSDP2 gather the weights in 8 bits.
    """
    change = _to_mx(emulate) if recipe == "mxfp8" else _to_float8(recipe, emulate, all_gather)
    for layer in layers:
        change(layer)
        wrap_method(layer, "forward", functools.partial(filled_up, rows))


def _to_float8(recipe: str, emulate: bool, all_gather: bool) -> Callable[[nn.Module], None]:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    chosen = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, enable_fsdp_float8_all_gather=all_gather
    )

    def change(layer: nn.Module) -> None:
        if is_transposed(layer):
            _multiply_with(Float8Linear.from_float(_stand_in(layer), config=chosen), layer)
            return
        made = Float8Linear.from_float(layer, config=chosen)
        # In place, so that hooks stay, and references to the layer, such as in a plan of tensor_parallel, stay valid.
        layer.__class__ = Float8Linear
        layer.__dict__.update({key: value for key, value in made.__dict__.items() if key not in layer.__dict__})
        layer.weight = made.weight

    return change


def _to_mx(emulate: bool) -> Callable[[nn.Module], None]:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    made = MXFP8Linear(32, 32, kernel_preference=kernels, device="meta")

    def change(layer: nn.Module) -> None:
        layer.__class__ = MXFP8Linear
        layer.__dict__.update({key: value for key, value in made.__dict__.items() if key not in layer.__dict__})

    return change


def _stand_in(layer: nn.Module) -> Any:
    """Return what torchao reads of an ``nn.Linear``, of a layer whose weight is (in, out)."""
    inputs, outputs = features(layer)
    return SimpleNamespace(in_features=inputs, out_features=outputs, weight=layer.weight, bias=layer.bias)


def _multiply_with(made: nn.Module, layer: nn.Module) -> None:
    """Let torchao's layer compute in place of one whose weight is (in, out), with the transpose of that.

    Args:
        made: torchao's layer, of which the forward alone is used. It gets parameters that hold nothing.
        layer: A layer of transformers' class Conv1D.
    """
    on_meta = functools.partial(torch.empty, device="meta")
    made.weight = nn.Parameter(on_meta(features(layer)[::-1]))
    made.bias = None if layer.bias is None else nn.Parameter(on_meta(features(layer)[1]))

    def around(forward: Callable[[Any], Any], input: Any) -> Any:
        own: dict[str, torch.Tensor] = {**dict(layer.named_parameters(recurse=False))}
        own["weight"] = own["weight"].t()
        return functional_call(made, own, (input,))

    wrap_method(layer, "forward", around)


def filled_up(rows: int, forward: Callable[[Any], Any], input: Any) -> Any:
    """Call a forward with its input rows padded to whole tiles, which the weight's gradient sums over.

    Rows of zeros add nothing to the sum.
    """
    flat = input.reshape(-1, input.shape[-1])
    missing = -flat.shape[0] % rows
    if not missing:
        return forward(input)
    output = forward(F.pad(flat, (0, 0, 0, missing)))[: flat.shape[0]]
    return output.reshape(*input.shape[:-1], output.shape[-1])


def scales_ahead(model: nn.Module) -> Callable[[], None]:
    """Return a hook for after every step that computes the scales of all weights, in one all-reduce.

    FSDP2 then gathers in 8 bits without asking for each scale. Loading weights drops the scales: the next gather asks
    for each on its own.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    def forget(*_: Any) -> None:
        for parameter in model.parameters():
            local = getattr(parameter, LOCAL_SHARD, parameter)
            if hasattr(local, PRECOMPUTED_SCALE):
                setattr(local, PRECOMPUTED_SCALE, None)

    model.register_load_state_dict_post_hook(forget)
    return functools.partial(precompute_float8_dynamic_scale_for_fsdp, model)


class Fp8Trace:
    """Runs a plain model as if its layers multiplied in 8 bits, for predictions.

    Args:
        layers: The layers by name.
        options: Options of delayed scaling; None for torchao's layers, which save the same tensors and cast them again.
        num_weights: The weights, with the number of layers that share each.
        rows: Multiple that torchao's layers pad their input rows to.
        scaling: The recipe: how tensors are scaled.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        options: Fp8Options | None,
        num_weights: Mapping[nn.Parameter, int],
        rows: int,
        scaling: Scaling,
    ) -> None:
        self.layers, self.scaling = layers, scaling
        self._options, self.num_weights, self._rows = options, num_weights, rows

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Enter one forward with the 8-bit layers; the model is as before afterwards."""
        plain = {layer: type(layer) for layer in self.layers.values()}
        try:
            for layer in plain:
                if self._options is not None:
                    to_fp8(layer, self._options)
                else:
                    wrap_method(layer, "forward", functools.partial(filled_up, self._rows))
            yield
        finally:
            for layer, cls in plain.items():
                if isinstance(layer, Fp8Layer):
                    to_plain(layer)
                layer.__class__ = cls
