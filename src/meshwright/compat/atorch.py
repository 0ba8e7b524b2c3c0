"""ATorch's ``auto_accelerate``, ``Strategy`` and named process groups.

The modules that ATorch's users import from (``meshwright.atorch.auto``, ``meshwright.atorch.distributed.distributed``)
are all this one; see :mod:`meshwright.compat.aliases`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import Dataset

from meshwright import runtime
from meshwright.errors import ConfigError, LaunchError, MeshwrightError, StrategyError, did_you_mean, join_names
from meshwright.methods import SAMPLED, ParallelMode, register_replace_pair as register_replace_pair
from meshwright.nn.batches import to_device as data_to_device
from meshwright.runtime import rank, rank_grid, same_on_every_rank, synchronize, world_size
from meshwright.strategy import Strategy as _Strategy

# Under another name: importing the alias ``meshwright.atorch.auto.accelerate`` sets ``accelerate`` in this module.
from meshwright.training.accelerate import accelerate as _accelerate, clip_grad_norm
from meshwright.training.accelerated import Accelerated

__all__ = [
    "Strategy",
    "auto_accelerate",
    "clip_grad_norm",
    "create_parallel_group",
    "data_to_device",
    "destroy_parallel_group",
    "get_data_partition_rank_and_size",
    "get_device_mesh",
    "init_distributed",
    "local_rank",
    "parallel_group",
    "parallel_group_and_ranks",
    "parallel_group_size",
    "parallel_rank",
    "rank",
    "register_replace_pair",
    "reset_distributed",
    "world_size",
]

# The modules of ATorch's package are aliases of this one: it must look like a package.
__path__: list[str] = []

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
# Arguments of ATorch's engine that are accepted with the one value that describes what is done here.
_FIXED_ARGUMENTS = {
    "expand_sample_batch": (True, "a sample_batch is always repeated to the size that is wanted"),
    "meta_init_offload_name": (None, "build the model under torch.device('meta'), or as usual"),
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
    known = {**_EXTRA_ARGUMENTS, **_FIXED_ARGUMENTS}
    for name in kargs.keys() - known.keys():
        raise TypeError(f"auto_accelerate has no argument {name!r}{did_you_mean(name, known)}.")
    extra = {**_EXTRA_ARGUMENTS, **kargs}
    try:
        _check_fixed(kargs)
        result = _accelerate(
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
        if result.mesh is not None:
            _meshes[:] = [*_made, result.mesh]
    except MeshwrightError as error:
        if rank() == 0 or not getattr(error, "agreed", False):
            print(f"meshwright: auto_accelerate failed: {error}", file=sys.stderr, flush=True)
        return False, None, None
    return True, result, Strategy(result.strategy)


def _check_fixed(arguments: Mapping[str, Any]) -> None:
    for name in arguments.keys() & _FIXED_ARGUMENTS.keys():
        value, why = _FIXED_ARGUMENTS[name]
        if arguments[name] != value:
            raise ConfigError(
                f"auto_accelerate: {name} is an argument of ATorch's engine",
                expected=f"{name}={value!r}, or nothing",
                got=f"{name}={arguments[name]!r}",
                fix=f"leave it out; {why}",
            )


def _save(strategy: _Strategy, path: str) -> None:
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


class Strategy(_Strategy):
    """A strategy with the methods of ATorch's ``Strategy``; ``add_opt`` changes it in place.

    Args:
        opt_list: As for :class:`meshwright.Strategy`; None is empty.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # it can change

    def __init__(self, opt_list: Any = None) -> None:
        super().__init__(() if opt_list is None else opt_list)

    def opt_names(self) -> list[str]:
        """Return the names of the methods, in the order listed."""
        return list(self.names)

    def get_parallel_mode(self) -> tuple[bool, tuple[list[tuple[str, int]], list[int] | None] | None]:
        """Return whether there is a ``parallel_mode``, and its axes and rank order; None where no axis is named."""
        mode = self.get("parallel_mode")
        if not isinstance(mode, ParallelMode):
            return False, None
        order = None if mode.rank_order is None else list(mode.rank_order)
        return True, (list(mode.axes), order) if mode.axes else None

    def add_opt(self, opt: Any) -> None:
        """Add one method: a name, ``(name, config)``, or ATorch's ``(name, config, tunable)``.

        Raises:
            StrategyError: When it is not valid, or named already.
        """
        object.__setattr__(self, "methods", _Strategy([*self.methods, opt]).methods)

    def __reduce__(self) -> tuple[Any, ...]:
        return Strategy, (self.to_json(),)


# --- Processes and their named groups

_made: list[DeviceMesh] = []  # by create_parallel_group
_meshes: list[DeviceMesh] = []  # these and that of the last auto_accelerate, the latest last


def init_distributed(
    backend: str | None = "nccl",
    coworker_num_per_node: int = 0,
    elastic_or_fault_tolerant: bool = False,
    set_cuda_device_using_local_rank: bool = False,
    timeout: timedelta = timedelta(minutes=30),
    *,
    seed: int = 0,
) -> bool:
    """Call :func:`meshwright.init_distributed` with ATorch's arguments. Return True.

    Args:
        backend: ``"nccl"`` or ``"gloo"``.
        coworker_num_per_node: Must be 0: there are no coworkers.
        elastic_or_fault_tolerant: Changes nothing; torchrun's ``--max-restarts`` and ``--nnodes MIN:MAX`` decide.
        set_cuda_device_using_local_rank: Changes nothing; with CUDA, each rank always gets the device of its number.
        timeout: How long a collective may take.
        seed: See :func:`meshwright.init_distributed`.

    Raises:
        LaunchError: Where ATorch prints an error and returns False.
    """
    if coworker_num_per_node:
        raise LaunchError(
            "There are no coworkers, processes that only prepare data",
            expected="coworker_num_per_node=0",
            got=repr(coworker_num_per_node),
            fix='prepare data in the workers of each rank\'s dataloader: dataloader_args={"num_workers": 4}',
        )
    if backend in ("accl", "hccl") or (backend == "nccl" and not torch.cuda.is_available()):
        raise LaunchError(
            f"The backend {backend!r} cannot be used here",
            expected='"nccl" with CUDA devices, or "gloo"',
            got=f"{torch.cuda.device_count()} CUDA devices",
            fix='pass "gloo" to train on the CPU, or None to choose by the device',
        )
    runtime.init_distributed(seed=seed, backend=backend, timeout_s=timeout.total_seconds())
    return True


