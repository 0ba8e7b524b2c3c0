"""Makes the target of a pair: a module of the new class that has the old one's weights and everything put on it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError, ModelError
from meshwright.methods.replace.changes import device_of
from meshwright.methods.replace.pairs import Pair
from meshwright.runtime import preserved_rng

_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks") or "_hooks_" in name]


def build_target(pair: Pair, source: nn.Module, path: str) -> nn.Module:
    """Builds the module that takes the place of ``source``.

    ``pair.building`` says how; without it: ``new.from_module(source)``; else the constructor with attributes of
    ``source`` where it has all that are required, else ``new(source)``. Parameters and buffers that are equal become
    the same objects, so that they stay tied, trained or frozen; hooks and the mode (train or eval) are kept.

    Raises:
        ModelError: Naming both classes, when the target cannot be made, or would not have the source's weights.
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
    if not any(module is source for module in target.modules()):  # else they run where they are
        for name in _HOOKS:
            getattr(target, name).update(getattr(source, name))
    return target.train(source.training)


def _construct(pair: Pair, source: nn.Module) -> tuple[Any, bool]:
    """The target, and whether its weights are fresh: then they are to be the source's."""
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
    """The constructor's arguments, from attributes of the same names; None where a required one has none."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in ("device", "dtype"):
            continue
        if hasattr(source, name):
            value = getattr(source, name)
            # ``bias``, as an argument, says whether there is one.
            found[name] = value is not None if name in source._parameters else value
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
    (owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers)[leaf] = tensor  # type: ignore[assignment]


def _check_trained(pair: Pair, source: nn.Module, target: nn.Module, path: str) -> None:
    """Weights made anew of old ones must at least be trained and typed as those were."""
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
