"""Names of a package that are imported when they are first asked for: importing is a part of every rank's start."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from meshwright.collector import paused_collection


def on_demand(package: str, homes: str) -> None:
    """Lets a package give out names of its modules, and the modules themselves, without importing them before.

    Static checkers read the package's imports under ``TYPE_CHECKING`` instead; a test holds the two against each other.

    Args:
        package: Its ``__name__``.
        homes: Lines of ``module: name name …``, modules without the package's name before them.
    """
    lines = (line.split(":") for line in homes.split("\n") if line.strip())
    found = {name: f"{package}.{module.strip()}" for module, names in lines for name in names.split()}
    vars(sys.modules[package])["_homes"] = found
    sys.modules[package].__class__ = _Package


class _Package(ModuleType):
    """A package whose names are looked up in its modules."""

    _homes: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        with paused_collection(to_stay=True):
            if name in self._homes:
                value = vars(self)[name] = getattr(importlib.import_module(self._homes[name]), name)
                return value
            module = f"{self.__name__}.{name}"
            if not name.startswith("_") and importlib.util.find_spec(module):
                return importlib.import_module(module)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """A name stays what the package says it is where one of its modules, which Python binds here, is called so."""
        if not (isinstance(value, ModuleType) and name in self._homes):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *vars(self)["__all__"]})
