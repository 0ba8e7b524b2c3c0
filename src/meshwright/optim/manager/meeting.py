"""The one meeting of all ranks per step: what any of them has found, and whether they have run the same model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.errors import ModelError
from meshwright.optim.layouts import Peers, reduced
from meshwright.runtime import take_order


def on_any_rank(found: torch.Tensor, flags: tuple[bool, ...], peers: Peers | None) -> list[bool]:
    """Whether any rank's flags are set; one all-reduce, for which the host waits.

    Args:
        found: A 0-dim fp32 flag on the device of the gradients.
        flags: Others, on the host.
        peers: The ranks of one replica; None for the world.

    Returns:
        All of them, ``found`` first.

    Raises:
        ModelError: On every rank, when ranks have gathered other Blocks, or in another order.
    """
    order = float(take_order())
    host = torch.tensor([order, -order, *map(float, flags)]).to(found.device, non_blocking=True)
    any_found, highest, lowest, *rest = reduced(torch.cat([found.reshape(1), host]), dist.ReduceOp.MAX, peers).tolist()
    if highest != -lowest:
        raise ModelError(
            "The ranks have run different Blocks since the last step, and got each other's weights",
            expected="the same Blocks in the same order on every rank: all of them gather each one together",
            got="others, or another order, on some rank (this step has changed no weight)",
            fix="let all ranks decide alike which layers run, by a torch.Generator of one seed: other draws differ "
            "between ranks",
        )
    return [bool(each) for each in (any_found, *rest)]
