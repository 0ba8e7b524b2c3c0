"""ColossalAI's names for the optimizers of those of :mod:`meshwright.optim`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import SGD, Adam, Optimizer

from meshwright.errors import ConfigError
from meshwright.optim import (
    CAME,
    Adafactor,
    GaLoreAdafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    Lamb,
    clip_grad_norm_,
    get_galore_param_groups,
)
from meshwright.optim.galore_projection import LEFT, RIGHT, ProjectorForm, leading_vectors
from meshwright.optim.lamb import BiasCorrection
from meshwright.optim.sharded import (
    Chunk,
    Kept,
    Layout,
    ShardedOptimizer,
    Sum,
    Update,
    bad_value,
    check_at_least_zero,
)

__all__ = [
    "CAME",
    "Adafactor",
    "CPUAdam",
    "DistGaloreAdamW",
    "DistGaloreAwamW",
    "DistributedAdaFactor",
    "DistributedCAME",
    "DistributedGalore",
    "DistributedLamb",
    "FusedAdam",
    "FusedLAMB",
    "FusedSGD",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "GaLoreProjector",
    "HybridAdam",
    "Lamb",
    "Lars",
    "cast_to_distributed",
    "get_galore_param_groups",
]


# ColossalAI has a module for each (``nn.optimizer.lamb``), which are aliases of this one: it must look like a package.
__path__: list[str] = []


class DistributedAdaFactor(Adafactor):
    """:class:`~meshwright.optim.Adafactor` under ColossalAI's name for its distributed form; RMS(p) counts here.

    ColossalAI takes an ``lr`` and ignores it, also with ``relative_step=True``: so does this class, with a warning.
    With ``relative_step=False`` the ``lr`` counts, which ColossalAI's class does not offer.
    """

    def check_group(self, group: dict[str, Any]) -> None:
        """Remove an ``lr`` beside a relative step, with a warning, and check the rest."""
        if group["lr"] is not None and group["relative_step"]:
            warnings.warn(
                f"DistributedAdaFactor: lr={group['lr']!r} changes nothing, as in ColossalAI; relative_step=True "
                "chooses the step size. Pass relative_step=False for steps by lr, or leave lr out",
                stacklevel=6,  # whoever builds the optimizer
            )
            group["lr"] = None
        super().check_group(group)


class DistributedCAME(CAME):
    """:class:`~meshwright.optim.CAME` under ColossalAI's name for its distributed form."""


class DistributedLamb(Lamb):
    """:class:`~meshwright.optim.Lamb` under the name and with the arguments of ColossalAI's distributed form.

    ``bias_correction`` stands where :class:`~meshwright.optim.Lamb` has ``adam``, which can be given by name. True
    means ``"paper"``, as there; pass ``bias_correction="lr"`` for ColossalAI's numbers.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: BiasCorrection = "paper",
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction, **options)


class DistGaloreAdamW(GaLoreAdamW8bit):
    """:class:`~meshwright.optim.GaLoreAdamW8bit` under ColossalAI's name for its distributed form."""


class DistGaloreAwamW(DistGaloreAdamW):
    """:class:`DistGaloreAdamW` in ColossalAI's spelling."""


class DistributedGalore(DistGaloreAdamW):
    """:class:`DistGaloreAdamW` under the name that ColossalAI's module announces."""


class GaLoreProjector:
    """The projection of one gradient matrix, as :class:`~meshwright.optim.GaLoreAdamW` does it, for loops of one's own.

    Args:
        rank: Number of singular vectors.
        verbose: No effect.
        update_proj_gap: Steps after which the vectors are computed anew.
        scale: Multiplies what :meth:`project_back` returns.
        proj_type: ``"std"`` contracts the shorter dim of a matrix, ``"reverse_std"`` the longer one.
    """

    def __init__(
        self,
        rank: int,
        verbose: bool = False,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        proj_type: str = "std",
    ) -> None:
        if proj_type not in ("std", "reverse_std"):
            raise bad_value("proj_type", proj_type, "'std' or 'reverse_std'")
        self.rank, self.verbose, self.update_proj_gap = rank, verbose, update_proj_gap
        self.scale, self.proj_type = scale, proj_type
        self.svd_type: str | None = None
        self.ortho_matrix: torch.Tensor | None = None

    def project(self, full_rank_grad: torch.Tensor, iter: int) -> torch.Tensor:
        """Return the gradient in the space of its singular vectors; one that is no matrix unchanged.

        Args:
            full_rank_grad: Shape (H, W).
            iter: Number of the step; a multiple of ``update_proj_gap`` renews the vectors.
        """
        if full_rank_grad.ndim != 2:
            return full_rank_grad
        height, width = full_rank_grad.shape
        if self.svd_type is None:
            self.svd_type = "right" if (height >= width) == (self.proj_type == "std") else "left"
        if self.ortho_matrix is None or iter % self.update_proj_gap == 0:
            self._renew(full_rank_grad)
        assert self.ortho_matrix is not None
        if self.svd_type == "right":
            return full_rank_grad @ self.ortho_matrix.mT
        return self.ortho_matrix.mT @ full_rank_grad

    def project_back(self, low_rank_grad: torch.Tensor) -> torch.Tensor:
        """Return a step in the parameter's space, times ``scale``; one that is no matrix unchanged."""
        if low_rank_grad.ndim != 2 or self.ortho_matrix is None:
            return low_rank_grad
        is_right = self.svd_type == "right"
        whole = low_rank_grad @ self.ortho_matrix if is_right else self.ortho_matrix @ low_rank_grad
        return whole * self.scale

    def _renew(self, gradient: torch.Tensor) -> None:
        """Compute the vectors; where that fails after the first time, the old ones stay."""
        side = RIGHT if self.svd_type == "right" else LEFT
        vectors = leading_vectors(gradient.float(), ProjectorForm(self.rank, side), "exact", 0).to(gradient.dtype)
        if self.ortho_matrix is None or not bool(vectors.isnan().any()):
            self.ortho_matrix = vectors.mT if self.svd_type == "right" else vectors


