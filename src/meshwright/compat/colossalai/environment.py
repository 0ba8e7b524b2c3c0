"""Answer what ColossalAI's scripts ask of their surroundings: launch, ranks, the device, a logger, lazy building."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import ConfigError, LaunchError, join_names
from meshwright.methods.birth import birth_of, give_parameters
from meshwright.nn.initial_values import Recording, remember
from meshwright.runtime import (
    init_distributed,
    peak_memory_bytes,
    print_rank,
    rank,
    require_distributed,
    seed_everything,
    settings,
    synchronize_device,
    world_size,
)
from meshwright.runtime.device import choose_device

__all__ = [
    "CurrentDevice",
    "DistCoordinator",
    "DistributedLogger",
    "LazyInitContext",
    "disable_existing_loggers",
    "get_accelerator",
    "get_current_device",
    "get_dist_logger",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "set_seed",
]


# ColossalAI has modules for these (``cluster.dist_coordinator``), which are aliases of this one: it must look like a
# package.
__path__: list[str] = []


def launch_from_torch(
    backend: str | None = None, seed: int = 1024, verbose: bool = True, timeout_s: float = 1800.0
) -> None:
    """Join the world that torchrun started, or make a world of one. Seed: ColossalAI.

    Args:
        backend: torch.distributed backend; None means NCCL with CUDA and gloo without.
        seed: Seed of the run, for all generators.
        verbose: Print on rank 0 what was launched.
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
    """Join a world whose processes were not started by torchrun. Seed: ColossalAI.

    It sets torchrun's environment variables for this process and its children.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        host: Address of rank 0.
        port: A free port there.
        backend: See :func:`launch_from_torch`.
        local_rank: Index of the device on this machine; None takes LOCAL_RANK, or ``rank``.
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


def launch_from_slurm(host: str, port: int, backend: str | None = None, seed: int = 1024, verbose: bool = True) -> None:
    """Join a world whose processes ``srun`` started; see :func:`launch`.

    Raises:
        LaunchError: Without Slurm's environment variables.
    """
    rank, size, local = _numbers_of("srun", "SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")
    launch(rank, size, host, port, backend, local, seed, verbose)


def launch_from_openmpi(
    host: str, port: int, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """Join a world whose processes OpenMPI's ``mpirun`` started; see :func:`launch`.

    Raises:
        LaunchError: Without OpenMPI's environment variables.
    """
    names = (f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK"))
    rank, size, local = _numbers_of("mpirun", *names)
    launch(rank, size, host, port, backend, local, seed, verbose)


def _numbers_of(launcher: str, *names: str) -> list[int]:
    missing = [name for name in names if not os.environ.get(name, "").isdigit()]
    if missing:
        raise LaunchError(
            f"This process was not started by {launcher}",
            expected=f"the environment variables {join_names(names)}, whole numbers",
            got=f"no such value in {join_names(missing)}",
            fix=f"start the script with {launcher}, or with torchrun and launch_from_torch()",
        )
    return [int(os.environ[name]) for name in names]


class DistCoordinator:
    """The ranks of this world, and who prints.

    Raises:
        LaunchError: When the world was not launched.
    """

    def __init__(self) -> None:
        require_distributed("DistCoordinator")

    @property
    def rank(self) -> int:
        """This process's rank."""
        return rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return world_size()

    @property
    def local_rank(self) -> int:
        """Index of this process on its node; −1 if the launcher does not tell."""
        return int(os.environ.get("LOCAL_RANK", -1))

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the first rank, of a group if one is given."""
        return _rank_in(process_group) == 0

    def is_node_master(self) -> bool:
        """Return whether this is the first process on its node.

        Raises:
            ConfigError: When the launcher does not tell.
        """
        if self.local_rank < 0:
            raise ConfigError(
                "The rank on this node is not known",
                expected="the environment variable LOCAL_RANK",
                got="none",
                fix="start the script with torchrun, or pass local_rank to launch",
            )
        return self.local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the last rank, of a group if one is given."""
        return _rank_in(process_group) == _size_of(process_group) - 1

    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        """Print on the first rank."""
        if self.is_master(process_group):
            print(msg)

    def print_on_node_master(self, msg: str) -> None:
        """Print once on every node."""
        if self.is_node_master():
            print(msg)

    @contextlib.contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """Run the block on one rank before the others run it, to download or prepare data once; collective."""
        is_executor = _rank_in(process_group) == executor_rank
        if not is_executor:
            self.block_all(process_group)
        try:
            yield
        finally:
            if is_executor:
                self.block_all(process_group)

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait for all ranks; collective."""
        if world_size() > 1:
            dist.barrier(group=process_group)

    def destroy(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Destroy a process group; without one, the world's."""
        if dist.is_initialized():
            dist.destroy_process_group(process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a function to run on the first rank alone, and return None on the others."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return call

        return decorate


def _rank_in(group: dist.ProcessGroup | None) -> int:
    return rank() if group is None else dist.get_rank(group)


def _size_of(group: dist.ProcessGroup | None) -> int:
    return world_size() if group is None else dist.get_world_size(group)


# --- The device of this rank.


class CurrentDevice:
    """The device that this rank trains on, under the names that ColossalAI gives torch's functions.

    What is not named here is found in ``torch.cuda``, or on a CPU in ``torch.cpu``.
    """

    @property
    def name(self) -> str:
        """The kind of device: ``"cuda"`` or ``"cpu"``."""
        return self.get_current_device().type

    @property
    def communication_backend(self) -> str:
        """Name of torch's backend for this kind of device."""
        return "nccl" if self.name == "cuda" else "gloo"

    @property
    def is_synchronous(self) -> bool:
        """True where kernels have run when their call returns."""
        return self.name == "cpu"

    def get_current_device(self) -> torch.device:
        """Return the device of this rank."""
        return get_current_device()

    def is_available(self) -> bool:
        """Return True: there always is a device."""
        return True

    def synchronize(self, device: Any = None) -> None:
        """Wait until all kernels have run."""
        synchronize_device(self.get_current_device())

    def empty_cache(self) -> None:
        """Give cached device memory back; a CPU caches none."""
        torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        """Seed all generators of this process."""
        set_seed(seed)

    manual_seed_all = manual_seed

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the largest number of bytes in use so far; on a CPU, by the process."""
        return peak_memory_bytes(self.get_current_device())

    def autocast(self, enabled: bool = True, dtype: torch.dtype = torch.float16, **options: Any) -> Any:
        """Return torch's autocast for this kind of device."""
        return torch.autocast(self.name, dtype=dtype, enabled=enabled, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda if self.name == "cuda" else torch.cpu, name)


def get_current_device() -> torch.device:
    """Return the device of this rank."""
    return settings().device if dist.is_initialized() else choose_device(None, int(os.environ.get("LOCAL_RANK", 0)))


def set_seed(seed: int) -> None:
    """Seed all generators of this process."""
    seed_everything(seed)


def get_accelerator() -> CurrentDevice:
    """Return this rank's device under ColossalAI's names."""
    return CurrentDevice()


# --- Models.


class LazyInitContext:
    """A place to build a model in without memory, as ColossalAI's scripts do before ``boost``.

    ``boost`` gives every rank its shards, with the values of the ordinary build. See [Note: models born sharded] in
    methods/birth.py.

    Args:
        tensor_cls, default_device: No effect.
    """

    def __init__(self, tensor_cls: Any = None, default_device: Any = None) -> None:
        self.tensor_cls, self.default_device = tensor_cls, default_device
        self._recording = Recording()

    def __enter__(self) -> LazyInitContext:
        remember(self._recording)
        self._recording.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._recording.__exit__(*error)

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Give a module that was built here its memory and its values, whole, on the CPU; return it."""
        birth = birth_of(module, None, None)
        if birth is not None:
            birth.give_buffers(module)
            give_parameters(module, birth, torch.device("cpu"))
        return module


# --- Loggers.


class DistributedLogger:
    """A logger of :mod:`logging` that writes on the ranks that a call names, or on all.

    Args:
        name: Name of the logger.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        if not self._logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[%(asctime)s] %(name)s: %(levelname)s: %(message)s"))
            self._logger.addHandler(handler)
            self._logger.setLevel(logging.INFO)
            self._logger.propagate = False

    @staticmethod
    def get_instance(name: str) -> DistributedLogger:
        """Return the logger of a name."""
        return DistributedLogger(name)

    def set_level(self, level: str) -> None:
        """Write messages from this level on: ``"DEBUG"``, ``"INFO"``, ``"WARNING"`` or ``"ERROR"``."""
        self._logger.setLevel(level)

    def log_to_file(
        self, path: str | os.PathLike[str], mode: str = "a", level: str = "INFO", suffix: str | None = None
    ) -> None:
        """Write messages to a file of this rank in a folder, too."""
        Path(path).mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(Path(path) / f"rank_{rank()}{f'_{suffix}' if suffix else ''}.log", mode)
        handler.setLevel(level)
        self._logger.addHandler(handler)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Write at level INFO."""
        self._write(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Write at level WARNING."""
        self._write(logging.WARNING, message, ranks)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Write at level DEBUG."""
        self._write(logging.DEBUG, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Write at level ERROR."""
        self._write(logging.ERROR, message, ranks)

    def _write(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or rank() in ranks:
            self._logger.log(level, "%s", message)


def get_dist_logger(name: str = "meshwright") -> DistributedLogger:
    """Return a logger that can be told which ranks write."""
    return DistributedLogger(name)


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = ("meshwright",)) -> None:
    """Let loggers write from WARNING on: those of ``include``, or all but those of ``exclude``."""
    for name in list(logging.Logger.manager.loggerDict):
        if name in include if include is not None else name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)
