"""What an optimizer will keep for each parameter, and what it runs and holds while it updates it.

Our own tell; of any other it is found out by trial steps.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import StateTensor, Updating
from meshwright.errors import ConfigError
from meshwright.optim.master import MASTER
from meshwright.planner.passing import PassingTensors
from meshwright.planner.profile.device import device_here
from meshwright.runtime import preserved_rng

if TYPE_CHECKING:
    from meshwright.optim import ShardedOptimizer

_PROBE_SIZES = (3, 5, 7, 11, 13, 17)  # distinct, so that every dim of a state tensor can be told apart
_MANY = 4  # tiny parameters that are updated at once: what grows with them is held together

StatesOf = Callable[[nn.Parameter], tuple[StateTensor, ...]]


class OptimizerProbe:
    """Finds what an optimizer keeps per parameter, when it is called, and what it holds while it updates one.

    A :class:`~meshwright.optim.ShardedOptimizer` says what it keeps, exactly; of any other, a tiny parameter of
    the same number of dims and dtype, in a group with the same hyperparameters, is updated once.

    Args:
        optim_func: Builds the optimizer from parameters or groups of them; None keeps nothing.
        device: That the run will train on; on a machine without it tiny parameters live on the CPU.
        params: The parameters or groups that the optimizer will be built over; None: each parameter asked about.
    """

    def __init__(
        self,
        optim_func: Callable[[Any], Optimizer] | None,
        device: torch.device,
        params: Iterable[Any] | None = None,
    ) -> None:
        self._optim_func, self._device = optim_func, device
        self._groups = None if params is None else _groups(params)
        self._states: dict[Hashable, tuple[StateTensor, ...]] = {}
        self._updating: dict[Hashable, Updating | None] = {}

    def __call__(self, parameter: nn.Parameter) -> tuple[StateTensor, ...]:
        """The state tensors of a parameter."""
        group = self._group_of(parameter)
        if self._optim_func is None or group is None:
            return ()
        kind = (parameter.dim(), parameter.dtype, _key(group.values))
        if kind not in self._states:
            optimizer = _built(self._optim_func, group.of([parameter]))
            if hasattr(optimizer, "state_forms"):
                return _told(cast("ShardedOptimizer", optimizer), parameter)
            self._states[kind] = _tried(self._optim_func, parameter, group, device_here(self._device))
        return self._states[kind]

    def updating(self, parameter: nn.Parameter) -> Updating | None:
        """What is held of a parameter for a moment as it is updated, such as torch's multi-tensor optimizers do.

        Tiny parameters are updated a few times. Our own optimizers update in pieces of bounded size, which are not
        counted; nor is what a CPU holds of one parameter after the other.
        """
        group = self._group_of(parameter)
        if self._optim_func is None or group is None:
            return None
        kind = (parameter.dim(), parameter.dtype, group.number, _key(group.values))
        if kind not in self._updating:
            self._updating[kind] = _watched(self._optim_func, parameter, group, self._device)
        return self._updating[kind]

    def _group_of(self, parameter: nn.Parameter) -> _Group | None:
        """None: the optimizer is not given the parameter."""
        return _Group(0, None) if self._groups is None else self._groups.get(parameter)


class _Group(NamedTuple):
    """Of an optimizer: its number, and the hyperparameters as they were given; None: there are no groups."""

    number: int
    values: dict[str, Any] | None

    def of(self, parameters: list[nn.Parameter]) -> list[Any]:
        """What an optimizer of these parameters alone is built over."""
        return parameters if self.values is None else [{**self.values, "params": parameters}]


def _groups(params: Iterable[Any]) -> dict[torch.Tensor, _Group]:
    """The group of every parameter; those that are given without any are in the first."""
    groups: dict[torch.Tensor, _Group] = {}
    for number, entry in enumerate(params):
        values = dict(entry) if isinstance(entry, Mapping) else {"params": [entry]}
        listed = values.pop("params")
        group = _Group(number if isinstance(entry, Mapping) else 0, values)
        for member in [listed] if isinstance(listed, torch.Tensor) else listed:
            groups[member[1] if isinstance(member, tuple) else member] = group
    return groups


def _key(values: Mapping[str, Any] | None) -> Hashable:
    """Tells hyperparameters apart; those that have no hash, and tensors, by who they are."""

    def known_by(value: Any) -> Hashable:
        try:
            hash(value)
        except TypeError:
            return id(value)
        return id(value) if isinstance(value, torch.Tensor) else value

    return tuple(sorted((name, type(value).__name__, known_by(value)) for name, value in (values or {}).items()))


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
    group: _Group,
    device: torch.device,
) -> tuple[StateTensor, ...]:
    with preserved_rng(), torch.enable_grad():
        tiny = _tiny(parameter, device)
        optimizer = _built(optim_func, group.of([tiny]))
        optimizer.step()
    tensors = [value for value in optimizer.state[tiny].values() if isinstance(value, torch.Tensor)]
    return tuple(_like(tiny, tensor.shape, tensor.dtype) for tensor in tensors)


def _tiny(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of as many dims, with a gradient."""
    tiny = nn.Parameter(torch.ones(_PROBE_SIZES[: parameter.dim()], dtype=parameter.dtype, device=device))
    tiny.grad = torch.full_like(tiny, 0.5)
    return tiny


