"""Read from the model's plan and the user's entries which layers a tensor axis splits, and in which style."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from meshwright.errors import ModelError, StrategyError, did_you_mean, join_names
from meshwright.nn import call_with, features, is_linear, is_transposed


@dataclass(frozen=True)
class Style:
    """The way in which a tensor axis splits one layer."""

    name: str
    dims: tuple[tuple[str, int], ...] = ()  # parameters that are divided, and in which dim; others stay whole
    gradient: Literal["nothing", "all_reduce", "all_gather"] = "nothing"  # of the layer's input, in backward
    output: Literal["as computed", "all_reduce", "all_gather", "logits"] = "as computed"
    splits_input: bool = False  # cut a whole input before the layer; else a row layer's input arrives cut
    fused: tuple[str, ...] = ()  # parameters that hold two tensors of one size along the dim: gates and values


LINEAR = {
    "colwise": Style("colwise", (("weight", 0), ("bias", 0)), gradient="all_reduce"),
    "colwise_gather_output": Style(
        "colwise_gather_output", (("weight", 0), ("bias", 0)), gradient="all_reduce", output="all_gather"
    ),
    "vocabulary_head": Style("vocabulary_head", (("weight", 0), ("bias", 0)), gradient="all_reduce", output="logits"),
    "rowwise": Style("rowwise", (("weight", 1),), output="all_reduce"),
    "rowwise_split_input": Style(
        "rowwise_split_input", (("weight", 1),), gradient="all_gather", output="all_reduce", splits_input=True
    ),
}
EMBEDDING = {
    "embedding_rowwise": Style("embedding_rowwise", (("weight", 0),), output="all_reduce"),
    "embedding_colwise": Style("embedding_colwise", (("weight", 1),)),
}
LATENT = "mla_kv_a_proj"
"""Style of the projection to latent keys and values (DeepSeek-V2: arXiv 2405.04434, §2.1). Every rank has it whole. Its
last features are one rotated key for all heads: each rank computes a gradient for its own heads, and these are summed.
Gradients of all others are whole already, since they come from a layer that is split by columns."""
SINKS = Style("sinks", (("sinks", 0),))
"""Style of an attention that holds one more score for every head (GPT-OSS), beside projections that are split."""
WIDE_NORM = Style("wide_norm", (("weight", 0),))
"""Style of a norm over the features of all heads (OLMo 2, OLMoE), between projections that are split by heads."""
ANY = {
    LATENT: Style(LATENT),
    "replicated_with_grad_allreduce": Style("replicated_with_grad_allreduce"),
    "replicate": Style("replicate"),
    SINKS.name: SINKS,
    WIDE_NORM.name: WIDE_NORM,
}
EXPERTS = {"experts": Style("experts", gradient="all_reduce", output="all_reduce")}
STYLES = LINEAR | EMBEDDING | ANY | EXPERTS

_OLDER = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "moe_tp_experts": "experts",
}
_OF_EMBEDDING = {"rowwise": "embedding_rowwise", "rowwise_split_input": "embedding_rowwise"}


def style_of(path: str, module: nn.Module, name: str) -> Style:
    """Return the style that a plan's entry stands for on one module.

    Raises:
        ModelError: When the style is unknown, or cannot be applied to such a module.
    """
    name = _OLDER.get(name, name)
    if isinstance(module, nn.Embedding):
        name = _OF_EMBEDDING.get(name, name)
    if name not in STYLES:
        raise ModelError(
            f"tensor_parallel: the plan has an unknown style for {path}",
            expected=f"one of {join_names([*STYLES, *_OLDER])}",
            got=repr(name),
            fix=f"override it, such as plan={{{path!r}: 'replicate'}}",
        )
    _check_kind(path, module, name)
    return STYLES[name]


def rotated_features(layer: PlannedLayer) -> int:
    """Return how many of a latent projection's last features are the rotated key.

    Raises:
        ModelError: When the attention around it does not say it.
    """
    found = getattr(layer.parent, "qk_rope_head_dim", None)
    if not isinstance(found, int):
        raise ModelError(
            f"tensor_parallel: the style {LATENT} cannot split {layer.path}",
            expected="an attention with the attribute qk_rope_head_dim",
            got=type(layer.parent).__name__,
            fix=f"leave it and the layers that it feeds whole with plan={{{layer.path!r}: 'replicate'}}",
        )
    return found


def _check_kind(path: str, module: nn.Module, name: str) -> None:
    wanted = nn.Linear if name in LINEAR else nn.Embedding if name in EMBEDDING else nn.Module
    if not isinstance(module, wanted) and not (name in LINEAR and is_linear(module)):
        raise ModelError(
            f"tensor_parallel: the style {name} cannot split {path}",
            expected=f"a torch.nn.{wanted.__name__}",
            got=type(module).__name__,
            fix=f"leave it and the layers that feed it whole with plan={{{path!r}: 'replicate'}}",
        )
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    if name in LINEAR and isinstance(weight, torch.Tensor) and not weight.is_floating_point():
        raise ModelError(
            f"tensor_parallel: {path} cannot be split, for its weights are packed",
            expected="weights of floating point, rows by columns",
            got=f"{weight.dtype} of shape {tuple(weight.shape)}",
            fix="use data, zero1, zero2 or fsdp, or load the model without quantization (leave adapter.bits out)",
        )
    if name == WIDE_NORM.name and norm_casts_first(module) is None:
        raise ModelError(
            f"tensor_parallel: the style {name} cannot split {path}",
            expected="a root-mean-square norm over the last dim, with a weight and variance_epsilon or eps",
            got=type(module).__name__,
            fix=f"leave it and the layers around it as they are with plan={{{path!r}: 'replicate'}}",
        )
    if isinstance(module, nn.Embedding) and name in EMBEDDING:
        odd = [key for key in ("max_norm", "sparse", "scale_grad_by_freq") if getattr(module, key)]
        if odd:
            raise ModelError(
                f"tensor_parallel: the embedding {path} does more than look up rows",
                expected="an nn.Embedding without max_norm, sparse and scale_grad_by_freq",
                got=join_names(odd),
                fix=f"leave it whole with plan={{{path!r}: 'replicate'}}",
            )


# --- LoRA adapters of peft
#
# Adapters are split as their layer is. A layer split by columns returns a part of the features, so B is split by
# columns, too, and A is whole; a layer split by rows takes a part, so A is split by rows, and B is whole. Only the r
# features between A and B are exchanged for them.

_HALF = {"colwise": "lora_B", "rowwise": "lora_A"}
_APART = ("lora_variant", "lora_magnitude_vector", "lora_embedding_A")


def base_path(model: nn.Module) -> str:
    """Return the path of the base model inside a peft model; empty for any other."""
    find_base = getattr(model, "get_base_model", None)
    if find_base is None:
        return ""
    base = find_base()
    return next((path for path, module in model.named_modules() if module is base), "")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is peft's adapters around a layer, its ``base_layer``."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def split_parts(path: str, module: nn.Module, style: Style) -> dict[str, nn.Module]:
    """Return the parts of an adapted layer that are split in its style, by path: its base, and a half of each adapter.

    Raises:
        ModelError: For adapters other than plain LoRA, and layers that are not split by columns or rows.
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


