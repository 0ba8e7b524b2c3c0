"""Register pairs of module classes, and replace modules of the first class by modules of the second."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from meshwright.errors import ConfigError, MeshwrightError, ModelError, did_you_mean
from meshwright.methods.base import DType, dtype_name
from meshwright.methods.replace.model_changes import Replacement, Swap, device_of
from meshwright.nn import outermost
from meshwright.runtime import preserved_rng
from meshwright.runtime.torch_internals.modules import buffers_of, parameters_of

BUILT_IN = ("attention", "rms_norm", "experts", "layer_norm", "swiglu", "rotary", "fused_loss")
"""Names of the built-in replacements."""

ATORCH_NAMES = {
    "LayerNorm_Apex": "layer_norm", "MultiheadAttention_FA": "attention", "HF_LlamaAttention_FA": "attention",
    "HF_BertAttention_FA": "attention", "HF_CLIPAttention_FA": "attention", "HF_GPT2Attention_FA": "attention",
}  # fmt: skip
"""ATorch's names for some of them."""

_BUILDING = ("need_src_module", "init_from_attr")
_ALL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Pair:
    """A rule to replace modules of class ``old`` by modules of class ``new`` in jobs that compute in ``dtypes``."""

    name: str
    old: type[nn.Module]
    new: type[nn.Module]
    dtypes: frozenset[str]
    building: str | None = None  # one of need_src_module and init_from_attr; None: see build_target


_PAIRS: dict[str, Pair] = {}


