"""Which gradients are known to be finite already, and whether the others are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from meshwright.optim.clip import local_tensor
from meshwright.optim.manager.gradients import any_nonfinite, unscale_and_find_nonfinite


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's shards of the gradients that exist."""
    return [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]


class GradientWatch:
    """Remembers norms that were taken: a finite norm says that its gradients are finite, for as long as nobody writes
    to them. That saves a pass over gradients that were clipped.
    """

    def __init__(self) -> None:
        # Local gradients, by identity, with the version they had and the norm they are part of.
        self._measured: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def remember(self, norm: torch.Tensor, gradients: Iterable[torch.Tensor]) -> None:
        """Notes the norm of local gradients, over all ranks, as they are now."""
        self._measured.update({id(gradient): (gradient, gradient._version, norm) for gradient in gradients})

    def is_measured(self, gradient: torch.Tensor) -> bool:
        """Whether a norm was taken of this local gradient and nobody has written to it since."""
        measured, version, _ = self._measured.get(id(gradient), (None, 0, None))
        return measured is gradient and version == gradient._version

    def any_nonfinite(
        self, plain: list[torch.Tensor], to_unscale: list[torch.Tensor], inverse_scale: float
    ) -> torch.Tensor:
        """1 when a gradient of this rank, or a norm that one of them is part of, is inf or nan, else 0; 0-dim fp32.

        Args:
            plain: Local gradients, which are left as they are.
            to_unscale: Others; those of which no norm was taken are multiplied by ``inverse_scale`` in the same pass.
            inverse_scale: See there.
        """
        known = [self._measured[id(gradient)] for gradient in [*plain, *to_unscale] if self.is_measured(gradient)]
        norms = {id(norm): norm for _, _, norm in known}
        flags = [any_nonfinite([gradient for gradient in plain if not self.is_measured(gradient)])]
        fresh = [gradient for gradient in to_unscale if not self.is_measured(gradient)]
        flags.append(unscale_and_find_nonfinite(fresh, inverse_scale))
        flags += [(~torch.isfinite(norm)).float() for norm in norms.values()]
        device = next((flag.device for flag in flags if flag.device.type != "cpu"), flags[0].device)
        return torch.stack([flag.to(device) for flag in flags]).max()

    def forget(self) -> None:
        """Begins anew, with the next step's gradients."""
        self._measured = {}
