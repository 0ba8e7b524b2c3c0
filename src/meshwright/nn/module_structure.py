"""Find modules of a model, check them, and change their forward in place.

Modules are found by class or as the model's repeated blocks. Methods change a module's forward by giving it a subclass
of its own class: no wrapper module, so parameter names, hooks and ``isinstance`` stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from meshwright.cost.step import names_class
from meshwright.errors import ModelError, did_you_mean, join_names
from meshwright.runtime.torch_internals.modules import buffers_of, forward_hooks_of, forward_pre_hooks_of

M = TypeVar("M", bound=nn.Module)
_subclasses: dict[tuple[type, type], Any] = {}


def class_name(cls: type) -> str:
    """Return the qualified name under which a strategy stores a class: ``"package.module.Class"``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def subclass_like(cls: type[nn.Module], mixin: type[M]) -> type[M]:
    """Return the one class that derives from ``mixin`` and ``cls`` and has the name of ``cls``."""
    if (cls, mixin) not in _subclasses:
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _subclasses[cls, mixin] = type(cls.__name__, (mixin, cls), named)
    return _subclasses[cls, mixin]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is torch's linear layer, or transformers' Conv1D."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer's weight is (in, out), as in transformers' Conv1D (GPT-2)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def setting_of(config: Any, name: str) -> Any:
    """Return a setting of a model's config; None where there is none, or where layers have different ones.

    Configs of transformers whose layers differ raise for such a setting.
    """
    with contextlib.suppress(Exception):
        return getattr(config, name, None)
    return None


def features(module: nn.Module) -> tuple[int, int]:
    """Return the input and output features of a linear layer."""
    weight = module.get_parameter("weight")
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def class_names(module: nn.Module) -> list[str]:
    """Return the qualified names of a module's class and its bases below nn.Module, most derived first."""
    return [class_name(cls) for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]


def modules_of(model: nn.Module, references: Sequence[str], *, method: str) -> list[tuple[str, nn.Module]]:
    """Find the modules of the named classes, outermost first in the model's order.

    Args:
        model: Where to look; the model itself is not a candidate.
        references: Class names, bare (``"GPT2Block"``) or qualified.
        method: Name of the method, for the error.

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
    """Leave out modules that lie inside another one of ``found``."""
    last = None
    for path, module in sorted(found, key=lambda entry: entry[0].split(".")):
        if last is None or not path.startswith(last + "."):
            last = path
            yield path, module


# --- Repeated blocks, found by structure: whatever the model's forward loops over.


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the modules that run in the model's outermost lists of layers and hold parameters.

    Lists are ``nn.ModuleList``s, as in transformers' models and most plain ones, and each ``nn.Sequential`` that
    repeats a module with modules of its own, as in timm's and torchvision's models (see :func:`in_sequence`).
    Containers in a ``nn.ModuleList`` never run themselves (``ModuleList([ModuleList([attention, mlp]), …])``): the
    modules in them are the blocks.

    Returns:
        ``(path, block)`` in the model's order; empty when the model has no such list.
    """
    blocks: dict[nn.Module, str] = {}  # a module in several containers has one path
    lists: list[str] = []
    for path, module in model.named_modules():
        if any(not outer or path.startswith(f"{outer}.") for outer in lists):
            continue
        found = _running(path, module) if isinstance(module, nn.ModuleList) else in_sequence(path, module)
        if isinstance(module, nn.ModuleList) or found:
            lists.append(path)
        for inner, block in found:
            blocks.setdefault(block, inner)
    return [(path, block) for block, path in blocks.items()]


