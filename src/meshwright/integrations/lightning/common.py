"""Shared by the strategies of Fabric and of the Trainer: the world, the distributed model, and what is refused."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import CheckpointError, ConfigError, LaunchError
from meshwright.nn.batches import leaves_of, usual_input_format
from meshwright.runtime import init_distributed, same_on_every_rank, settings
from meshwright.training.accelerate import accelerate
from meshwright.training.accelerated import Accelerated

OTHER_STATE = "state.pt"
"""The file of a checkpoint's folder that holds all but weights and optimizer states."""


def process_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return Lightning's options about processes, with a backend for what ranks exchange on the host."""
    if torch.cuda.is_available():
        options.setdefault("process_group_backend", "cpu:gloo,cuda:nccl")
    return options


def join_world(local_rank: int, device: torch.device) -> None:
    """Make Meshwright's world of the processes that Lightning has started, unless the program has: as it chose then."""
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    backend = "gloo" if device.type == "cpu" else None
    try:
        init_distributed(seed=torch.initial_seed() % 2**32, backend=backend)
    except LaunchError:
        settings()


@dataclass(frozen=True)
class Distribution:
    """A strategy, and how :func:`meshwright.accelerate` is called with it."""

    strategy: Any
    sample_batch: Any = None
    accelerate_args: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, module: nn.Module, optimizer: Optimizer | None, precision: str, loop: str) -> Accelerated:
        """Distribute a model and its optimizer; collective.

        Args:
            module: The plain model.
            optimizer: Built over it; None for a model that is not trained.
            precision: Of Lightning's plugin.
            loop: The name of the loop, for errors.

        Raises:
            ConfigError: On every rank, with a precision of Lightning's, or a pipeline.
        """
        with same_on_every_rank():
            if precision != "32-true":
                raise ConfigError(
                    f"{loop}'s precision and a strategy's would both cast the model",
                    expected=f"precision='32-true', {loop}'s default",
                    got=f"precision={precision!r}",
                    fix='leave it out, and add a method: ("amp_native", "bf16")',
                )
        job = accelerate(
            module, optimizer, loss_func=_loss_for_predictions, strategy=self.strategy,
            sample_batch=self.sample_batch, model_input_format=usual_input_format(self.sample_batch),
            **self.accelerate_args,
        )  # fmt: skip
        if job.pipeline is not None:
            raise ConfigError(
                f"A pipeline's stages run inside Accelerated.step, and {loop}'s loop calls the model itself",
                expected="a strategy without pipeline_parallel",
                got=str(job.strategy),
                fix="leave it out, or train with meshwright.accelerate",
            )
        return job


def refuse_code(weights_only: bool | None) -> None:
    """Refuse to load a file that can run code.

    Raises:
        ConfigError: With ``weights_only=False``.
    """
    if weights_only is False:
        raise ConfigError(
            "A checkpoint is not loaded with weights_only=False",
            expected="numbers, texts, tensors, and lists and dictionaries of them in the state",
            got="weights_only=False, with which a file can run any code",
            fix="leave it out, and save other objects by their state_dict",
        )


def read_other_state(folder: Path, before: str) -> dict[str, Any]:
    """Read all of a checkpoint but weights and optimizer states, without running code.

    Args:
        folder: The checkpoint.
        before: Until when a user may load weights otherwise, for the error.

    Raises:
        CheckpointError: When it is none, or holds objects for which torch would have to run code.
    """
    path = folder / OTHER_STATE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint of this strategy",
            expected=f"a folder with {OTHER_STATE}, as this strategy writes it",
            got="a file" if folder.is_file() else "a folder without it" if folder.is_dir() else "nothing",
            fix=f"load the state_dict of a file of another strategy into the module before {before}",
        )
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        raise CheckpointError(
            f"{path} holds objects that are not loaded, for a file could run any code by them",
            expected="numbers, texts, tensors, and lists and dictionaries of them, in states and hyperparameters",
            got=", ".join(sorted(names)) or str(error).splitlines()[0],
            fix="name the classes that you trust, torch.serialization.add_safe_globals([…]), and load it again; "
            "save_hyperparameters(ignore=[…]) leaves them out of what is saved",
        ) from None
    return found


def _loss_for_predictions(inputs: Any, output: Any) -> torch.Tensor:
    """Return a number made of the output: the loop computes the loss, which is never seen here."""
    return next(leaf for leaf in leaves_of(output) if isinstance(leaf, torch.Tensor)).float().mean()
