"""Parameter groups for GaLore: which weights are projected."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshwright.errors import ConfigError

_NOT_DECAYED = ("bias", "LayerNorm.weight")


def get_galore_param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    proj_type: str = "std",
    *,
    decay: float | None = None,
    svd: str = "exact",
) -> list[dict[str, Any]]:
    """A model's parameters in three groups, as ColossalAI's function of this name makes them.

    Args:
        model: Parameters may be sharded; those that need no gradient are left out.
        weight_decay: Of the first two groups.
        rank: Singular vectors that are kept.
        update_proj_gap: Steps between decompositions.
        scale: Of projected steps.
        proj_type: See :class:`~meshwright.optim.galore.GaLoreAdamW`.
        decay: Another name of ``weight_decay``, which ColossalAI's documentation uses.
        svd: How singular vectors are computed.

    Returns:
        Matrices that the rank makes smaller, projected; everything else; what is not decayed (names with ``bias`` or
        ``LayerNorm.weight``). A matrix with a side of ``rank`` or less is not projected: nothing would be saved.

    Raises:
        ConfigError: When both or neither of ``weight_decay`` and ``decay`` are given, or no matrix can be projected.
    """
    if (weight_decay is None) == (decay is None):
        raise ConfigError(
            "The weight decay is named by weight_decay or by decay",
            expected="one of them",
            got=f"weight_decay={weight_decay}, decay={decay}",
            fix="pass weight_decay=…",
        )
    whole: dict[str, list[nn.Parameter]] = {"projected": [], "other": [], "not decayed": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole[_kind(name, parameter, rank)].append(parameter)
    if not whole["projected"]:
        raise ConfigError(
            "No matrix of the model is larger than the rank",
            expected="a rank below the smaller side of the model's matrices",
            got=f"rank={rank}",
            fix="choose a smaller rank, or an optimizer that does not project",
        )
    decayed = {"weight_decay": weight_decay if decay is None else decay}
    projection = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": proj_type, "svd": svd}
    return [
        {"params": whole["projected"], **decayed, **projection},
        {"params": whole["other"], **decayed},
        {"params": whole["not decayed"], "weight_decay": 0.0},
    ]


def _kind(name: str, parameter: nn.Parameter, rank: int) -> str:
    if any(part in name for part in _NOT_DECAYED):
        return "not decayed"
    return "projected" if parameter.ndim == 2 and min(parameter.shape) > rank else "other"
