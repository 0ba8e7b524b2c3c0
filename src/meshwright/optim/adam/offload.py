"""Adam with its states in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from meshwright.optim.adam.backward_update import BackwardUpdate
from meshwright.optim.adam.base import AdamBase, FreshLinksAfterError
from meshwright.optim.adam.cuda_copies import CudaCopies
from meshwright.optim.adam.links import DirectLink, Link, StagedLink


class AdamOffloadOptimizer(AdamBase):
    """:class:`~meshwright.optim.AdamOptimizer` whose states live in host memory (ZeRO-Offload, Ren et al. 2021, §4-5).

    The device keeps parameters and gradients. The host keeps 12 bytes per element (fp32 master, two fp32 moments) and
    staging buffers for two buckets of ``bucket_elements``, page-locked on CUDA; states need no page-locking, since only
    staging buffers are copied from and to. A step is a pipeline over buckets: gradients of the next one travel to the
    host in their own type while torch's fused kernel updates the present one and the weights of the one before travel
    back in theirs, on two streams. The host does not wait for the last weights; the device does, before its next work.

    The update of a step needs the whole gradient norm or overflow flag when gradients are clipped or scaled, so it
    cannot begin before the end of backward. Where neither is used, :meth:`step_in_backward` updates behind backward.

    Parameters that are in host memory already are updated there as AdamOptimizer does, with no copies. Arguments,
    states, errors and results are AdamOptimizer's; either loads the checkpoints of the other.
    """

    def _make_link(self, device: torch.device) -> Link:
        return DirectLink() if device.type == "cpu" else StagedLink(CudaCopies(device))

    @contextlib.contextmanager
    def step_in_backward(self, scale: float = 1.0) -> Iterator[None]:
        """Does the work of one ``step`` behind the backward pass inside the block; collective as ``step`` is.

        A bucket's gradients leave as soon as backward has completed them, and are freed; a thread updates the bucket on
        the host, and its weights return, while backward goes on. When the block ends the step is done, and parameters
        that got no gradient in this backward but had one from earlier are updated too::

            loss(first_half).backward()  # accumulates
            with optimizer.step_in_backward():
                loss(second_half).backward()

        Weights change although nobody has looked at the gradients: clipping, loss scaling and the skipping of
        non-finite steps need ``step``. An error inside the block leaves some parameters updated and others not. Not
        with ``DistributedDataParallel``, which averages gradients only after they were taken here; FSDP2 averages
        before. Hooks of ``step`` (averaged weights, votes) are called when the block ends.

        Args:
            scale: What the loss was multiplied by.

        Raises:
            ModelError: When a parameter gets a second gradient in the block, or a sparse one.
        """
        self._check_step(scale)
        with FreshLinksAfterError(self._links):
            with torch.no_grad():
                self._delta.restart()
                update = BackwardUpdate(self._updates(with_gradient=False), scale)
            with update:
                yield
            if self.record_delta:
                self._delta.reduce()
        for hook in (*self._optimizer_step_pre_hooks.values(), *self._optimizer_step_post_hooks.values()):
            hook(self, (), {})
