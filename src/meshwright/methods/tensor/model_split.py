"""Decide how a tensor axis splits a model: its layers, and the tokens between them for ``sequence=True``.

:func:`split_of` is the entry. Layers come from a plan (``split_plan.py``) or are found in the data flow
(``split_search.py``). With ``sequence=True`` (Korthikanti et al. 2022) tokens are cut before the first block, gathered
where a module needs all of them, and gathered again when something behind the last block needs them; where that is, is
proved on single blocks.

Stages of a pipeline hand on parts. Where sequence and context axes cut tokens too, they cut before, and gather behind.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.pipeline.splice import Elsewhere
from meshwright.methods.tensor.axis_exchange import GatheredInput, TensorAxis, TokenWise, gathered_late
from meshwright.methods.tensor.block_trials import (
    VIEWS,
    Adjustment,
    RecordedBlock,
    Refuted,
    SampleRun,
    narrow_views,
    record_calls,
    signature,
)
from meshwright.methods.tensor.narrow_copy import adjustments_in, layers_in, narrow_copy, plan_in, tried_narrow
from meshwright.methods.tensor.split_checks import check_layers, heads_of, stay_whole, vocabulary_embedding
from meshwright.methods.tensor.split_plan import (
    EXPERTS,
    LATENT,
    LINEAR,
    PlannedLayer,
    matches,
    own_plan,
    planned,
    planned_layers,
)
from meshwright.methods.tensor.split_proof import TOKENS_DIM, BlockProof, SequenceTrial, first_hidden, with_argument
from meshwright.methods.tensor.split_search import FoundPlan, find_plan
from meshwright.nn import find_blocks, is_linear, wrap_method
from meshwright.runtime.torch_internals.modules import parameters_of
from meshwright.runtime.torch_internals.pytree import tree_flatten, tree_leaves, tree_unflatten


@dataclass(frozen=True)
class SequenceLayout:
    """The places where tokens are cut and gathered, as paths of modules."""

    scopes: tuple[str, ...]  # modules, or layers, that take all tokens
    first: tuple[str, ...]  # blocks before which tokens are cut
    last: tuple[str, ...]  # blocks behind which they are gathered
    summed: tuple[str, ...]  # modules with whole parameters whose gradients are summed over the ranks
    blocks: tuple[str, ...]  # all blocks that work on parts of the tokens

    def covers(self, path: str) -> bool:
        """Return whether a layer lies in a block that works on parts of the tokens."""
        return any(path.startswith(block + ".") for block in self.blocks)

    def of_part(self, model: nn.Module) -> SequenceLayout:
        """Return the layout of one pipeline rank's part of the model: other ranks cut and gather what they have."""
        here = {path for path, module in model.named_modules() if not isinstance(module, Elsewhere)}
        kept = {
            field.name: tuple(path for path in getattr(self, field.name) if path in here)
            for field in dataclasses.fields(self)
        }
        return SequenceLayout(**kept)

    def gathers_above(self, path: str) -> bool:
        """Return whether a module around a layer gathers all tokens for it."""
        return any(path.startswith(scope + ".") for scope in self.scopes)


@dataclass(frozen=True)
class _ProvedBlock:
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
    """Find where a split model can work on parts of the tokens, and prove it on each kind of block.

    Raises:
        ModelError: When some block cannot, with the reason.
    """
    known: dict[Any, _ProvedBlock] = {}
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
    """Mark a block's inputs that are split: the hidden state along the tokens, others as earlier blocks return them."""
    assert block.call is not None
    hidden = first_hidden((block.call.args, block.call.kwargs))
    if hidden is None:
        raise _cannot(block.path, "it takes no tensor (batch, tokens, features)")
    check_tokens(tree_leaves((block.call.args, block.call.kwargs))[hidden], ranks)
    return block.with_split_inputs(dims, {hidden: TOKENS_DIM})


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
) -> _ProvedBlock:
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
        return _ProvedBlock(scopes, tuple(path for path in modules if path not in rows), tuple(dims))
    raise _cannot(block.path, reason)


def _scopes(block: nn.Module, layers: list[PlannedLayer]) -> Iterator[tuple[str, ...]]:
    """Yield candidates for where to gather tokens: modules around column layers, or these layers themselves."""
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
        fix="leave sequence=True out; or leave layers that this names whole, with their pairs, by an entry 'replicate' "
        "for each in plan",
    )