@runtime.before_leaving
def _forget_groups() -> None:
    _made.clear()
    _meshes.clear()


def reset_distributed() -> None:
    """Leave the world, with all of its groups; see :func:`meshwright.shutdown_distributed`."""
    runtime.shutdown_distributed()


def local_rank() -> int:
    """Return this rank's number on its machine; 0 where no launcher has set one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def create_parallel_group(parallel_config: Sequence[Any]) -> None:
    """Create named process groups: ``([("tensor", 4), ("data", 2)], rank_order or None)``. Every rank must call it.

    Names are free, and the first is innermost: neighbouring ranks are in its groups. A third item, True, repeats the
    mesh over as many ranks as there are; ranks that are left over get no groups.

    ``auto_accelerate`` makes the groups of its strategy by itself; the functions below find these, too.

    Raises:
        LaunchError: When sizes do not fit the number of ranks, or a name is taken.
        StrategyError: When ``parallel_config`` cannot be read.
    """
    runtime.require_distributed("create_parallel_group")
    axes, order, repeats = _read_parallel_config(parallel_config)
    total, world = math.prod(size for _, size in axes), world_size()
    if total != world if not repeats else total > world:
        raise LaunchError(
            "The sizes of the parallel groups do not multiply to the number of ranks",
            expected=f"a product of {'at most ' if repeats else ''}{world}",
            got=f"{total}, of {dict(axes)}",
            fix=f"start {total} processes, or change the sizes",
        )
    taken = {name for name, _ in axes} & {name for mesh in _made for name in _names(mesh)}
    if taken:
        raise LaunchError(
            "There are groups of these names already",
            expected="new names",
            got=join_names(sorted(taken)),
            fix="call destroy_parallel_group() first, or choose other names",
        )
    grid = rank_grid(axes).transpose()  # outermost first, as in a DeviceMesh
    for first in range(0, world - total + 1, total):
        ranks = torch.from_numpy(order[grid + first])
        mesh = DeviceMesh(runtime.settings().device.type, ranks, mesh_dim_names=tuple(name for name, _ in axes)[::-1])
        if rank() in ranks:
            _made.append(mesh)
            _meshes.append(mesh)


def _read_parallel_config(config: Sequence[Any]) -> tuple[list[tuple[str, int]], np.ndarray, bool]:
    try:
        axes = [(str(name), int(size)) for name, size in config[0]]
        order = np.arange(world_size()) if config[1] is None else np.asarray(config[1], dtype=np.int64)
        repeats = bool(config[2]) if len(config) > 2 else False
    except (TypeError, ValueError, LookupError):
        axes, order, repeats = [], np.arange(0), False
    names = [name for name, _ in axes]
    is_mesh = axes and len(set(names)) == len(names) and all(size > 0 for _, size in axes)
    if not is_mesh or sorted(order.tolist()) != list(range(world_size())):
        raise StrategyError(
            "parallel_config does not describe groups",
            expected="([(name, size), …], rank_order), with each name once and None or a permutation of all ranks",
            got=repr(config),
            fix='write it as ([("tensor", 2), ("data", 4)], None)',
        )
    return axes, order, repeats


def destroy_parallel_group() -> None:
    """Destroy the groups of ``create_parallel_group``, forget those of ``auto_accelerate``; every rank must call it."""
    for mesh in _made:
        for group in mesh.get_all_groups():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    _forget_groups()


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def get_device_mesh(name: str) -> DeviceMesh | None:
    """Return the groups of a name as a mesh of one dim; None where there are none."""
    spellings = {name, "pipeline" if name == "pipe" else name}
    for mesh in reversed(_meshes):
        for axis in spellings.intersection(_names(mesh)):
            return mesh[axis]
    return None


def parallel_group(name: str) -> dist.ProcessGroup | None:
    """Return this rank's group of a name; None where it has none."""
    mesh = get_device_mesh(name)
    return None if mesh is None else mesh.get_group()


def parallel_group_and_ranks(name: str) -> tuple[dist.ProcessGroup | None, list[int] | None]:
    """Return this rank's group of a name, and its ranks in ascending order; None twice where it has none."""
    group = parallel_group(name)
    return group, None if group is None else dist.get_process_group_ranks(group)


def parallel_rank(name: str) -> int | None:
    """Return this rank's number in its group of a name; None where it has none."""
    group = parallel_group(name)
    return None if group is None else dist.get_rank(group)


def parallel_group_size(name: str) -> int | None:
    """Return the number of ranks in the group of a name; None where there is none."""
    group = parallel_group(name)
    return None if group is None else dist.get_world_size(group)


def get_data_partition_rank_and_size() -> tuple[int, int]:
    """Return which part of the samples this rank takes, and of how many."""
    place, size = 0, 1
    for axis in SAMPLED:
        ranks = parallel_group_size(axis) or 1
        place, size = place * ranks + (parallel_rank(axis) or 0), size * ranks
    return place, size
