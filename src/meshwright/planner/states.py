"""What an optimizer will keep for each parameter: told by our own, found out by a trial step of any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import StateTensor
from meshwright.errors import ConfigError
from meshwright.optim.master import MASTER
from meshwright.runtime import preserved_rng

if TYPE_CHECKING:
    from meshwright.optim import ShardedOptimizer

_PROBE_SIZES = (3, 5, 7, 11, 13, 17)  # distinct, so that every dim of a state tensor can be told apart

StatesOf = Callable[[nn.Parameter], tuple[StateTensor, ...]]


def probe_optimizer(
    optim_func: Callable[[Any], Optimizer] | None, device: torch.device, params: Iterable[Any] | None = None
) -> StatesOf:
    """Finds what an optimizer keeps per parameter.

    A :class:`~meshwright.optim.ShardedOptimizer` says so for each parameter, exactly; of any other, a tiny parameter of
    the same number of dims and dtype, in a group with the same hyperparameters, is updated once.

    Args:
        optim_func: Builds the optimizer from parameters or groups of them; None keeps nothing.
        device: Where tiny parameters live.
        params: The parameters or groups that the optimizer will be built over; None: each parameter asked about.

    Returns:
        A function from a parameter to its state tensors.
    """
    groups = None if params is None else _groups(params)
    known: dict[Hashable, tuple[StateTensor, ...]] = {}

    def states_of(parameter: nn.Parameter) -> tuple[StateTensor, ...]:
        values = None if groups is None else groups.get(parameter)
        if optim_func is None or (groups is not None and values is None):
            return ()
        kind = (parameter.dim(), parameter.dtype, _key(values or {}))
        if kind not in known:
            optimizer = _built(optim_func, _params(parameter, values))
            if hasattr(optimizer, "state_forms"):
                return _told(cast("ShardedOptimizer", optimizer), parameter)
            known[kind] = _tried(optim_func, parameter, values, device)
        return known[kind]

    return states_of


def _groups(params: Iterable[Any]) -> dict[torch.Tensor, dict[str, Any]]:
    """Of every parameter the hyperparameters of its group, as they were given."""
    groups: dict[torch.Tensor, dict[str, Any]] = {}
    for entry in params:
        values = dict(entry) if isinstance(entry, Mapping) else {"params": [entry]}
        listed = values.pop("params")
        for member in [listed] if isinstance(listed, torch.Tensor) else listed:
            groups[member[1] if isinstance(member, tuple) else member] = values
    return groups


def _params(parameter: nn.Parameter, values: Mapping[str, Any] | None) -> list[Any]:
    """What an optimizer of one parameter is built over: the parameter, or a group with these hyperparameters."""
    return [parameter] if values is None else [{**values, "params": [parameter]}]


def _key(values: Mapping[str, Any]) -> Hashable:
    """Tells hyperparameters apart; those that have no hash, and tensors, by who they are."""

    def known_by(value: Any) -> Hashable:
        try:
            hash(value)
        except TypeError:
            return id(value)
        return id(value) if isinstance(value, torch.Tensor) else value

    return tuple(sorted((name, type(value).__name__, known_by(value)) for name, value in values.items()))


def _built(optim_func: Callable[[Any], Optimizer], params: list[Any]) -> Optimizer:
    with preserved_rng():
        optimizer = optim_func(params)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "optim_func did not return an optimizer",
            expected="a torch.optim.Optimizer",
            got=type(optimizer).__name__,
            fix="pass a class such as torch.optim.AdamW, or a function (parameters, **optim_args) -> Optimizer",
        )
    return optimizer


def _told(optimizer: ShardedOptimizer, parameter: nn.Parameter) -> tuple[StateTensor, ...]:
    known = any(parameter is one for group in optimizer.param_groups for one in group["params"])
    if not known or not parameter.numel():  # an empty one is passed over
        return ()
    states = []
    for name, form in optimizer.state_forms(parameter).items():
        pairs = list(zip(form.shape, form.dims, strict=True))
        dims = tuple(dim for size, dim in pairs if dim is not None and size == parameter.shape[dim])
        # A dim with one element for many (of 8-bit blocks) counts as held whole.
        apart = math.prod(size for size, dim in pairs if dim is None or size != parameter.shape[dim])
        states.append(StateTensor(dims, form.dtype.itemsize, apart, own_type=True, only_for_half=name == MASTER))
    if parameter.dtype == torch.float32 and optimizer.param_groups[0]["half_update"] == "master":
        states.append(StateTensor(tuple(range(parameter.dim())), 4, own_type=True, only_for_half=True))
    return tuple(states)


def _tried(
    optim_func: Callable[[Any], Optimizer],
    parameter: nn.Parameter,
    values: Mapping[str, Any] | None,
    device: torch.device,
) -> tuple[StateTensor, ...]:
    sizes = _PROBE_SIZES[: parameter.dim()]
    with preserved_rng(), torch.enable_grad():
        tiny = nn.Parameter(torch.ones(sizes, dtype=parameter.dtype, device=device))
        tiny.grad = torch.full_like(tiny, 0.5)
        optimizer = _built(optim_func, _params(tiny, values))
        optimizer.step()
    tensors = [value for value in optimizer.state[tiny].values() if isinstance(value, torch.Tensor)]
    return tuple(
        StateTensor(_dims_of(tensor.shape, sizes), tensor.element_size(), own_type=tensor.dtype != tiny.dtype)
        for tensor in tensors
    )


def _dims_of(shape: Iterable[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Which dims of the parameter a state tensor has; dims of size one are none."""
    return tuple(sizes.index(size) for size in shape if size in sizes)
