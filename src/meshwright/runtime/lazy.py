"""Import a package's public names when they are first used.

Importing is a part of every rank's start-up, so a package imports none of its modules. Its ``__init__`` names what it
offers once, under ``TYPE_CHECKING``, where static checkers read it, and hands the rest to :func:`lazy_exports`::

    if TYPE_CHECKING:
        from meshwright.optim.lamb import Lamb as Lamb
    else:
        __getattr__, __dir__, __all__ = lazy_exports(__name__)

[Note: documented names that moved] Names that other systems' users know (``meshwright.optim.OptimManager``,
``meshwright.booster``) live in ``meshwright.compat``, which nothing below it may import. The package's root tells
:func:`alias_name` and :func:`alias_modules` where they are; until somebody asks for one, nothing is imported.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.errors import ConfigError

_ALIASED_NAMES: dict[str, dict[str, tuple[str, str]]] = {}  # package -> name -> module and name there
_ALIASED_MODULES: dict[str, str] = {}  # old name -> new name; also of everything below it


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package, as PEP 562 describes them.

    Args:
        package: Its ``__name__``. Its source says which names it exports, in its block under ``TYPE_CHECKING``.
    """
    homes = _exports(package)

    def find(name: str) -> Any:
        home, attribute = homes.get(name) or _ALIASED_NAMES.get(package, {}).get(name) or (package, name)
        is_module = home == package
        if is_module:
            # Pickle asks every loaded module for names that only one of them has: a miss touches no collector.
            if name.startswith("_") or importlib.util.find_spec(f"{package}.{attribute}") is None:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            home = f"{package}.{attribute}"
        with contextlib.nullcontext() if home in sys.modules else paused_collection(to_stay=True):
            module = importlib.import_module(home)
        if is_module:
            return module
        value = getattr(module, attribute)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *_ALIASED_NAMES.get(package, {})})

    return find, names, sorted(homes)


def _exports(package: str) -> dict[str, tuple[str, str]]:
    """Return the module and the name there of everything that a package's ``__init__`` imports for type checkers."""
    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def alias_name(package: str, name: str, home: str, attribute: str) -> None:
    """Let a package offer a name that lives above it, or is called otherwise today.

    Args:
        package: The package that offers it.
        name: Its documented name.
        home: The module it lives in.
        attribute: Its name there.
    """
    _ALIASED_NAMES.setdefault(package, {})[name] = (home, attribute)


def alias_modules(homes: Mapping[str, str]) -> None:
    """Let modules be imported under the names they are documented by, too.

    Args:
        homes: Where each documented module lives today; what lies below a package goes with it. ``"module: name name"``
            makes a module of these names alone.
    """
    _ALIASED_MODULES.update(homes)
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        # First, or a package's own path would find its modules anew under the second name.
        sys.meta_path.insert(0, _AliasFinder())


class _AliasFinder(MetaPathFinder):
    """Find modules by their documented names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("meshwright."):
            return None
        old = max((each for each in _ALIASED_MODULES if f"{fullname}.".startswith(f"{each}.")), key=len, default=None)
        if old is None:
            return None
        home, _, names = _ALIASED_MODULES[old].partition(":")
        home += fullname.removeprefix(old)
        return ModuleSpec(fullname, _AliasLoader(home, names.split())) if importlib.util.find_spec(home) else None


class _AliasLoader(Loader):
    """Hand out the module that an alias stands for, unchanged, or a module of some of its names."""

    def __init__(self, home: str, names: list[str]) -> None:
        self._home = home
        self._names = names
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        if self._names:
            return ModuleType(spec.name, module.__doc__)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._names:
            home = importlib.import_module(self._home)
            vars(module).update({name: getattr(home, name) for name in self._names}, __all__=self._names)
        else:
            # The import system has written the alias's spec over the module's own.
            module.__spec__ = self._spec


_is_frozen = False  # by :func:`freeze`; to count what is frozen takes as long as a collection


def freeze() -> None:
    """Spare the collector all that is alive, for good; also in processes that are forked later."""
    global _is_frozen
    gc.collect()
    gc.freeze()
    _is_frozen = True


def _anything_is_frozen() -> bool:
    return _is_frozen or gc.get_freeze_count() > 0


@contextlib.contextmanager
def paused_collection(to_stay: bool = False) -> Iterator[None]:
    """Pause the collection of garbage cycles; a caller's own setting stays.

    Args:
        to_stay: Whether new objects are permanent, as modules are. They then count as old at once; else the collector
            would visit all of them as soon as it goes on.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Unfreezing would thaw what a caller has frozen.
        if to_stay and not _anything_is_frozen():
            gc.freeze()
            gc.unfreeze()
        if collects:
            gc.enable()


@contextlib.contextmanager
def settling() -> Iterator[Callable[[], None]]:
    """Offer a call that spares the collector what is alive then, until the block ends.

    Training makes few objects, and torch's modules alone are half a million: to look at all of them stops a rank, and
    those that wait for it, for some 0.2 s. What a caller has frozen stays frozen.
    """
    thaws = not _anything_is_frozen()

    def settle() -> None:
        gc.collect()  # what is garbage now would stay
        gc.freeze()

    try:
        yield settle
    finally:
        if thaws:
            gc.unfreeze()


def optional_library(name: str, needed_by: str, fix: str) -> ModuleType:
    """Import a module that Meshwright does not depend on.

    Args:
        name: The module.
        needed_by: What needs it, for the error.
        fix: How to install it, or do without.

    Raises:
        ConfigError: When it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{needed_by} needs {package}, which is not installed",
            expected=f"an importable package {package!r}",
            got=str(error),
            fix=fix,
        ) from error
