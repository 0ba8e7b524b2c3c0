"""A strategy as an immutable value: methods with their configs. How methods work is not known here."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.strategy.value import (
        METHOD_CONFIGS as METHOD_CONFIGS,
        Bytes as Bytes,
        MethodConfig as MethodConfig,
        Strategy as Strategy,
        parse_method as parse_method,
        read_size as read_size,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
