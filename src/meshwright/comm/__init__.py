"""Collectives that gradients pass through, and how fast they are.

Which gradient is right depends on what becomes of the result, and only the caller knows that:

- ``grad="replicated"``: every rank goes on *alike* and ends in the *same* loss, which counts once. The gradient that
  comes back is then the same on every rank and is used as it is: nothing is sent in backward.
- ``grad="partial"``: every rank goes on *differently*, and the loss is the *sum* of the ranks' losses. The gradients
  that come back are parts of the whole and are summed over the ranks first: backward is the transpose of forward.

With ``W`` ranks, ``x_r`` the tensor of rank ``r``, ``y`` the result, ``g`` the gradient that comes back and
``G = sum of all ranks' g``, the gradient of ``x_r`` is:

===========================  ============================  ==================================
forward                      ``"replicated"``              ``"partial"``
===========================  ============================  ==================================
``all_reduce`` sum           ``g``                         ``G``
``all_reduce`` avg           ``g / W``                     ``G / W``
``all_reduce`` max, min      ``g`` shared by the holders   ``G`` shared by the holders
``all_reduce`` prod          ``g * prod of the others``    ``G * prod of the others``
``all_gather``               ``g[r]``                      ``G[r]``, by reduce-scatter
``reduce_scatter`` sum       does not arise                all-gather of ``g``
``reduce_scatter`` avg       does not arise                all-gather of ``g``, divided by W
``reduce_scatter`` others    does not arise                as ``all_reduce``, of all-gathered ``g``
``broadcast``                does not arise                ``G`` on the root, 0 elsewhere
===========================  ============================  ==================================

``all_reduce`` defaults to ``"replicated"``, as in BMTrain (a loss that is averaged over ranks). ``all_gather`` defaults
to ``"partial"``: BMTrain takes ``g[r]`` there whatever the ranks do next, and so loses gradients (a bug, mended here).
A rank that takes part in forward must take part in backward wherever backward communicates.

Where tensors are on the CPU, the ranks first compare what they were called with, so that a mismatch is one error on
every rank (gloo would abort the process). On CUDA that would make the host wait; there the environment variable
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` makes torch compare.
"""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.comm.bandwidth import (
        BENCHMARK_OPS as BENCHMARK_OPS,
        Measurement as Measurement,
        benchmark_collectives as benchmark_collectives,
        benchmark_sizes as benchmark_sizes,
    )
    from meshwright.comm.collectives import (
        all_gather as all_gather,
        all_reduce as all_reduce,
        broadcast as broadcast,
        reduce_scatter as reduce_scatter,
    )
    from meshwright.comm.point_to_point import (
        recv_activations as recv_activations,
        send_activations as send_activations,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
