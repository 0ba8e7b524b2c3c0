"""Give a model on ``meta`` its memory and its values, once methods have said which part of it this rank holds.

[Note: models born sharded] A model that no device can hold is given on ``meta``, or as a function that builds it. The
plan and the methods see shapes only. Buffers, which are small and which models read while they are changed, get their
values first (:meth:`Birth.give_buffers`). The parameters follow when the methods have decided on their layout:
``shard`` in methods/zero.py calls :func:`give_parameters` for shards, and ``apply_strategy`` for everything else,
before anything holds references to the parameters: hooks, replicas, masters, the optimizer. Every rank computes, or
reads, the elements that it holds, and nothing is sent. On torch's fake process group, where the other ranks are
pretended, parameters stay on ``meta``: a start of any size can be tried in one process.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from meshwright.errors import ModelError, join_names
from meshwright.nn import RankOrder, is_on_meta, parameter_groups, rank_orders
from meshwright.nn.initial_values import InitialValues, record, record_reset, remembered
from meshwright.optim import local_tensor
from meshwright.runtime import all_equal, broadcast_object, is_pretended, rank, same_on_every_rank
from meshwright.runtime.torch_internals.dtensor import StridedShard
from meshwright.runtime.torch_internals.modules import buffers_of, parameters_of
from meshwright.store.entries import stored_name, unwrapped

Index = tuple[slice | torch.Tensor, ...]
"""The part of a whole tensor that a rank holds: for each dim a slice, or the positions (int64) of its rows."""


class Weights(Protocol):
    """Stored weights under a model's names."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the model's tensors that are not stored."""

    def __contains__(self, name: object) -> bool:
        """Return whether a tensor of the model is stored."""

    def read(self, name: str, index: Index, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a part of a tensor into ``out``, a tensor on the host, or a new one."""


