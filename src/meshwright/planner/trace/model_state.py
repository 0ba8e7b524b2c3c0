"""Describe a model's blocks and parameters, and the state that its optimizer keeps for them, as plain data.

:class:`OptimizerProbe` finds the states by trial steps; :func:`describe_blocks` writes both down for the simulated
step. :func:`measured_state` counts what a real job holds, in the same classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, Optimizer

from meshwright.cost import Block, Buffer, Parameter, StateTensor, Updating
from meshwright.errors import ConfigError
from meshwright.nn import class_name, class_names, find_blocks
from meshwright.optim import CUTTABLE, average_of, guard_of, local_tensor
from meshwright.optim.guarded_step import is_outer, use_fused
from meshwright.optim.mixed_precision import MASTER
from meshwright.planner.trace.aten_kernels import device_here, storage_of, tensors_in
from meshwright.runtime import preserved_rng
from meshwright.runtime.torch_internals.fake_tensors import TorchDispatchMode
from meshwright.runtime.torch_internals.optim import FOREACH_DEVICES

if TYPE_CHECKING:
    from meshwright.methods import Cut
    from meshwright.methods.pipeline.stage_cut import Outside
    from meshwright.optim import GuardedOptimizer, HostWeights, OffloadedOptimizer, ShardedOptimizer
    from meshwright.planner.trace.op_recording import ModelOps


class OffloadedBytes:
    """The tensors that ``offload`` keeps off the device; none where it is not used.

    Args:
        model: The model as the methods have changed it.
        optimizer: The optimizer with all wrappers.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        weights, inner = _offloaded(guard_of(optimizer))
        self._optimizer, self._inner = optimizer, inner
        self.parameters: set[torch.Tensor] = set(weights.resident) if weights is not None else set()
        """The model's parameters that are on the host."""
        self.copies: set[torch.Tensor] = set(weights.offloaded.values()) if weights is not None else set()
        """Copies of other parameters on the host or on disk."""
        self.gradients = {p.grad for p in (*self.parameters, *self.copies) if p.grad is not None}
        """Gradients of both."""
        self.on_disk = weights is not None and weights.disk is not None

    def states(self, place: Literal["device", "host", "disk"]) -> Iterator[torch.Tensor]:
        """Yield the optimizer's state tensors in one place."""
        for parameter, state in self._optimizer.state.items() if self._optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and self._place(parameter, key) == place:
                    yield value

    def _place(self, parameter: torch.Tensor, key: str) -> str:
        if self._inner is None:
            return "device"
        return self._inner.place_of(parameter, key)


def _offloaded(guard: GuardedOptimizer | None) -> tuple[HostWeights | None, OffloadedOptimizer | None]:
    if guard is None:
        return None, None
    from meshwright.optim import HostWeights, OffloadedOptimizer

    return (
        guard.master if isinstance(guard.master, HostWeights) else None,
        guard.inner if isinstance(guard.inner, OffloadedOptimizer) else None,
    )


# --- The states of an optimizer, and its temporary tensors during an update.

_PROBE_SIZES = (3, 5, 7, 11, 13, 17)  # distinct, so that every dim of a state tensor can be told apart
_MANY = 4  # tiny parameters updated at once, to see what grows with their number

StatesOf = Callable[[nn.Parameter], tuple[StateTensor, ...]]


