"""Splitting layers over the tensor axis: the ``apply`` of ``tensor_parallel``. Its twin in numbers is ``tensor_trace``.

torch's ColwiseParallel and RowwiseParallel do the linear layers. Around them stands what they leave out: layers that
share an input share its gradient's all-reduce, as in Megatron-LM; tied weights stay tied; a vocabulary is looked up on
local shards (a DTensor's embedding leaves whole gradients behind and misplaces ``padding_idx``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from meshwright.methods.replicas import broadcast_states
from meshwright.methods.tensor_plan import PlannedLayer
from meshwright.methods.tensor_styles import EMBEDDING, LINEAR
from meshwright.nn import wrap_method


def split_layers(
    model: nn.Module, layers: list[PlannedLayer], mesh: DeviceMesh, device: torch.device, *, sync: bool = True
) -> None:
    """Makes DTensors of the planned parameters, in place, and lets the layers exchange what they must.

    Args:
        model: A plain module, on ``device`` or the CPU.
        layers: What to split.
        mesh: The tensor axis.
        device: Where shards go; a layer is whole there only while it is being split.
        sync: Take rank 0's values over first; False where the model is one pipeline rank's part.
    """
    if sync:
        broadcast_states(model)
    tied = _tied_names(model)
    for layer in layers:
        layer.module.to(device)
        _split(layer, mesh)
    for names in tied:
        _tie(model, names)
    _share_inputs(layers, mesh)


def _split(layer: PlannedLayer, mesh: DeviceMesh) -> None:
    module, name = layer.module, layer.style.name
    if name in LINEAR:
        # All ranks have the same values: each cuts its own part, and none is sent. (None: src_data_rank)
        parallelize_module(module, mesh, _torch_style(layer), src_data_rank=None)
    elif name in EMBEDDING:
        assert isinstance(module, nn.Embedding)
        _split_vocabulary(module, mesh)
    elif name == "replicated_with_grad_allreduce":
        wrap_method(module, "forward", _with_summed_gradients(module, mesh))


def _torch_style(layer: PlannedLayer) -> ParallelStyle:
    style = layer.style
    if style.dims[0] == ("weight", 0):
        return ColwiseParallel(output_layouts=Replicate() if style.output == "all_gather" else Shard(-1))
    return RowwiseParallel(input_layouts=Replicate() if style.splits_input else Shard(-1))


def _split_vocabulary(module: nn.Embedding, mesh: DeviceMesh) -> None:
    """Every rank looks up the rows it holds; a sum puts them together."""
    weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    rows = weight.to_local().shape[0]
    first = rows * mesh.get_local_rank()
    if module.padding_idx is not None:
        inside = first <= module.padding_idx < first + rows
        module.padding_idx = module.padding_idx - first if inside else None  # type: ignore[assignment]

    def look_up(forward: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < first) | (ids >= first + rows)
        weight = module.weight
        assert isinstance(weight, DTensor)
        with _lent(module, {"weight": weight.to_local()}):
            found = forward((ids - first).masked_fill(elsewhere, 0))
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        whole: DTensor = DTensor.from_local(found, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()])
        return whole.to_local()

    wrap_method(module, "forward", look_up)


def _with_summed_gradients(module: nn.Module, mesh: DeviceMesh) -> Callable[..., Any]:
    """For a module whose parameters are whole while each rank feeds it other features, such as a norm within heads."""

    def summed(parameter: torch.Tensor) -> torch.Tensor:
        whole: DTensor = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])  # backward of from_local adds the parts up

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _lent(module, {name: summed(p) for name, p in module.named_parameters(recurse=False)}):
            return forward(*args, **kwargs)

    return around


@contextlib.contextmanager
def _lent(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Lets a module compute with other tensors in the place of its parameters."""
    own = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(own)


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [every for every in names.values() if len(every) > 1]


def _tie(model: nn.Module, names: list[str]) -> None:
    """Puts the parameter of the first name under the others again: splitting made a copy of each."""
    first = model.get_parameter(names[0])
    for name in names[1:]:
        path, _, own = name.rpartition(".")
        model.get_submodule(path).register_parameter(own, first)


def _share_inputs(layers: list[PlannedLayer], mesh: DeviceMesh) -> None:
    groups: dict[str, list[PlannedLayer]] = {}
    for layer in layers:
        if layer.style.gradient == "all_reduce":
            groups.setdefault(layer.group, []).append(layer)
    for group in groups.values():
        if len(group) > 1:
            shared = _SharedInput(mesh)
            for layer in group:
                layer.module.register_forward_pre_hook(shared.enter, prepend=True)
            group[0].parent.register_forward_hook(shared.leave, always_call=True)


class _SharedInput:
    """Makes one DTensor of an input that several layers take, so that its gradient is summed over the ranks once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._seen: weakref.ref[torch.Tensor] | None = None  # the input that was converted last
        self._whole: DTensor | None = None  # what became of it; dropped when the module they lie in is through

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replaces the first argument."""
        tensor, *others = args
        if isinstance(tensor, DTensor):
            return args
        if self._whole is None or self._seen is None or self._seen() is not tensor:
            self._seen = weakref.ref(tensor)
            self._whole = DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        return (self._whole, *others)

    def leave(self, *_: Any) -> None:
        """Forgets the input."""
        self._seen = self._whole = None