def in_sequence(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks in an ``nn.Sequential``, with their paths; none in any other module.

    They follow a module of their class, or come before one, and have parameters and modules of their own: the
    bottlenecks of a ResNet and the blocks of a ViT, but neither ``Sequential(Linear, ReLU, Linear)`` nor what stands
    between stages.
    """
    entries = list(module.named_children()) if isinstance(module, nn.Sequential) else []
    kinds = ["", *(_kind(child) for _, child in entries), ""]
    return [
        (f"{path}.{name}" if path else name, child)
        for at, (name, child) in enumerate(entries, 1)
        if kinds[at] in (kinds[at - 1], kinds[at + 1])
        and type(child) is not nn.Sequential
        and has_forward(child)
        and next(child.children(), None) is not None
        and next(child.parameters(), None) is not None
    ]


STANDS_FOR = "_stands_for"
"""Attribute of a module in the place of a block: the class of that block."""


def _kind(module: nn.Module) -> str:
    """Return the name of a module's class, which is kept when methods and FSDP2 change it."""
    cls = vars(module).get(STANDS_FOR, type(module))
    return class_name(next(each for each in cls.__mro__ if not issubclass(each, FSDPModule)))


def _running(path: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules in a container that have a forward and parameters."""
    for name, child in container.named_children():
        inner = f"{path}.{name}" if path else name
        if not has_forward(child):
            yield from _running(inner, child)
        elif next(child.parameters(), None) is not None:
            yield inner, child


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can run itself; ``nn.ModuleList`` and ``nn.ModuleDict`` cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


SCALARS = (bool, int, float, str, type(None))  # settings of a module


def settings_of(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the classes, hooks, settings and tensors' layouts of a module and those in it, by path and name.

    Modules for which these are equal run the same code on tensors of the same shapes.
    """
    found: dict[tuple[str, str], Any] = {}
    for path, each in module.named_modules():
        found[path, ""] = type(each), len(forward_hooks_of(each)), len(forward_pre_hooks_of(each))
        for name, value in vars(each).items():
            if isinstance(value, SCALARS) or (isinstance(value, tuple) and all(isinstance(v, SCALARS) for v in value)):
                found[path, name] = value
        for name, tensor in (*each._parameters.items(), *each._buffers.items()):
            if tensor is not None:
                found[path, name] = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return found


def check_forward(found: Iterable[tuple[str, nn.Module]], *, method: str) -> None:
    """Check that modules can run themselves, for a method that changes what happens when they do.

    Raises:
        ModelError: Naming a container: ``nn.ModuleList``, ``nn.ModuleDict``, or another class without a forward.
    """
    for path, module in found:
        if not has_forward(module):
            raise ModelError(
                f"{method}: {path} has no forward, so that nothing could be done when it runs",
                expected="classes of modules that run",
                got=f"{type(module).__name__}, a container",
                fix="name classes of the modules in it, or leave the classes out to use the model's repeated blocks",
            )


def require_blocks(model: nn.Module, *, method: str, fix: str) -> list[tuple[str, nn.Module]]:
    """Find the blocks of a model for a method that needs some.

    Args:
        model: Where to look.
        method: Name of the method, for the error.
        fix: What to do in place of it, for the error.

    Raises:
        ModelError: When the model has no blocks.
    """
    blocks = find_blocks(model)
    if not blocks:
        children = [f"{name} ({type(child).__name__})" for name, child in model.named_children()]
        raise ModelError(
            f"{method}: the model has no repeated blocks to work on",
            expected="an nn.ModuleList or nn.Sequential of layers somewhere in the model",
            got=f"{type(model).__name__} with {join_names(children)}",
            fix=fix,
        )
    return blocks


# --- One pipeline rank's part of a model.
#
# A model that ``pipeline_parallel`` has cut has its own names still; ``Part`` says which of them are on other ranks.

_ATTRIBUTE = "_part_of_whole"


@dataclass(frozen=True)
class Part:
    """One pipeline rank's part of a model, as plain data."""

    names: tuple[str, ...]
    """Names in the whole model's state dict, in its order; tied tensors under each of theirs."""
    homes: Mapping[str, tuple[int, ...]]
    """Pipeline ranks that train a tensor, ascending, by its name."""
    rank: int
    """This rank's coordinate on the pipeline axis."""
    size: int
    """Size of the pipeline axis."""

    def is_home(self, name: str) -> bool:
        """Return whether this rank trains a tensor, and has not merely a copy that may be stale."""
        homes = self.homes.get(name)  # none for what methods have added since: it is on every rank
        return homes is None or self.rank in homes


def keep_part_of_whole(model: nn.Module, part: Part) -> None:
    """Attach to a model which part of the whole it is."""
    model.__dict__[_ATTRIBUTE] = part


def part_of_whole(model: nn.Module) -> Part | None:
    """Return the part that :func:`keep_part_of_whole` attached; None for a model that is whole on every rank."""
    part: Part | None = model.__dict__.get(_ATTRIBUTE)
    return part


# --- Wrapped methods, and forwards that nothing bypasses.

_WRAPS = "_wraps_method"  # the method that a class of :func:`wrap_method` wraps

Around = Callable[..., Any]
"""Called as ``around(forward, *args, **kwargs)`` in place of ``forward(*args, **kwargs)``."""


def class_with(cls: type[nn.Module], name: str, method: Callable[..., Any]) -> type[nn.Module]:
    """Return a subclass of ``cls`` under the same name that differs in one method."""
    return type(cls.__name__, (cls,), {name: method, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


@dataclass(frozen=True)
class _Around:
    """Hold what a module's method is wrapped in; copies of the module share it."""

    call: Around

    def __deepcopy__(self, memo: object) -> _Around:
        return self


def wrap_method(module: nn.Module, name: str, around: Around) -> None:
    """Wrap one method of one module, for example its ``forward``, in ``around``.

    The module's class becomes a subclass of what it was (as FSDP2 does), so ``isinstance``, deep copies, parameter
    names and state dicts are those of the plain module. Wrapping twice nests. Modules of one class go on sharing a
    class, whatever they are wrapped in, so code that is compiled for one of them serves all.
    """
    cls = type(module)
    depth = sum(each.__dict__.get(_WRAPS) == name for each in cls.__mro__)
    key = f"_around_{name}_{depth}"
    module.__dict__[key] = _Around(around)
    known = (each for each in cls.__subclasses__() if each.__dict__.get(_WRAPS) == name)
    module.__class__ = next(known, None) or _wrapping_class(cls, name, key)


def _wrapping_class(cls: type[nn.Module], name: str, key: str) -> type[nn.Module]:
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, key).call(functools.partial(original, self), *args, **kwargs)

    subclass = class_with(cls, name, method)
    setattr(subclass, _WRAPS, name)
    return subclass


def without_fast_path(model: nn.Module) -> None:
    """Switch off the fast path of ``nn.TransformerEncoder``, so that layers run their forwards without gradients, too.

    The fast path reads the layers' weights directly, and passes nested tensors on.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # torch takes the fast path for 1 and 2
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


# --- Compiled forwards.

_SHAPES = 8  # versions for shapes and modes: torch's own limit
_MARK = "_forward_is_compiled"


def compile_forward(
    modules: Iterable[nn.Module],
    context: Callable[[nn.Module], contextlib.AbstractContextManager[Any]],
    runs_plain: Callable[[nn.Module], bool] | None = None,
    **options: Any,
) -> None:
    """Compile the forwards of modules in place; modules of one class share the compiled code.

    ``nn.Module.compile`` would compile the caller of forward too, with every hook: FSDP2's, and the user's. Here hooks
    of a compiled module run outside the compiled code; hooks of modules inside it are compiled with it.

    Args:
        modules: Not inside each other.
        context: Makes a context that is entered around every call of a module: torch compiles in the first ones.
        runs_plain: Whether the next call of a module is to run as it is; None: none is.
        options: Keyword arguments of ``torch.compile``.
    """
    from meshwright.runtime.torch_internals.compilers import dynamo

    classes: dict[type[nn.Module], type[nn.Module]] = {}
    listed = list(modules)
    # Blocks may have hooks of their own; torch gives up on code that it compiles more often, for all models of a class.
    dynamo.config.recompile_limit += len(listed) + _SHAPES
    for module in listed:
        cls = type(module)
        if cls not in classes:
            classes[cls] = _compiled_class(cls, context, runs_plain, options)
        module.__class__ = classes[cls]


def _compiled_class(
    cls: type[nn.Module],
    context: Callable[[nn.Module], contextlib.AbstractContextManager[Any]],
    runs_plain: Callable[[nn.Module], bool] | None,
    options: dict[str, Any],
) -> type[nn.Module]:
    compiled = torch.compile(cls.forward, **options)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A cache knows the layer, so that each would be compiled anew: texts are written without.
        is_plain = any(map(is_cache, (*args, *kwargs.values()))) or (runs_plain is not None and runs_plain(self))
        with context(self):
            return cls.forward(self, *args, **kwargs) if is_plain else compiled(self, *args, **kwargs)

    subclass = class_with(cls, "forward", forward)
    setattr(subclass, _MARK, True)
    return subclass


def is_compiled(module: nn.Module) -> bool:
    """Return whether :func:`compile_forward` has compiled the module's forward."""
    return getattr(type(module), _MARK, False)


def outside_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """List the modules of a model that are not inside compiled ones, where hooks cannot be added any more."""
    inside = {id(m) for each in model.modules() if is_compiled(each) for m in each.modules() if m is not each}
    return (module for module in model.modules() if id(module) not in inside)


# --- Key-value caches: training fills them and never reads them; and where there is one, transformers does not look for
# the documents in a packed sample.


def without_caches(model: nn.Module) -> bool:
    """Set ``config.use_cache`` of a transformers model to False, as its Trainer does; return whether it was set."""
    caching = _caching_configs(model)
    for config in caching:
        config.use_cache = False
    return bool(caching)


@contextlib.contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """Run a transformers model without key-value caches inside the context."""
    caching = _caching_configs(model)
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _caching_configs(model: nn.Module) -> list[Any]:
    # Parts of a model (T5's decoder, the language model of LLaVA) have configurations of their own.
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    return [config for config in configs.values() if getattr(config, "use_cache", False)]


def is_cache(value: Any) -> bool:
    """Return whether a value is a key-value cache, as transformers' blocks write into."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


# --- Models whose parameters are on meta.


def is_on_meta(model: nn.Module) -> bool:
    """Return whether parameters of a model have no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def move_to(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, in place; parameters on meta stay there."""
    if not is_on_meta(module):
        module.to(device)
        return
    for each in module.modules():
        for name, buffer in buffers_of(each).items():
            if buffer is not None and not buffer.is_meta:
                buffers_of(each)[name] = buffer.to(device)


# --- Checks of parameters without a shape, and of embeddings that rescale their rows.


def check_model(model: nn.Module, device: torch.device) -> None:
    """Refuse anything but a plain model, on the job's device, the CPU or meta.

    Raises:
        ModelError: Saying what was given instead.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "The model is not a module",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            fix="pass the model itself, built",
        )
    check_initialized(model)
    wrapped = next(
        (m for m in model.modules() if isinstance(m, DistributedDataParallel | DataParallel | FSDPModule)), None
    )
    sharded = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), None)
    if wrapped is not None or sharded is not None:
        raise ModelError(
            "The model is already distributed",
            expected="a plain nn.Module",
            got=f"{type(wrapped).__name__ if wrapped is not None else sharded} inside {type(model).__name__}",
            fix="pass the model as it was before wrapping; the strategy wraps it",
        )
    synchronised = next((name for name, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)), None)
    if synchronised is not None and device.type == "cpu":
        raise ModelError(
            "SyncBatchNorm runs on GPUs alone: torch has no kernel for it on a CPU",
            expected="norms that run on the job's device",
            got=f"{synchronised} (SyncBatchNorm) on {device}",
            fix="use GroupNorm, or BatchNorm with each rank's own statistics; convert to SyncBatchNorm on GPUs only",
        )
    _check_devices(model, device)


