"""Muon on any layout: momentum on shards, Newton–Schulz on whole matrices by one rank each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from meshwright.errors import ModelError
from meshwright.optim.adam.rule import AdamRule
from meshwright.optim.muon.newton_schulz import cost, orthogonalised
from meshwright.optim.muon.parts import MatrixParts
from meshwright.optim.sharded import (
    Chunk,
    Kept,
    Layout,
    ShardedOptimizer,
    Update,
    Whole,
    bad_value,
    check_at_least_zero,
    check_betas,
)

AdjustLr = Literal["original", "match_rms_adamw"] | None


class Muon(ShardedOptimizer):
    """Muon (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982) for matrices, and AdamW for all else, on any layout.

    For every matrix, with the arguments and numbers of :class:`torch.optim.Muon`::

        m = momentum · m + (1 − momentum) · g        u = momentum · m + (1 − momentum) · g   (Nesterov), or m
        p -= lr · weight_decay · p + lr · ratio · NewtonSchulz(u)

    Momentum is kept and updated on shards. Whole matrices then travel to owners, each to one of the ranks that share
    it, replicas included, so that the work is balanced; results travel back. However many matrices there are, that is
    one all-to-all each way per mesh and bucket (128 MiB of matrices on each rank), behind the work on the bucket
    before. Matrices that one rank holds alone, as experts under expert parallelism, do not travel. Plain parameters are
    updated on every rank, unless :meth:`setup_distributed` told which ranks hold the same ones (``dp_group``).

    Groups with ``algorithm="adamw"`` are updated by AdamW on their shards: embeddings, output heads, norms and biases
    belong there. :func:`~meshwright.optim.muon.muon_param_groups` makes both groups.

    Args:
        params: Parameters or groups: matrices ``(H, W)`` or stacks of them ``(E, H, W)``, each matrix by itself.
        lr: Learning rate.
        weight_decay: Decoupled.
        momentum: Of the moving average.
        nesterov: Whether to look one step ahead.
        ns_coefficients: a, b, c of the quintic iteration.
        eps: Least norm that a matrix is divided by.
        ns_steps: Number of iterations.
        adjust_lr_fn: ``"original"`` (or None) multiplies lr by √max(1, H/W), ``"match_rms_adamw"`` by 0.2·√max(H, W),
            which makes steps as large as AdamW's.
        algorithm: ``"muon"`` or ``"adamw"``; of groups that do not say.
        betas: Decay rates of AdamW.
        adamw_eps: Added to √v̂ by AdamW.
        split: Of fused weights: the number of equal parts along ``split_dim`` (3 for a query-key-value projection), or
            their sizes; each is orthogonalised as a matrix of its own.
        split_dim: −2 for weights ``(out, in)``, −1 for ``(in, out)``.
        ns_dtype: In which matrices travel and are orthogonalised. None: bfloat16 on accelerators, as in torch; fp32 on
            a CPU, where it is faster than bfloat16 and exact.
        half_update: See :class:`~meshwright.optim.sharded.ShardedOptimizer`.

    Raises:
        ConfigError: When a hyperparameter is out of range.
        ModelError: For parameters that are not fp32, fp16 or bf16, or neither matrices nor stacks of them.
    """

    takes_half_gradients = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr = None,
        *,
        algorithm: Literal["muon", "adamw"] = "muon",
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        split: int | Sequence[int] = 1,
        split_dim: int = -2,
        ns_dtype: torch.dtype | None = None,
        half_update: str = "master",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "algorithm": algorithm,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "split": split,
            "split_dim": split_dim,
            "ns_dtype": ns_dtype,
            "half_update": half_update,
        }
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuses numbers out of range, and parameters that are no matrices.

        Raises:
            ConfigError: Naming the first hyperparameter.
            ModelError: For parameters.
        """
        check_at_least_zero(group, "lr", "weight_decay", "eps", "adamw_eps")
        check_betas(group, 2)
        if group["algorithm"] not in ("muon", "adamw"):
            raise bad_value("algorithm", group["algorithm"], "'muon' or 'adamw'")
        if group["algorithm"] == "muon":
            _check_muon(group)

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """The momentum, or AdamW's two moments, in the parameter's shape, fp32."""
        whole = Kept(layout.shape, tuple(range(layout.ndim)))
        if group["algorithm"] == "muon":
            return {"momentum_buffer": whole}
        return {"exp_avg": whole, "exp_avg_sq": whole}

    def variant(self, layout: Layout, group: dict[str, Any]) -> None:
        """Matrices and stacks of them go together, and so does all that AdamW updates."""

    def update(self, chunk: Chunk) -> Update:
        """One request: Newton–Schulz of the momentum."""
        if chunk.group["algorithm"] == "muon":
            yield [self._orthogonal_step(chunk)]
        elif chunk.has_gradients:
            _adamw_step(chunk)

    def _orthogonal_step(self, chunk: Chunk) -> Whole:
        """Momentum goes to owners as it is made, matrix by matrix; weights are moved by what comes back."""
        group, parts = chunk.group, _parts(chunk.group)
        lr, momentum = float(group["lr"]), group["momentum"]
        gradients, buffers = chunk.gradients.tensors, chunk.states["momentum_buffer"].tensors
        ratios = [_ratio(group, parts.first(layout.shape)) for layout in chunk.layouts]

        def send(index: int) -> torch.Tensor:
            gradient, buffer = gradients[index].float(), buffers[index]
            buffer.lerp_(gradient, 1 - momentum)
            return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer

        def work(members: list[int], wholes: list[torch.Tensor]) -> list[torch.Tensor]:
            results = orthogonalised(wholes, group["ns_coefficients"], group["ns_steps"], group["eps"])
            for member, result in zip(members, results, strict=True):
                if (ratio := _ratio(group, result.shape)) != ratios[member]:  # one of several parts, of unequal sizes
                    result.mul_(ratio / ratios[member])
            return results

        def receive(index: int, result: torch.Tensor) -> None:
            weight = chunk.weights.tensors[index].mul_(1 - lr * group["weight_decay"])
            weight.add_(result, alpha=-lr * ratios[index])

        return Whole(send, work, receive, parts, cost=cost, dtype=_ns_dtype(chunk), replicas=self._replicas)


