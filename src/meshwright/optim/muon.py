"""Muon: orthogonalised momentum for matrices, and AdamW for all other parameters."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from meshwright.errors import ConfigError, ModelError
from meshwright.optim.adam.adam_rule import AdamRule
from meshwright.optim.sharded import (
    Chunk,
    Kept,
    Layout,
    Parts,
    Region,
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

    Momentum is stored and updated on shards. Whole matrices then travel to owners, each to one of the ranks that share
    it, replicas included, so that the work is balanced; results travel back. For any number of matrices that is one
    all-to-all each way per mesh and bucket (128 MiB of matrices on each rank), behind the work on the last bucket.
    Matrices that one rank has whole, as experts under expert parallelism, do not travel. Plain parameters are updated
    on every rank, unless :meth:`setup_distributed` names the ranks that hold the same ones (``dp_group``).

    Groups with ``algorithm="adamw"`` are updated by AdamW on their shards: embeddings, output heads, norms and biases
    belong there. :func:`~meshwright.optim.muon.muon_param_groups` makes both groups.

    Args:
        params: Parameters or groups: matrices ``(H, W)``, or stacks of separate matrices ``(E, H, W)``.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Decay rate of the moving average.
        nesterov: Whether momentum is Nesterov's.
        ns_coefficients: a, b, c of the quintic iteration.
        eps: Smallest norm that a matrix is divided by.
        ns_steps: Number of iterations.
        adjust_lr_fn: ``"original"`` (or None) multiplies lr by √max(1, H/W), ``"match_rms_adamw"`` by 0.2·√max(H, W),
            which makes steps as large as AdamW's.
        algorithm: ``"muon"`` or ``"adamw"``, for groups that do not choose.
        betas: Decay rates of AdamW.
        adamw_eps: Added to √v̂ by AdamW.
        split: For fused weights, the number of equal parts along ``split_dim`` (3 for a query-key-value projection), or
            their sizes; each part is orthogonalised as a matrix of its own.
        split_dim: −2 for weights ``(out, in)``, −1 for ``(in, out)``.
        ns_dtype: Type in which matrices travel and are orthogonalised. None: bfloat16 on accelerators, as in torch;
            fp32 on a CPU, where it is faster than bfloat16 and exact.
        half_update: See :class:`~meshwright.optim.sharded.ShardedOptimizer`.

    Raises:
        ConfigError: When a hyperparameter is out of range.
        ModelError: For parameters that are not fp32, fp16 or bf16, or neither matrices nor stacks of them.
    """

    takes_whole_tensors = True
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
        """Refuse numbers out of range, and parameters that are no matrices.

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
        """Return the momentum, or AdamW's two moments, in the parameter's shape, fp32."""
        whole = Kept(layout.shape, tuple(range(layout.ndim)))
        if group["algorithm"] == "muon":
            return {"momentum_buffer": whole}
        return {"exp_avg": whole, "exp_avg_sq": whole}

    def variant(self, layout: Layout, group: dict[str, Any]) -> None:
        """Return one key for all parameters of a group."""

    def update(self, chunk: Chunk) -> Update:
        """Update a chunk, asking for the orthogonalised momentum."""
        if chunk.group["algorithm"] == "muon":
            yield [self._orthogonal_step(chunk)]
        elif chunk.has_gradients:
            _adamw_step(chunk)

    def _orthogonal_step(self, chunk: Chunk) -> Whole:
        """Return the request that sends momentum to owners as it is computed, and moves weights by the results."""
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
                # Parts of a fused weight may have unequal sizes.
                if (ratio := _ratio(group, result.shape)) != ratios[member]:
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
    """Return the factor of the learning rate of a matrix of this shape, as in torch."""
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
    rule = AdamRule(float(group["lr"]), float(beta1), float(beta2), group["adamw_eps"], group["weight_decay"])
    # The kernel goes through memory: all tensors must have one layout, that of the states.
    weights, gradients = chunk.weights.contiguous(), chunk.gradients.in_fp32().contiguous()
    moments = (chunk.states["exp_avg"].tensors, chunk.states["exp_avg_sq"].tensors)
    rule.update(weights.tensors, gradients.tensors, *moments, chunk.step, scale=1.0)
    for weight, moved in zip(chunk.weights, weights, strict=True):
        if moved is not weight:
            weight.copy_(moved)


# --- Parameter groups: which parameters Muon updates

_BLOCK_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def muon_param_groups(
    model: nn.Module,
    *,
    adamw_names: Sequence[str] = (),
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Divide a model's parameters into groups for :class:`~meshwright.optim.muon.Muon`: hidden matrices, and the rest.

    Muon is for weights that map hidden states to hidden states (Jordan et al. 2024): parameters of 2 dims, and of 3
    where they are stacks of expert weights. AdamW updates

    - parameters of another number of dims, and stacks of a single matrix (position embeddings ``(1, S, D)``);
    - all parameters of modules whose type has "embedding" in its name, and those with "embed" in their own;
    - output heads: the module that ``get_output_embeddings()`` returns, as in transformers; a ``Linear`` with the shape
      of an embedding outside all lists of blocks; whatever is tied to an embedding;
    - parameters in ``adamw_names``: heads of other kinds, such as classifiers, have to be named.

    Parameters that need no gradient are in no group.

    Args:
        model: The model, before or after it was sharded.
        adamw_names: Patterns (as of file names) of full parameter names.
        muon: Hyperparameters of the first group.
        adamw: Hyperparameters of the second group.

    Returns:
        Two groups, or one if the other is empty.

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
    """Return whether a module is inside a list of modules."""
    ancestors = ["", *(name[:index] for index, letter in enumerate(name) if letter == ".")]
    return any(isinstance(model.get_submodule(ancestor), _BLOCK_LISTS) for ancestor in ancestors)


# --- Matrices to orthogonalise: a weight, one of a stack, or a part of a fused weight


@dataclass(frozen=True)
class MatrixParts:
    """The regions of a weight that are matrices of their own.

    Args:
        split: Number of equal parts of a matrix, or their sizes.
        split_dim: Dim of the parts, from the end: −2 for ``Linear`` weights ``(out, in)``.
    """

    split: int | tuple[int, ...] = 1
    split_dim: int = -2

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of a matrix's parts along the split dim.

        Raises:
            ModelError: When they do not add up to the matrix.
        """
        total = shape[self.split_dim]
        sizes = (total // self.split,) * self.split if isinstance(self.split, int) else self.split
        if sum(sizes) != total:
            raise ModelError(
                "A matrix does not consist of the parts that it is to be split into",
                expected=f"{self.split!r} along dim {self.split_dim}",
                got=f"shape {shape}",
                fix="give fused weights a parameter group of their own, with the split that they have",
            )
        return sizes

    def first(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the height and width of the first part of a matrix."""
        extent = list(shape[-2:])
        extent[self.split_dim] = self.sizes(shape)[0]
        return extent[0], extent[1]

    def __call__(self, layout: Layout) -> Parts:
        """Return one region for each matrix, or part of one."""
        shape, axis = layout.shape, layout.ndim + self.split_dim
        sizes = self.sizes(shape)
        starts = list(itertools.accumulate(sizes, initial=0))
        blocks = []
        for index in itertools.product(*map(range, shape[:-2])):
            for start, size in zip(starts, sizes, strict=False):
                offset, extent = [*index, 0, 0], [*(1 for _ in index), *shape[-2:]]
                offset[axis], extent[axis] = start, size
                blocks.append(Region(tuple(offset), tuple(extent)))
        return tuple((block, block) for block in blocks)


# --- Newton–Schulz iteration, batched over matrices of one shape

# Elements of matrices in a batch. Small ones cost their calls, large ones gain nothing (CPU, fp32: batches of 32 are
# 28 times faster for 16 x 16, twice as fast for 64 x 64, and not faster for 256 x 1024).
_BATCH_ELEMENTS = {"cpu": 1 << 18, "other": 1 << 24}


def orthogonalised(
    matrices: Sequence[torch.Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[torch.Tensor]:
    """Return U·S'·Vᵀ for every U·S·Vᵀ, with all of S' roughly between 0.5 and 1.5 (Jordan et al. 2024, "Muon").

    The quintic iteration is X ← aX + (bA + cA²)X with A = XXᵀ, from X / ‖X‖ on. As in torch.optim.Muon, it works on the
    wide side of the matrix, with the norm in the matrix's own type.

    Args:
        matrices: Tensors of shape (..., H, W) with one matrix in each, in fp32 or half precision; only read.
        coefficients: a, b and c.
        steps: Number of iterations.
        eps: Smallest norm to divide by.

    Returns:
        One result for each matrix, of its shape and type.
    """
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.shape[-2], matrix.shape[-1]].append(index)
    results = list(matrices)
    for (height, width), indices in by_shape.items():
        size = _BATCH_ELEMENTS["cpu" if matrices[0].device.type == "cpu" else "other"] // max(height * width, 1)
        for start in range(0, len(indices), max(size, 1)):
            part = indices[start : start + max(size, 1)]
            made = _orthogonalised_batch(
                [matrices[index].reshape(height, width) for index in part], coefficients, steps, eps
            )
            for index, result in zip(part, made, strict=True):
                results[index] = result.reshape(matrices[index].shape)
    return results


def _orthogonalised_batch(
    matrices: Sequence[torch.Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> Sequence[torch.Tensor]:
    """Orthogonalise matrices (H, W) in one batch; a single one without a copy into a stack."""
    norms = [torch.linalg.vector_norm(matrix).clamp_(min=eps) for matrix in matrices]
    is_tall = matrices[0].shape[0] > matrices[0].shape[1]
    wide = [matrix.mT / norm if is_tall else matrix / norm for matrix, norm in zip(matrices, norms, strict=True)]
    x, multiply_add = (wide[0], torch.addmm) if len(wide) == 1 else (torch.stack(wide), torch.baddbmm)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    results = [x] if len(wide) == 1 else x.unbind()
    return [result.mT for result in results] if is_tall else results


def cost(shape: tuple[int, ...]) -> float:
    """Return the multiplications of one step for a matrix (..., H, W): H·W·min for XXᵀ and for (…)X, min³ for A²."""
    height, width = shape[-2:]
    least = min(height, width)
    return float(2 * height * width * least + least**3)
