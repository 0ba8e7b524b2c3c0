"""Split layers over the tensor axis: how ``tensor_parallel`` changes a model.

Its twin is :class:`~meshwright.methods.tensor.tensor_parallel.SplitTrace`, which counts the same exchanges.

Parameters become DTensors, so that saving, further sharding and norms see them as parts of a whole; layers compute with
local parts. Layers with one input share the all-reduce of its gradient, as in Megatron-LM (Shoeybi et al. 2019, §3);
tied weights stay tied.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from meshwright.loss import HeadLogits, LazyLogits, Vocabulary, VocabularyShards
from meshwright.methods.tensor.axis_exchange import GatheredInput, TensorAxis, as_products
from meshwright.methods.tensor.model_split import Change, Split, gather_around, gathers_of, let_exchange_tokens
from meshwright.methods.tensor.split_plan import (
    EXPERTS,
    LATENT,
    WIDE_NORM,
    PlannedLayer,
    norm_in_parts,
    rotated_features,
)
from meshwright.methods.tensor.split_proof import TOKENS_DIM, part_of
from meshwright.nn import RankOrder, is_transposed, keep_rank_order, move_to, without_fast_path, wrap_method
from meshwright.runtime.torch_internals.autograd import Function
from meshwright.runtime.torch_internals.dtensor import dtensor_of, local_shard, spec_of
from meshwright.runtime.torch_internals.modules import PARAMETERS
from meshwright.runtime.torch_internals.pytree import tree_map


def split_layers(
    model: nn.Module,
    split: Split,
    axis: TensorAxis,
    device: torch.device,
    *,
    keeps_gathered: bool = False,
    sums_together: bool = True,
) -> None:
    """Turn the planned parameters into DTensors, in place, and add the layers' exchanges.

    Args:
        model: A plain module, on ``device`` or the CPU, with the same values on every rank.
        split: The layers to split.
        axis: The tensor axis.
        device: Device of the shards; a layer is whole there only while it is being split.
        keeps_gathered: Whether gathered tokens are saved for backward, instead of gathered again.
        sums_together: See [Note: gradients summed together].
    """
    gathers = gathers_of(split, lambda path: GatheredInput(axis, TOKENS_DIM, keeps=keeps_gathered))
    tied = _tied_names(model)
    scattered = _scattered_rows(split)
    for layer in split.layers:
        move_to(layer.module, device)
        for name, parameter, dim in layer.parameters():
            if dim is not None:
                _cut(layer, name, parameter, dim, axis)
        scatter = _scattering(axis, gather_around(layer.path, gathers)) if layer.path in scattered else None
        _let_exchange(layer, axis, scatter)
    for names in tied:
        _tie(model, names)
    _share_inputs(split, axis, gathers)
    without_fast_path(model)
    if split.sequence is not None:
        let_exchange_tokens(model, split.sequence, axis, gathers)
    for block, shared in split.summed_together(model).items() if sums_together else ():
        wrap_method(block, "forward", _summing_together(shared, axis))


def _scattered_rows(split: Split) -> set[str]:
    """Return the row layers whose sums are scattered over tokens: those in blocks that work on parts of them."""
    if split.sequence is None:
        return set()
    return {layer.path for layer in split.layers if layer.style.name == "rowwise" and split.sequence.covers(layer.path)}


def _cut(layer: PlannedLayer, name: str, parameter: nn.Parameter, dim: int, axis: TensorAxis) -> None:
    """Replace a parameter by this rank's part; all ranks have the same values, so nothing is sent."""
    part = part_of(parameter.detach(), dim, layer.parts_of(name), axis.index, axis.size).clone()
    shard: DTensor = DTensor.from_local(
        part, axis.mesh, [Shard(dim)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    setattr(layer.module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    if len(layer.parts_of(name)) > 1:
        keep_rank_order(layer.module, name, RankOrder(dim, layer.parts_of(name), axis.size))


def _scattering(axis: TensorAxis, tokens: GatheredInput | None) -> Change:
    """Return the sum of a row layer over the ranks, whose tokens are scattered.

    In backward its gradient is gathered first, then the input of the column layers before it.
    """
    return axis.scatter_tokens if tokens is None else lambda part: axis.scatter_tokens(tokens.behind(part))


def _let_exchange(layer: PlannedLayer, axis: TensorAxis, scatter: Change | None) -> None:
    module, style = layer.module, layer.style
    if style.name == "embedding_rowwise":
        assert isinstance(module, nn.Embedding)
        wrap_method(module, "forward", _looking_up(module, axis))
    elif style.name == "replicated_with_grad_allreduce":
        wrap_method(module, "forward", _with_summed_gradients(module, axis))
    elif style.name == LATENT:
        wrap_method(module, "forward", _with_shared_key(rotated_features(layer), axis))
    elif style is WIDE_NORM:
        wrap_method(module, "forward", _normed_in_parts(module, axis))
    elif style.name in EXPERTS:
        wrap_method(module, "forward", _summing_experts(module, axis))
    elif style.output == "all_reduce":
        wrap_method(module, "forward", _adding_up(module, style.splits_input, scatter, axis))
    elif style.dims:
        wrap_method(module, "forward", _oflocal_parts(module, style.output, axis))


def _oflocal_parts(module: nn.Module, wanted: str, axis: TensorAxis) -> Callable[..., Any]:
    """Return the forward of a layer split by columns: its output is this rank's part, gathered if ``wanted``."""
    whole = functools.partial(axis.gather, dim=-1)

    def around(forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        with swapped_parameters(module, local_parts(module)):
            output = forward(*args, **kwargs)
        if wanted == "logits" and torch.is_grad_enabled():
            part = output.shape[-1]
            vocabulary = Vocabulary(part * axis.index, part * axis.size, axis.sum, axis.max, whole)
            return logits_in_parts(output, vocabulary)
        return output if wanted == "as computed" else whole(output)

    return around


def logits_in_parts(part: torch.Tensor, vocabulary: Vocabulary) -> LazyLogits:
    """Return logits over a vocabulary, of which a head has computed this rank's, or will do so for the loss."""
    return part.over(vocabulary) if isinstance(part, HeadLogits) else VocabularyShards.of(part, vocabulary)


def _adding_up(module: nn.Module, splits_input: bool, scatter: Change | None, axis: TensorAxis) -> Callable[..., Any]:
    """Return the forward of a layer split by rows: the ranks' outputs are summed, and its bias is added once."""
    add = scatter or axis.add

    def around(forward: Callable[..., torch.Tensor], features: torch.Tensor) -> torch.Tensor:
        bias = getattr(module, PARAMETERS)["bias"]
        parts: dict[str, torch.Tensor | None] = {"weight": local(module.weight)}  # type: ignore[arg-type]
        if bias is not None:
            parts["bias"] = torch.zeros_like(bias) if is_transposed(module) else None
        with swapped_parameters(module, parts):
            output = add(forward(axis.cut(features, -1) if splits_input else features))
        if bias is None:
            return output
        return output + (_summed(bias, axis) if scatter is not None else bias).to(output.dtype)

    return around


def _summing_experts(module: nn.Module, axis: TensorAxis) -> Callable[..., Any]:
    """Return the forward of stacked experts: gradients of tokens and of their weights are summed, and the answers."""

    def enter(leaf: Any) -> Any:
        return axis.copy(leaf) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf

    def around(forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = tree_map(enter, (args, kwargs))
        with swapped_parameters(module, local_parts(module)):
            return axis.add(forward(*args, **kwargs))

    return around


def _looking_up(module: nn.Embedding, axis: TensorAxis) -> Callable[..., Any]:
    """Return the forward of an embedding split by rows: each rank looks up the rows it has, and a sum follows."""
    rows = local(module.weight).shape[0]
    first = rows * axis.index
    if module.padding_idx is not None:
        inside = first <= module.padding_idx < first + rows
        module.padding_idx = module.padding_idx - first if inside else None  # type: ignore[assignment]

    def around(forward: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < first) | (ids >= first + rows)
        with swapped_parameters(module, {"weight": local(module.weight)}):
            found = forward((ids - first).masked_fill(elsewhere, 0))
        return axis.add(found.masked_fill(elsewhere.unsqueeze(-1), 0))

    return around


def _with_summed_gradients(module: nn.Module, axis: TensorAxis) -> Callable[..., Any]:
    """Return the forward of a whole module that gets other features on each rank, such as a norm within heads."""

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = getattr(module, PARAMETERS).items()
        with swapped_parameters(module, {name: _summed(p, axis) for name, p in own if p is not None}):
            return forward(*args, **kwargs)

    return around


# [Note: gradients summed together] Norms, and biases behind sums, are whole on every rank, which uses them for its own
# tokens or heads: their gradients are summed over the axis. An exchange for each would take longer than the data. So a
# block passes all of them through one function, whose backward sums once; inside, its modules find these copies in
# place of their parameters, and sum nothing themselves. A module whose parameters are still sharded when its block
# begins (a unit of its own in FSDP2), or that runs alone, finds parameters, and sums by itself. A schedule that
# computes gradients of inputs and of weights apart takes each parameter's part of the graph, and one function would
# join them: there all modules sum by themselves.


def _summing_together(places: Sequence[tuple[nn.Module, str]], axis: TensorAxis) -> Callable[..., Any]:
    """Return the forward of a block that sums the gradients of its whole parameters together."""
    places_of: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module, name in places:
        places_of.setdefault(module.get_parameter(name), []).append((module, name))
    shared = list(places_of.values())

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for places, copied in _copied_together(shared, axis) if torch.is_grad_enabled() else ():
                for module, name in places:
                    stack.enter_context(swapped_parameters(module, {name: copied}))
            return forward(*args, **kwargs)

    return around


_Places = list[tuple[nn.Module, str]]  # modules and names under which they have one parameter


def _copied_together(shared: Sequence[_Places], axis: TensorAxis) -> list[tuple[_Places, torch.Tensor]]:
    """Return copies of those parameters that train and are whole now, with their places."""
    present = [(places, getattr(places[0][0], PARAMETERS)[places[0][1]]) for places in shared]
    whole = [(places, p) for places, p in present if p.requires_grad and not isinstance(p, DTensor)]
    if len(whole) < 2:
        return []
    copies = _CopyTogether.apply(axis, *(p for _, p in whole))
    return [(places, copied) for (places, _), copied in zip(whole, copies, strict=True)]


class _CopyTogether(Function):
    """Passes several tensors on; their gradients travel as one, in its own exchange for each type."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, *wholes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axis = axis
        ctx.set_materialize_grads(False)  # what a forward leaves unused has no gradient
        return tuple(whole.view_as(whole) for whole in wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        present = {at: gradient for at, gradient in enumerate(gradients) if gradient is not None}
        summed: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(gradient.dtype for gradient in present.values()):
            parts = {at: gradient for at, gradient in present.items() if gradient.dtype == dtype}
            flat = ctx.axis.sum(torch.cat([part.flatten() for part in parts.values()]))
            totals = flat.split([part.numel() for part in parts.values()])
            summed |= {at: total.view(parts[at].shape) for at, total in zip(parts, totals, strict=True)}
        return None, *(summed.get(at) for at in range(len(gradients)))


def _summed(parameter: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """Return a whole parameter whose gradient is summed over the ranks; a block's copy already is."""
    return axis.copy(parameter) if isinstance(parameter, nn.Parameter) else parameter


def _normed_in_parts(module: nn.Module, axis: TensorAxis) -> Callable[..., torch.Tensor]:
    """Return the forward of a norm over all heads' features, of which this rank has its own heads'."""
    normed = norm_in_parts(module, axis.size, axis.total)

    def around(forward: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        with swapped_parameters(module, {"weight": local(module.get_parameter("weight"))}):
            return normed(hidden)

    return around


def _with_shared_key(features: int, axis: TensorAxis) -> Callable[..., Any]:
    """Return the forward of a projection to latent keys and values, whose last features every rank's heads share."""

    def around(forward: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        return share_key(forward(hidden), features, axis)

    return around


def share_key(latent: torch.Tensor, features: int, axis: TensorAxis) -> torch.Tensor:
    """Sum the gradients of the last features over the ranks."""
    rest, rotated = latent.split([latent.shape[-1] - features, features], -1)
    return torch.cat([rest, axis.copy(rotated)], -1)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; gradients pass through it. Other tensors are returned as they are."""
    return _LocalPart.apply(parameter) if isinstance(parameter, DTensor) else parameter  # type: ignore[no-any-return]


def local_parts(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own parameters by name, with this rank's parts in place of DTensors."""
    return {name: local(p) for name, p in getattr(module, PARAMETERS).items() if p is not None}


class _LocalPart(torch.autograd.Function):
    """Take a parameter's local part; its gradient has the layout of the parameter, as FSDP2's have.

    ``to_local`` derives that layout again in every backward, which takes the host as long as two products.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        part = local_shard(parameter)
        ctx.spec, ctx.stride = spec_of(parameter), part.stride()
        return part.view_as(part)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        laid_out = gradient if gradient.stride() == ctx.stride else gradient.contiguous()
        return dtensor_of(laid_out, ctx.spec)


@contextlib.contextmanager
def swapped_parameters(module: nn.Module, tensors: dict[str, torch.Tensor | None]) -> Iterator[None]:
    """Let a module compute with other tensors in place of its parameters inside."""
    own = {name: getattr(module, PARAMETERS)[name] for name in tensors}
    getattr(module, PARAMETERS).update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        getattr(module, PARAMETERS).update(own)


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [every for every in names.values() if len(every) > 1]


def _tie(model: nn.Module, names: list[str]) -> None:
    """Register one parameter under all of its names again, since splitting made a copy for each."""
    present = [model.get_parameter(name) for name in names]
    one = next((parameter for parameter in present if isinstance(parameter, DTensor)), present[0])
    for name in names:
        path, _, own = name.rpartition(".")
        model.get_submodule(path).register_parameter(own, one)


def _share_inputs(split: Split, axis: TensorAxis, gathers: Mapping[str, GatheredInput]) -> None:
    """Pass column layers a copy of their input whose gradient is summed over ranks: one copy for each input."""
    groups: dict[str, list[PlannedLayer]] = {}
    for layer in split.layers:
        inside = split.sequence is not None and split.sequence.gathers_above(layer.path)
        if layer.style.gradient == "all_reduce" and layer.style.name not in EXPERTS and not inside:
            groups.setdefault(layer.group, []).append(layer)
    for name, group in groups.items():
        tokens = gathers.get(name)
        shared = (
            _SharedInput(lambda tensor: axis.copy(as_products(tensor)))
            if tokens is None
            else _SharedInput(tokens.gather, tokens.forget)
        )
        for layer in group:
            if tokens is not None:
                wrap_method(layer.module, "forward", tokens.around)
            wrap_method(layer.module, "forward", shared.around)
        holder = group[0].parent if len(group) > 1 else group[0].module
        wrap_method(holder, "forward", shared.around_all)


class _SharedInput:
    """Copies an input of several layers once, so that its gradient is summed over the ranks once.

    Args:
        copied: Makes the copy: of the input, or of all ranks' tokens.
        forget: Called when the layers have run.
    """

    def __init__(
        self, copied: Callable[[torch.Tensor], torch.Tensor], forget: Callable[[], None] | None = None
    ) -> None:
        self._copied, self._forget = copied, forget
        self._seen: weakref.ref[torch.Tensor] | None = None  # the input that was copied last
        self._copy: torch.Tensor | None = None  # dropped when the module around the layers has run

    def around(self, forward: Callable[..., Any], tensor: torch.Tensor, *others: Any) -> Any:
        """Run the forward of one of the layers on the copy of its input."""
        if self._copy is None or self._seen is None or self._seen() is not tensor:
            self._seen = weakref.ref(tensor)
            self._copy = self._copied(tensor)
        return forward(self._copy, *others)

    def around_all(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module around the layers, and forget the input behind it."""
        try:
            return forward(*args, **kwargs)
        finally:
            self._seen = self._copy = None
            if self._forget is not None:
                self._forget()
