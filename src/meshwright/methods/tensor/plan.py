"""Which layers a tensor axis splits: the model's own plan, the user's entries, and the layers both mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from meshwright.errors import ModelError, StrategyError, did_you_mean, join_names
from meshwright.methods.tensor.adapters import base_path, is_adapted, split_parts
from meshwright.methods.tensor.styles import EMBEDDING, LINEAR, Style, is_transposed, style_of

_FIX = "give plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise', …} with the names of its layers"


@dataclass(frozen=True)
class PlannedLayer:
    """A module and what the tensor axis does to it."""

    path: str
    module: nn.Module
    style: Style
    parent: nn.Module  # the module it lies in
    parts: tuple[int, ...] = ()  # output features of what is fused in it (queries, keys, values); empty: one part
    place: str = ""  # path of the adapters around it, which lie where the plan has it; empty: it lies there itself

    @property
    def parent_path(self) -> str:
        """Path of the module it lies in, or in which its adapters lie."""
        return (self.place or self.path).rpartition(".")[0]

    @property
    def group(self) -> str:
        """Layers of one group are fed one input: those that lie in one module with a forward of its own."""
        contains = isinstance(self.parent, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        return self.path if contains else self.parent_path

    def parameters(self) -> list[tuple[str, nn.Parameter, int | None]]:
        """Its own parameters: name, parameter, and the dim that is divided (None: whole)."""
        dims = dict(self.style.dims)
        if is_transposed(self.module) and "weight" in dims:
            dims["weight"] = 1 - dims["weight"]
        return [(name, p, dims.get(name)) for name, p in self.module.named_parameters(recurse=False)]


def planned(model: nn.Module, path: str, style: str) -> PlannedLayer:
    """One layer of a module."""
    module = model.get_submodule(path)
    return PlannedLayer(path, module, style_of(path, module, style), model.get_submodule(path.rpartition(".")[0]))


def own_plan(model: nn.Module) -> dict[str, str]:
    """The plan a model carries, as transformers' models do; empty when it carries none."""
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(model, name, None)
        if isinstance(plan, Mapping) and plan:
            base = base_path(model)
            return {f"{base}.{pattern}" if base else pattern: style for pattern, style in plan.items()}
    return {}


def planned_layers(model: nn.Module, given: Mapping[str, str], *, is_part: bool = False) -> list[PlannedLayer]:
    """Finds the layers of a plan in a model, in the model's order; tied weights are split alike.

    Args:
        model: A plain module.
        given: The user's entries ``{name pattern: style}``; they override the model's own. ``*`` stands for one part of
            a name, such as a layer's number.
        is_part: The model lacks the parameters of other pipeline ranks: layers without any are passed over.

    Raises:
        ModelError: When there is no plan, a style is unknown, or a style does not go with its module.
        StrategyError: When an entry of ``given`` names nothing in the model.
    """
    own = own_plan(model)
    if not own and not given:
        raise ModelError(
            "tensor_parallel: the model carries no plan that says how its layers are split",
            expected="a transformers model with a base_model_tp_plan (Llama, Mistral, Qwen, Gemma, Phi, …), or plan=…",
            got=type(model).__name__,
            fix=f"{_FIX}; or shard it with fsdp, which needs no plan",
        )
    if not is_part:
        _check_named(model, given)
    entries = [(re.compile(_regex(pattern)), style) for pattern, style in (*given.items(), *own.items())]
    _check_bare_parameters(model, entries)
    chosen, places = _chosen(model, entries, is_part)
    _with_tied(model, chosen)
    layers = [_layer(model, path, *chosen[path], places.get(path, "")) for path in chosen]
    if not is_part and not any(layer.style.dims for layer in layers):
        raise ModelError(
            "tensor_parallel: the plan splits no layer of this model",
            expected="at least one layer that is split by columns or rows",
            got=join_names({**own, **given}),
            fix=_FIX,
        )
    return layers


def _chosen(
    model: nn.Module, entries: list[tuple[re.Pattern[str], str]], is_part: bool
) -> tuple[dict[str, tuple[nn.Module, Style]], dict[str, str]]:
    """The modules that entries name, by path, with their styles; and the paths of the adapters around them."""
    chosen: dict[str, tuple[nn.Module, Style]] = {}
    places: dict[str, str] = {}
    for path, module in model.named_modules():
        style = next((style for regex, style in entries if regex.fullmatch(path)), None)
        emptied = is_part and next(module.parameters(recurse=is_adapted(module)), None) is None
        if not path or style is None or emptied:
            continue
        if is_adapted(module):
            own = f"{path}.base_layer"
            meant = style_of(own, model.get_submodule(own), style)
            chosen |= {at: (part, meant) for at, part in split_parts(path, module, meant).items()}
            places[own] = path
        else:
            chosen[path] = (module, style_of(path, module, style))
    return chosen, places


def _layer(model: nn.Module, path: str, module: nn.Module, style: Style, place: str) -> PlannedLayer:
    parent = model.get_submodule((place or path).rpartition(".")[0])
    return PlannedLayer(path, module, style, parent, place=place)


def matches(entries: Mapping[str, str], path: str) -> bool:
    """Whether an entry's pattern names a layer."""
    return any(re.fullmatch(_regex(pattern), path) for pattern in entries)


def _regex(pattern: str) -> str:
    return r"[^.]+".join(map(re.escape, pattern.split("*")))


def _check_named(model: nn.Module, given: Mapping[str, str]) -> None:
    paths = [path for path, _ in model.named_modules() if path]
    for pattern in given:
        if not any(re.fullmatch(_regex(pattern), path) for path in paths):
            raise StrategyError(
                f"tensor_parallel: the plan names no module of the model{did_you_mean(pattern, paths)}",
                expected=f"names such as {join_names(paths, limit=6)}; * stands for a layer's number",
                got=repr(pattern),
                fix="correct the name",
            )


def _check_bare_parameters(model: nn.Module, entries: list[tuple[re.Pattern[str], str]]) -> None:
    """Refuses what transformers' plans ask of bare parameters (experts, attention sinks)."""
    for name, _ in model.named_parameters():
        style = next((style for regex, style in entries if regex.fullmatch(name)), "replicate")
        if style != "replicate":
            raise ModelError(
                "tensor_parallel: the plan splits a parameter that belongs to no linear layer",
                expected="entries for nn.Linear and nn.Embedding",
                got=f"{name}: {style!r}",
                fix="train this model with fsdp, or its experts with expert_parallel; mixtures of experts and "
                "attention sinks are not split yet",
            )


def _with_tied(model: nn.Module, chosen: dict[str, tuple[nn.Module, Style]]) -> None:
    """Gives a layer whose weight is tied to a planned one, and that no entry names, the style that splits it alike."""
    split = {module.weight: style for module, style in chosen.values() if ("weight", 0) in style.dims}
    for path, module in model.named_modules():
        if path in chosen or getattr(module, "weight", None) not in split:
            continue
        if isinstance(module, nn.Embedding):
            chosen[path] = (module, EMBEDDING["embedding_rowwise"])
        elif isinstance(module, nn.Linear):
            chosen[path] = (module, LINEAR["colwise_gather_output"])
