"""Find the layers over the vocabulary, and refuse layers that a tensor axis cannot split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError, join_names
from meshwright.methods.tensor.split_plan import LATENT, PlannedLayer
from meshwright.nn import call_with, find_blocks, setting_of

_SEED = 5


def vocabulary_entries(model: nn.Module, ranks: int) -> tuple[dict[str, str], str]:
    """Return the styles of the layers over the vocabulary, by path; none and a remark if they stay whole.

    The vocabulary is that of the largest embedding outside the blocks. A head is a linear layer outside them that is
    tied to it, or has as many outputs.
    """
    embedding = vocabulary_embedding(model)
    if embedding is None:
        return {}, ""
    path, module = embedding
    if any(getattr(module, key) for key in ("max_norm", "sparse", "scale_grad_by_freq")):
        return {}, f"{path} does more than look up rows and stays whole"
    heads = heads_of(model, module)
    if module.num_embeddings % ranks:
        return {}, stay_whole([path, *heads], module, ranks)
    tied = {p: m for p, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight is module.weight}
    odd = [p for p, m in tied.items() if not _adds_up(m, ranks)]
    if odd:
        return {}, f"{', '.join(odd)} does more than look up rows and stays whole"
    return dict.fromkeys(tied, "embedding_rowwise") | dict.fromkeys(heads, "colwise_gather_output"), ""


def stay_whole(paths: Iterable[str], embedding: nn.Embedding, ranks: int) -> str:
    """Return the remark for a vocabulary that the axis does not divide."""
    return f"{', '.join(paths)} stay whole: {ranks} ranks do not divide a vocabulary of {embedding.num_embeddings}"


def vocabulary_embedding(model: nn.Module) -> tuple[str, nn.Embedding] | None:
    """Return the largest embedding outside the blocks that has a head; the largest of all if none has one."""
    inside = {module for _, block in find_blocks(model) for module in block.modules()}
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Embedding) and m not in inside]
    return max(found, key=lambda pair: (bool(heads_of(model, pair[1])), pair[1].num_embeddings), default=None)


def _adds_up(module: nn.Embedding, ranks: int) -> bool:
    """Return whether lookups in the ranks' rows add up to the whole embedding's, when it is called with ids alone.

    A subclass may shift or clamp ids, or take other arguments, as tables of positions do.
    """
    if type(module).forward is nn.Embedding.forward:
        return True
    rows = module.num_embeddings // ranks
    ids = torch.tensor([0, 1 % rows, rows - 1, rows, module.num_embeddings - 1])
    table = torch.randn(module.weight.shape[0], 1, generator=torch.Generator().manual_seed(_SEED))
    try:
        with torch.no_grad():
            whole = call_with(module, {"weight": table}, (ids,), {})
            parts = [
                call_with(module, {"weight": part}, ((ids - first).clamp(0, rows - 1),), {})
                * ((ids >= first) & (ids < first + rows)).unsqueeze(-1)
                for first, part in zip(range(0, len(table), rows), table.split(rows), strict=True)
            ]
    except Exception:  # a subclass's code may do anything
        return False
    return torch.stack(parts).sum(0).allclose(whole)


def heads_of(model: nn.Module, embedding: nn.Embedding) -> list[str]:
    """Return the paths of the linear layers with one logit for each row of an embedding."""
    inside = {module for _, block in find_blocks(model) for module in block.modules()}
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module not in inside
        and (module.weight is embedding.weight or module.out_features == embedding.num_embeddings)
    ]


# --- Refusals: sizes that the axis does not divide, heads cut through, unplanned layers between split ones

_HEAD_SIZES = ("head_dim", "head_size")
HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")
_OWN_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_kv_heads", "num_key_value_heads", "nhead")


def check_layers(model: nn.Module, layers: list[PlannedLayer], ranks: int, *, proved: bool) -> None:
    """Refuse a split that would fail or compute something else on ``ranks`` ranks.

    Args:
        model: The model.
        layers: The layers to split.
        ranks: Size of the axis.
        proved: The plan was proved on the model's blocks, so their code is known to be right with it.

    Raises:
        ModelError: Naming the layer.
    """
    for layer in layers:
        _check_sizes(layer, ranks)
    check_grouped(layers, ranks)
    _check_tied(model, layers)
    if proved:
        return
    _check_head_counts(model, layers, ranks)
    for layer in layers:
        _check_whole_heads(layer, ranks)
    _check_own_counts(layers)
    _check_between(layers)


def _check_sizes(layer: PlannedLayer, ranks: int) -> None:
    for name, parameter, dim in layer.parameters():
        sizes = layer.parts_of(name) or (0 if dim is None else parameter.shape[dim],)
        if dim is not None and any(size % ranks for size in sizes):
            words = isinstance(layer.module, nn.Embedding) or layer.style.output in ("all_gather", "logits")
            pad = "pad the vocabulary with model.resize_token_embeddings(pad_to_multiple_of=…), " if words else ""
            raise ModelError(
                f"tensor_parallel: the tensor axis does not divide {layer.path}",
                expected=f"a multiple of {ranks} in dim {dim} of its {name}",
                got=f"shape {tuple(parameter.shape)}" + (f", {len(sizes)} tensors in one" if len(sizes) > 1 else ""),
                fix=f"{pad}use another size of the tensor axis, or leave it whole with plan={{{layer.path!r}: "
                "'replicate'} (and what it is tied to)",
            )


_GROUPED_BYTES = 16  # strides of torch's grouped products are multiples of it


def check_grouped(layers: Iterable[PlannedLayer], ranks: int, itemsize: int | None = None) -> None:
    """Refuse parts of experts that their grouped products cannot compute with.

    Args:
        layers: The layers to split.
        ranks: Size of the axis.
        itemsize: Bytes of a value that products take; None: as the parameters are.

    Raises:
        ModelError: Naming the experts.
    """
    for layer in layers:
        config: Any = getattr(layer.module, "config", None)
        if layer.style.name != "experts" or getattr(config, "_experts_implementation", None) != "grouped_mm":
            continue
        for name, parameter, dim in layer.parameters():
            size = parameter.shape[dim or 0] // max(len(layer.parts_of(name)), 1)
            part_bytes = size // ranks * (itemsize or parameter.element_size())
            if part_bytes % _GROUPED_BYTES:
                raise ModelError(
                    f"tensor_parallel: grouped products cannot compute with a part of the experts {layer.path}",
                    expected=f"parts whose rows are multiples of {_GROUPED_BYTES} bytes",
                    got=f"{part_bytes} bytes: {size} features over {ranks} ranks",
                    fix="call model.set_experts_implementation('eager'), or leave them whole with "
                    f"plan={{{layer.path!r}: 'replicate'}}",
                )


def _check_head_counts(model: nn.Module, layers: list[PlannedLayer], ranks: int) -> None:
    """Refuse heads that the axis does not divide: transformers' attentions view projections as (…, -1, head_dim)."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    in_attention = any(
        layer.style.name == "colwise" and "attention" in type(layer.parent).__name__.lower() for layer in layers
    )
    for name in HEAD_COUNTS:
        count = setting_of(config, name)
        if in_attention and isinstance(count, int) and count % ranks:
            raise undivided_heads(name, count, ranks)


