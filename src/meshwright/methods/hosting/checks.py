"""What cannot be offloaded in a job, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshwright.errors import StrategyError
from meshwright.methods.hosting.choice import completed_in_backward
from meshwright.methods.zero.config import ZeroMethod
from meshwright.optim import Disk
from meshwright.strategy import Strategy


def check_gradients(fraction: float, sizes: Mapping[str, int], shard_axis: str | None) -> None:
    """Refuses gradients that leave before they are final.

    Raises:
        StrategyError: Where gradients are averaged after backward has accumulated them.
    """
    if fraction and not completed_in_backward(sizes, shard_axis):
        raise StrategyError(
            "offload: gradients cannot leave the device in backward here, they are averaged or reduced after it",
            expected="a single replica, or zero1, zero2 or fsdp, without tensor, expert and pipeline axes",
            got=f"gradients={fraction} over the axes {dict(sizes)}",
            fix="set gradients to 0, also in place of 'all': they then travel when they are final; or add zero2",
        )


def check_parameters(fraction: float, sizes: Mapping[str, int], shard_axis: str | None) -> None:
    """Refuses parameters that no engine brings to the device in time.

    Raises:
        StrategyError: Where FSDP2 does not shard.
    """
    if fraction and (shard_axis is None or sizes.get("pipeline", 1) > 1):
        raise StrategyError(
            "offload: parameters come to the device block by block as FSDP2 gathers them, which it does not do here",
            expected="fsdp or zero2 without a pipeline axis",
            got=f"parameters={fraction} over the axes {dict(sizes)}",
            fix="add fsdp, which works on one rank, too; or leave parameters at 0",
        )


def check_parameter_units(fraction: float, strategy: Strategy) -> None:
    """Refuses a part of the parameters where FSDP2 gathers by other units than blocks.

    Raises:
        StrategyError: Naming the keys.
    """
    if not fraction:
        return
    config = next(method for method in strategy.methods if isinstance(method, ZeroMethod))
    own_units = config.atorch_wrap_cls or config.atorch_size_based_min_num_params or config.wrap_trainable_outmost
    if fraction < 1 and own_units:
        raise StrategyError(
            f"offload: a part of the parameters is chosen by block, and {config.method_name} gathers other units",
            expected="parameters of 0 or 1, or the model's blocks as units",
            got=f"parameters={fraction} and {config}",
            fix="set parameters to 1, or leave the keys that choose units out",
        )


def check_activations(fraction: float, sizes: Mapping[str, int]) -> None:
    """Refuses activations under a pipeline, whose schedule decides when they are needed.

    Raises:
        StrategyError: Naming the axis.
    """
    if fraction and sizes.get("pipeline", 1) > 1:
        raise StrategyError(
            "offload: activations stay on the device under a pipeline in this version",
            expected="activations of 0",
            got=f"activations={fraction} and pipeline={sizes['pipeline']}",
            fix="use checkpoint, or a schedule that holds fewer micro-batches such as 1f1b",
        )


def check_disk(folder: str | None) -> None:
    """Makes the folder, and a file in it, which vanishes at once.

    Raises:
        ConfigError: When that fails.
    """
    if folder is not None:
        Disk(Path(folder))
