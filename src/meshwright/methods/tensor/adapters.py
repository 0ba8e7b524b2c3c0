"""LoRA adapters of peft around layers that a tensor axis splits: they are split as their layer is.

A layer split by columns puts out a part of the features, so B is split by columns too, and A is whole; a layer split by
rows gets a part, so A is split by rows, and B is whole. What lies between A and B, r features wide, is all that is sent
for them.
"""

from __future__ import annotations

from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.tensor.styles import Style

_HALF = {"colwise": "lora_B", "rowwise": "lora_A"}
_APART = ("lora_variant", "lora_magnitude_vector", "lora_embedding_A")


def base_path(model: nn.Module) -> str:
    """Where the model lies inside a peft model around it; empty for any other."""
    find_base = getattr(model, "get_base_model", None)
    if find_base is None:
        return ""
    base = find_base()
    return next((path for path, module in model.named_modules() if module is base), "")


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is adapters around a layer, which is its ``base_layer``."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def split_parts(path: str, module: nn.Module, style: Style) -> dict[str, nn.Module]:
    """The layers of an adapted one that are split in its style, by path: its own, and one half of every adapter.

    Raises:
        ModelError: When the adapters are of another kind, or around a layer that is split in another way.
    """
    if not style.dims:
        return {}
    half = getattr(module, _HALF.get(style.name, ""), None)
    other = next((name for name in _APART if getattr(module, name, None)), None)
    if not isinstance(half, nn.ModuleDict) or not half or other is not None:
        raise ModelError(
            f"tensor_parallel: the adapters of {path} cannot be split with it",
            expected="plain LoRA (no DoRA) around linear layers that are split by columns or rows (colwise, rowwise)",
            got=f"a layer split as {style.name!r}" + (f", and adapters with {other}" if other else ""),
            fix="leave it out of the adapters' target_modules, or use fsdp (zero_stage=3), which takes any adapters",
        )
    found = {"base_layer": module.get_submodule("base_layer")}
    found |= {f"{_HALF[style.name]}.{name}": part for name, part in half.items()}
    return {f"{path}.{name}": part for name, part in found.items()}
