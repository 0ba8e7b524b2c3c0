"""The pairs of classes that users register: modules of the first become modules of the second. Seed: ATorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from meshwright.errors import ConfigError, did_you_mean
from meshwright.methods.dtypes import DType, dtype_name

BUILT_IN = ("attention", "rms_norm", "layer_norm", "swiglu", "rotary", "fused_loss")
"""Names of what needs no registration."""

ATORCH_NAMES = {
    "LayerNorm_Apex": "layer_norm", "MultiheadAttention_FA": "attention", "HF_LlamaAttention_FA": "attention",
    "HF_BertAttention_FA": "attention", "HF_CLIPAttention_FA": "attention", "HF_GPT2Attention_FA": "attention",
}  # fmt: skip
"""What ATorch calls some of them."""

_BUILDING = ("need_src_module", "init_from_attr")
_ALL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Pair:
    """Modules of class ``old`` become modules of class ``new`` where the job computes in one of ``dtypes``."""

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
    """Registers a pair for ``module_replace``: call it on every rank, before ``accelerate``. Seed: ATorch.

    Args:
        name: What a strategy calls it; a name that was registered before gets the new pair.
        kwargs: How a target is made of a source: ``{"need_src_module": True}`` calls ``target(source)``,
            ``{"init_from_attr": True}`` calls ``target(…)`` with the source's attributes of the names of its arguments.
            None: ``target.from_module(source)`` where there is one, else from attributes where the source has all that
            are required, else ``target(source)``.
        supported_dtypes: The precisions in which the target computes; in others the pair is left out, which is said.
        pair_cls: ``(source, target)``. None returns a decorator for the target class, whose source is its
            ``_src_module_cls``, or else the class it derives from.

    Returns:
        The decorator; it returns the target class.

    Raises:
        ConfigError: When a name, a dtype or a class is none.
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
    # As in ATorch, where the source is passed unless its attributes are asked for.
    chosen = [key for key in ("init_from_attr", "need_src_module") if (kwargs or {}).get(key)]
    return chosen[0] if chosen else None


def registered_pairs() -> Mapping[str, Pair]:
    """All registered pairs by name."""
    return _PAIRS
