"""ColossalAI's verbs for joining the world."""

from __future__ import annotations

import os
import sys

from meshwright.runtime import init_distributed, print_rank, settings, world_size


def launch_from_torch(
    backend: str | None = None, seed: int = 1024, verbose: bool = True, timeout_s: float = 1800.0
) -> None:
    """Makes this process a rank of the world that torchrun started, or a world of one. Seed: ColossalAI.

    Args:
        backend: torch.distributed backend; None means NCCL with CUDA and gloo without.
        seed: Seed of the run, for all generators.
        verbose: Say on rank 0 what was launched.
        timeout_s: Seconds a collective may take before its rank gives up.

    Raises:
        LaunchError: When environment and devices do not fit together.
    """
    init_distributed(seed=seed, backend=backend, timeout_s=timeout_s)
    if verbose:
        device = settings().device.type
        print_rank(f"meshwright: launched {world_size()} ranks on {device}, seed {seed}", file=sys.stderr, flush=True)


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """:func:`launch_from_torch` for processes that were started by other means than torchrun. Seed: ColossalAI.

    Sets torchrun's environment variables for this process and those it starts.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        host: Address of rank 0.
        port: A free port there.
        backend: See :func:`launch_from_torch`.
        local_rank: Which device of its machine the rank uses; None takes LOCAL_RANK, or ``rank``.
        seed: See :func:`launch_from_torch`.
        verbose: See :func:`launch_from_torch`.

    Raises:
        LaunchError: When these do not fit together.
    """
    local = local_rank if local_rank is not None else os.environ.get("LOCAL_RANK", rank)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(port), LOCAL_RANK=str(local)
    )
    launch_from_torch(backend, seed, verbose)