def register_replace_pair(
    name: str,
    kwargs: Mapping[str, bool] | None = None,
    supported_dtypes: Iterable[torch.dtype | str] = _ALL_DTYPES,
    pair_cls: tuple[type[nn.Module], type[nn.Module]] | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a pair for ``module_replace``: call it on every rank, before ``accelerate``. Seed: ATorch.

    Args:
        name: Name of the pair in strategies; registering it again replaces the pair.
        kwargs: How a target is built from a source: ``{"need_src_module": True}`` calls ``target(source)``,
            ``{"init_from_attr": True}`` calls ``target(…)`` with the source's attributes that have the names of its
            arguments. None: ``target.from_module(source)`` where there is one, else from attributes where the source
            has all that are required, else ``target(source)``.
        supported_dtypes: Precisions that the target computes in; in others the pair is left out, with a notice.
        pair_cls: ``(source, target)``. None returns a decorator for the target class, whose source is its
            ``_src_module_cls``, or else the class it derives from.

    Returns:
        The decorator; it returns the target class.

    Raises:
        ConfigError: When a name, a dtype or a class is invalid.
    """
    if name in BUILT_IN or name in ATORCH_NAMES:
        raise ConfigError(
            f"register_replace_pair: {name!r} is the name of a built-in replacement",
            expected="a name of your own",
            got=repr(name),
            fix="choose another name; exclude the built-in one in module_replace's config where both fit",
        )
    dtypes = frozenset(_dtype_name(name, dtype) for dtype in supported_dtypes)
    building = _building(name, kwargs)
    if pair_cls is not None:
        _register(name, pair_cls, dtypes, building)
        return lambda target: target

    def decorate(target: type[nn.Module]) -> type[nn.Module]:
        source = getattr(target, "_src_module_cls", target.__bases__[0])
        _register(name, (source, target), dtypes, building)
        return target

    return decorate


def _register(name: str, pair: Any, dtypes: frozenset[str], building: str | None) -> None:
    listed = pair if isinstance(pair, tuple | list) else (pair,)
    fits = len(listed) == 2 and all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in listed)
    if not fits or listed[0] is listed[1] or listed[0] is nn.Module:
        raise ConfigError(
            f"register_replace_pair: {name!r} is not a pair of module classes",
            expected="pair_cls=(source class, target class), two classes of nn.Module",
            got=repr(pair),
            fix="pass the classes; one that is decorated derives from its source, or names it as _src_module_cls",
        )
    _PAIRS[name] = Pair(name, listed[0], listed[1], dtypes, building)


def _dtype_name(name: str, dtype: torch.dtype | str) -> str:
    known, names = dtype_name(dtype), get_args(get_args(DType)[0])
    if known not in names:
        raise ConfigError(
            f"register_replace_pair: {name!r} names a dtype that nothing computes in",
            expected=", ".join(names),
            got=str(dtype),
            fix="use torch.float32, torch.float16 and torch.bfloat16",
        )
    return str(known)


def _building(name: str, kwargs: Mapping[str, bool] | None) -> str | None:
    for key in kwargs or {}:
        if key not in _BUILDING:
            raise ConfigError(
                f"register_replace_pair: {name!r} has an unknown key {key!r} in kwargs{did_you_mean(key, _BUILDING)}",
                expected=" or ".join(_BUILDING),
                got=repr(key),
                fix="leave kwargs out, and give the target a classmethod from_module(source) where more is to be said",
            )
    # As in ATorch, where init_from_attr takes precedence.
    chosen = [key for key in ("init_from_attr", "need_src_module") if (kwargs or {}).get(key)]
    return chosen[0] if chosen else None


def registered_pairs() -> Mapping[str, Pair]:
    """Return all registered pairs by name."""
    return _PAIRS


# --- Building a target: a module of the new class with the old one's weights, hooks and mode

_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks") or "_hooks_" in name]


def build_target(pair: Pair, source: nn.Module, path: str) -> nn.Module:
    """Build the module that replaces ``source``.

    ``pair.building`` chooses how; where it is None, ``new.from_module(source)`` if there is one, else the constructor
    with attributes of ``source`` if it has all that are required, else ``new(source)``. Parameters and buffers that are
    equal become the same objects, so that they stay tied, trained or frozen; hooks and the mode (train or eval) stay.

    Raises:
        ModelError: Naming both classes, when the target cannot be built, or would not have the source's weights.
    """
    try:
        with preserved_rng(), torch.device(device_of(source)):
            target, copied = _construct(pair, source)
    except MeshwrightError:
        raise
    except Exception as error:  # the user's class may do anything
        raise _cannot(
            pair, path, f"{type(error).__name__}: {error}", "give the target a classmethod from_module(source)"
        ) from error
    if not isinstance(target, nn.Module):
        raise _cannot(pair, path, f"a {type(target).__name__}", "let from_module return the module")
    _keep_weights(pair, source, target, path, copy=copied)
    if not any(module is source for module in target.modules()):  # otherwise the source runs its own hooks
        for name in _HOOKS:
            getattr(target, name).update(getattr(source, name))
    return target.train(source.training)


def _construct(pair: Pair, source: nn.Module) -> tuple[Any, bool]:
    """Return the target, and whether its weights are fresh and must become the source's."""
    if pair.building is None and hasattr(pair.new, "from_module"):
        return pair.new.from_module(source), False
    arguments = _from_attributes(pair.new, source)
    if pair.building == "init_from_attr" or (pair.building is None and arguments is not None):
        if arguments is None:
            names = ", ".join(sorted(set(inspect.signature(pair.new).parameters) - set(dir(source))))
            raise TypeError(f"{pair.old.__name__} has no attribute for {names}")
        return pair.new(**arguments), True
    return pair.new(source), False


def _from_attributes(cls: type[nn.Module], source: nn.Module) -> dict[str, Any] | None:
    """Return the constructor's arguments, from attributes of the same names; None where a required one has none."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in ("device", "dtype"):
            continue
        if hasattr(source, name):
            value = getattr(source, name)
            # An argument ``bias`` says whether there is one.
            found[name] = value is not None if name in parameters_of(source) else value
        elif parameter.default is parameter.empty:
            return None
    return found


def _keep_weights(pair: Pair, source: nn.Module, target: nn.Module, path: str, *, copy: bool) -> None:
    old, new = _tensors(source), _tensors(target)
    if copy and {n: t.shape for n, t in old.items()} != {n: t.shape for n, t in new.items()}:
        different = sorted(n for n in old.keys() | new.keys() if n not in old or n not in new or _differ(old, new, n))
        raise _cannot(
            pair, path, f"other weights: {', '.join(different)}", "give the target a classmethod from_module(source)"
        )
    for name, tensor in old.items():
        same = name in new and not _differ(old, new, name) and (copy or _equal(tensor, new[name]))
        if same:
            _put(target, name, tensor)
    target.to(device_of(source))
    _check_trained(pair, source, target, path)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))
    }  # fmt: skip


def _differ(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], name: str) -> bool:
    return old[name].shape != new[name].shape or isinstance(old[name], nn.Parameter) != isinstance(
        new[name], nn.Parameter
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and torch.equal(a, b.to(a.device)))


def _put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    *above, leaf = name.split(".")
    owner = module.get_submodule(".".join(above))
    (parameters_of(owner) if isinstance(tensor, nn.Parameter) else buffers_of(owner))[leaf] = tensor  # type: ignore[assignment]


def _check_trained(pair: Pair, source: nn.Module, target: nn.Module, path: str) -> None:
    # Weights that are computed from old ones must at least have their dtype and requires_grad.
    before = {(p.requires_grad, p.dtype) for p in source.parameters()}
    kept = {id(p) for p in source.parameters()}
    for name, parameter in target.named_parameters():
        if before and id(parameter) not in kept and (parameter.requires_grad, parameter.dtype) not in before:
            raise _cannot(
                pair,
                path,
                f"{name} with requires_grad={parameter.requires_grad} and {parameter.dtype}",
                "let the target take dtype and requires_grad from the source's parameters",
            )


def _cannot(pair: Pair, path: str, got: str, fix: str) -> ModelError:
    return ModelError(
        f"module_replace: {pair.old.__name__} at {path!r} cannot be replaced by {pair.new.__name__} "
        f"(the pair {pair.name!r})",
        expected=f"a {pair.new.__name__} with the weights of the {pair.old.__name__}",
        got=got,
        fix=fix,
    )


# --- Replacing modules


def replace_pairs(model: nn.Module, pairs: Iterable[Pair], dtype: str, into: Replacement) -> None:
    """Add the replacement of every module whose class is exactly the source of a pair.

    A module that an earlier pair replaces is not replaced again, and neither are the modules inside it.

    Raises:
        ModelError: When a target cannot be built or would break a tie, or the model itself is a source.
    """
    taken: list[tuple[str, nn.Module]] = []
    for pair in pairs:
        if dtype not in pair.dtypes:
            into.left.append(f"{pair.name}: computes in {', '.join(sorted(pair.dtypes))}, and the job in {dtype}")
            continue
        found = [(p, m) for p, m in model.named_modules(remove_duplicate=False) if type(m) is pair.old]
        if any(not path for path, _ in found):
            raise ModelError(
                f"module_replace: the model itself is the {pair.old.__name__} of the pair {pair.name!r}",
                expected="modules inside the model",
                got=type(model).__name__,
                fix="build the model with the other class",
            )
        own = {path for path, _ in outermost([*found, *taken])} - {path for path, _ in taken}
        found = [(path, module) for path, module in found if path in own]
        if not found:
            into.left.append(f"{pair.name}: the model has no {pair.old.__name__}")
            continue
        new_of: dict[nn.Module, nn.Module] = {}
        for path, module in found:
            if module not in new_of:
                new_of[module] = build_target(pair, module, path)
        _check_ties(model, pair, new_of)
        taken += found
        into.add(
            f"{pair.name}: {len(new_of)} modules {pair.old.__name__} -> {pair.new.__name__}", [Swap(new_of)]
        )  # fmt: skip


def _check_ties(model: nn.Module, pair: Pair, new_of: dict[nn.Module, nn.Module]) -> None:
    """Refuse targets with a copy of a weight that is tied to another module of the model."""
    inside = {id(m) for old in new_of for m in old.modules()}
    outside = {
        id(p) for m in model.modules() if id(m) not in inside for p in parameters_of(m).values() if p is not None
    }
    for old, new in new_of.items():
        kept = {id(parameter) for parameter in new.parameters()}
        for name, parameter in old.named_parameters():
            if id(parameter) in outside and id(parameter) not in kept:
                raise ModelError(
                    f"module_replace: a {pair.new.__name__} in the place of a {pair.old.__name__} would train a copy "
                    "of a weight that is tied to another module",
                    expected=f"the parameter itself in the {pair.new.__name__}",
                    got=f"other values, or another name or shape, for {name}",
                    fix="let the target hold the source's parameter, or exclude the pair",
                )
