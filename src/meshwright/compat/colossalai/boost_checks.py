"""Checks of a Booster's arguments, made before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwright.compat.colossalai.boosted_optimizer import BoostedOptimizer
from meshwright.compat.colossalai.plugin import Plugin
from meshwright.errors import ConfigError, LaunchError, ModelError, did_you_mean
from meshwright.runtime import world_size
from meshwright.strategy import Strategy

_MIXED = ("fp16", "bf16")


def check_plugin(plugin: Any) -> None:
    """Check that ``plugin`` is a plugin of Meshwright, or None."""
    if plugin is not None and not isinstance(plugin, Plugin):
        raise ConfigError(
            "This is not a plugin",
            expected="one of meshwright.booster.plugin, such as HybridParallelPlugin(tp_size=1, pp_size=1)",
            got=type(plugin).__name__,
            fix="import the plugin from meshwright.booster.plugin",
        )


def check_precision(mixed_precision: Any, plugin: Plugin | None) -> None:
    """Check that the precision is known and does not contradict the plugin's."""
    if mixed_precision is None:
        return
    if mixed_precision not in _MIXED:
        raise ConfigError(
            f"mixed_precision is none of its values{did_you_mean(str(mixed_precision), _MIXED)}",
            expected="None, 'fp16' or 'bf16'",
            got=repr(mixed_precision),
            fix="use bf16, or fp16 where the device has no bf16",
        )
    own = getattr(plugin, "precision", None)
    if plugin is not None and plugin.controls_precision and own != mixed_precision:
        raise ConfigError(
            f"{type(plugin).__name__} controls the precision, and the Booster is asked for another",
            expected=f"mixed_precision=None, or {own!r}",
            got=repr(mixed_precision),
            fix=f"give the precision to the plugin: {type(plugin).__name__}(precision={mixed_precision!r}, …)"
            if own is not None
            else "give mixed_precision to the plugin",
        )


def check_world(plugin: Plugin | None, wanted: torch.device | None, device: torch.device) -> None:
    """Check that several ranks have a plugin, and that the device is the one launched on."""
    if plugin is None and world_size() > 1:
        raise LaunchError(
            "A Booster without a plugin trains each rank for itself",
            expected="a world of one rank, or a plugin",
            got=f"{world_size()} ranks",
            fix="pass plugin=TorchDDPPlugin() to average gradients",
        )
    if wanted is not None and wanted.type != device.type:
        raise LaunchError(
            "The Booster is asked for another device than was launched on",
            expected=device.type,
            got=wanted.type,
            fix="leave device out, or launch with backend='gloo' for the CPU",
        )


def check_scheduler(scheduler: LRScheduler | None, optimizer: Optimizer | None, strategy: Strategy) -> None:
    """Check that a scheduler belongs to the optimizer, whose parameter groups must stay as the scheduler knows them."""
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "The lr_scheduler belongs to another optimizer than the one to boost",
            expected="a scheduler over the optimizer given",
            got="one over another" if optimizer is not None else "no optimizer",
            fix="build the scheduler over that optimizer, and pass both",
        )
    groups = optimizer.param_groups if optimizer is not None else []
    kernels = [key for key in ("fused", "foreach") if any(group.get(key) for group in groups)]
    if scheduler is not None and "tensor_parallel" in strategy and kernels:
        # Such a kernel takes tensors of one mesh only, so groups are divided; the scheduler has an lr for each old one.
        raise ConfigError(
            f"The lr_scheduler was built over parameter groups that tensor parallelism divides for {kernels[0]}=True",
            expected="a scheduler over the groups as they will be",
            got=f"{kernels[0]}=True and an lr_scheduler",
            fix=f"leave {kernels[0]} out, or build the scheduler over the optimizer that boost returns",
        )


def check_own_loop(strategy: Strategy) -> None:
    """Check for methods that work inside ``Accelerated.step``, which a Booster's own loop does not call."""
    if "loss_spike" in strategy:
        raise ConfigError(
            "loss_spike judges the losses of Accelerated.step, and a Booster's loop calls backward itself",
            expected="a strategy without it",
            got=str(strategy),
            fix="leave it out, and compare losses in the loop",
        )
    if "gradient_accumulation" in strategy:
        raise ConfigError(
            "gradient_accumulation cuts the batches of Accelerated.step, and a Booster's loop calls backward itself",
            expected="a strategy without it",
            got=str(strategy),
            fix="call backward several times before a step, all but the last inside booster.no_sync",
        )


def check_lora(is_boosted: bool, is_quantized: bool) -> None:
    """Check that adapters are asked for around a plain model without quantised weights."""
    if is_boosted:
        raise ModelError(
            "The model is boosted: adapters cannot be put around it any more",
            expected="a plain model",
            got="one that boost returned",
            fix="call enable_lora before boost",
        )
    if is_quantized:
        raise ConfigError(
            "enable_lora is asked to quantise the weights",
            expected="quantize=False and no bnb_quantization_config",
            got="one of them",
            fix="leave them out; zero_stage=3 shards frozen weights too",
        )


def check_save(checkpoint: Path, shard: bool, gather_dtensor: bool, size_per_shard: int, use_safetensors: bool) -> None:
    """Check that the arguments of ``save_…`` are supported and fit together."""
    if not gather_dtensor:
        raise ConfigError(
            "gather_dtensor=False asks for files of parts of tensors",
            expected="gather_dtensor=True: whole tensors, which any layout of ranks can load",
            got="False",
            fix="leave it out; meshwright.store.CheckpointStore writes in parallel without gathering",
        )
    if shard and size_per_shard < 1:
        raise ConfigError(
            "size_per_shard is not a size",
            expected="1 MiB or more",
            got=repr(size_per_shard),
            fix="leave it out for 1024",
        )
    if use_safetensors and not shard and checkpoint.suffix != ".safetensors":
        raise ConfigError(
            "use_safetensors=True and the file's name says otherwise",
            expected="a name that ends in .safetensors",
            got=checkpoint.name,
            fix="rename it; the name decides the format",
        )


def check_optimizer_file(checkpoint: Path, shard: bool) -> None:
    """Check that an optimizer is not written to one safetensors file, which holds nothing but tensors."""
    if not shard and checkpoint.suffix == ".safetensors":
        raise ConfigError(
            "An optimizer does not fit into one .safetensors file: its groups and loss scale are no tensors",
            expected="another suffix, or shard=True",
            got=checkpoint.name,
            fix="rename it, to .pt for one; or pass shard=True for a folder of safetensors",
        )


def check_optimizer(optimizer: Any) -> None:
    """Check that ``boost`` returned the optimizer."""
    if not isinstance(optimizer, BoostedOptimizer):
        raise ConfigError(
            "This optimizer is not boosted",
            expected="the optimizer that boost returned",
            got=type(optimizer).__name__,
            fix="pass that one; its unwrap() is yours",
        )


def refuse_unboosted(model: Any) -> NoReturn:
    """Raise the error for a model that this Booster did not return."""
    raise ConfigError(
        "This model is not one that this Booster has boosted",
        expected="the model that boost returned, or its optimizer",
        got=type(model).__name__,
        fix="pass what boost returned",
    )