# --- The layers of a plan

_FIX = "give plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise', …} with the names of its layers"


@dataclass(frozen=True)
class PlannedLayer:
    """A layer and the style in which it is split."""

    path: str
    module: nn.Module
    style: Style
    parent: nn.Module  # the module it lies in
    parts: tuple[int, ...] = ()  # output features of the layers fused in it (queries, keys, values); empty: one
    place: str = ""  # path of the adapters around it, which the plan names; empty: no adapters

    @property
    def parent_path(self) -> str:
        """Path of the module that holds the layer, or its adapters."""
        return (self.place or self.path).rpartition(".")[0]

    @property
    def group(self) -> str:
        """Key of the layers that may share an input: those in one module with a forward of its own."""
        contains = isinstance(self.parent, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        return self.path if contains else self.parent_path

    def parameters(self) -> list[tuple[str, nn.Parameter, int | None]]:
        """Return the layer's parameters: name, parameter, and the dim that is divided (None: whole)."""
        dims = dict(self.style.dims)
        if is_transposed(self.module) and "weight" in dims:
            dims["weight"] = 1 - dims["weight"]
        return [(name, p, dims.get(name)) for name, p in self.module.named_parameters(recurse=False)]

    def parts_of(self, name: str) -> tuple[int, ...]:
        """Return the sizes of the tensors that are fused in a parameter along its divided dim; empty for one."""
        if name not in self.style.fused:
            return self.parts
        return (self.module.get_parameter(name).shape[dict(self.style.dims)[name]] // 2,) * 2


def planned(model: nn.Module, path: str, style: str) -> PlannedLayer:
    """Return the layer at ``path``, to be split in a style."""
    module = model.get_submodule(path)
    return PlannedLayer(path, module, style_of(path, module, style), model.get_submodule(path.rpartition(".")[0]))


def own_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that a model brings, as transformers' models do; empty without one."""
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(model, name, None)
        if isinstance(plan, Mapping) and plan:
            base = base_path(model)
            return {f"{base}.{pattern}" if base else pattern: style for pattern, style in plan.items()}
    return {}


_LATENT_ATTENTION = {
    "q_proj": "colwise", "q_a_proj": "", "q_a_layernorm": "", "q_b_proj": "colwise", "kv_a_proj_with_mqa": LATENT,
    "kv_a_layernorm": "", "kv_b_proj": "colwise", "o_proj": "rowwise",
}  # fmt: skip


def _of_latent_attentions(model: nn.Module, own: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return entries for latent attentions that the model's own plan leaves whole, as DeepSeek-V3's does.

    An attention with parameters of its own beside the usual ones, or whose heads the axis does not divide, stays whole.
    """
    named = [re.compile(_regex(pattern)) for pattern in own]
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        parts = {name for name, part in module.named_children() if next(part.parameters(), None) is not None}
        if not {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= parts <= _LATENT_ATTENTION.keys():
            continue
        if next(module.parameters(recurse=False), None) is not None or _heads_of_latent_attention(module) % ranks:
            continue
        entries = {f"{path}.{name}": style for name, style in _LATENT_ATTENTION.items() if name in parts and style}
        if not any(pattern.fullmatch(name) for pattern in named for name in entries):
            found |= entries
    return found


_BY_HEADS = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}


def _of_sink_attentions(
    model: nn.Module, own: Mapping[str, str], given: Mapping[str, str], ranks: int
) -> dict[str, str]:
    """Return entries for attentions with a sink for every head, in addition to those of a model's own plan.

    An attention with other parameters of its own, or whose heads the axis does not divide, stays as it is; so does one
    of which the user's entries name a part.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        parameters = {name: p.shape for name, p in module.named_parameters(recurse=False)}
        parts = {name: part for name, part in module.named_children() if name in _BY_HEADS and is_linear(part)}
        size = getattr(module, "head_dim", None)
        if set(parameters) != {"sinks"} or len(parts) < len(_BY_HEADS) or not isinstance(size, int):
            continue
        heads = [features(parts[name])[1] / size for name in ("q_proj", "k_proj", "v_proj")]
        if parameters["sinks"] != (heads[0],) or any(count % ranks for count in heads):
            continue
        entries = {f"{path}.{name}": style for name, style in _BY_HEADS.items()} | {path: SINKS.name}
        if not any(matches(given, name) for name in entries):
            found |= entries
    return {path: style for path, style in found.items() if not matches(own, path)}


def _of_wide_norms(model: nn.Module, own: Mapping[str, str], given: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return entries for attentions that norm queries and keys over all heads, in place of the model's own.

    Plans of transformers gather queries, keys and values there, and every rank computes the attention of all heads. An
    attention whose heads the axis does not divide stays so; so does one of which the user's entries name a part.
    """
    norms = {"q_norm": "q_proj", "k_norm": "k_proj"}
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        parts = dict(module.named_children())
        size = getattr(module, "head_dim", None)
        if not norms.keys() | _BY_HEADS.keys() <= parts.keys() or not isinstance(size, int):
            continue
        if not all(is_linear(parts[name]) and matches(own, f"{path}.{name}") for name in _BY_HEADS):
            continue
        widths = {name: features(parts[name])[1] for name in ("q_proj", "k_proj", "v_proj")}
        if any(width % (size * ranks) for width in widths.values()):
            continue
        if any(_norm_width(parts[norm]) != widths[layer] for norm, layer in norms.items()):
            continue
        entries = _BY_HEADS | dict.fromkeys(norms, WIDE_NORM.name)
        if not any(matches(given, f"{path}.{name}") for name in ("", *entries)):
            found |= {f"{path}.{name}": style for name, style in entries.items()}
    return found


def _norm_width(module: nn.Module) -> int | None:
    return None if norm_casts_first(module) is None else module.get_parameter("weight").numel()


_CASTS_FIRST: dict[type[nn.Module], bool | None] = {}  # what has been tried out: in a trace nothing can be


def norm_casts_first(module: nn.Module) -> bool | None:
    """Return whether a root-mean-square norm casts to its input's type before it multiplies by its weight.

    None for any other module: what its class computes is tried out once.
    """
    if {name for name, _ in module.named_parameters()} != {"weight"} or not isinstance(_epsilon(module), float):
        return None
    if type(module) not in _CASTS_FIRST:
        _CASTS_FIRST[type(module)] = _tried_out(module)
    return _CASTS_FIRST[type(module)]


@torch.no_grad()
def _tried_out(norm: nn.Module) -> bool | None:
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(norm.get_parameter("weight").shape, generator=generator).bfloat16()
        hidden = torch.randn(3, *weight.shape, generator=generator).bfloat16()
        try:
            computed = call_with(norm, {"weight": weight}, (hidden,), {})
        except Exception:  # a module's code may do anything
            return None
    ways = {first: _normed(hidden, weight, _epsilon(norm), first, lambda mean: mean) for first in (False, True)}
    return next((first for first, way in ways.items() if torch.equal(way, computed)), None)


def norm_in_parts(
    module: nn.Module, ranks: int, total: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward of a norm of whose features, and of whose weight, a rank has a part.

    Args:
        module: The norm, which computes with the weight that it has then.
        ranks: How many equal parts there are.
        total: Sums a tensor over the ranks, and its gradient in backward.
    """
    casts_first = norm_casts_first(module)
    assert casts_first is not None, "the style has been checked"

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        weight: Any = module.weight  # a plain tensor, where a part of a parameter takes its place
        return _normed(hidden, weight, _epsilon(module), casts_first, lambda mean: total(mean / ranks))

    return forward


def _epsilon(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _normed(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    casts_first: bool,
    of_all: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    wide = hidden.to(torch.float32)
    wide = wide * torch.rsqrt(of_all(wide.pow(2).mean(-1, keepdim=True)) + epsilon)
    return weight * wide.to(hidden.dtype) if casts_first else (weight * wide).to(hidden.dtype)


def _heads_of_latent_attention(module: nn.Module) -> int:
    """Return how many heads share the latent keys and values; 1 if the module does not say it."""
    sizes = [getattr(module, name, None) for name in ("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim")]
    expand = module.get_submodule("kv_b_proj")
    if not all(isinstance(size, int) for size in sizes) or not is_linear(expand):
        return 1
    return features(expand)[1] // (sizes[0] + sizes[1])  # type: ignore[operator]


def planned_layers(
    model: nn.Module, given: Mapping[str, str], ranks: int, *, is_part: bool = False
) -> list[PlannedLayer]:
    """Find the layers of a plan in a model, in the model's order; tied weights are split alike.

    Args:
        model: A plain module.
        given: The user's entries ``{name pattern: style}``, which override the model's own. ``*`` stands for one part
            of a name, such as a layer's number.
        ranks: Size of the axis.
        is_part: The model lacks the parameters of other pipeline ranks: layers without any are skipped.

    Raises:
        ModelError: When there is no plan, a style is unknown, or a style does not go with its module.
        StrategyError: When an entry of ``given`` names nothing in the model.
    """
    own = own_plan(model)
    if not own and not given:
        raise ModelError(
            "tensor_parallel: the model brings no plan that says how its layers are split",
            expected="a transformers model with a base_model_tp_plan (Llama, Mistral, Qwen, Gemma, Phi, …), or plan=…",
            got=type(model).__name__,
            fix=f"{_FIX}; or shard it with fsdp, which needs no plan",
        )
    if not is_part:
        _check_named(model, given)
    if own:
        instead = _of_wide_norms(model, own, given, ranks)
        own |= _of_latent_attentions(model, own, ranks) | _of_sink_attentions(model, own, given, ranks)
        own = instead | {pattern: style for pattern, style in own.items() if pattern not in instead}
    entries = [(re.compile(_regex(pattern)), style) for pattern, style in (*given.items(), *own.items())]
    chosen, places = _chosen(model, entries, is_part)
    _check_bare_parameters(model, entries, chosen)
    _with_tied(model, chosen)
    layers = []
    for path, (module, style) in chosen.items():
        place = places.get(path, "")
        parent = model.get_submodule((place or path).rpartition(".")[0])
        layers.append(PlannedLayer(path, module, style, parent, place=place))
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
    """Return the modules that entries name, by path, with their styles; and paths of adapters around them."""
    chosen: dict[str, tuple[nn.Module, Style]] = {}
    places: dict[str, str] = {}
    for path, module in model.named_modules():
        style = _entry(entries, path)
        emptied = is_part and next(module.parameters(recurse=is_adapted(module)), None) is None
        if not path or style is None or emptied:
            continue
        if is_adapted(module):
            own = f"{path}.base_layer"
            meant = style_of(own, model.get_submodule(own), style)
            chosen |= {at: (part, meant) for at, part in split_parts(path, module, meant).items()}
            places[own] = path
        else:
            meant = style_of(path, module, style)
            chosen[path] = (module, meant if meant.name not in EXPERTS else _of_experts(path, module, meant, entries))
    return chosen, places


def matches(entries: Mapping[str, str], path: str) -> bool:
    """Return whether an entry's pattern names a layer."""
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


def _check_bare_parameters(
    model: nn.Module, entries: list[tuple[re.Pattern[str], str]], chosen: Mapping[str, tuple[nn.Module, Style]]
) -> None:
    """Refuse entries for parameters of no layer that the plan names, such as attention sinks."""
    for name, _ in model.named_parameters():
        style = _entry(entries, name)
        if style not in (None, "replicate") and name.rpartition(".")[0] not in chosen:
            raise ModelError(
                "tensor_parallel: the plan splits a parameter that belongs to no layer of it",
                expected="entries for nn.Linear, nn.Embedding and modules of stacked experts",
                got=f"{name}: {style!r}",
                fix="train this model with fsdp, or its experts with expert_parallel; attention sinks are not split",
            )


def _entry(entries: list[tuple[re.Pattern[str], str]], path: str) -> str | None:
    return next((style for regex, style in entries if regex.fullmatch(path)), None)


# --- Stacked experts: parameters (experts, out, in) of one module, which every rank has for all experts
#
# Each rank holds a part of the features between an expert's two products, for every expert: the first is split by
# columns and the second by rows, so a rank's answers are summed as those of an MLP are. Routers stay whole.

_OF_EXPERTS = {"colwise": (-2, False), "packed_colwise": (-2, True), "rowwise": (-1, False),
               "packed_rowwise": (-1, True)}  # fmt: skip


def _of_experts(path: str, module: nn.Module, style: Style, entries: list[tuple[re.Pattern[str], str]]) -> Style:
    """Return the style of a module of stacked experts, with the dims that the plan's entries give its parameters."""
    dims, fused = [], []
    for name, parameter in module.named_parameters():
        entry = _entry(entries, f"{path}.{name}")
        if entry not in _OF_EXPERTS or parameter.dim() != 3:
            raise ModelError(
                f"tensor_parallel: the experts {path} cannot be split",
                expected=f"parameters (experts, out, in) alone, each with an entry: {join_names(_OF_EXPERTS)}",
                got=f"{name} of shape {tuple(parameter.shape)}: {entry!r}",
                fix=f"leave them whole on every rank with plan={{{path!r}: 'replicate'}}, or use expert_parallel",
            )
        dim, is_fused = _OF_EXPERTS[entry]
        dims.append((name, parameter.dim() + dim))
        fused += [name] if is_fused else []
    return replace(style, dims=tuple(dims), fused=tuple(fused))


def _with_tied(model: nn.Module, chosen: dict[str, tuple[nn.Module, Style]]) -> None:
    """Add layers whose weight is tied to a planned one, with the style that splits it in the same way."""
    split = {module.weight: style for module, style in chosen.values() if ("weight", 0) in style.dims}
    for path, module in model.named_modules():
        if path in chosen or getattr(module, "weight", None) not in split:
            continue
        if isinstance(module, nn.Embedding):
            chosen[path] = (module, EMBEDDING["embedding_rowwise"])
        elif isinstance(module, nn.Linear):
            chosen[path] = (module, LINEAR["colwise_gather_output"])