def undivided_heads(name: str, count: int, ranks: int) -> ModelError:
    """Return the error for a number of heads that the axis does not divide."""
    return ModelError(
        f"tensor_parallel: the tensor axis does not divide {name}",
        expected=f"a multiple of {ranks}, so that every rank has whole heads",
        got=f"{count}",
        fix="use a tensor axis that divides it",
    )


def _check_whole_heads(layer: PlannedLayer, ranks: int) -> None:
    """Refuse a cut through heads in any attention that has the size of a head as an attribute."""
    size = next((getattr(layer.parent, name) for name in _HEAD_SIZES if hasattr(layer.parent, name)), None)
    features = getattr(layer.module, "out_features", 0)
    if layer.style.name == "colwise" and isinstance(size, int) and features // ranks % size:
        raise ModelError(
            f"tensor_parallel: the tensor axis cuts through the heads of {layer.path}",
            expected=f"a multiple of {ranks} heads of {size} features",
            got=f"{features} features, {features / size:g} heads",
            fix="use a tensor axis that divides the number of heads",
        )


def _split_parents(layers: list[PlannedLayer]) -> dict[nn.Module, str]:
    """Return the modules inside which a rank has only a part of the features, with their paths."""
    return {layer.parent: layer.parent_path for layer in layers if layer.style.name == "colwise"}