def _like(tiny: nn.Parameter, shape: Iterable[int], dtype: torch.dtype) -> StateTensor:
    return StateTensor(_dims_of(tuple(shape), tuple(tiny.shape)), dtype.itemsize, own_type=dtype != tiny.dtype)


def _dims_of(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Which dims of the parameter a tensor has; dims of size one are none."""
    if math.prod(shape) == math.prod(sizes):  # also where it is flat
        return tuple(range(len(sizes)))
    return tuple(sizes.index(size) for size in shape if size in sizes)


def _watched(
    optim_func: Callable[[Any], Optimizer], parameter: nn.Parameter, group: _Group, device: torch.device
) -> Updating | None:
    optimizer = _built(optim_func, group.of([parameter]))
    ours = hasattr(optimizer, "state_forms") or type(optimizer).__module__.startswith("meshwright.")
    lists = any(each.get("foreach") for each in optimizer.param_groups)
    if ours or (device.type == "cpu" and not lists):
        return None
    (one, alone), (many, all_of_them) = (_held(optim_func, parameter, group, device, number) for number in (1, _MANY))
    together = {tensor: (many[tensor] - one[tensor]) // (_MANY - 1) for tensor in many}
    apart = {tensor: many[tensor] - _MANY * count for tensor, count in together.items()}
    operators = 0 if device.type == "cpu" else (all_of_them - alone) // (_MANY - 1)
    if not many and not operators:
        return None
    return Updating(tuple(Counter(together).elements()), tuple(Counter(apart).elements()), group.number, operators)


def _held(
    optim_func: Callable[[Any], Optimizer], parameter: nn.Parameter, group: _Group, device: torch.device, number: int
) -> tuple[Counter[StateTensor], int]:
    """The most that is held for a moment in the second step or the third, and the operators of one.

    The first step has made the states.
    """
    with preserved_rng(), torch.enable_grad(), _choosing_as_on(device):
        tiny = [_tiny(parameter, device_here(device)) for _ in range(number)]
        optimizer = _built(optim_func, group.of(tiny))
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        before = [*tiny, *(each.grad for each in tiny), *states]
        with PassingTensors(each for each in before if isinstance(each, torch.Tensor)) as passing:
            optimizer.step()
            optimizer.step()
    found = (_like(tiny[0], form.shape, form.dtype) for form in passing.most)
    return Counter(each for each in found if each.dims), passing.operators // 2


@contextlib.contextmanager
def _choosing_as_on(device: torch.device) -> Iterator[None]:
    """Lets torch's optimizers choose kernels for tensors of the CPU as they would for those of a device."""
    asked: Any = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it
    supported = asked._get_foreach_kernels_supported_devices
    if device.type in supported():
        asked._get_foreach_kernels_supported_devices = lambda: [*supported(), "cpu"]
    try:
        yield
    finally:
        asked._get_foreach_kernels_supported_devices = supported
