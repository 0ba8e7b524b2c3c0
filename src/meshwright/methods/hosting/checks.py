"""What cannot be offloaded in a job, and why."""

from __future__ import annotations

from pathlib import Path

from meshwright.errors import StrategyError
from meshwright.methods.hosting.choice import completed_in_backward
from meshwright.methods.job import Job
from meshwright.methods.zero.config import ZeroMethod
from meshwright.nn import require_blocks
from meshwright.optim import Disk


def check_gradients(fraction: float, job: Job) -> None:
    """Refuses gradients that leave before they are final.

    Raises:
        StrategyError: Where gradients are averaged after backward has accumulated them.
    """
    if fraction and not completed_in_backward(dict(job.axes), job.shard_axis):
        raise StrategyError(
            "offload: gradients cannot leave the device in backward here, they are averaged or reduced after it",
            expected="a single replica, or zero1, zero2 or fsdp, without tensor, expert and pipeline axes",
            got=f"gradients={fraction} over the axes {dict(job.axes)}",
            fix="set gradients to 0, also in place of 'all': they then travel when they are final; or add zero2",
        )


def check_parameters(fraction: float, job: Job) -> None:
    """Refuses parameters that no engine brings to the device in time.

    Raises:
        StrategyError: Where FSDP2 does not shard, or does so by other units than blocks.
    """
    if not fraction:
        return
    if job.shard_axis is None or job.size("pipeline") > 1:
        raise StrategyError(
            "offload: parameters come to the device block by block as FSDP2 gathers them, which it does not do here",
            expected="fsdp or zero2 without a pipeline axis",
            got=f"parameters={fraction} over the axes {dict(job.axes)}",
            fix="add fsdp, which works on one rank, too; or leave parameters at 0",
        )
    config = next(method for method in job.strategy.methods if isinstance(method, ZeroMethod))
    own_units = config.atorch_wrap_cls or config.atorch_size_based_min_num_params or config.wrap_trainable_outmost
    if fraction < 1 and own_units:
        raise StrategyError(
            f"offload: a part of the parameters is chosen by block, and {config.method_name} gathers other units",
            expected="parameters of 0 or 1, or the model's blocks as units",
            got=f"parameters={fraction} and {config}",
            fix="set parameters to 1, or leave the keys that choose units out",
        )


def check_activations(fraction: float, job: Job) -> None:
    """Refuses models without blocks.

    Raises:
        ModelError: When there is nothing to choose from.
        StrategyError: Under a pipeline, whose schedule decides when activations are needed.
    """
    if not fraction:
        return
    require_blocks(job.model, method="offload", option="activations")
    if job.size("pipeline") > 1:
        raise StrategyError(
            "offload: activations stay on the device under a pipeline in this version",
            expected="activations of 0",
            got=f"activations={fraction} and pipeline={job.size('pipeline')}",
            fix="use checkpoint, or a schedule that holds fewer micro-batches such as 1f1b",
        )


def check_disk(folder: str | None) -> None:
    """Makes the folder, and a file in it, which vanishes at once.

    Raises:
        ConfigError: When that fails.
    """
    if folder is not None:
        Disk(Path(folder))