@dataclass
class Birth:
    """The sources of the values of a model on ``meta``."""

    values: InitialValues
    weights: Weights | None = None
    given: set[str] = field(default_factory=set)
    """Names of the tensors that have their values."""
    is_over: bool = False
    """Whether the parameters have memory and values."""

    def share_seed(self) -> str | None:
        """Let all ranks draw rank 0's numbers; return a notice if they would have drawn others. Collective."""
        state = self.values.generator
        if all_equal(b"" if state is None else state.numpy().tobytes()):
            return None
        self.values.generator = broadcast_object(state)
        return "the ranks' random generators differ: the model is initialised with rank 0's"

    def check_values(self, model: nn.Module) -> None:
        """Refuse a model with tensors that would have no values.

        Raises:
            ModelError: Naming them.
        """
        known = self.values.places.keys() - set(self.values.without_values())
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        stored = self.weights if self.weights is not None else ()
        lacking = [name for name, tensor in named if tensor.is_meta and name not in known and name not in stored]
        if lacking:
            raise ModelError(
                "Tensors of a model on meta would have no values: nothing says how they are initialised",
                expected="a way to initialise each of them",
                got=join_names(lacking),
                fix="pass a function that builds the model in place of the model; or weights=FOLDER with trained ones; "
                "or give the modules that hold them a reset_parameters method",
            )
        self._check_sources()

    def _check_sources(self) -> None:
        """Refuse values that are computed from those that stored ones replace: adapters such as DoRA's or PiSSA's."""
        read = [name for name in self.values.places if self._is_stored(name)]
        own = [name for name in self.values.places if not self._is_stored(name)]
        wrong = self.values.computed_from(own, read) if read else []
        if wrong:
            raise ModelError(
                "Tensors that the weights lack are computed from others, which the weights replace",
                expected="initial values of their own",
                got=join_names(wrong),
                fix="load the weights into a model with values, build the rest around it, and pass the model",
            )

    def give_buffers(self, model: nn.Module) -> None:
        """Put real buffers into a model on meta, on the CPU."""
        holders: dict[str, tuple[nn.Module, str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for name, buffer in buffers_of(module).items():
                full = f"{path}.{name}" if path else name
                if buffer is not None and full in self.values.places:
                    holders[full] = module, name
        read = {name for name in holders if self._is_stored(name)}
        found: dict[str, torch.Tensor] = {}
        self.values.compute(holders.keys() - read, lambda name, whole: found.update({name: whole.clone()}), draws=False)
        for name in read:
            assert self.weights is not None
            module, own = holders[name]
            buffer = buffers_of(module)[own]
            assert buffer is not None
            found[name] = self.weights.read(name, _whole(buffer.shape), buffer.dtype)
        shared: dict[int, torch.Tensor] = {}
        for name, value in found.items():
            module, own = holders[name]
            buffers_of(module)[own] = shared.setdefault(id(buffers_of(module)[own]), value)
        self.given |= found.keys()

    def _is_stored(self, name: str) -> bool:
        return self.weights is not None and name in self.weights

    def targets(self, model: nn.Module) -> dict[str, tuple[torch.Tensor, Index]]:
        """Return this rank's part of every tensor without values, and which elements of the whole it has, by name."""
        orders, along = rank_orders(model), functools.cache(index_along)
        return {
            stored_name(name): (local_tensor(tensor), part_of_tensor(tensor, orders.get(id(tensor)), along))
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if stored_name(name) not in self.given
        }

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Fill the tensors of a model that have memory, but no values; each rank its own elements."""
        targets = self.targets(model)
        drawn = [name for name in targets if name in self.values.places and not self._is_stored(name)]
        with _advancing("filling tensors", len(targets)) as advance:
            for name in filter(self._is_stored, targets):
                assert self.weights is not None
                local, index = targets[name]
                if local.device.type == "cpu":
                    self.weights.read(name, index, local.dtype, local)
                else:
                    local.copy_(self.weights.read(name, index, local.dtype))
                advance()

            def deliver(name: str, whole: torch.Tensor) -> None:
                local, index = targets[name]
                local.copy_(_cut(whole, index))
                advance()

            if drawn:
                skipped = [name for name in self.values.places if self._is_stored(name)]
                self.values.compute(drawn, deliver, skipped=skipped)
        self.given |= targets.keys()


@contextlib.contextmanager
def _advancing(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on rank 0's terminal; the function given advances it by one."""
    if rank() != 0 or not sys.stderr.isatty():
        yield lambda: None
        return
    from meshwright.runtime.terminal import progress_bar  # late: most runs have no terminal

    with progress_bar(len(what)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def birth_of(model: nn.Module, values: InitialValues | None, weights: Weights | None) -> Birth | None:
    """Find out how a model gets its values; None if it has them.

    Args:
        model: The plain model.
        values: How it was built, if a function was recorded.
        weights: Stored weights.

    Raises:
        ModelError: When nothing says how a tensor is initialised.
    """
    if values is None and not is_on_meta(model):
        return None if weights is None else Birth(InitialValues(), weights)
    birth = Birth(values or remembered(model) or _reset_of(model), weights)
    birth.check_values(model)
    return birth


def _reset_of(model: nn.Module) -> InitialValues:
    """Return the initial values of a model that was built on meta by others."""
    again = _transformers_build(model)
    if again is not None:
        rebuilt, values = record(again)
        if _shapes(rebuilt) == _shapes(model):
            return values
    return record_reset(model)


def _transformers_build(model: nn.Module) -> Callable[[], nn.Module] | None:
    """Return the build of a transformers model, which needs nothing but the config: also buffers come out right."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(type(model), "from_pretrained") or not hasattr(type(model), "config_class"):
        return None
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # as ``from_config(dtype=…)`` does
        try:
            built: nn.Module = type(model)(config)
        finally:
            torch.set_default_dtype(before)
        return built

    return build


def _shapes(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (p.shape, p.dtype) for name, p in model.named_parameters(remove_duplicate=False)}


# --- Memory


def give_parameters(
    model: nn.Module, birth: Birth, device: torch.device, is_on_host: Callable[[str], bool] = lambda name: False
) -> dict[nn.Parameter, nn.Parameter]:
    """Give a model's parameters memory and values where they lack them; return the new parameters by the old.

    See [Note: models born sharded].

    Args:
        model: As the methods have left it; its layout on this rank is final.
        birth: The sources of its values.
        device: Device of the parameters.
        is_on_host: Whether the sharded parameter of this name lives on the host.
    """
    if birth.is_over:
        return {}
    if is_pretended():
        birth.targets(unwrapped(model))
        birth.is_over = True
        return {}
    new_of = _with_memory(model, device, is_on_host)
    with same_on_every_rank():  # a file that one rank cannot read
        birth.fill(unwrapped(model))
    birth.is_over = True
    birth.values = InitialValues()  # which may hold numbers that the code has read
    return new_of


def _with_memory(
    model: nn.Module, device: torch.device, is_on_host: Callable[[str], bool]
) -> dict[nn.Parameter, nn.Parameter]:
    """Replace all parameters on meta by others with memory, in all places where each stands."""
    new_of: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        own, buffers = parameters_of(module), buffers_of(module)
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_meta:  # of another pipeline rank's parameter, which stays as it is
                buffers[name] = torch.empty_like(buffer, device=device)
        for name, parameter in own.items():
            if parameter is None or not local_tensor(parameter).is_meta:
                continue
            if parameter not in new_of:
                on_host = isinstance(parameter, DTensor) and is_on_host(f"{path}.{name}")
                empty = torch.empty_like(parameter, device="cpu" if on_host else device)
                new_of[parameter] = new = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                vars(new).update(vars(parameter))
            own[name] = new_of[parameter]
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            for each in group.fsdp_params:
                each.reset_sharded_param()
    return new_of


# --- The elements that this rank holds


def part_of_tensor(tensor: torch.Tensor, order: RankOrder | None, along: Callable[..., slice | torch.Tensor]) -> Index:
    """Return which elements of the whole tensor a rank holds, per dim.

    Args:
        tensor: A DTensor, or a plain tensor, which is held whole.
        order: The order of its rows, if ranks hold them in another order than the model has.
        along: :func:`index_along`, or a cached version of it: most tensors of a model have few sizes.
    """
    if not isinstance(tensor, DTensor):
        return _whole(tensor.shape)
    index: list[slice | torch.Tensor] = []
    for dim, size in enumerate(tensor.shape):
        placements = tuple(_along(placement, dim) for placement in tensor.placements)
        own = order if order is not None and order.dim == dim else None
        index.append(along(size, tensor.device_mesh, placements, own))
    return tuple(index)


def _along(placement: Placement, dim: int) -> Placement:
    """Return how a placement lays out the positions along one dim."""
    if not isinstance(placement, Shard | StridedShard) or placement.dim != dim:
        return Replicate()
    if isinstance(placement, StridedShard):
        return StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)


def index_along(
    size: int, mesh: DeviceMesh, placements: tuple[Placement, ...], order: RankOrder | None
) -> slice | torch.Tensor:
    """Return the positions along one dim of a whole tensor that a rank holds."""
    if order is None and all(isinstance(placement, Replicate) for placement in placements):
        return slice(0, size)
    positions = order.source() if order is not None else torch.arange(size)
    laid_out = distribute_tensor(positions.to(mesh.device_type), mesh, placements, src_data_rank=None)
    mine = local_tensor(laid_out).cpu()
    if not mine.numel():
        return slice(0, 0)
    first, last = int(mine[0]), int(mine[-1])
    return slice(first, last + 1) if torch.equal(mine, torch.arange(first, last + 1)) else mine


def _whole(shape: Iterable[int]) -> Index:
    return tuple(slice(0, size) for size in shape)


def _cut(whole: torch.Tensor, index: Index) -> torch.Tensor:
    for dim, part in enumerate(index):
        if isinstance(part, slice):
            whole = whole.narrow(dim, part.start, part.stop - part.start)
        else:
            whole = whole.index_select(dim, part)
    return whole
