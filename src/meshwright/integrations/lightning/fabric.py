"""A strategy of Lightning Fabric that is a strategy of Meshwright.

::

    from lightning.fabric import Fabric
    from meshwright.integrations.lightning import FabricStrategy

    fabric = Fabric(accelerator="auto", devices=8, strategy=FabricStrategy(["fsdp", "checkpoint"]))
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

The loop stays the user's: ``fabric.backward``, ``clip_gradients``, ``no_backward_sync``, ``save`` and ``load`` work on
the distributed model. ``fabric.strategy.job_of(model)`` is what :func:`meshwright.accelerate` returned.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import CheckpointError, ConfigError
from meshwright.integrations.lightning.common import (
    OTHER_STATE,
    Distribution,
    join_world,
    process_options,
    read_other_state,
    refuse_code,
)
from meshwright.optim.guarded_step import guard_of
from meshwright.runtime import same_on_every_rank
from meshwright.store.entries import unwrapped
from meshwright.store.model_file import load, save_folder
from meshwright.store.optimizer_file import load_optimizer, save_optimizer
from meshwright.training.accelerated import Accelerated


class FabricStrategy(DDPStrategy):
    """Distribute what ``fabric.setup`` is given by a strategy of Meshwright.

    ``fabric.setup(model, optimizer)`` comes before ``setup_dataloaders``, whose samplers divide the data among
    replicas: ranks that divide layers or tokens among themselves share their samples.

    Args:
        strategy: A Strategy, or anything it can be made from; None lets the planner choose.
        sample_batch: A replica's batch, for predictions and for methods that look at the model's data flow.
        accelerate_args: Further arguments of :func:`meshwright.accelerate`.
        options: Arguments of Lightning's ``DDPStrategy`` about processes, such as ``cluster_environment``.
    """

    def __init__(
        self,
        strategy: Any = None,
        *,
        sample_batch: Any = None,
        accelerate_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**process_options(options))
        self._distribution = Distribution(strategy, sample_batch, dict(accelerate_args or {}))
        self._jobs: weakref.WeakKeyDictionary[nn.Module, Accelerated] = weakref.WeakKeyDictionary()
        self._replicas: dict[str, int] | None = None
        self._backward_sync_control = self

    def setup_environment(self) -> None:
        """Make or join the world."""
        super().setup_environment()
        join_world(self.local_rank, self.root_device)

    # --- Models

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Distribute a model that is not trained, such as a reference; collective."""
        return self._distribute(module, None).model

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Distribute a model, and give its optimizer the new parameters; collective.

        Raises:
            ConfigError: With more than one optimizer.
        """
        if len(optimizers) != 1:
            raise ConfigError(
                "fabric.setup is given several optimizers for one model",
                expected="one, with groups of parameters",
                got=str(len(optimizers)),
                fix="unite them, or set up each part of the model with its own",
            )
        job = self._distribute(module, optimizers[0])
        assert job.optim is not None
        return job.model, [job.optim], scheduler

    def _distribute(self, module: nn.Module, optimizer: Optimizer | None) -> Accelerated:
        job = self._distribution.apply(module, optimizer, self.precision.precision, "Fabric")
        self._jobs[unwrapped(job.model)] = job
        self._replicas = {"num_replicas": job.num_replicas, "rank": job.replica}
        return job

    def job_of(self, module: nn.Module) -> Accelerated:
        """Return what ``accelerate`` made of a model that ``fabric.setup`` returned.

        Raises:
            ConfigError: When it was not set up.
        """
        found = self._jobs.get(unwrapped(getattr(module, "module", module)))
        if found is None:
            raise ConfigError(
                "This model has not been set up",
                expected="the result of fabric.setup",
                got=type(module).__name__,
                fix="call fabric.setup(model, optimizer) first",
            )
        return found

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the model where it is: each rank moves its own part alone."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return this replica's number, for a ``DistributedSampler``."""
        if self._replicas is None:
            raise ConfigError(
                "It is not known yet how many replicas share the data: the strategy decides it",
                expected="fabric.setup(model, optimizer) before setup_dataloaders",
                got="setup_dataloaders first",
                fix="set up the model first",
            )
        return dict(self._replicas)

    # --- Steps

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **options: Any) -> None:
        """Run backward of the loss, with the loss scale of fp16."""
        jobs = list(self._jobs.values()) if module is None else [self.job_of(module)]
        guard = next((found for job in jobs if (found := guard_of(job.optim)) is not None), None)
        (tensor if guard is None else guard.scaled(tensor)).backward(*args, **options)

    @contextlib.contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Accumulate gradients inside, which the next backward outside averages."""
        with self.job_of(module).no_sync() if enabled else contextlib.nullcontext():
            yield

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the gradients of the whole model; return their norm before.

        Raises:
            RuntimeError: On every rank, when the norm is not finite and ``error_if_nonfinite``.
        """
        norm = self.job_of(module).clip_grad_norm(float(max_norm), float(norm_type))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"The norm of the gradients is {norm.item()}; error_if_nonfinite=False clips anyway")
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp every element of the gradients."""
        self.job_of(module).clip_grad_value(float(clip_val))

    # --- Checkpoints: a folder that loads on any number of ranks

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write models, optimizers and all else into a folder; collective.

        Raises:
            ConfigError: With ``storage_options`` or ``filter``.
        """
        if storage_options is not None or filter:
            raise ConfigError(
                "fabric.save writes a folder, in Meshwright's own way",
                expected="neither storage_options nor filter",
                got="one of them",
                fix="leave them out",
            )
        folder, others = Path(self.broadcast(path)), {}
        for name, value in state.items():
            if isinstance(value, nn.Module):
                save_folder(self.job_of(value).model, folder / name)
            elif isinstance(value, Optimizer):
                save_optimizer(*self._optimizer_and_model(value), folder / name, folder=True)
            else:
                others[name] = value.state_dict() if hasattr(value, "state_dict") else value
        with same_on_every_rank():
            if self.is_global_zero:
                folder.mkdir(parents=True, exist_ok=True)  # of a state without models
                torch.save(others, folder / OTHER_STATE)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what :meth:`save_checkpoint` wrote into objects of any layout; return what is left; collective.

        Raises:
            CheckpointError: When ``state`` names nothing to load into, or ``strict`` and it lacks a name.
            ConfigError: With ``weights_only=False``, which would run code from the file.
        """
        refuse_code(weights_only)
        folder = Path(self.broadcast(path))
        if not isinstance(state, dict) or not state:
            raise CheckpointError(
                "fabric.load needs the objects to load into",
                expected="a dictionary such as {'model': model, 'optimizer': optimizer}",
                got=type(state).__name__,
                fix="pass one; fabric.load_raw does not read folders",
            )
        with same_on_every_rank():
            others = read_other_state(folder, "fabric.setup")
        for name, value in state.items():
            if isinstance(value, nn.Module):
                load(self.job_of(value).model, folder / name, strict=strict)
            elif isinstance(value, Optimizer):
                load_optimizer(*self._optimizer_and_model(value), folder / name)
            elif name in others:
                stored = others.pop(name)
                if hasattr(value, "load_state_dict"):
                    value.load_state_dict(stored)
                else:
                    state[name] = stored
            elif strict:
                raise CheckpointError(
                    f"The checkpoint has no {name!r}",
                    expected=f"one of {sorted(others)}",
                    got=str(folder),
                    fix="pass strict=False, or leave it out of state",
                )
        return others

    def _optimizer_and_model(self, optimizer: Any) -> tuple[Optimizer, nn.Module]:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return next((job.optim, job.model) for job in self._jobs.values() if job.optim is optimizer)
