"""The methods there are, by name; the file of each is imported when its method is first looked up."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.strategy.config import MethodConfig


class Register(MutableMapping[str, "type[MethodConfig]"]):
    """Method configs by name, in the order in which they were announced or set."""

    def __init__(self) -> None:
        self._found: dict[str, type[MethodConfig] | str] = {}

    def announce(self, module: str, *names: str) -> None:
        """Says that importing a module sets these names."""
        for name in names:
            self._found.setdefault(name, module)

    def __getitem__(self, name: str) -> type[MethodConfig]:
        found = self._found[name]
        if isinstance(found, str):
            importlib.import_module(found)
            found = self._found[name]
            assert not isinstance(found, str), f"{name} was announced and is not there"
        return found

    def __setitem__(self, name: str, config: type[MethodConfig]) -> None:
        self._found[name] = config

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._found))

    def __len__(self) -> int:
        return len(self._found)


METHOD_CONFIGS = Register()
"""Every known method by name; filled as the files of ``meshwright.methods`` are imported."""
