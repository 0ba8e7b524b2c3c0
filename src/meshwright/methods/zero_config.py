"""Configure and cost ZeRO without a job: the shared keys, the units gathered together, and the simulated step.

:mod:`~meshwright.methods.zero` applies them to a job. A plan needs only this file: neither FSDP2 nor a process group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, field_validator, model_validator
from torch import nn

from meshwright.cost import (
    AVERAGING,
    Block,
    Parameter,
    Placement,
    Step,
    Traffic,
    axis_parts,
    element_bytes,
    gather_traffic,
    gathered_bytes,
    gathered_itemsize,
    names_class,
    padded_bytes,
    reduce_traffic,
    reduced_bytes,
)
from meshwright.errors import ModelError, StrategyError, join_names
from meshwright.methods.base import ClassReferences, Conflict, DType, Job, Method, Phase, itemsize
from meshwright.methods.planner_hooks import Role
from meshwright.nn import check_forward, class_name, find_blocks, modules_of, outermost
from meshwright.runtime.torch_internals.modules import AnyBatchOrInstanceNorm
from meshwright.strategy import Strategy

_RENAMED = {"fsdp_wrap_params_outmost": "wrap_trainable_outmost"}

# Arguments of FSDP1, DeepSpeed and ATorch that would change the result or the memory of a rank if they were ignored.
_FOREIGN = {
    "sharding_strategy": "name the method instead: zero2 is SHARD_GRAD_OP, fsdp is FULL_SHARD, and a 'data' beside a "
    "'zero' axis in parallel_mode is HYBRID_SHARD",
    "auto_wrap_policy": "name the classes with atorch_wrap_cls, or set atorch_size_based_min_num_params",
    "ignored_modules": "name their classes with atorch_ignored_cls",
    "ignored_states": "name the classes of their modules with atorch_ignored_cls",
    "param_init_fn": "give the model with its parameters initialised on the CPU; they are sharded from there",
    "cpu_offload": "leave it out and add the method offload: ('offload', {'parameters': 1.0})",
    "device_id": "leave it out; the device follows from the local rank",
    "device_mesh": "leave it out; the mesh follows from parallel_mode",
    "process_group": "leave it out; the groups follow from parallel_mode",
    "static_loss_scale": "leave it out; amp_native and half find the loss scale of fp16, and bf16 needs none",
    "dynamic_loss_args": "leave it out; amp_native and half find the loss scale of fp16, and bf16 needs none",
    "clip_grad": "leave it out and add the method grad_clip: ('grad_clip', 1.0)",
    "allgather_bucket_size": "leave it out; the modules of atorch_wrap_cls are gathered one at a time",
    "reduce_bucket_size": "leave it out; the modules of atorch_wrap_cls are reduced one at a time",
    "use_local_sgd": "leave it out and add the method outer: ('outer', {'rule': 'local_sgd'})",
    "intra_load": "leave it out; a CheckpointStore reads each rank's part alone",
}

# Arguments that say how an engine should do what FSDP2 always does: accepted, stored, and reported to change nothing.
_INERT = {
    "limit_all_gathers": "FSDP2 always limits the all-gathers in flight",
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "backward_prefetch": "FSDP2 always prefetches the next block in backward",
    "use_ds_zero": "Meshwright has one implementation of ZeRO, on FSDP2",
    "not_use_fsdp": "Meshwright has one implementation of ZeRO, on FSDP2",
}


class MixedPrecision(BaseModel):
    """Precision of gathered parameters and of gradient reduction under sharding; None keeps the parameter's own.

    Gradients are reduced in ``param_dtype`` where no ``reduce_dtype`` is given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    param_dtype: DType | None = None
    reduce_dtype: DType | None = None
    buffer_dtype: DType | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_torch(cls, value: Any) -> Any:
        """Accept FSDP1's ``MixedPrecision`` and FSDP2's ``MixedPrecisionPolicy``, too."""
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        changed = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        changed = {name: own for name, own in changed.items() if own != getattr(type(value)(), name)}
        beside = sorted(changed.keys() - cls.model_fields.keys())
        if beside:
            raise ValueError(f"precisions alone; without {', '.join(beside)}")
        return changed


def not_beside(*names: str) -> tuple[Conflict, ...]:
    """Return the conflicts with other methods that shard."""
    reason = "each decides how parameters are sharded"
    fix = "keep one of them: zero1 communicates least, fsdp holds least"
    return tuple(Conflict(other=name, reason=reason, fix=fix) for name in names)