def _check_muon(group: dict[str, Any]) -> None:
    if not 0 <= group["momentum"] < 1:
        raise bad_value("momentum", group["momentum"], "from 0 to below 1")
    if len(group["ns_coefficients"]) != 3:
        raise bad_value("ns_coefficients", group["ns_coefficients"], "three numbers")
    if not 0 < group["ns_steps"] < 100:
        raise bad_value("ns_steps", group["ns_steps"], "1 to 99")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise bad_value("adjust_lr_fn", group["adjust_lr_fn"], "None, 'original' or 'match_rms_adamw'")
    if group["ns_dtype"] not in (None, torch.float32, torch.bfloat16):
        raise bad_value("ns_dtype", group["ns_dtype"], "None, torch.float32 or torch.bfloat16")
    parts = _parts(group)
    for parameter in group["params"]:
        if parameter.ndim not in (2, 3):
            raise ModelError(
                "A parameter that Muon is to update is no matrix",
                expected="2 dims, or 3 for a stack of matrices",
                got=f"shape {tuple(parameter.shape)}",
                fix="put it into a group with algorithm='adamw', as muon_param_groups does",
            )
        parts.sizes(tuple(parameter.shape))


def _parts(group: Mapping[str, Any]) -> MatrixParts:
    split, dim = group["split"], group["split_dim"]
    sizes = (split,) if isinstance(split, int) else tuple(split)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise bad_value("split", split, "a number of parts, or their sizes, above 0")
    if dim not in (-2, -1):
        raise bad_value("split_dim", dim, "-2 or -1")
    return MatrixParts(split if isinstance(split, int) else sizes, dim)


def _ratio(group: Mapping[str, Any], shape: tuple[int, ...]) -> float:
    """What the learning rate of a matrix of this shape is multiplied by, as in torch."""
    height, width = shape[-2:]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(height, width))
    return math.sqrt(max(1, height / width))


def _ns_dtype(chunk: Chunk) -> torch.dtype:
    if chunk.group["ns_dtype"] is not None:
        return chunk.group["ns_dtype"]
    mesh = chunk.layout.mesh
    where = chunk.device.type if mesh is None or chunk.is_local else mesh.device_type
    return torch.float32 if where == "cpu" else torch.bfloat16


def _adamw_step(chunk: Chunk) -> None:
    group = chunk.group
    beta1, beta2 = group["betas"]
    rule = AdamRule(
        lr=float(group["lr"]), beta1=float(beta1), beta2=float(beta2), eps=group["adamw_eps"],
        weight_decay=group["weight_decay"], decoupled=True, maximize=False, hold_steps=0,
    )  # fmt: skip
    # The kernel walks through memory: all must lie alike, as the states do.
    weights, gradients = chunk.weights.contiguous(), chunk.gradients.in_fp32().contiguous()
    moments = (chunk.states["exp_avg"].tensors, chunk.states["exp_avg_sq"].tensors)
    rule.update(weights.tensors, gradients.tensors, *moments, chunk.step, scale=1.0)
    for weight, moved in zip(chunk.weights, weights, strict=True):
        if moved is not weight:
            weight.copy_(moved)
