"""The repeated blocks of a model, found by structure: whatever its forward loops over."""

from __future__ import annotations

from torch import nn

from meshwright.errors import ModelError, join_names


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Finds the modules that sit in the model's outermost ``nn.ModuleList``s and hold parameters.

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
    """Finds the blocks of a model, or says why a method cannot go on without.

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
