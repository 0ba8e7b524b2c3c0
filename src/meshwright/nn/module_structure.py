"""Find modules by class, repeated block or pipeline part, check them, and change what their forward does in place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from meshwright.cost.step import names_class
from meshwright.errors import ModelError, did_you_mean, join_names

M = TypeVar("M", bound=nn.Module)
_subclasses: dict[tuple[type, type], Any] = {}


def class_name(cls: type) -> str:
    """Return the qualified name under which a strategy stores a class: ``"package.module.Class"``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def subclass_like(cls: type[nn.Module], mixin: type[M]) -> type[M]:
    """A class with the name of ``cls`` that derives from ``mixin`` first and from ``cls`` second; one per pair."""
    if (cls, mixin) not in _subclasses:
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _subclasses[cls, mixin] = type(cls.__name__, (mixin, cls), named)
    return _subclasses[cls, mixin]


def class_names(module: nn.Module) -> list[str]:
    """Qualified names of a module's class and of every nn.Module class it derives from, most derived first."""
    return [class_name(cls) for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]


def modules_of(model: nn.Module, references: Sequence[str], *, method: str) -> list[tuple[str, nn.Module]]:
    """Find the modules of the named classes, outermost first in the model's order.

    Args:
        model: Where to look; the model itself is not a candidate.
        references: Class names, bare (``"GPT2Block"``) or qualified.
        method: The method that asks, for the error.

    Returns:
        ``(path, module)`` pairs.

    Raises:
        ModelError: When a class names no module of the model.
    """
    candidates = [(path, module, class_names(module)) for path, module in model.named_modules() if path]
    for reference in references:
        if not any(names_class(reference, names) for _, _, names in candidates):
            present = sorted({names[0].rsplit(".", 1)[-1] for _, _, names in candidates if names})
            bare = reference.rsplit(".", 1)[-1]
            raise ModelError(
                f"{method}: no module of class {reference!r} is in the model{did_you_mean(bare, present)}",
                expected=f"classes of its modules: {join_names(present)}",
                got=repr(reference),
                fix="name a class from this list, or leave the classes out to use the model's repeated blocks",
            )
    return [
        (path, module)
        for path, module, names in candidates
        if any(names_class(reference, names) for reference in references)
    ]


def outermost(found: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Leave out modules that lie inside another of the found ones."""
    last = None
    for path, module in sorted(found, key=lambda entry: entry[0].split(".")):
        if last is None or not path.startswith(last + "."):
            last = path
            yield path, module


# --- The repeated blocks of a model, found by structure: whatever its forward loops over.


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the modules that sit in the model's outermost ``nn.ModuleList``s and hold parameters.

    That is where transformer layers live, in plain models as in transformers' GPT-2, Llama, BERT and T5.

    Returns:
        ``(path, block)`` in the model's order; empty when the model has no such list.
    """
    blocks: list[tuple[str, nn.Module]] = []
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(outer + ".") for outer in lists):
            continue
        lists.append(path)
        blocks += [
            (f"{path}.{name}", child)
            for name, child in module.named_children()
            if next(child.parameters(), None) is not None
        ]
    return blocks


def require_blocks(model: nn.Module, *, method: str, option: str) -> list[tuple[str, nn.Module]]:
    """Find the blocks of a model, or say why a method cannot go on without.

    Raises:
        ModelError: When the model holds no ``nn.ModuleList`` of modules with parameters.
    """
    blocks = find_blocks(model)
    if not blocks:
        children = [f"{name} ({type(child).__name__})" for name, child in model.named_children()]
        raise ModelError(
            f"{method}: the model has no repeated blocks to work on",
            expected="an nn.ModuleList of layers somewhere in the model",
            got=f"{type(model).__name__} with {join_names(children)}",
            fix=f"name the classes with {option}=(…)",
        )
    return blocks


# --- What one pipeline rank knows of the whole model, of which it holds a part: all names, and where each lies.
#
# A model that ``pipeline_parallel`` has cut keeps its own names; this says which of them are elsewhere.

_ATTRIBUTE = "_part_of_whole"


@dataclass(frozen=True)
class Part:
    """One pipeline rank's part of a model, as plain data."""

    names: tuple[str, ...]
    """Of the whole model's state dict, in its order; tied tensors under each of theirs."""
    homes: Mapping[str, tuple[int, ...]]
    """By name, the pipeline ranks that hold a tensor as it is trained, ascending."""
    rank: int
    """This rank's place on the pipeline axis."""
    size: int
    """Ranks on it."""

    def is_home(self, name: str) -> bool:
        """Return whether this rank holds a tensor as it is trained, and not a copy that is lent or goes stale."""
        homes = self.homes.get(name)  # what methods have added since is on every rank
        return homes is None or self.rank in homes


def keep_part_of_whole(model: nn.Module, part: Part) -> None:
    """Note on a model what it is a part of."""
    model.__dict__[_ATTRIBUTE] = part


def part_of_whole(model: nn.Module) -> Part | None:
    """Return what :func:`keep_part_of_whole` noted; None for a model that every rank holds."""
    part: Part | None = model.__dict__.get(_ATTRIBUTE)
    return part


# --- Changing what a module's forward does, without a wrapper module: parameter names stay as they are.