def _refuse(optimizer: object, name: str, value: object, expected: str, fix: str) -> None:
    raise ConfigError(
        f"{type(optimizer).__name__}: {name} is not supported", expected=expected, got=f"{name}={value!r}", fix=fix
    )


# --- ColossalAI's fused kernels and host kernels. torch chooses the kernel here, by the device of the parameters.

_OFFLOAD = "keep states on the host with the plugin's cpu_offload, or on disk with methods=[('offload', {…})]"


class CPUAdam(Adam):
    """torch's AdamW with ColossalAI's arguments, or Adam with ``adamw_mode=False``; decay is 0 unless given.

    It updates parameters wherever they live. The plugins' ``cpu_offload``, ``offload_optim_frac`` and the method
    ``offload`` keep its states in host memory, or on a disk.

    Args:
        model_params: Parameters or groups of them.
        lr, betas, eps, weight_decay: As in torch.
        bias_correction: Must be True.
        adamw_mode: Decoupled decay; False adds decay to gradients.
        nvme_offload_fraction: Must be 0.
        nvme_offload_dir: No meaning without it.
        defaults: Accepted and ignored, as in ColossalAI's ``HybridAdam``.

    Raises:
        ConfigError: For an argument that is not supported.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | os.PathLike[str] | None = None,
        **defaults: Any,
    ) -> None:
        _check_adam(self, bias_correction)
        if nvme_offload_fraction:
            _refuse(self, "nvme_offload_fraction", nvme_offload_fraction, "0.0", _OFFLOAD)
        super().__init__(model_params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode)


class HybridAdam(CPUAdam):
    """:class:`CPUAdam` under the name of ColossalAI's Adam for any device."""


class FusedAdam(Adam):
    """torch's AdamW with ColossalAI's arguments and their order, or Adam with ``adamw_mode=False``.

    ``bias_correction`` must be True and ``amsgrad`` False; ``set_grad_none`` is what torch does anyway.

    Raises:
        ConfigError: For an argument that is not supported.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check_adam(self, bias_correction, amsgrad)
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode)


def _check_adam(optimizer: Adam, bias_correction: bool, amsgrad: bool = False) -> None:
    if not bias_correction:
        _refuse(optimizer, "bias_correction", bias_correction, "True", "use meshwright.optim.Lamb(…, adam=True, "
                "bias_correction=False), which is Adam without it")  # fmt: skip
    if amsgrad:
        _refuse(optimizer, "amsgrad", amsgrad, "False", "use torch.optim.AdamW(…, amsgrad=True)")


class FusedSGD(SGD):
    """torch's SGD with ColossalAI's arguments; ``lr`` must be given, and ``wd_after_momentum`` must be False.

    Raises:
        ConfigError: For ``wd_after_momentum=True``.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        if wd_after_momentum:
            _refuse(self, "wd_after_momentum", True, "False: decay enters the momentum, as in torch", "leave it out")
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


