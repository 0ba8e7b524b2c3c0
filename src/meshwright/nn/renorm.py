"""Modules whose forward changes rows of their weights, by the samples it is given."""

from __future__ import annotations

from torch import nn

from meshwright.errors import ModelError


def check_no_renorm(model: nn.Module, world: int) -> None:
    """Refuses modules whose forward changes rows of their weights, those that a rank's own samples look up.

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
