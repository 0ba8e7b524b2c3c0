"""What a method is: one file with a validated config, ``check``, and the twins ``apply`` and ``cost``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from enum import IntEnum
from typing import ClassVar

import torch

from meshwright.cost import Device, Step
from meshwright.methods.job import Job
from meshwright.methods.law import Conflict, Need
from meshwright.strategy import MethodConfig


class Phase(IntEnum):
    """The order in which methods are applied, whatever order a strategy lists them in."""

    MESH = 0
    REPLACE = 1  # modules are exchanged while the model is whole: what the cut frees could not be taken over
    PIPELINE = 2  # the model is cut: all that follows sees one rank's part
    FP8 = 3  # the layers of one rank's part
    TENSOR = 4
    SEQUENCE = 5
    CONTEXT = 6  # around what sequence does
    RECOMPUTE = 7  # inside the sharding hooks, so that recomputation finds gathered parameters
    COMPILE = 8
    PRECISION = 9  # before sharding, which must know the precision it gathers in
    OFFLOAD = 10  # around recomputation, and before sharding, which must know what lives on the host
    SHARD = 11
    REPLICATE = 12
    OPTIMIZER = 13
    WATCH = 14  # over the optimizer as all others have finished it


class Method(MethodConfig):
    """One optimisation. Its fields are its config; it changes a real job and a simulated step in the same way."""

    phase: ClassVar[Phase]
    shards: ClassVar[bool] = False  # whether it shards parameters: at most one such method in a strategy
    summary: ClassVar[str]  # one line on what it does
    effect: ClassVar[str] = ""  # one line on what that does to memory, time and communication
    seed_name: ClassVar[str | None] = None  # "system: its name there"; None: it is Meshwright's own
    axis: ClassVar[str | None] = None  # the mesh axis that is its own: nothing else works on it
    needs: ClassVar[tuple[Need, ...]] = ()
    conflicts: ClassVar[tuple[Conflict, ...]] = ()  # each is declared by one of the two methods

    def at_work(self, sizes: Mapping[str, int]) -> bool:
        """Whether it changes anything on a mesh: the method of an axis does where the axis has several ranks."""
        return self.axis is None or sizes.get(self.axis, 1) > 1

    @property
    def of_state(self) -> bool:
        """Whether it changes what becomes of parameters and their states alone: what blocks compute and save stays."""
        return False

    def check(self, job: Job) -> None:
        """Refuses a job it cannot work on, before anything is changed.

        Raises:
            MeshwrightError: Saying what, expected, got, and what to do.
        """

    def left_out_on(self, device: torch.device | Device) -> str | None:
        """Why a strategy is applied without it on such a device, as a sentence for the user; None where it works."""
        return None

    def check_mesh(self, sizes: Mapping[str, int], shard_axis: str | None) -> None:
        """Refuses a mesh on which it cannot do what its keys ask for; searches pass such strategies over.

        Args:
            sizes: Ranks along every axis.
            shard_axis: The axis that parameters are sharded over; None: they are not.

        Raises:
            StrategyError: Naming the key.
        """

    @abstractmethod
    def apply(self, job: Job) -> None:
        """Changes the real job."""

    @abstractmethod
    def cost(self, step: Step) -> Step:
        """Changes the simulated step in the same way."""
