"""Which parameters of a model Muon updates, and which are left to AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError

_BLOCK_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def muon_param_groups(
    model: nn.Module,
    *,
    adamw_names: Sequence[str] = (),
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Groups for :class:`~meshwright.optim.muon.Muon`: hidden matrices; and what AdamW does better.

    Muon is for weights that map hidden states to hidden states (Jordan et al. 2024): parameters of 2 dims, and of 3
    where they are stacks of expert weights. To AdamW go

    - parameters of another number of dims, and stacks of a single matrix (position embeddings ``(1, S, D)``);
    - all of a module whose type has "embedding" in its name, and what has "embed" in its own;
    - output heads: what the model's ``get_output_embeddings()`` gives, as transformers' models have it; a ``Linear``
      with the shape of an embedding that is in no list of blocks; whatever is tied to an embedding;
    - what ``adamw_names`` says: heads of other kinds, such as classifiers, have to be named.

    Parameters that need no gradient are in no group.

    Args:
        model: Before or after it was sharded.
        adamw_names: Patterns (as of file names) of full parameter names.
        muon: Hyperparameters of the first group.
        adamw: Hyperparameters of the second group.

    Returns:
        Two groups, or one where there is nothing for the other.

    Raises:
        ConfigError: When a pattern fits no parameter.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    for pattern in adamw_names:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                "A name in adamw_names fits no parameter",
                expected="a pattern of full parameter names",
                got=repr(pattern),
                fix="compare it with model.named_parameters(), such as "
                + ", ".join(repr(name) for name in list(names)[:3]),
            )
    apart = {id(parameter) for parameter in _outer_parameters(model)}
    apart |= {
        id(parameter)
        for name, parameter in names.items()
        if not _is_hidden(name, parameter) or any(fnmatchcase(name, pattern) for pattern in adamw_names)
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {**(muon or {}), "params": [p for p in trained if id(p) not in apart], "algorithm": "muon"},
        {**(adamw or {}), "params": [p for p in trained if id(p) in apart], "algorithm": "adamw"},
    ]
    return [group for group in groups if group["params"]]


def _is_hidden(name: str, parameter: torch.Tensor) -> bool:
    is_stack = parameter.ndim == 3 and parameter.shape[0] > 1
    return (parameter.ndim == 2 or is_stack) and "embed" not in name.lower()


def _outer_parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    """Those of embeddings and output heads."""
    embeddings = [module for module in model.modules() if "embedding" in type(module).__name__.lower()]
    shapes = set()
    for module in embeddings:
        yield from module.parameters()
        shapes |= {parameter.shape for parameter in module.parameters(recurse=False)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        yield from head.parameters()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if (
            isinstance(module, nn.Linear)
            and weight is not None
            and weight.shape in shapes
            and not _in_list(model, name)
        ):
            yield weight


def _in_list(model: nn.Module, name: str) -> bool:
    """Whether a module is within a list of others."""
    ancestors = ["", *(name[:index] for index, letter in enumerate(name) if letter == ".")]
    return any(isinstance(model.get_submodule(ancestor), _BLOCK_LISTS) for ancestor in ancestors)
