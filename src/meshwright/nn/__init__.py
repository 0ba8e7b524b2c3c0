"""What methods need to know of modules: their classes by name, their repeated blocks, their forward."""

from meshwright.nn.blocks import find_blocks, require_blocks
from meshwright.nn.classes import class_name, class_names, modules_of, outermost
from meshwright.nn.forward import wrap_method

__all__ = [
    "class_name",
    "class_names",
    "find_blocks",
    "modules_of",
    "outermost",
    "require_blocks",
    "wrap_method",
]