class FusedLAMB(Lamb):
    """:class:`~meshwright.optim.Lamb` with the arguments of ColossalAI's fused form, right on any layout.

    Gradients are first clipped to ``max_grad_norm`` over all parameters; a Booster does this where it clips, so that
    stages and experts of other ranks count. Groups without decay take Adam's step, unless ``use_nvlamb``.

    Args:
        params, lr, betas, eps, weight_decay: See :class:`~meshwright.optim.Lamb`.
        bias_correction: Divide the moments by 1 − βᵗ.
        amsgrad: Must be False.
        adam_w_mode: Must be True: decay is a part of the step.
        grad_averaging: Must be True: the gradient enters its moment by 1 − β₁.
        set_grad_none: What torch does anyway.
        max_grad_norm: Largest norm of all gradients; 0 for no clipping.
        use_nvlamb: Scale the steps of groups without decay, too.

    Raises:
        ConfigError: For an argument that is out of range or not supported.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            _refuse(self, "amsgrad", True, "False", "leave it out")
        for name, value in (("adam_w_mode", adam_w_mode), ("grad_averaging", grad_averaging)):
            if not value:
                _refuse(self, name, value, "True", "leave it out")
        self.use_nvlamb, self.max_grad_norm = use_nvlamb, max_grad_norm
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction)

    def check_group(self, group: dict[str, Any]) -> None:
        """Choose Adam's step for a group without decay, and check the rest."""
        group["adam"] = not (self.use_nvlamb or group["weight_decay"])
        super().check_group(group)

    def clips_elsewhere(self) -> float:
        """Return ``max_grad_norm`` for another to clip by, and clip no more."""
        max_norm, self.max_grad_norm = self.max_grad_norm, 0.0
        return max_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip the gradients by their norm over all parameters, and update the weights; collective."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        if self.max_grad_norm:
            clip_grad_norm_([each for group in self.param_groups for each in group["params"]], self.max_grad_norm)
        super().step()
        return loss


class Lars(ShardedOptimizer):
    """LARS (You et al. 2017, arXiv 1708.03888), right on any layout; one all-reduce a step.

    For every parameter, with gradient g and its momentum u::

        r = eeta · ‖p‖ / (‖g‖ + weight_decay · ‖p‖ + epsilon), at most 50; 1 where either norm is 0
        u = momentum · u + clamp(g + weight_decay · p, −10, 10)        p -= lr · r · u

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        momentum: Decay rate of u.
        eeta: The trust coefficient.
        weight_decay: Added to gradients, times the weights.
        epsilon: Added to the ratio's denominator.

    Raises:
        ConfigError: When a hyperparameter is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        eeta: float = 1e-3,
        weight_decay: float = 0.0,
        epsilon: float = 0.0,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "eeta": eeta, "weight_decay": weight_decay, "epsilon": epsilon}
        super().__init__(params, {**numbers, "lars": True})

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse numbers out of range.

        Raises:
            ConfigError: Naming the hyperparameter.
        """
        check_at_least_zero(group, "lr", "momentum", "weight_decay", "epsilon")
        if not 0 < group["eeta"] <= 1:
            raise bad_value("eeta", group["eeta"], "a number above 0, at most 1")

    def kept_states(self, layout: Layout, group: dict[str, Any]) -> dict[str, Kept]:
        """Return the momentum in the parameter's shape, if there is any."""
        return {"momentum_buffer": Kept(layout.shape, tuple(range(layout.ndim)))} if group["momentum"] else {}

    def update(self, chunk: Chunk) -> Update:
        """Update a chunk, asking for the norms of every parameter and its gradient."""
        group, weights, gradients = chunk.group, chunk.weights, chunk.gradients
        ratios: torch.Tensor | float = 1.0
        if group["lars"]:
            weight_squares, gradient_squares = yield [Sum(weights.squares()), Sum(gradients.squares())]
            ratios = _trust(weight_squares, gradient_squares, group)
            if group["weight_decay"]:
                gradients = gradients.map(lambda g, p: g.add(p, alpha=group["weight_decay"]), weights)
        direction = gradients.map(lambda gradient: gradient.clamp(-10.0, 10.0))
        if group["momentum"]:
            direction = chunk.states["momentum_buffer"].mul_(float(group["momentum"])).add_(direction)
        weights.add_(direction * ratios, alpha=-float(group["lr"]))


def _trust(weight_squares: torch.Tensor, gradient_squares: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return the ratio of every parameter from the squares of both norms."""
    weight, gradient = weight_squares.sqrt(), gradient_squares.sqrt()
    ratio = group["eeta"] * weight / (gradient + group["weight_decay"] * weight + group["epsilon"])
    return torch.where((weight > 0) & (gradient > 0), ratio, 1.0).clamp(0.0, 50.0)


def cast_to_distributed(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer itself, so that code which calls ColossalAI's function runs.

    There it rebuilds a ``Lamb``, ``CAME``, ``Adafactor`` or ``GaLoreAdamW8bit`` as the ``Distributed…`` class. Here
    these are right on any layout.

    Args:
        optimizer: Any torch optimizer.
    """
    return optimizer