class OptimizerProbe:
    """Find out what an optimizer keeps for each parameter, and what it holds while it updates one.

    A :class:`~meshwright.optim.ShardedOptimizer` says exactly what it keeps. With any other optimizer, a tiny parameter
    of as many dims, the same dtype and the same hyperparameters is updated once.

    Args:
        optim_func: Builds the optimizer from parameters or groups of them; None keeps nothing.
        device: Device that the run will train on; on a machine without it, tiny parameters live on the CPU.
        params: Parameters or groups that the optimizer will be built over; None: each parameter asked about.
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
        """Return the state tensors of a parameter; of a frozen one, those that exist before the first step."""
        group = self._group_of(parameter)
        if self._optim_func is None or group is None:
            return ()
        kind = (parameter.dim(), parameter.dtype, parameter.requires_grad, _key(group.values))
        if kind not in self._states and not parameter.requires_grad:
            self._states[kind] = _before_steps(self._optim_func, parameter, group, device_here(self._device))
        if kind not in self._states:
            optimizer = _built(self._optim_func, group.of([parameter]))
            if hasattr(optimizer, "state_forms"):
                return _declared(cast("ShardedOptimizer", optimizer), parameter)
            self._states[kind] = _tried(self._optim_func, parameter, group, device_here(self._device))
        return self._states[kind]

    def updating(self, parameter: nn.Parameter) -> Updating | None:
        """Describe the temporary tensors of a parameter's update, as torch's multi-tensor optimizers make them.

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

    @functools.cached_property
    def updates_elements(self) -> bool:
        """Return whether every element is updated by itself, so that states can be offloaded and visit the device."""
        if self._optim_func is None:
            return True
        tiny = _tiny(nn.Parameter(torch.empty(1, 1)), device_here(self._device))
        return type(_built(self._optim_func, [tiny] if self._groups is None else [{"params": [tiny]}])) in CUTTABLE

    def _group_of(self, parameter: nn.Parameter) -> _Group | None:
        """Return the group of a parameter; None where the optimizer does not get it."""
        return _Group(0, None) if self._groups is None else self._groups.get(parameter)


class _Group(NamedTuple):
    """A group of an optimizer: its number, and its hyperparameters as given; None where there are no groups."""

    number: int
    values: dict[str, Any] | None

    def of(self, parameters: list[nn.Parameter]) -> list[Any]:
        """Return the argument with which to build an optimizer of these parameters alone."""
        return parameters if self.values is None else [{**self.values, "params": parameters}]


def _groups(params: Iterable[Any]) -> dict[torch.Tensor, _Group]:
    """Return the group of every parameter; parameters given without one are in the first."""
    groups: dict[torch.Tensor, _Group] = {}
    for number, entry in enumerate(params):
        values = dict(entry) if isinstance(entry, Mapping) else {"params": [entry]}
        listed = values.pop("params")
        group = _Group(number if isinstance(entry, Mapping) else 0, values)
        for member in [listed] if isinstance(listed, torch.Tensor) else listed:
            groups[member[1] if isinstance(member, tuple) else member] = group
    return groups


def _key(values: Mapping[str, Any] | None) -> Hashable:
    """Return a key of hyperparameters; tensors and values without a hash are compared by identity."""

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


def _declared(optimizer: ShardedOptimizer, parameter: nn.Parameter) -> tuple[StateTensor, ...]:
    known = any(parameter is one for group in optimizer.param_groups for one in group["params"])
    if not known or not parameter.requires_grad or not parameter.numel():  # an empty one is passed over
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
    return _states_of(optimizer, tiny)


def _before_steps(
    optim_func: Callable[[Any], Optimizer], parameter: nn.Parameter, group: _Group, device: torch.device
) -> tuple[StateTensor, ...]:
    """Return the states that exist of a frozen parameter; none where the optimizer leaves those out."""
    sizes = _PROBE_SIZES[: parameter.dim()]
    tiny = nn.Parameter(torch.ones(sizes, dtype=parameter.dtype, device=device), requires_grad=False)
    other = nn.Parameter(torch.ones(1, device=device))  # torch has no optimizer of nothing
    return _states_of(_built(optim_func, group.of([tiny, other])), tiny)


def _states_of(optimizer: Optimizer, tiny: nn.Parameter) -> tuple[StateTensor, ...]:
    tensors = [value for value in optimizer.state.get(tiny, {}).values() if isinstance(value, torch.Tensor)]
    return tuple(_like(tiny, tensor.shape, tensor.dtype) for tensor in tensors)


