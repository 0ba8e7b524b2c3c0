"""ATorch's ``auto_accelerate``, over :func:`meshwright.accelerate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from meshwright.errors import ConfigError, MeshwrightError, did_you_mean
from meshwright.methods import register_replace_pair as register_replace_pair
from meshwright.runtime import rank, same_on_every_rank, synchronize
from meshwright.strategy import Strategy
from meshwright.training.accelerate import accelerate
from meshwright.training.accelerated import Accelerated

_EXTRA_ARGUMENTS = {
    "verbose": False,
    "time_limit": None,
    "cluster": None,
    "find_unused_parameters": False,
    "ignore_dryrun_on_load_strategy": True,
    "sample_batch": None,
    "batch_size": None,
    "sampler_seed": 0,
    "memory_limit": None,
    "loss_weight": None,
}


def auto_accelerate(
    model: nn.Module,
    optim_func: Callable[..., Optimizer] | None = None,
    dataset: Dataset | None = None,
    loss_func: Callable[[Any, Any], Any] | None = None,
    prepare_input: Callable[[Any, torch.device], Any] | None = None,
    model_input_format: str | None = None,
    optim_args: Mapping[str, Any] | None = None,
    optim_param_func: Callable[[nn.Module], Any] | None = None,
    dataloader_args: Mapping[str, Any] | None = None,
    distributed_sampler_cls: type | None = None,
    excluded: Sequence[str] | None = None,
    included: Sequence[Any] | None = None,
    load_strategy: Any = None,
    lr_scheduler_cls: Callable[..., Any] | None = None,
    lr_scheduler_args: Mapping[str, Any] | None = None,
    finetune_strategy: bool = False,
    save_strategy_to_file: str | None = None,
    **kargs: Any,
) -> tuple[bool, Accelerated | None, Strategy | None]:
    """Accelerate a model with ATorch's arguments, in its order, and its three results.

    Arguments have the meaning that they have for :func:`accelerate`, which raises where this returns False. Others are:

    - ``load_strategy``: the strategy, in any form that :class:`Strategy` reads; None chooses one.
    - ``finetune_strategy``: search the configs of ``load_strategy``'s methods anew.
    - ``save_strategy_to_file``: path of a JSON file to write the strategy to; rank 0 writes it.
    - ``verbose``, ``cluster``, ``find_unused_parameters``, ``sample_batch``, ``batch_size``, ``sampler_seed``,
      ``memory_limit`` (bytes one rank may use) and ``loss_weight``, as keywords only.
    - ``time_limit``: seconds in which the best few candidates may be run to choose the fastest; None chooses by
      prediction alone.
    - ``ignore_dryrun_on_load_strategy``: False runs forward and backward once before returning.

    Returns:
        ``(status, result, best_strategy)``; ``(False, None, None)`` when it failed, with the reason printed on rank 0.

    Raises:
        TypeError: For an argument that does not exist.
    """
    for name in kargs.keys() - _EXTRA_ARGUMENTS.keys():
        raise TypeError(f"auto_accelerate has no argument {name!r}{did_you_mean(name, _EXTRA_ARGUMENTS)}.")
    extra = {**_EXTRA_ARGUMENTS, **kargs}
    try:
        result = accelerate(
            model, optim_func, dataset, loss_func, strategy=load_strategy, prepare_input=prepare_input,
            model_input_format=model_input_format, optim_args=optim_args, optim_param_func=optim_param_func,
            dataloader_args=dataloader_args, distributed_sampler_cls=distributed_sampler_cls,
            lr_scheduler_cls=lr_scheduler_cls, lr_scheduler_args=lr_scheduler_args, excluded=excluded or (),
            included=included or (), find_unused_parameters=extra["find_unused_parameters"],
            sample_batch=extra["sample_batch"], batch_size=extra["batch_size"], sampler_seed=extra["sampler_seed"],
            dry_run=load_strategy is not None and not extra["ignore_dryrun_on_load_strategy"],
            time_limit=extra["time_limit"], finetune_strategy=finetune_strategy, verbose=extra["verbose"],
            memory_limit=extra["memory_limit"], loss_weight=extra["loss_weight"], cluster=extra["cluster"],
        )  # fmt: skip
        if save_strategy_to_file is not None:
            _save(result.strategy, save_strategy_to_file)
    except MeshwrightError as error:
        if rank() == 0 or not getattr(error, "agreed", False):
            print(f"meshwright: auto_accelerate failed: {error}", file=sys.stderr, flush=True)
        return False, None, None
    return True, result, result.strategy


def _save(strategy: Strategy, path: str) -> None:
    with same_on_every_rank():
        if rank() == 0:
            try:
                strategy.save(path)
            except OSError as error:
                raise ConfigError(
                    "The strategy cannot be written to save_strategy_to_file",
                    got=f"{path}: {error.strerror}",
                    expected="a path in a directory that this user may write",
                    fix="name another path",
                ) from None
    synchronize()