class ZeroMethod(Method):
    """A method that shards, with the keys that all of them have.

    Short forms: None, or ATorch's ``{"use_ds_zero", True}``.
    """

    phase: ClassVar[Phase] = Phase.SHARD
    shards: ClassVar[bool] = True
    role: ClassVar[Role | None] = Role.SHARDING
    foreign_keys: ClassVar[Mapping[str, str]] = _FOREIGN
    foreign_off: ClassVar[Mapping[str, tuple[Any, ...]]] = {"device_id": (None,)}

    atorch_wrap_cls: ClassReferences | None = None
    """Classes whose modules are gathered one at a time; None: the model's repeated blocks."""
    atorch_size_based_min_num_params: int | None = None
    """Instead of classes: gather modules of at least this many parameters one at a time."""
    atorch_ignored_cls: ClassReferences = ()
    """Classes whose parameters stay whole on every rank; their gradients are averaged."""
    wrap_trainable_outmost: bool = False
    """Gather all trainable modules as one group, once per step (LoRA: many small trainable modules)."""
    forward_prefetch: bool = True
    """Start gathering the next block while one computes."""
    sync_module_states: bool = True
    """Take parameters and buffers over from rank 0 before sharding."""
    mixed_precision: MixedPrecision | None = None
    """Overrides the precision that amp_native or half asks for."""
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    backward_prefetch: str | None = None
    use_ds_zero: bool | None = None
    not_use_fsdp: bool | None = None

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read ATorch's set literal, in which a key stands beside True."""
        if isinstance(raw, set | frozenset) and raw <= {True, "use_ds_zero", "not_use_fsdp"}:
            return {key: True for key in raw if isinstance(key, str)}
        return super().from_short(raw)

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Rename ATorch's other spelling and refuse what FSDP2 cannot do."""
        keys = {_RENAMED.get(key, key): value for key, value in keys.items()}
        if keys.get("atorch_wrap_cls") is not None and keys.get("atorch_size_based_min_num_params") is not None:
            raise StrategyError(
                f"{cls.method_name}: modules are to be wrapped by class and by size",
                expected="atorch_wrap_cls or atorch_size_based_min_num_params",
                got="both",
                fix="leave one of them out",
            )
        return keys

    def check(self, job: Job) -> None:
        """Refuse models that FSDP2 cannot shard."""
        units_of(self, job.model, job.strategy, dict(job.axes))

    @field_validator("backward_prefetch", mode="before")
    @classmethod
    def _enum_name(cls, value: Any) -> Any:
        return getattr(value, "name", value)  # torch's BackwardPrefetch.BACKWARD_PRE

    def notices(self) -> list[str]:
        """Return a notice on each accepted key that changes nothing."""
        return [
            f"{self.method_name}: {key}={getattr(self, key)!r} changes nothing; {why}"
            for key, why in _INERT.items()
            if getattr(self, key) is not None
        ] + self._buffers_notice()

    def _buffers_notice(self) -> list[str]:
        asked = self.mixed_precision
        if asked is None or asked.buffer_dtype in (None, asked.param_dtype):
            return []
        return [f"{self.method_name}: mixed_precision.buffer_dtype changes nothing; FSDP2 leaves buffers as they are"]


# --- Units: which modules are gathered together, and which parameters must stay whole

KEPT_IN_HALF = class_name(AnyBatchOrInstanceNorm)
"""Modules with running statistics, which stay whole and in fp32 where units are gathered in half precision."""

_REDUCED_TOGETHER = ("pipeline", "expert")  # beside these axes no gradient can be averaged apart from the others
_CONTAINERS = (
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
)  # without a forward, so that FSDP2 cannot hook them


@dataclass(frozen=True)
class Units:
    """Modules that FSDP2 gathers as units, outer before inner, and parameters that stay whole."""

    modules: list[tuple[str, nn.Module]]
    trainable: list[list[nn.Module]]  # gathered together, by dtype, when wrap_trainable_outmost asks for it
    apart: list[tuple[str, list[nn.Module]]]  # gathered together: of another dtype than the unit at this path
    ignored: set[nn.Parameter]
    kept: set[nn.Parameter] = field(default_factory=set)  # those of ``ignored`` that no key asks for


