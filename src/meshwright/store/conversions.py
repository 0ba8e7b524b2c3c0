"""Plan how the weights of a folder become those of a model, before any is read.

transformers renames, stacks, joins and splits stored tensors on loading. Its own rules and functions are used here:
they run on tensors without values, which record what is done to them as a :class:`StoredTensor` to be read by parts.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from meshwright.store.stored_tensors import Computed, Narrowed, Stack, StoredTensor, Transposed, concatenation

# Present on the layers that peft has wrapped.
_ADAPTERS = "adapter_layer_names"


@dataclass
class Plan:
    """Stored tensors under the names of a model."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """Names of the model only; not compared with its shapes."""
    sources: dict[str, str] = field(default_factory=dict)
    """By name of the model, one stored name."""
    extra: list[str] = field(default_factory=list)
    """Stored names that the model has no place for."""
    failed: list[str] = field(default_factory=list)
    """What went wrong in conversions."""
    new: list[str] = field(default_factory=list)
    """Names of the model that pretrained weights never have: of peft's adapters."""
    names: tuple[str, ...] = ()
    """All names of :attr:`transformers_model`."""
    transformers_model: Any = None
    """The model, or the part of it, whose conversions were used."""


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a model is a ``PreTrainedModel``; transformers is not imported for that."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def plan_for(model: nn.Module, stored: Mapping[str, StoredTensor], entries: Mapping[str, Any]) -> Plan:
    """Match stored tensors with the entries of a model.

    Args:
        model: Of transformers, around one of transformers, with peft's adapters, or any other; it may be on ``meta``.
        stored: Tensors by their names on disk.
        entries: The model's state dict.
    """
    if is_transformers_model(model):
        return plan_as_transformers(model, stored, entries)
    own = plan_by_name(stored, entries)
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    base = cast(Any, model).get_base_model() if is_peft else None
    for prefix, module in model.named_modules():
        if module is base or (base is None and is_transformers_model(module)):
            inner = _plan_inside(model, f"{prefix}.", module, stored, entries)
            return max(own, inner, key=lambda plan: len(plan.tensors))
    return own


def _plan_inside(
    model: nn.Module, prefix: str, inner: nn.Module, stored: Mapping[str, StoredTensor], entries: Mapping[str, Any]
) -> Plan:
    """Plan for the weights of a model inside of another, by the names that it had before peft wrapped its layers."""
    adapted = {path: each.adapter_layer_names for path, each in model.named_modules() if hasattr(each, _ADAPTERS)}
    names = {name: _name_before(name, adapted) for name in entries}
    inside = {n: before.removeprefix(prefix) for n, before in names.items() if before and before.startswith(prefix)}
    plan = plan_for(inner, stored, {before: entries[name] for name, before in inside.items()})
    filled = [name for name, before in inside.items() if before in plan.tensors]
    plan.tensors = {name: plan.tensors[inside[name]] for name in filled}
    plan.sources = {name: plan.sources[inside[name]] for name in filled}
    plan.new = [name for name, before in names.items() if before is None]
    return plan