def check_tokens(hidden: torch.Tensor, ranks: int) -> None:
    """Refuse a number of tokens that the axis does not divide.

    Raises:
        ModelError: On every rank of the axis, since all have the same tokens.
    """
    if hidden.shape[TOKENS_DIM] % ranks:
        raise ModelError(
            "tensor_parallel: the tensor axis does not divide the tokens, which sequence=True cuts",
            expected=f"a multiple of {ranks} tokens",
            got=str(hidden.shape[TOKENS_DIM]),
            fix="pad the sequences, or leave sequence=True out",
        )


# --- Hooks that cut and gather tokens, for ``sequence=True``

Change = Callable[[torch.Tensor], torch.Tensor]


def let_exchange_tokens(
    model: nn.Module, layout: SequenceLayout, axis: TensorAxis, gathers: Mapping[str, GatheredInput]
) -> None:
    """Cut tokens before the first block; gather them where a module needs all of them, and late behind the last block.

    Linear layers that gather for themselves are left to the caller, since those with one input share the gather.

    Args:
        model: A plain module, whose layers are split.
        layout: Where tokens are cut and gathered.
        axis: The tensor axis.
        gathers: See :func:`gathers_of`.
    """

    def cut(hidden: torch.Tensor) -> torch.Tensor:
        check_tokens(hidden, axis.size)
        return axis.cut(hidden, TOKENS_DIM)

    for path in layout.first:
        change_hidden_input(model.get_submodule(path), cut)
    for path in layout.last:
        change_hidden_output(model.get_submodule(path), lambda hidden: gathered_over(axis, hidden, axis.copy))
    TokenWise(model, layout.blocks).take_parts()
    for path in layout.scopes:
        module = model.get_submodule(path)
        if not is_linear(module):
            wrap_method(module, "forward", functools.partial(on_all_tokens, gathers[path]))
            for layer in linear_layers(module):
                wrap_method(layer, "forward", gathers[path].around)


def gathered_over(axis: TensorAxis, hidden: torch.Tensor, share: Change, gather: Change | None = None) -> torch.Tensor:
    """Return all tokens of a hidden state, gathered over a tensor axis when something needs them.

    Args:
        axis: The tensor axis.
        hidden: This rank's part.
        share: Sums gradients of parameters of modules that work on the part.
        gather: Gathers the tokens; None: the axis does.
    """
    count = hidden.shape[TOKENS_DIM] * axis.size
    return gathered_late(hidden, count, gather or (lambda part: axis.gather(part, TOKENS_DIM)), share)


def gathers_of(split: Split, make: Callable[[str], GatheredInput]) -> dict[str, GatheredInput]:
    """Make the gathers of tokens, by the paths of modules that gather, or by the groups of layers that do.

    Args:
        split: The split.
        make: Makes the gather for the module, or the layers, at a path.
    """
    if split.sequence is None:
        return {}
    groups = {layer.path: layer.group for layer in split.layers if is_linear(layer.module)}
    found: dict[str, GatheredInput] = {}
    for path in split.sequence.scopes:
        key = groups.get(path, path)
        if key not in found:
            found[key] = make(path)
    return found


def gather_around(path: str, gathers: Mapping[str, GatheredInput]) -> GatheredInput | None:
    """Return the gather in the module around a row layer; None without one."""
    return next((tokens for key, tokens in gathers.items() if path.startswith(key + ".")), None)


def on_all_tokens(tokens: GatheredInput, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module on all tokens of its hidden state."""
    args, kwargs = with_argument(args, kwargs, tokens.gather)
    try:
        return forward(*args, **kwargs)
    finally:
        tokens.forget()


def linear_layers(module: nn.Module) -> list[nn.Module]:
    """Return the linear layers inside a module that gathers tokens."""
    return [each for each in module.modules() if is_linear(each)]


def change_hidden_input(module: nn.Module, change: Change) -> Any:
    """Apply ``change`` to the hidden state that a module is called with; return the hook's handle."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_argument(args, kwargs, change)

    return module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)


def change_hidden_output(module: nn.Module, change: Change) -> Any:
    """Apply ``change`` to the hidden state that a module returns; return the hook's handle."""

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        leaves, tree = tree_flatten(output)
        place = first_hidden(leaves)
        assert place is not None, "a block that was proved returns a hidden state"
        leaves[place] = change(leaves[place])
        return tree_unflatten(leaves, tree)

    return module.register_forward_hook(leave)


# --- The split of a model