def units_of(config: ZeroMethod, model: nn.Module, strategy: Strategy, sizes: Mapping[str, int]) -> Units:
    """Choose the units of a config in a strategy, and refuse those that the mesh does not allow.

    Args:
        config: The method's keys.
        model: Plain, or as the methods before have left it.
        strategy: Resolved; it says in which precision units are gathered.
        sizes: Of the mesh axes.

    Raises:
        ModelError: As :func:`choose_units` does, and for parameters that must stay whole beside an axis that does not
            allow it.
    """
    units = choose_units(config, model, in_half=_gathers_in_half(config, strategy))
    beside = [axis for axis in _REDUCED_TOGETHER if sizes.get(axis, 1) > 1]
    if units.kept and beside:
        raise ModelError(
            f"{config.method_name}: some parameters have to stay whole, which does not go together with {beside[0]}",
            expected="no scalar parameters, and under mixed precision no batch normalisation",
            got=join_names(name for name, parameter in model.named_parameters() if parameter in units.kept),
            fix=f"leave out the sharding method or the axis {beside[0]}, or make scalars tensors of shape (1,)",
        )
    return units


def choose_units(config: ZeroMethod, model: nn.Module, *, in_half: bool = False) -> Units:
    """Find the units that a config asks for, and check that FSDP2 can shard them.

    Scalars and empty parameters stay whole: there is nothing to divide. So do the few parameters of batch
    normalisation where units are gathered in half precision: their running statistics stay in fp32, and torch
    normalises in one precision.

    Raises:
        ModelError: For classes that are not in the model, and parameters shared between units, of dtypes that cannot
            be told apart by module, or with sparse gradients.
    """
    ignored_modules = list(outermost(modules_of(model, config.atorch_ignored_cls, method=config.method_name)))
    asked = {parameter for _, module in ignored_modules for parameter in module.parameters()}
    kept = _kept_whole(model, in_half=in_half) - asked
    ignored = asked | kept
    units = [
        (path, module)
        for path, module in _candidates(config, model)
        if any(parameter not in ignored for parameter in module.parameters())
    ]
    trainable = _trainable_modules(model, ignored) if config.wrap_trainable_outmost else []
    _check_parameters(config.method_name, model, units, ignored)
    together = _by_dtype(trainable)
    gathered = [*units, *(("", module) for module in trainable)]
    return Units(units, together, _modules_apart(config.method_name, model, gathered, ignored), ignored, kept)


def _gathers_in_half(config: ZeroMethod, strategy: Strategy) -> bool:
    """Return whether parameters are gathered in half precision beside fp32 buffers; ``half`` casts these too."""
    asked = config.mixed_precision.param_dtype if config.mixed_precision is not None else None
    lower = asked != "fp32" if asked is not None else "amp_native" in strategy
    return lower and "half" not in strategy


def _kept_whole(model: nn.Module, *, in_half: bool) -> set[nn.Parameter]:
    kept = {parameter for parameter in model.parameters() if not parameter.shape or not parameter.numel()}
    for module in model.modules() if in_half else ():
        if isinstance(module, AnyBatchOrInstanceNorm):
            kept.update(module.parameters())
    return kept


def unit_of(name: str, blocks: list[str]) -> str:
    """Return the path of the block that contains a parameter; ``""`` if none does."""
    return next((path for path in blocks if name.startswith(path + ".")), "")


def _candidates(config: ZeroMethod, model: nn.Module) -> list[tuple[str, nn.Module]]:
    if config.atorch_wrap_cls is not None:
        named = modules_of(model, config.atorch_wrap_cls, method=config.method_name)
        check_forward(named, method=config.method_name)
        return named
    if config.atorch_size_based_min_num_params is not None:
        found: list[tuple[str, nn.Module]] = []
        _by_size("", model, config.atorch_size_based_min_num_params, found)
        return [(path, module) for path, module in reversed(found) if path]
    return find_blocks(model)


def _by_size(path: str, module: nn.Module, minimum: int, found: list[tuple[str, nn.Module]]) -> int:
    """Collect modules, inner first, with ``minimum`` parameters not yet in a unit; return how many are left over."""
    left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    for name, child in module.named_children():
        left += _by_size(f"{path}.{name}" if path else name, child, minimum, found)
    if left >= minimum and not isinstance(module, _CONTAINERS):
        found.append((path, module))
        return 0
    return left


