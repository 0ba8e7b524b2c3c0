"""WHAT was decided: methods with their configs, as an immutable value. Knows nothing of how they are done."""

from meshwright.strategy.config import Bytes, MethodConfig, read_size
from meshwright.strategy.reading import parse_method
from meshwright.strategy.register import METHOD_CONFIGS
from meshwright.strategy.value import Strategy

__all__ = ["METHOD_CONFIGS", "Bytes", "MethodConfig", "Strategy", "parse_method", "read_size"]