# Plans found so far, by model and number of ranks: prediction, check and application ask for the same one.
_FOUND: weakref.WeakKeyDictionary[nn.Module, dict[int, FoundPlan]] = weakref.WeakKeyDictionary()
_LAYOUTS: weakref.WeakKeyDictionary[nn.Module, dict[Any, SequenceLayout]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Split:
    """The division of a model over a tensor axis."""

    layers: tuple[PlannedLayer, ...]
    source: str  # where the plan comes from, for the summary
    adjustments: tuple[Adjustment, ...] = ()
    remarks: tuple[str, ...] = ()
    sequence: SequenceLayout | None = None  # where tokens are cut and gathered; None: every rank has all

    def of_part(self, model: nn.Module) -> Split:
        """Return the split of one pipeline rank's part of the model, without layers that the rank does not have."""
        paths = {id(module): path for path, module in model.named_modules()}
        present = (
            layer
            for layer in self.layers
            if id(layer.module) in paths and next(layer.module.parameters(recurse=False), None) is not None
        )
        adjusted = (each for each in self.adjustments if each.path in paths.values())
        sequence = self.sequence.of_part(model) if self.sequence is not None else None
        return replace(self, layers=tuple(present), adjustments=tuple(adjusted), sequence=sequence)

    def summed_together(self, model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
        """Return the whole parameters whose gradients a block sums together, as modules and names, by block.

        See [Note: gradients summed together].
        """
        places = [(layer, name) for layer in self.layers for name in self._summed_in(layer)]
        found = {
            block: [(layer.module, name) for layer, name in places if layer.path.startswith(f"{path}.")]
            for path, block in find_blocks(model)
        }
        return {block: each for block, each in found.items() if len(each) > 1}

    def _summed_in(self, layer: PlannedLayer) -> tuple[str, ...]:
        if layer.style.name == "replicated_with_grad_allreduce":
            return tuple(name for name, _ in layer.module.named_parameters(recurse=False))
        scatters = layer.style.name == "rowwise" and self.sequence is not None and self.sequence.covers(layer.path)
        return ("bias",) if scatters and parameters_of(layer.module)["bias"] is not None else ()

    def adjust(self, model: nn.Module) -> None:
        """Set the attributes that count heads or features to a rank's share, and adjust views."""
        for adjustment in self.adjustments:
            module = model.get_submodule(adjustment.path)
            if adjustment.name == VIEWS:
                wrap_method(module, "forward", functools.partial(narrow_views, adjustment.value))
            else:
                setattr(module, adjustment.name, adjustment.value)

    def summary(self, model: nn.Module, ranks: int) -> str:
        """Describe the split in one line; layers of the same name in different blocks appear once."""
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
    """Let heads over the vocabulary return logits in parts, unless the user's entries ask for gathered ones."""
    embedding = vocabulary_embedding(model)
    heads = heads_of(model, embedding[1]) if embedding is not None else []

    def changed(layer: PlannedLayer) -> PlannedLayer:
        is_head = layer.path in heads and layer.style.name == "colwise_gather_output"
        return replace(layer, style=LINEAR["vocabulary_head"]) if is_head and not matches(given, layer.path) else layer

    return [changed(layer) for layer in layers]


def _without_vocabulary(
    model: nn.Module, layers: list[PlannedLayer], given: Mapping[str, str], ranks: int
) -> tuple[list[PlannedLayer], tuple[str, ...]]:
    """Leave embedding and head whole if the axis does not divide the vocabulary, unless the user's entries name them.

    So a vocabulary to which a token for padding was added is no obstacle.
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
    model: nn.Module,
    given: Mapping[str, str],
    ranks: int,
    sample: SampleRun | None,
    *,
    sequence: bool = False,
    apart: Sequence[str] = (),
    beside: Sequence[str] = (),
) -> Split:
    """Return the split of a model over a tensor axis.

    Args:
        model: A plain module.
        given: The user's entries of a plan.
        ranks: Size of the axis.
        sample: Runs the model once, where its plan must be found or ``sequence`` proved.
        sequence: Whether ranks have a part of the tokens between the layers that are split.
        apart: Paths of the experts that another method divides, which stay as they are.
        beside: Paths of modules that run with these experts, and of which a proof sees nothing.

    Raises:
        ModelError: When the model cannot be split, with the reason.
        StrategyError: When an entry of ``given`` names nothing in the model.
    """
    if own_plan(model) or given:
        given = dict.fromkeys(apart, "replicate") | dict(given)
    split = _whole_tokens(model, given, ranks, sample)
    split = replace(split, layers=tuple(layer for layer in split.layers if not _is_inside(layer.path, apart)))
    return _with_sequence(model, split, ranks, sample, apart, beside) if sequence else split


def _is_inside(path: str, paths: Sequence[str]) -> bool:
    return any(path == each or path.startswith(each + ".") for each in paths)


def _needs_whole_tokens(what: str, why: str, found: str, otherwise: str = "") -> ModelError:
    return ModelError(
        f"tensor_parallel: {what} and sequence=True do not go together",
        expected=f"all tokens on every rank, {why}",
        got=f"{found}, and a part of the tokens between the layers that are split",
        fix=f"{otherwise}leave sequence=True (split_gather, ring) out",
    )


def needs_undivided_experts(found: str, otherwise: str = "") -> ModelError:
    """Return the error for experts that are split where ranks have a part of the tokens.

    Args:
        found: What experts there are.
        otherwise: What else would help than ``expert_parallel``.
    """
    why = "or experts that expert_parallel divides"
    return _needs_whole_tokens("split experts", why, found, f"add expert_parallel, or {otherwise}")


def _with_sequence(
    model: nn.Module,
    split: Split,
    ranks: int,
    sample: SampleRun | None,
    apart: Sequence[str],
    beside: Sequence[str],
) -> Split:
    if any(layer.place for layer in split.layers):
        raise _needs_whole_tokens("adapters", "for the half of an adapter that is not split", "LoRA adapters")
    # The attention around a latent projection gathers all tokens, and its input's gradient is summed: so are gradients
    # of all that stays whole inside, the rotated key's among them.
    split = replace(split, layers=tuple(layer for layer in split.layers if layer.style.name != LATENT))
    experts = next((layer.path for layer in split.layers if layer.style.name in EXPERTS), None)
    if experts is not None:
        whole = f"leave them whole on every rank with plan={{{experts!r}: 'replicate'}}, or "
        raise needs_undivided_experts(f"the experts {experts}", whole)
    known = _LAYOUTS.setdefault(model, {})
    # Without experts, which are passed by, a proof sees nothing of what runs with them.
    key = ranks, tuple(apart), tuple((layer.path, layer.style.name, layer.parts) for layer in split.layers)
    if key not in known:
        known[key] = _proved_layout(model, split, ranks, sample)
    layout = known[key]
    # What a plan leaves whole on every rank sees a part of the tokens, too.
    kept = [layer for layer in split.layers if layer.style.name != "replicate" or layer.path not in layout.summed]
    present = {layer.path for layer in kept}
    left = (
        path for path in dict.fromkeys((*layout.summed, *beside)) if path not in present and not _is_inside(path, apart)
    )
    summed = [planned(model, path, "replicated_with_grad_allreduce") for path in left]
    remarks = (*split.remarks, "tokens are split between them")
    return replace(split, layers=(*kept, *summed), remarks=remarks, sequence=layout)


def _proved_layout(model: nn.Module, split: Split, ranks: int, sample: SampleRun | None) -> SequenceLayout:
    """Return the places where tokens are cut and gathered, proved on a narrow copy if blocks are large."""
    small = narrow_copy(model, ranks)
    layers = layers_in(small, split.layers) if small is not None else None
    changes = adjustments_in(small, split.adjustments, ranks) if small is not None else None
    if small is not None and layers is not None and changes is not None:
        with tried_narrow(model):
            return sequence_layout(small, layers, changes, ranks, sample)
    return sequence_layout(model, list(split.layers), split.adjustments, ranks, sample)


def _found_plan(model: nn.Module, sample: SampleRun | None, ranks: int) -> FoundPlan:
    """Find the plan of a model that brings none: in a narrow copy if its blocks are large."""
    small, found = narrow_copy(model, ranks), None
    if small is not None:
        with tried_narrow(model):
            found = plan_in(model, find_plan(small, sample, ranks), small, ranks)
    return found or find_plan(model, sample, ranks)


def _whole_tokens(model: nn.Module, given: Mapping[str, str], ranks: int, sample: SampleRun | None) -> Split:
    """Return the split by the user's entries and the model's own plan, else by the model's data flow."""
    if own_plan(model) or given:
        layers = _with_heads(model, planned_layers(model, given, ranks), given)
        layers, remarks = _without_vocabulary(model, layers, given, ranks)
        check_layers(model, layers, ranks, proved=False)
        return Split(tuple(layers), "the plan that was given" if given else "the model's own plan", remarks=remarks)
    known = _FOUND.setdefault(model, {})
    if ranks not in known:
        known[ranks] = _found_plan(model, sample, ranks)
    found = known[ranks]
    split = []
    for path, entry in found.entries.items():
        layer = planned(model, path, entry.style)
        split.append(PlannedLayer(layer.path, layer.module, layer.style, layer.parent, entry.parts))
    split = _with_heads(model, split, {})
    check_layers(model, split, ranks, proved=True)
    return Split(tuple(split), "the data flow of its blocks", found.adjustments, found.remarks)
