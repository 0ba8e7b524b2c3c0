"""What a tensor axis does to one model: the layers it splits, where that was read, and what is said about it."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.sample import SampleRun
from meshwright.methods.tensor.checks import check_layers
from meshwright.methods.tensor.plan import PlannedLayer, matches, own_plan, planned, planned_layers
from meshwright.methods.tensor.search import FoundPlan, find_plan
from meshwright.methods.tensor.sequence import SequenceLayout, sequence_layout
from meshwright.methods.tensor.styles import LINEAR
from meshwright.methods.tensor.trial import Adjustment
from meshwright.methods.tensor.vocabulary import heads_of, stay_whole, vocabulary_embedding

_FOUND: weakref.WeakKeyDictionary[nn.Module, dict[int, FoundPlan]] = weakref.WeakKeyDictionary()
_LAYOUTS: weakref.WeakKeyDictionary[nn.Module, dict[Any, SequenceLayout]] = weakref.WeakKeyDictionary()
"""Plans found so far, by model and number of ranks: prediction, check and application ask for the same one."""


@dataclass(frozen=True)
class Split:
    """How a model is divided."""

    layers: tuple[PlannedLayer, ...]
    source: str
    adjustments: tuple[Adjustment, ...] = ()
    remarks: tuple[str, ...] = ()
    sequence: SequenceLayout | None = None  # where tokens are cut and put together; None: every rank has all

    def of_part(self, model: nn.Module) -> Split:
        """The same for one pipeline rank's part of the model: without what it does not have."""
        paths = {id(module): path for path, module in model.named_modules()}
        held = (
            layer
            for layer in self.layers
            if id(layer.module) in paths and next(layer.module.parameters(recurse=False), None) is not None
        )
        adjusted = (each for each in self.adjustments if each.path in paths.values())
        return replace(self, layers=tuple(held), adjustments=tuple(adjusted))

    def adjust(self, model: nn.Module) -> None:
        """Sets the attributes that count what a rank has a part of."""
        for adjustment in self.adjustments:
            setattr(model.get_submodule(adjustment.path), adjustment.name, adjustment.value)

    def summary(self, model: nn.Module, ranks: int) -> str:
        """One line: what is split and how, layers of the same name in different blocks once."""
        styles: dict[str, list[str]] = {}
        for layer in self.layers:
            name = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", layer.path)
            label = layer.style.name + (f" in {len(layer.parts)} parts" if layer.parts else "")
            if layer.style.name == "replicated_with_grad_allreduce":
                continue
            if name not in styles.setdefault(label, []):
                styles[label].append(name)
        what = "; ".join(f"{label}: {', '.join(names)}" for label, names in styles.items())
        split = {p for layer in self.layers for _, p, dim in layer.parameters() if dim is not None}
        share = sum(p.numel() for p in split) / max(sum(p.numel() for p in model.parameters()), 1)
        remarks = "".join(f"; {remark}" for remark in self.remarks)
        return (
            f"tensor_parallel splits {share:.0%} of the parameters over {ranks} ranks by {self.source}: {what}{remarks}"
        )


def _with_heads(model: nn.Module, layers: list[PlannedLayer], given: Mapping[str, str]) -> list[PlannedLayer]:
    """Lets heads over the vocabulary return logits in parts, unless the user's entries want them gathered."""
    embedding = vocabulary_embedding(model)
    heads = heads_of(model, embedding[1]) if embedding is not None else []

    def changed(layer: PlannedLayer) -> PlannedLayer:
        is_head = layer.path in heads and layer.style.name == "colwise_gather_output"
        return replace(layer, style=LINEAR["vocabulary_head"]) if is_head and not matches(given, layer.path) else layer

    return [changed(layer) for layer in layers]


def _without_vocabulary(
    model: nn.Module, layers: list[PlannedLayer], given: Mapping[str, str], ranks: int
) -> tuple[list[PlannedLayer], tuple[str, ...]]:
    """Leaves embedding and head whole where the axis does not divide the words, unless the user's entries name them.

    Such as a vocabulary to which a token for padding was added.
    """
    path, embedding = vocabulary_embedding(model) or ("", None)
    if embedding is None or embedding.num_embeddings % ranks == 0:
        return layers, ()
    tied = [at for at, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight is embedding.weight]
    names = dict.fromkeys([path, *tied, *heads_of(model, embedding)])
    if any(layer.path in names and matches(given, layer.path) for layer in layers):
        return layers, ()
    left = [layer for layer in layers if layer.path not in names]
    return left, (stay_whole(names, embedding, ranks),) if len(left) < len(layers) else ()


def split_of(
    model: nn.Module, given: Mapping[str, str], ranks: int, sample: SampleRun | None, *, sequence: bool = False
) -> Split:
    """The split of a model, with parts of the tokens between its layers if ``sequence``.

    Raises:
        ModelError: When the model cannot be split, with the reason.
        StrategyError: When an entry of ``given`` names nothing in the model.
    """
    split = _whole_tokens(model, given, ranks, sample)
    return _with_sequence(model, split, ranks, sample) if sequence else split


def _with_sequence(model: nn.Module, split: Split, ranks: int, sample: SampleRun | None) -> Split:
    if any(layer.place for layer in split.layers):
        raise ModelError(
            "tensor_parallel: adapters and sequence=True do not go together",
            expected="all tokens where a half of an adapter is whole",
            got="LoRA adapters, and a part of the tokens between the layers that are split",
            fix="leave sequence=True (split_gather, ring) out",
        )
    known = _LAYOUTS.setdefault(model, {})
    key = ranks, tuple((layer.path, layer.style.name, layer.parts) for layer in split.layers)
    if key not in known:
        known[key] = sequence_layout(model, list(split.layers), split.adjustments, ranks, sample)
    layout = known[key]
    present = {layer.path for layer in split.layers}
    summed = [planned(model, p, "replicated_with_grad_allreduce") for p in layout.summed if p not in present]
    remarks = (*split.remarks, "tokens are split between them")
    return replace(split, layers=(*split.layers, *summed), remarks=remarks, sequence=layout)


def _whole_tokens(model: nn.Module, given: Mapping[str, str], ranks: int, sample: SampleRun | None) -> Split:
    """By the user's entries and the model's own plan, else by its data flow."""
    if own_plan(model) or given:
        layers = _with_heads(model, planned_layers(model, given), given)
        layers, remarks = _without_vocabulary(model, layers, given, ranks)
        check_layers(model, layers, ranks, proved=False)
        return Split(tuple(layers), "the plan that was given" if given else "the model's own plan", remarks=remarks)
    known = _FOUND.setdefault(model, {})
    if ranks not in known:
        known[ranks] = find_plan(model, sample, ranks)
    found = known[ranks]
    split = []
    for path, entry in found.entries.items():
        layer = planned(model, path, entry.style)
        split.append(PlannedLayer(layer.path, layer.module, layer.style, layer.parent, entry.parts))
    split = _with_heads(model, split, {})
    check_layers(model, split, ranks, proved=True)
    return Split(tuple(split), "the data flow of its blocks", found.adjustments, found.remarks)