def _trainable_modules(model: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Return the outermost modules all of whose parameters train, in a model in which some are frozen."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return []
    found = []
    for path, module in model.named_modules():
        parameters = list(module.parameters())
        trains = parameters and all(p.requires_grad and p not in ignored for p in parameters)
        if path and trains and not isinstance(module, _CONTAINERS):
            found.append((path, module))
    return [module for _, module in outermost(found)]


def _by_dtype(modules: list[nn.Module]) -> list[list[nn.Module]]:
    groups: dict[frozenset[torch.dtype], list[nn.Module]] = {}
    for module in modules:
        groups.setdefault(frozenset(parameter.dtype for parameter in module.parameters()), []).append(module)
    return list(groups.values())


def _check_parameters(
    method: str, model: nn.Module, units: list[tuple[str, nn.Module]], ignored: set[nn.Parameter]
) -> None:
    _check_dense(method, model, ignored)
    home: dict[nn.Parameter, str] = {}
    first = {module: path for path, module in units}  # one that is listed several times is one unit
    paths = {path: first[each] for path, each in model.named_modules(remove_duplicate=False) if each in first}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = [path for path in paths if name.startswith(path + ".")]
        unit = paths[max(inside, key=len)] if inside else ""
        if parameter not in ignored and home.setdefault(parameter, unit) != unit:
            raise ModelError(
                f"{method}: a parameter is shared between modules that are gathered separately",
                expected="tied parameters within one unit, or all of them outside the units",
                got=f"{name} in {unit or 'the model'} and in {home[parameter] or 'the model'}",
                fix="name classes with atorch_wrap_cls that hold both, or neither",
            )


def _check_dense(method: str, model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Refuse sparse gradients: FSDP2 packs gradients into one dense buffer."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight not in ignored:
            raise ModelError(
                f"{method}: a layer has sparse gradients, which cannot be sharded",
                expected="dense gradients",
                got=f"{path or type(module).__name__} with sparse=True",
                fix="build it with sparse=False, or train without a method that shards",
            )


# [Note: units of one dtype] FSDP2 packs the gradients of a unit into one buffer, and casts all parameters of a unit in
# one way. Frozen parameters are gathered as bytes beside any others: adapters over a bf16 or int8 base need nothing.
# But parameters that train and differ in dtype, or are complex beside real ones, cannot share a unit. Modules within
# the unit that hold one dtype alone then make units of their own, one per dtype.


def _modules_apart(
    method: str, model: nn.Module, modules: list[tuple[str, nn.Module]], ignored: set[nn.Parameter]
) -> list[tuple[str, list[nn.Module]]]:
    """Return modules that make units of their own, with the path of the unit that they lie in.

    See [Note: units of one dtype].

    Raises:
        ModelError: When modules cannot be found so that every unit has one dtype.
    """
    inner, found = {module for _, module in modules}, []
    for path, module in [("", model), *modules]:
        own = _parameters_of(module, inner - {module}) - ignored
        if _fit_together(own):
            continue
        sizes: dict[torch.dtype, int] = {}
        for parameter in own:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        for main in sorted(sizes, key=lambda dtype: -sizes[dtype]):
            apart = _of_one_dtype(module, main, inner, ignored)
            left = own - {parameter for each in apart.values() for one in each for parameter in one.parameters()}
            if _fit_together(left) and not any(_is_used_outside(model, each) for each in apart.values()):
                found += [(path, each) for each in apart.values()]
                break
        else:
            names = [name for name, parameter in model.named_parameters() if parameter in own]
            raise ModelError(
                f"{method}: parameters of one unit have different dtypes",
                expected="one dtype of the parameters that train, or modules within the unit that hold one dtype each",
                got=f"{join_names(sorted(map(str, sizes)))} in {path or 'the model outside its blocks'}: "
                f"{join_names(names)}",
                fix="cast them alike, for example with model.float(), or keep a class whole with atorch_ignored_cls",
            )
    return found


def _is_used_outside(model: nn.Module, modules: list[nn.Module]) -> bool:
    """Return whether parameters of some modules are tied to modules outside of these."""
    inside = {each for module in modules for each in module.modules()}
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return any(
        each not in inside and not parameters.isdisjoint(each.parameters(recurse=False)) for each in model.modules()
    )


def _parameters_of(module: nn.Module, without: Collection[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of a module that do not lie in some of its submodules."""
    found = set(module.parameters(recurse=False))
    for child in module.children():
        if child not in without:
            found |= _parameters_of(child, without)
    return found


def _fit_together(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether parameters can be one unit: those that train have one dtype, no other is complex."""
    every, trained = {p.dtype for p in parameters}, {p.dtype for p in parameters if p.requires_grad}
    return len(trained) <= 1 and (len(every) <= 1 or not any(dtype.is_complex for dtype in every))


def _of_one_dtype(
    module: nn.Module, main: torch.dtype, inner: Collection[nn.Module], ignored: set[nn.Parameter]
) -> dict[torch.dtype, list[nn.Module]]:
    """Return the outermost modules inside one that hold another dtype alone, by dtype."""
    found: dict[torch.dtype, list[nn.Module]] = {}
    for child in module.children():
        if child in inner:
            continue
        parameters = set(child.parameters())
        dtypes = {parameter.dtype for parameter in parameters}
        is_alone = len(dtypes) == 1 and main not in dtypes and not parameters & ignored
        if is_alone and not isinstance(child, _CONTAINERS) and not any(each in inner for each in child.modules()):
            found.setdefault(dtypes.pop(), []).append(child)
        elif parameters:
            for dtype, modules in _of_one_dtype(child, main, inner, ignored).items():
                found.setdefault(dtype, []).extend(modules)
    return found


# --- The dim that is cut.

_STACKED = 3  # dims


def shard_dim(shape: Sequence[int], parts: int) -> int:
    """Return the dim along which a parameter is sharded.

    FSDP2 cuts dim 0, the last ranks' shards being smaller or empty. Of stacked matrices (experts: number, in, out) with
    fewer of them than ranks, that leaves whole matrices to some ranks and nothing to all others, and pads what is
    gathered and reduced to as many matrices as there are ranks. So these are cut inside of the matrices, where that
    gives equal parts. FSDP2 copies them once more as they are gathered and reduced.

    Args:
        shape: Of the parameter, or of the part that a tensor or expert axis leaves to a rank.
        parts: Number of ranks.
    """
    if len(shape) != _STACKED or shape[0] >= parts:
        return 0
    return next((dim for dim in range(1, _STACKED) if shape[dim] and shape[dim] % parts == 0), 0)


# --- ``cost``

_HALF_BYTES = 2

Gathers = Literal["once", "twice", "nearby"]
"""``once``: a step gathers everything once. ``twice``: every micro-batch gathers blocks in forward and in backward.
``nearby``: in backward over a smaller group of ranks, always in whole numbers."""


def shard_cost(config: ZeroMethod, step: Step, *, gathers: Gathers, reduce_once: bool) -> Step:
    """Shard the simulated step: the twin of :func:`meshwright.methods.zero.shard`.

    Args:
        config: The method's keys.
        step: The step; it is sharded over its ``shard_axis``.
        gathers: How often blocks are gathered.
        reduce_once: Whether gradients are reduced once per step instead of once per micro-batch.
    """
    if step.stages is not None:
        gathers, reduce_once = "once", True
    step, parts = _with_precision(config, step), step.size(step.shard_axis)
    beside_wider_buffers = step.compute_itemsize == _HALF_BYTES and step.buffers_itemsize is None
    whole = (KEPT_IN_HALF,) if beside_wider_buffers else ()
    step = step.replace(
        blocks=tuple(_marked(config, block, whole, 1 if gathers == "nearby" else parts) for block in step.blocks),
        parameters=Placement(step.shard_axis, step.parameters.itemsize),
        gradients=Placement(step.shard_axis, step.gradients.itemsize),
        optimizer=Placement(step.shard_axis, step.optimizer.itemsize),
        master=Placement(step.shard_axis) if step.master is not None else None,
        gathered="model" if gathers == "once" else "unit",
        whole_gradients=reduce_once,
    )
    return _with_traffic(step, gathers, reduce_once)


def _with_precision(config: ZeroMethod, step: Step) -> Step:
    asked = config.mixed_precision
    if asked is None:
        return step
    param = itemsize(asked.param_dtype) if asked.param_dtype else step.compute_itemsize
    # FSDP2 reduces in the gathered precision unless told otherwise.
    reduce = itemsize(asked.reduce_dtype) if asked.reduce_dtype else step.reduce_itemsize or param
    return step.replace(compute_itemsize=param, reduce_itemsize=reduce)


def _marked(config: ZeroMethod, block: Block, whole: tuple[str, ...], parts: int) -> Block:
    """Return the block with scalars, and the parameters of some classes, marked as whole; and what is cut of others.

    Args:
        config: The method's keys.
        block: A block.
        whole: Classes whose parameters stay whole.
        parts: Number of ranks among which parameters may be cut along another dim than 0; 1: none.
    """
    references = (*config.atorch_ignored_cls, *whole)

    def marked(parameter: Parameter) -> Parameter:
        indivisible = not parameter.shape or not parameter.numel
        ignored = indivisible or any(names_class(reference, parameter.owners) for reference in references)
        dim = shard_dim(parameter.shape, parts)
        return dataclasses.replace(parameter, sharded=parameter.sharded and not ignored, shard_dim=dim)

    return dataclasses.replace(block, parameters=tuple(map(marked, block.parameters)))


def _with_traffic(step: Step, gathers: Gathers, reduce_once: bool) -> Step:
    axis = step.shard_axis or "data"
    micro_batches = step.num_micro_batches
    trained = [(count, p) for count, p in step.every_parameter() if p.sharded and p.trainable]
    gradients = sum(count * reduced_bytes(step, p) for count, p in trained)
    whole = sum(
        count * p.numel * element_bytes(p, step.held_itemsize(p))
        for count, p in step.every_parameter()
        if p.trainable and not p.sharded and p.expert is None
    )
    units = sum(block.count for block in step.blocks)  # each is reduced in one collective
    reduced = 1 if reduce_once else micro_batches
    step = step.send(
        *_gathers(step, axis, gathers),
        *reduce_traffic(step, axis, gradients * reduced, calls=units * reduced, each=not reduce_once),
        *(_reduced_again(step, axis) if reduce_once else ()),
    )
    step = step.send(*_beside(step, axis, trained))
    return step.send(
        Traffic("all_reduce", axis, whole * micro_batches, "backward", calls=micro_batches, per_micro_batch=True)
    )


def _gathers(step: Step, axis: str, gathers: Gathers) -> tuple[Traffic, ...]:
    """Return the gathers of a step. Blocks are gathered as often as they run.

    A block that stays whole through a step is freed by each of its backwards all the same.
    """
    again, each = gathers != "once", gathers == "twice"
    ahead = [(block, block.count * (block.runs * step.num_micro_batches if again else 1)) for block in step.blocks]
    behind = ahead if again else [(block, block.count * (block.runs - 1)) for block in step.blocks]
    inside = [(block, number) for block, number in behind if block.name != "outside"]
    whole = functools.partial(gathered_bytes, step)
    calls = sum(number for _, number in ahead)
    forward = gather_traffic(step, axis, _sharded_bytes(ahead, whole), "forward", calls=calls, each=each)
    calls = sum(number for _, number in behind)
    if gathers == "nearby":
        size = _sharded_bytes(inside, lambda p: padded_bytes(step, p, gathered_itemsize(step, p)))
        return (*forward, Traffic("all_gather", axis, size, "backward", calls=max(calls, 1), per_micro_batch=True))
    return (*forward, *gather_traffic(step, axis, _sharded_bytes(inside, whole), "backward", calls=calls, each=each))


def _reduced_again(step: Step, axis: str) -> tuple[Traffic, ...]:
    """Return the extra reductions of blocks that run several times in a forward.

    Their first backward reduces separately what micro-batches have accumulated.
    """
    blocks = [(block, block.count) for block in step.blocks if block.runs > 1 and step.num_micro_batches > 1]
    size = _sharded_bytes(blocks, lambda p: reduced_bytes(step, p) if p.trainable else 0)
    return reduce_traffic(step, axis, size, calls=sum(number for _, number in blocks))


def _sharded_bytes(times: list[tuple[Block, int]], bytes_of: Callable[[Parameter], int]) -> int:
    return sum(number * bytes_of(p) for block, number in times for p in block.parameters if p.sharded)


def _beside(step: Step, axis: str, trained: list[tuple[int, Parameter]]) -> list[Traffic]:
    """Return the means of gradient shards over all other axes at once; those of experts over all but ``expert``."""

    def shards(of_experts: bool) -> int:
        return sum(
            count * padded_bytes(step, p, element_bytes(p, step.reduce_itemsize)) // step.size(axis)
            for count, p in trained
            if (p.expert is not None) == of_experts
        )

    others = [each for each in (*AVERAGING, "expert") if each not in axis_parts(axis) and step.size(each) > 1]
    return [
        *(Traffic("all_reduce", each, shards(False), "backward") for each in others[:1]),
        *(Traffic("all_reduce", each, shards(True), "backward") for each in others[:1] if each != "expert"),
    ]