def _check_own_counts(layers: list[PlannedLayer]) -> None:
    """Refuse modules that keep their number of heads: they would view a rank's share of the features as that many.

    Only transformers' modules are trusted, since their plans are made for their code.
    """
    for parent, path in _split_parents(layers).items():
        counts = [name for name in _OWN_COUNTS if isinstance(getattr(parent, name, None), int)]
        if counts and not type(parent).__module__.startswith("transformers."):
            raise ModelError(
                f"tensor_parallel: {path} counts its heads itself, and a rank has only some of them",
                expected="an attention that views its projections as (…, -1, head_dim)",
                got=f"{type(parent).__name__} with {join_names(counts)}",
                fix="write its views with -1 for the number of heads and keep no such attribute, or plan its MLP only",
            )


def _check_between(layers: list[PlannedLayer]) -> None:
    """Refuse trained modules beside split layers that the plan leaves out: they may see a part of the features."""
    planned = {layer.module for layer in layers}
    for parent, path in _split_parents(layers).items():
        if any(layer.parent is parent and layer.style.name == LATENT for layer in layers):
            continue  # what it leaves out lies in front of layers that are split by columns, and sees whole features
        for name, child in parent.named_children():
            trains = any(parameter.requires_grad for parameter in child.parameters())
            inner = planned.intersection(child.modules())
            if trains and not inner:
                raise ModelError(
                    f"tensor_parallel: the plan says nothing of {path}.{name}, beside layers that it splits",
                    expected="an entry for it",
                    got=f"{type(child).__name__} with parameters that train",
                    fix=f"plan={{{f'{path}.{name}'!r}: 'replicate'}} if it sees whole features, "
                    "'replicated_with_grad_allreduce' if every rank feeds it its own heads",
                )


def _check_tied(model: nn.Module, layers: list[PlannedLayer]) -> None:
    dims: dict[nn.Parameter, tuple[str, int | None]] = {}
    split = {(layer.module, name): dim for layer in layers for name, _, dim in layer.parameters()}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        path, _, name = full.rpartition(".")
        module = model.get_submodule(path)
        if (module, name) not in split and not hasattr(module, "weight"):
            continue  # a second name in a module that is no layer, such as BERT's cls.predictions.bias
        dim = split.get((module, name))
        first, other = dims.setdefault(parameter, (full, dim))
        if other != dim:
            raise ModelError(
                "tensor_parallel: tied weights would be split differently",
                expected="one split for a weight, wherever it is used",
                got=f"{first} in dim {other} and {full} in dim {dim} (None: whole)",
                fix="give both layers entries that agree, such as 'replicate' for both",
            )


def refuse_router_loss(model: nn.Module, method: str) -> None:
    """Refuse a model of transformers that computes its routers' loss, where ranks have parts of a sample's tokens.

    Args:
        model: The model.
        method: What divides the tokens.

    Raises:
        ModelError: When its config asks for the loss.
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ModelError(
            f"{method}: the routers' loss over all tokens cannot be computed from parts of them",
            expected="output_router_logits=False",
            got="True",
            fix="switch it off in the model's config; expert_parallel balances experts with bias_rate",
        )
