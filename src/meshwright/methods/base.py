"""What a method is: one file with a validated config, ``check``, and the twins ``apply`` and ``cost``."""

from __future__ import annotations

from abc import abstractmethod
from enum import IntEnum
from typing import ClassVar

from meshwright.cost import Step
from meshwright.methods.job import Job
from meshwright.strategy import MethodConfig


class Phase(IntEnum):
    """The order in which methods are applied, whatever order a strategy lists them in."""

    MESH = 0
    PIPELINE = 1  # the model is cut first: all that follows sees one rank's part
    REPLACE = 2  # modules are exchanged while they are whole and on one device
    TENSOR = 3
    SEQUENCE = 4
    RECOMPUTE = 5  # inside the sharding hooks, so that recomputation finds gathered parameters
    COMPILE = 6
    PRECISION = 7  # before sharding, which must know the precision it gathers in
    OFFLOAD = 8  # around recomputation, and before sharding, which must know what lives on the host
    SHARD = 9
    REPLICATE = 10
    OPTIMIZER = 11


class Method(MethodConfig):
    """One optimisation. Its fields are its config; it changes a real job and a simulated step in the same way."""

    phase: ClassVar[Phase]
    shards: ClassVar[bool] = False  # whether it shards parameters: at most one such method in a strategy
    summary: ClassVar[str]  # one line on what it does

    def check(self, job: Job) -> None:
        """Refuses a job it cannot work on, before anything is changed.

        Raises:
            MeshwrightError: Saying what, expected, got, and what to do.
        """

    @abstractmethod
    def apply(self, job: Job) -> None:
        """Changes the real job."""

    @abstractmethod
    def cost(self, step: Step) -> Step:
        """Changes the simulated step in the same way."""