def _tiny(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a small parameter of as many dims, with a gradient."""
    tiny = nn.Parameter(torch.ones(_PROBE_SIZES[: parameter.dim()], dtype=parameter.dtype, device=device))
    tiny.grad = torch.full_like(tiny, 0.5)
    return tiny


def _like(tiny: nn.Parameter, shape: Iterable[int], dtype: torch.dtype) -> StateTensor:
    return StateTensor(_dims_of(tuple(shape), tuple(tiny.shape)), dtype.itemsize, own_type=dtype != tiny.dtype)


def _dims_of(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims of the parameter that a tensor has; dims of size one are none."""
    if math.prod(shape) == math.prod(sizes):  # also where it is flat
        return tuple(range(len(sizes)))
    return tuple(sizes.index(size) for size in shape if size in sizes)


def _watched(
    optim_func: Callable[[Any], Optimizer], parameter: nn.Parameter, group: _Group, device: torch.device
) -> Updating | None:
    optimizer = _built(optim_func, group.of([parameter]))
    ours = hasattr(optimizer, "state_forms") or type(optimizer).__module__.startswith("meshwright.")
    lists = any(each.get("foreach") for each in optimizer.param_groups)
    # torch's fused SGD has no rule for DTensors, so it works on lists where parameters are divided.
    only_divided = device.type == "cuda" and type(optimizer) is SGD and use_fused(optimizer)
    if ours or (device.type == "cpu" and not lists):
        return None
    build = functools.partial(_on_lists, optim_func) if only_divided else optim_func
    (one, alone), (many, all_of_them) = (_held(build, parameter, group, device, number) for number in (1, _MANY))
    together = {tensor: (many[tensor] - one[tensor]) // (_MANY - 1) for tensor in many}
    apart = {tensor: many[tensor] - _MANY * count for tensor, count in together.items()}
    operators = 0 if device.type == "cpu" else (all_of_them - alone) // (_MANY - 1)
    if not many and not operators:
        return None
    held = tuple(Counter(together).elements()), tuple(Counter(apart).elements())
    return Updating(*held, group.number, operators, only_divided)


def _on_lists(optim_func: Callable[[Any], Optimizer], params: list[Any]) -> Optimizer:
    optimizer = optim_func(params)
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["fused"], group["foreach"] = False, True
    return optimizer


def _held(
    optim_func: Callable[[Any], Optimizer], parameter: nn.Parameter, group: _Group, device: torch.device, number: int
) -> tuple[Counter[StateTensor], int]:
    """Return the most that is held for a moment in a later step, and the number of its operators.

    The first step makes the states.
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
    """Let torch's optimizers choose kernels for CPU tensors as they would on a device."""
    asked: Any = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it
    supported = getattr(asked, FOREACH_DEVICES)
    if device.type in supported():
        setattr(asked, FOREACH_DEVICES, lambda: [*supported(), "cpu"])
    try:
        yield
    finally:
        setattr(asked, FOREACH_DEVICES, supported)


# --- Blocks and parameters.


@dataclass(frozen=True)
class Marks:
    """Changes that methods and the optimizer make to single parameters."""

    tensor_dims: Mapping[nn.Parameter, int] = field(default_factory=dict)  # the dim that a tensor axis divides
    experts: Mapping[nn.Parameter, tuple[int | None, int]] = field(default_factory=dict)  # see ``Parameter.expert``
    num_fp8: Mapping[nn.Parameter, int] = field(default_factory=dict)  # layers that multiply with it in 8 bits
    updating: Callable[[nn.Parameter], Updating | None] = lambda parameter: None


@dataclass(frozen=True)
class Described:
    """A model's blocks one by one.

    Args:
        blocks: Blocks with parameters of their own, by path.
        outside: Parameters in no block.
    """

    blocks: tuple[tuple[str, Block], ...]
    outside: tuple[Parameter, ...]


def describe_blocks(
    model: nn.Module,
    states_of: StatesOf,
    marks: Marks | None = None,
    cut: Cut | None = None,
) -> tuple[Block, ...]:
    """List the distinct blocks of a model; what lies in no repeated block is the block ``outside``.

    Args:
        model: A plain module, not wrapped or sharded.
        states_of: Returns what the optimizer keeps for a parameter.
        marks: What methods do to single parameters.
        cut: Where a pipeline axis cuts the model.
    """
    return group_blocks(describe_each(model, states_of, marks, cut), cut)


def describe_each(
    model: nn.Module, states_of: StatesOf, marks: Marks | None = None, cut: Cut | None = None
) -> Described:
    """Describe the parameters of every block, and those outside; arguments as for :func:`describe_blocks`."""
    seen: set[nn.Parameter] = set()
    owners, marks = _owners(model), marks or Marks()
    places = {item.name: item for item in cut.outside} if cut is not None else {}
    blocks = []
    for path, module in find_blocks(model):
        parameters = _describe(module, path + ".", owners, seen, states_of, marks, places)
        if parameters:
            blocks.append((path, Block(class_name(type(module)), 1, parameters)))
    return Described(tuple(blocks), _describe(model, "", owners, seen, states_of, marks, places))


def group_blocks(described: Described, cut: Cut | None = None, ops: ModelOps | None = None) -> tuple[Block, ...]:
    """Group equal blocks, and add the block ``outside``.

    Args:
        described: Blocks one by one.
        cut: Where a pipeline axis cuts the model.
        ops: Ops of the blocks; None: unknown. Those of blocks without parameters of their own are ``outside``.
    """
    entries: dict[Block, list[int]] = {}  # per distinct block, how many of them every pipeline rank holds
    for path, block in described.blocks:
        rank = cut.rank_of(path) if cut is not None else 0
        if ops is not None:
            block = dataclasses.replace(block, ops=ops.by_path.get(path, ()), runs=ops.runs.get(path, 1))
        if rank is not None:
            entries.setdefault(block, [0] * _ranks(cut))[rank] += 1
        else:
            entries.setdefault(block, []).append(1)
    blocks = [
        dataclasses.replace(
            block, count=sum(counts), on_ranks=tuple(counts) if cut is not None and _in_list(block) else ()
        )
        for block, counts in entries.items()
    ]
    apart = ops.outside_of(dict(described.blocks), cut.ranks[-1] if cut is not None else None) if ops else ()
    outside = Block("outside", 1, described.outside, (), apart)
    return (*blocks, *([outside] if described.outside or apart else []))


def _ranks(cut: Cut | None) -> int:
    return cut.num_ranks if cut is not None else 1


def _in_list(block: Block) -> bool:
    return all(parameter.trained_on is None for parameter in block.parameters)


def describe_buffers(model: nn.Module, cut: Cut | None = None) -> tuple[Buffer, ...]:
    """List the buffers of a model, with the pipeline rank of those that lie in a block."""
    return tuple(
        Buffer(b.numel(), b.element_size(), b.is_floating_point(), cut.rank_of(name) if cut is not None else None)
        for name, b in model.named_buffers()
    )


def _owners(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return for every module path the qualified class names of the modules it lies in, itself included."""
    owners: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        above = owners.get(path.rpartition(".")[0], ()) if path else ()
        owners[path] = (*above, *class_names(module)) if path else ()
    return owners


def _describe(
    module: nn.Module,
    prefix: str,
    owners: dict[str, tuple[str, ...]],
    seen: set[nn.Parameter],
    states_of: StatesOf,
    marks: Marks,
    places: Mapping[str, Outside],
) -> tuple[Parameter, ...]:
    described = []
    for name, parameter in module.named_parameters():
        if parameter in seen:  # tied, or already in a block
            continue
        seen.add(parameter)
        place = places.get(prefix + name)
        described.append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                itemsize=parameter.element_size(),
                trainable=parameter.requires_grad,
                floating=parameter.is_floating_point(),
                owners=owners.get((prefix + name).rpartition(".")[0], ()),
                states=states_of(parameter),
                updating=marks.updating(parameter) if parameter.requires_grad else None,
                tensor_dim=marks.tensor_dims.get(parameter),
                expert=marks.experts.get(parameter),
                num_fp8=marks.num_fp8.get(parameter, 0),
                trained_on=place.trained_on if place is not None else None,
                buffer_on=place.buffer_on if place is not None else (),
            )
        )
    return tuple(described)


def measured_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, int]:
    """Return the bytes that this rank really holds, by class.

    Counted are the local parts of parameters, gradients, states, master weights and buffers.
    """
    parameters = list(model.parameters())
    updated = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    own = set(parameters)
    masters = [parameter for parameter in updated if parameter not in own]
    gradients = {p.grad for p in (*parameters, *masters) if p.grad is not None}
    offloaded = OffloadedBytes(model, optimizer)
    average, on_host = average_of(optimizer), offloaded.copies | offloaded.parameters
    averages = average.of if average is not None else {}
    return _by_class(
        parameters=_bytes(p for p in parameters if p not in offloaded.parameters),
        master=_bytes(master for master in masters if master not in offloaded.copies),
        gradients=_bytes(gradients - offloaded.gradients),
        optimizer=_bytes(offloaded.states("device")),
        buffers=_bytes(model.buffers()),
        outer=_outer_bytes(optimizer),
        average=_bytes(averages[p] for p in averages.keys() - on_host),
        host_parameters=_bytes(offloaded.parameters),
        host_master=0 if offloaded.on_disk else _bytes(offloaded.copies),
        host_gradients=_bytes(offloaded.gradients),
        host_optimizer=_bytes(offloaded.states("host")),
        host_average=_bytes(averages[p] for p in averages.keys() & on_host),
        disk_master=_bytes(offloaded.copies) if offloaded.on_disk else 0,
        disk_optimizer=_bytes(offloaded.states("disk")),
    )


def _by_class(**sizes: int) -> dict[str, int]:
    return sizes


def _outer_bytes(optimizer: Optimizer | None) -> int:
    if not is_outer(optimizer):
        return 0
    values = [value for state in optimizer.outer.state.values() for value in state.values()]
    states = [value for value in values if isinstance(value, torch.Tensor)]
    return _bytes([*optimizer.synchronizer.copy.of.values(), *states])


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_tensor, tensors))


# --- The tensors that a piece of code holds for a moment, such as an optimizer's update.


class Form(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its elements."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class PassingTensors(TorchDispatchMode):
    """Follow the tensors that operators make, and the most of them that live at once.

    Args:
        before: Tensors that are there already; where one of them is freed, what takes its place is not counted.
    """

    def __init__(self, before: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.most: tuple[Form, ...] = ()
        self.operators = 0
        """Number of operators that are kernels on a device: neither views nor of scalars alone, such as step counts."""
        self._live: dict[int, tuple[StorageWeakRef, Form, bool]] = {}  # by storage; True: made since
        for tensor in before:
            self._add(tensor, made=False)
        self._let_go: Counter[Form] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_of(tensor)[0] for tensor in tensors_in((args, kwargs))}
        self.operators += not func.is_view and any(tensor.dim() for tensor in tensors_in((args, kwargs, result)))
        self._forget()
        for tensor in tensors_in(result):
            key = storage_of(tensor)[0]
            if key not in self._live and key not in given:
                self._add(tensor, made=True)
        held = Counter(form for _, form, made in self._live.values() if made) - self._let_go
        if sum(form.num_bytes for form in held.elements()) > sum(form.num_bytes for form in self.most):
            self.most = tuple(held.elements())
        return result

    def _add(self, tensor: torch.Tensor, *, made: bool) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._live[storage_of(tensor)[0]] = reference, Form(tuple(tensor.shape), tensor.dtype), made

    def _forget(self) -> None:
        for key, (reference, form, made) in list(self._live.items()):
            if reference.expired():
                del self._live[key]
                self._let_go.update(() if made else (form,))
