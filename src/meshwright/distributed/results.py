"""Results of all ranks in one tensor, for logs and evaluation."""

from __future__ import annotations

import torch

from meshwright.distributed.header import Header, check_alike, exchange
from meshwright.distributed.members import Group, members_of
from meshwright.distributed.transport import gathered


def gather_result(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Joins the results of all ranks along dim 0, on every rank (BMTrain).

    Without gradient: it is for predictions and measurements. In training use ``all_gather``.

    Args:
        x: Tensor on any device, contiguous or not, alike on all ranks but for dim 0. A scalar counts as ``(1,)``.
        group: Process group or DeviceMesh of one axis; None means the world.

    Returns:
        A new tensor ``(sum of all ranks' x.shape[0], *x.shape[1:])`` on the device of ``x``, in the order of the group.

    Raises:
        LaunchError: On every rank, when dtypes or other dims differ; before ``init_distributed``.
    """
    members = members_of(group)
    headers = exchange(Header.of("gather_result", x), members)
    check_alike(headers, ("call", "dtype", "row_shape"), members)
    rows = x.detach().reshape(1) if x.dim() == 0 else x.detach()
    lengths = [header.shape[0] if header.shape else 1 for header in headers]
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    # A group without a CPU backend carries CUDA tensors only.
    carried = padded if members.backend(x.device) else padded.to(members.host_device)
    every = gathered(carried, members).to(x.device)
    return torch.cat([part[:length] for part, length in zip(every, lengths, strict=True)])
