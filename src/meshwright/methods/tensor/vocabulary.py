"""The embedding of a model's vocabulary and the head over it: which layers they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.nn import call_with, find_blocks

_SEED = 5


def vocabulary_entries(model: nn.Module, ranks: int) -> tuple[dict[str, str], str]:
    """The layers over the vocabulary, with the style that splits each; nothing and a remark where they stay whole.

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
    """What is said where the axis does not divide a vocabulary."""
    return f"{', '.join(paths)} stay whole: {ranks} ranks do not divide a vocabulary of {embedding.num_embeddings}"


def vocabulary_embedding(model: nn.Module) -> tuple[str, nn.Embedding] | None:
    """The largest embedding outside the blocks with a head over it; the largest of all where none has one."""
    inside = {module for _, block in find_blocks(model) for module in block.modules()}
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Embedding) and m not in inside]
    return max(found, key=lambda pair: (bool(heads_of(model, pair[1])), pair[1].num_embeddings), default=None)


def _adds_up(module: nn.Embedding, ranks: int) -> bool:
    """Whether what ranks find in their rows, called with ids alone, adds up to what the whole embedding finds.

    A subclass may shift or clamp ids, or be called with something else, as tables of positions are.
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
    except Exception:  # the code of a subclass may do anything
        return False
    return torch.stack(parts).sum(0).allclose(whole)


def heads_of(model: nn.Module, embedding: nn.Embedding) -> list[str]:
    """Paths of the linear layers that put out one logit for each word of an embedding."""
    inside = {module for _, block in find_blocks(model) for module in block.modules()}
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module not in inside
        and (module.weight is embedding.weight or module.out_features == embedding.num_embeddings)
    ]
