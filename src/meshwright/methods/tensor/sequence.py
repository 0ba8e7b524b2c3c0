"""``sequence=True``: between the blocks' split layers each rank has a part of the tokens (Korthikanti et al. 2022).

The all-reduce behind a pair of layers becomes a reduce-scatter of tokens, and the next pair begins with an all-gather:
norms, dropout and residuals in between work on, and save, a part. Tokens are cut before the first block of a list and
put together behind the last.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.errors import ModelError
from meshwright.methods.sample import SampleRun
from meshwright.methods.tensor.calls import RecordedBlock, record_calls, signature
from meshwright.methods.tensor.compare import Refuted
from meshwright.methods.tensor.plan import PlannedLayer
from meshwright.methods.tensor.proof import BlockProof
from meshwright.methods.tensor.sequence_trial import TOKENS_DIM, SequenceTrial, first_hidden
from meshwright.methods.tensor.trial import Adjustment


@dataclass(frozen=True)
class SequenceLayout:
    """Where tokens are cut and put together; paths of modules."""

    scopes: tuple[str, ...]  # modules, or layers, that take all tokens
    first: tuple[str, ...]  # blocks before which tokens are cut
    last: tuple[str, ...]  # blocks behind which they are put together
    summed: tuple[str, ...]  # modules whose parameters are whole and whose gradients are summed over the ranks
    blocks: tuple[str, ...]  # all blocks that work on parts of the tokens

    def covers(self, path: str) -> bool:
        """Whether a layer lies in a block that works on parts of the tokens."""
        return any(path.startswith(block + ".") for block in self.blocks)

    def gathers_above(self, path: str) -> bool:
        """Whether a layer gets all tokens from a module around it."""
        return any(path.startswith(scope + ".") for scope in self.scopes)


@dataclass(frozen=True)
class _Proved:
    scopes: tuple[str, ...]
    summed: tuple[str, ...]
    output_dims: tuple[int | None, ...]


def sequence_layout(
    model: nn.Module,
    layers: list[PlannedLayer],
    adjustments: tuple[Adjustment, ...],
    ranks: int,
    sample: SampleRun | None,
) -> SequenceLayout:
    """Finds where a split model can work on parts of the tokens, and proves it on each kind of block.

    Raises:
        ModelError: When some block cannot, with the reason.
    """
    known: dict[Any, _Proved] = {}
    dims: list[tuple[int | None, ...]] = []
    scopes: list[str] = []
    summed: list[str] = []
    blocks = record_calls(model, sample, ranks)
    for block in blocks:
        block = _with_parts(block, dims, ranks)
        inside = _within(block.path, layers)
        key = signature(block), tuple((layer.path, layer.style.name) for layer in inside)
        if key not in known:
            known[key] = _prove(block, inside, _adjustments_within(block.path, adjustments), ranks)
        dims.append(known[key].output_dims)
        scopes += [f"{block.path}.{path}" for path in known[key].scopes]
        summed += [f"{block.path}.{path}" if path else block.path for path in known[key].summed]
    lists = [list(group) for _, group in itertools.groupby(blocks, lambda block: block.path.rpartition(".")[0])]
    return SequenceLayout(
        scopes=tuple(scopes),
        first=tuple(group[0].path for group in lists),
        last=tuple(group[-1].path for group in lists),
        summed=tuple(summed),
        blocks=tuple(block.path for block in blocks),
    )


def _with_parts(block: RecordedBlock, dims: list[tuple[int | None, ...]], ranks: int) -> RecordedBlock:
    """Marks the hidden state as cut along the tokens, and what earlier blocks give split as they give it."""
    assert block.call is not None
    hidden = first_hidden((block.call.args, block.call.kwargs))
    if hidden is None:
        raise _cannot(block.path, "it takes no tensor (batch, tokens, features)")
    check_tokens(tree_leaves((block.call.args, block.call.kwargs))[hidden], ranks)
    split = {hidden: TOKENS_DIM}
    for leaf, (giver, place) in block.given.items():
        dim = dims[giver][place]
        if dim is not None:
            split[leaf] = dim
    return dataclasses.replace(block, call=dataclasses.replace(block.call, split=tuple(split.items())))


def _within(path: str, layers: list[PlannedLayer]) -> list[PlannedLayer]:
    prefix = path + "."
    return [
        dataclasses.replace(layer, path=layer.path.removeprefix(prefix))
        for layer in layers
        if layer.path.startswith(prefix) and layer.style.dims
    ]


def _adjustments_within(path: str, adjustments: tuple[Adjustment, ...]) -> tuple[Adjustment, ...]:
    return tuple(
        dataclasses.replace(each, path=each.path[len(path) + 1 :])
        for each in adjustments
        if each.path == path or each.path.startswith(path + ".")
    )


def _prove(
    block: RecordedBlock, layers: list[PlannedLayer], adjustments: tuple[Adjustment, ...], ranks: int
) -> _Proved:
    assert block.call is not None
    odd = [layer.path for layer in layers if layer.style.splits_input or layer.style.output == "all_gather"]
    if odd:
        raise _cannot(block.path, f"{odd[0]} exchanges whole features")
    proof = BlockProof(block.module, block.call, ranks)
    reason = "no layer of it is split by columns"
    for scopes in _scopes(block.module, layers):
        try:
            summed, dims = proof.holds(layers, adjustments, SequenceTrial(scopes, ranks))
        except Refuted as refuted:
            reason = str(refuted)
            continue
        # A row layer adds its bias to a part of the tokens, and sums its gradient itself.
        rows = {layer.path for layer in layers}
        modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in sorted(summed)))
        return _Proved(scopes, tuple(path for path in modules if path not in rows), tuple(dims))
    raise _cannot(block.path, reason)


def _scopes(block: nn.Module, layers: list[PlannedLayer]) -> Iterator[tuple[str, ...]]:
    """What may take all tokens: the modules in which layers split by columns lie, or these layers themselves."""
    groups: dict[str, list[str]] = {}
    for layer in layers:
        if layer.style.gradient == "all_reduce":
            groups.setdefault(layer.path.rpartition(".")[0], []).append(layer.path)
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    choices = []
    for parent, columns in groups.items():
        is_module = parent and not isinstance(block.get_submodule(parent), containers)
        choices.append([(parent,), tuple(columns)] if is_module else [tuple(columns)])
    for chosen in itertools.product(*choices):
        yield tuple(path for paths in chosen for path in paths)


def _cannot(path: str, reason: str) -> ModelError:
    return ModelError(
        f"tensor_parallel: {path} cannot work on a part of the tokens",
        expected="a block that treats tokens alike outside its split layers, with hidden states (batch, tokens, "
        "features)",
        got=reason,
        fix="leave sequence=True out",
    )


def check_tokens(hidden: torch.Tensor, ranks: int) -> None:
    """Refuses a number of tokens that the axis does not divide.

    Raises:
        ModelError: On every rank of the axis: all have the same tokens.
    """
    if hidden.shape[TOKENS_DIM] % ranks:
        raise ModelError(
            "tensor_parallel: the tensor axis does not divide the tokens, which sequence=True cuts",
            expected=f"a multiple of {ranks} tokens",
            got=str(hidden.shape[TOKENS_DIM]),
            fix="pad the sequences, or leave sequence=True out",
        )
