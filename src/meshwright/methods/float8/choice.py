"""Which linear layers multiply in 8 bits, and why others do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.cost import Device
from meshwright.errors import ModelError, join_names
from meshwright.nn import find_blocks


@dataclass
class Choice:
    """The layers that are replaced, and the names of those that are not, by reason."""

    layers: dict[str, nn.Linear] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    subclasses: list[str] = field(default_factory=list)

    @property
    def num_weights(self) -> dict[nn.Parameter, int]:
        """The weights of the layers, with the number of layers that share each."""
        counts: dict[nn.Parameter, int] = {}
        for layer in self.layers.values():
            weight = layer._parameters["weight"]
            assert weight is not None
            counts[weight] = counts.get(weight, 0) + 1
        return counts


def choose_layers(
    model: nn.Module, include: Sequence[str] | None, exclude: Sequence[str] | None, multiple: int
) -> Choice:
    """Sorts the linear layers of a model by what ``include`` and ``exclude`` say of their names, and by their dims.

    Args:
        model: A plain module.
        include: Substrings of which a name must have one; None takes all names.
        exclude: Substrings of which a name may have none.
        multiple: What both dims of a weight must be multiples of.
    """
    choice = Choice()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module._parameters.get("weight") is None:
            continue  # without a weight: another rank of a pipeline has it
        wanted = include is None or any(part in name for part in include)
        if not wanted or any(part in name for part in exclude or ()):
            choice.excluded.append(name)
        elif type(module) is not nn.Linear:
            choice.subclasses.append(name)  # computes in a way of its own, which a replacement would lose
        elif any(size % multiple for size in module.weight.shape):
            choice.misshapen.append(name)
        else:
            choice.layers[name] = module
    return choice


def require_layers(choice: Choice, multiple: int) -> None:
    """Refuses a choice of no layers.

    Raises:
        ModelError: With what stands in the way of those there are.
    """
    if choice.layers:
        return
    reasons = [
        f"{len(choice.excluded)} left out by include and exclude" * bool(choice.excluded),
        f"{join_names(choice.misshapen, 4)} with other dims" * bool(choice.misshapen),
        f"{join_names(choice.subclasses, 4)} of classes derived from nn.Linear" * bool(choice.subclasses),
    ]
    raise ModelError(
        "fp8: no layer of the model can be computed in 8 bits",
        expected=f"nn.Linear layers whose weight has dims that are multiples of {multiple}",
        got="; ".join(reason for reason in reasons if reason) or "no nn.Linear at all",
        fix="correct include and exclude, choose dims that are such multiples, or leave fp8 out",
    )


def heads(model: nn.Module, choice: Choice) -> list[str]:
    """Names of the chosen layers that predict the vocabulary: outside the blocks, one output for each embedding."""
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    blocks = tuple(path + "." for path, _ in find_blocks(model))
    return [
        name
        for name, layer in choice.layers.items()
        if not name.startswith(blocks) and layer.out_features in sizes and layer.out_features != layer.in_features
    ]


def said(choice: Choice, recipe: str, multiple: int, *, verbose: bool) -> list[str]:
    """What the user is told of a choice, one sentence each."""
    others = len(choice.excluded) + len(choice.misshapen) + len(choice.subclasses)
    lines = [f"fp8: {len(choice.layers)} of {len(choice.layers) + others} linear layers multiply in 8 bits ({recipe})"]
    if choice.misshapen:
        lines.append(f"fp8: left as they are, with dims not multiples of {multiple}: {join_names(choice.misshapen, 4)}")
    if verbose:
        lines.append(f"fp8: in 8 bits: {', '.join(choice.layers)}")
    return lines


def unusable_on(device: torch.device | Device, least: tuple[int, int]) -> str | None:
    """Why a device cannot multiply in 8 bits; None when it can. One that is planned for need not be here."""
    if isinstance(device, Device):
        return None if device.fp8_flops_per_s is not None else f"a {device.name} has no 8-bit matrix products"
    if device.type != "cuda":
        return f"a {device.type.upper()} has no 8-bit matrix products"
    found = torch.cuda.get_device_capability(device)
    if found >= least:
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} has compute capability {found[0]}.{found[1]}, below {least[0]}.{least[1]}"