def _name_before(name: str, adapted: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the name of an entry before peft wrapped its layer; None for an adapter."""
    path = name.split(".")
    before: list[str] = []
    for number, part in enumerate(path):
        layer = adapted.get(".".join(path[:number]), ())
        if part == "modules_to_save" and part in layer:
            # A copy that is trained, which begins as the original; the adapter's name comes next.
            return ".".join([*before, *path[number + 2 :]])
        if part in layer:
            return None
        if not (layer and part in ("base_layer", "original_module")):
            before.append(part)
    return ".".join(before)


def plan_by_name(stored: Mapping[str, StoredTensor], wanted: Mapping[str, Any]) -> Plan:
    """Plan without conversions."""
    tensors = {name: tensor for name, tensor in stored.items() if name in wanted}
    return Plan(tensors, {name: name for name in tensors}, [name for name in stored if name not in wanted])


def plan_as_transformers(model: Any, stored: Mapping[str, StoredTensor], wanted: Mapping[str, Any]) -> Plan:
    """Plan as ``from_pretrained`` would load the same tensors.

    Args:
        model: A ``PreTrainedModel``, which may be on ``meta``.
        stored: Tensors by their names on disk.
        wanted: The model's state dict.
    """
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping")
    except ImportError:  # before transformers 5, which converts on loading
        return _plan_by_prefix(model, stored, wanted)
    rules = mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    plan = Plan(names=tuple(wanted), transformers_model=model)
    conversions: dict[str, tuple[Any, str]] = {}
    for name in sorted(stored, key=loading.dot_natural_key):
        prefix = (model.base_model_prefix, wanted)
        target, pattern = loading.rename_source_key(name, renamings, converters, *prefix)
        if target not in wanted and name in wanted:
            target, pattern = loading.rename_source_key(name, [], [], *prefix)
        if target not in wanted:
            plan.extra.append(name)
        elif pattern is None:
            _add(plan, target, stored[name], name)
        else:
            if target not in conversions:
                conversions[target] = (copy.deepcopy(by_pattern[pattern]), name)
            conversions[target][0].add_tensor(target, name, pattern, recording(stored[name]))
    for target, (conversion, name) in conversions.items():
        _add_converted(plan, model, wanted, target, conversion, name)
    return plan


def _plan_by_prefix(model: Any, stored: Mapping[str, StoredTensor], wanted: Mapping[str, Any]) -> Plan:
    """Plan with the base model's prefix put on or taken off where the names fit then."""
    plan, prefix = Plan(names=tuple(wanted), transformers_model=model), model.base_model_prefix
    for name, tensor in stored.items():
        choices = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        target = next((each for each in choices if each in wanted), None)
        if target is None:
            plan.extra.append(name)
        else:
            _add(plan, target, tensor, name)
    return plan


def _add(plan: Plan, target: str, tensor: StoredTensor, name: str) -> None:
    if target in plan.tensors:
        plan.failed.append(f"{plan.sources[target]} and {name} are both {target} of the model")
    plan.tensors[target], plan.sources[target] = tensor, name


def _add_converted(plan: Plan, model: Any, wanted: Mapping[str, Any], target: str, conversion: Any, name: str) -> None:
    """Record the results of a conversion."""
    try:
        results = conversion.convert(target, model=model, config=model.config)
    except Exception as error:  # whatever the library's operations raise on tensors that they were not made for
        plan.failed.append(f"{target} cannot be made of {name} and others: {type(error).__name__}: {error}")
        return
    for result, tensor in results.items():
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        if result in wanted:
            _add(plan, result, source_of(tensor), name)
        else:
            plan.extra.append(name)


# --- Tensors that record


class _Recorded(torch.Tensor):
    """A tensor on ``meta`` that knows how its values are to be read."""

    source: StoredTensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and args and result is args[0]):
            raise NotImplementedError(f"{name} writes into a tensor that is not read yet")
        if isinstance(result, _Recorded):
            if "source" not in result.__dict__:  # the operation may have returned its argument
                result.source = _result_of(name, func, args, kwargs, result)
        elif isinstance(result, tuple | list) and any(isinstance(each, _Recorded) for each in result):
            _record_parts(name, func, args, kwargs, result)
        return result


def recording(source: StoredTensor) -> torch.Tensor:
    """Return a tensor without values that records what is done to it."""
    tensor = torch.empty(source.shape, dtype=source.dtype, device="meta").as_subclass(_Recorded)
    tensor.source = source
    return tensor


def source_of(tensor: torch.Tensor) -> StoredTensor:
    """Return how to read a result of operations on recording tensors.

    Raises:
        TypeError: When it is an ordinary tensor.
    """
    if not isinstance(tensor, _Recorded):
        raise TypeError("a conversion made a tensor of nothing that is stored")
    return tensor.source


def _result_of(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
) -> StoredTensor:
    shape, dtype = tuple(result.shape), result.dtype
    if name in ("stack", "cat", "concat", "concatenate"):
        parts = tuple(source_of(each) for each in (args[0] if args else kwargs["tensors"]))
        dim = _dim(args, kwargs, 1, len(shape))
        return Stack(parts, dim, shape, dtype) if name == "stack" else concatenation(parts, dim, shape, dtype)
    if name == "transpose" and len(args) == 3:
        dims = (args[1] % len(shape), args[2] % len(shape))
        return Transposed(source_of(args[0]), dims, shape, dtype)
    if name in ("contiguous", "clone", "detach"):
        return source_of(args[0])
    return Computed(lambda dtype: func(*_read(args, dtype), **_read(kwargs, dtype)), shape, dtype)


def _record_parts(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Iterable[Any]) -> None:
    at = 0
    for number, result in enumerate(results):
        shape, dtype = tuple(result.shape), result.dtype
        if name in ("chunk", "split"):
            dim = _dim(args, kwargs, 2, len(shape))
            result.source = Narrowed(source_of(args[0]), dim, at, shape, dtype)
            at += shape[dim]
        else:
            result.source = Computed(_item(func, args, kwargs, number), shape, dtype)


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Callable[[torch.dtype], Any]:
    return lambda dtype: func(*_read(args, dtype), **_read(kwargs, dtype))[number]


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, ndim: int) -> int:
    dim = args[place] if len(args) > place else kwargs.get("dim", 0)
    return int(dim) % ndim


def _read(value: Any, dtype: torch.dtype) -> Any:
    """Replace recording tensors, wherever they are in the arguments, by their values."""
    if isinstance(value, _Recorded):
        return value.source.read(tuple(slice(0, size) for size in value.source.shape), dtype)
    if isinstance(value, list | tuple):
        return type(value)(_read(each, dtype) for each in value)
    if isinstance(value, dict):
        return {key: _read(each, dtype) for key, each in value.items()}
    return value