Around = Callable[..., Any]
"""Called as ``around(forward, *args, **kwargs)`` in place of ``forward(*args, **kwargs)``."""


def class_with(cls: type[nn.Module], name: str, method: Callable[..., Any]) -> type[nn.Module]:
    """A class that differs from ``cls`` in one method: a subclass of the same name, whatever it is asked."""
    return type(cls.__name__, (cls,), {name: method, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def wrap_method(module: nn.Module, name: str, around: Around) -> None:
    """Put ``around`` about one method of one module, for example its ``forward``.

    The module's class becomes a subclass of what it was (as FSDP2 does), so ``isinstance``, deep copies, parameter
    names and state dicts are those of the plain module; wrapping twice nests.
    """
    wrap_methods([module], name, around)


def wrap_methods(modules: Iterable[nn.Module], name: str, around: Around) -> None:
    """:func:`wrap_method` for several modules; those of one class still share a class, so what is compiled for one of
    them serves all.
    """
    wrapped: dict[type[nn.Module], type[nn.Module]] = {}
    for module in modules:
        cls = type(module)
        if cls not in wrapped:
            wrapped[cls] = class_with(cls, name, _around(getattr(cls, name), around))
        module.__class__ = wrapped[cls]


def without_fast_path(model: nn.Module) -> None:
    """Let ``nn.TransformerEncoder`` run its layers by their forwards where gradients are off, too.

    Its fast path reads their weights, and hands on nested tensors.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # what torch asks for that path
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _around(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), *args, **kwargs)

    return method


# --- Modules whose forward is compiled: in place, so that names, hooks and ``isinstance`` stay as they are.

_SHAPES = 8  # torch's own limit: as many versions for shapes and modes
_MARK = "_forward_is_compiled"


def compile_forward(
    modules: Iterable[nn.Module], context: Callable[[], contextlib.AbstractContextManager[Any]], **options: Any
) -> None:
    """Compile the forwards of modules; those of one class are compiled once, and share the code.

    ``nn.Module.compile`` would compile what calls forward too, with every hook: those of FSDP2, and of whoever looks
    at the model while it trains. Here hooks of a compiled module run outside the compiled code; hooks of modules inside
    it are compiled with it.

    Args:
        modules: Not inside each other.
        context: Makes a context that is entered around every call: torch compiles in the first ones.
        options: Of ``torch.compile``.
    """
    from meshwright.runtime.torch_internals.compilers import dynamo

    classes: dict[type[nn.Module], type[nn.Module]] = {}
    listed = list(modules)
    # Other methods give blocks classes and hooks of their own; torch gives up on code that it compiles more often.
    limit = max(dynamo.config.recompile_limit, len(listed) + _SHAPES)
    dynamo.config.recompile_limit = limit
    for module in listed:
        cls = type(module)
        if cls not in classes:
            classes[cls] = _compiled_class(cls, context, options)
        module.__class__ = classes[cls]


def _compiled_class(
    cls: type[nn.Module], context: Callable[[], contextlib.AbstractContextManager[Any]], options: dict[str, Any]
) -> type[nn.Module]:
    compiled = torch.compile(cls.forward, **options)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with context():
            return compiled(self, *args, **kwargs)

    subclass = class_with(cls, "forward", forward)
    setattr(subclass, _MARK, True)
    return subclass


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module's forward is compiled."""
    return getattr(type(module), _MARK, False)


def outside_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model without what is inside compiled ones: no hook can be put there any more."""
    inside = {id(m) for each in model.modules() if is_compiled(each) for m in each.modules() if m is not each}
    return (module for module in model.modules() if id(module) not in inside)


# --- Caches of keys and values, for generation: in training they are filled and never read.


def without_caches(model: nn.Module) -> bool:
    """Switch off what ``config.use_cache`` of a transformers model asks for; return whether it asked for it.

    Parts of a model (T5's decoder, the language model of LLaVA) have configurations of their own.
    """
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    return bool(caching)


def is_cache(value: Any) -> bool:
    """Return whether a block that is called with this writes its keys and values into it, as into transformers' caches."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


# --- Lazy modules, whose parameters have no shape before the first forward.


def check_initialized(model: nn.Module) -> None:
    """Refuse a model with parameters or buffers that wait for an input to get their shapes.

    Raises:
        ModelError: Naming them.
    """
    waiting = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if is_lazy(each)]
    if waiting:
        raise ModelError(
            "Lazy modules of the model have no parameters yet",
            expected="parameters with shapes",
            got=join_names(waiting),
            fix="run the model once on a batch before, model(batch), or build it with modules of given sizes",
        )


# --- Modules whose forward changes rows of their weights, by the samples it is given.


def check_no_renorm(model: nn.Module, world: int) -> None:
    """Refuse modules whose forward changes rows of their weights, those that a rank's own samples look up.

    Args:
        model: With all its modules.
        world: Number of ranks; one alone trains as plain torch does.

    Raises:
        ModelError: Naming the module.
    """
    for path, module in model.named_modules() if world > 1 else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ModelError(
                f"{path or type(module).__name__} changes its weights in forward: max_norm",
                expected="weights that only the optimizer changes, equally on every rank",
                got=f"max_norm={module.max_norm} on {world} ranks, which look up different rows",
                fix="set its max_norm to None, and scale the rows that are looked up in the model's own forward",
            )