def _check_devices(model: nn.Module, device: torch.device) -> None:
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
        if real:
            raise ModelError(
                "The model is half on meta",
                expected="all parameters with values, or all on meta",
                got=f"values in {join_names(real)}, and none in {join_names(on_meta)}",
                fix="build all of it under torch.device('meta'), or pass a function that builds it",
            )
        return
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if not devices <= {device, torch.device("cpu")} or len(devices) > 1:
        raise ModelError(
            "The model is on a wrong device",
            expected=f"all parameters and buffers on {device}"
            + ("" if device.type == "cpu" else ", or all on the CPU"),
            got=", ".join(sorted(map(str, devices))),
            fix=f"call model.to({str(device)!r}) before",
        )


def check_initialized(model: nn.Module) -> None:
    """Check that no parameter or buffer is lazy, without a shape before the first forward.

    Raises:
        ModelError: Naming those that are.
    """
    waiting = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if is_lazy(each)]
    if waiting:
        raise ModelError(
            "Lazy modules of the model have no parameters yet",
            expected="parameters with shapes",
            got=join_names(waiting),
            fix="run the model once on a batch before, model(batch), or build it with modules of given sizes",
        )


def check_no_renorm(model: nn.Module, world: int) -> None:
    """Check that no embedding has ``max_norm``: its forward would rescale the rows that this rank's samples look up.

    Args:
        model: The whole model.
        world: Number of ranks; with 1 there is nothing to check.

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
