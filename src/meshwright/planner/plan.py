"""A plan: a strategy with its predictions for one model on one world."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from meshwright.cost import memory
from meshwright.planner.sizes import readable_bytes
from meshwright.planner.words import number, seconds, short_strategy

if TYPE_CHECKING:
    from meshwright.cost import Memory, Step
    from meshwright.methods import Cut
    from meshwright.planner.forecast import Forecast
    from meshwright.strategy import Strategy


@dataclass(frozen=True)
class Plan:
    """What a strategy will hold and send on the rank that holds most."""

    strategy: Strategy  # resolved
    step: Step
    memory: Memory
    limit_bytes: int | None  # what one rank may hold; None: unknown
    notices: tuple[str, ...]
    gaps: tuple[str, ...] = ()  # what could not be predicted, and why: matters to whoever reads the predictions
    cut: Cut | None = None  # where the mesh has a pipeline axis: which rank holds what
    steps: tuple[Step, ...] = ()  # then: the step of each of its ranks; ``step`` is that of the one that holds most
    micro_batch: int = 1  # samples of one micro-batch on one replica
    forecast: Forecast | None = None  # seconds, where the cluster is known
    taken_bytes: int | None = None  # of the limit, where an allocator's peak is simulated; None: the sum of all classes
    host_bytes: int = 0  # of host memory beside the device's, on the rank that holds most of it
    host_limit_bytes: int | None = None  # what of it one rank may hold; None: unknown

    @property
    def fits(self) -> bool:
        """Whether the predicted memory is within the limits, of the device and of its host."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        """Whether the device has what is needed of it."""
        return self.limit_bytes is None or self.needed_bytes <= self.limit_bytes

    @property
    def fits_host(self) -> bool:
        """Whether what is offloaded has room in host memory."""
        return self.host_limit_bytes is None or self.host_bytes <= self.host_limit_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of the memory that is limited: the device's, with the host's where they are one."""
        return self.taken_bytes if self.taken_bytes is not None else needed_bytes(self.step, self.memory)

    @property
    def complete_strategy(self) -> Strategy:
        """The strategy with the number of micro-batches that this plan is for: what trains as it is predicted."""
        parts, pipeline = self.step.num_micro_batches, self.strategy.get("pipeline_parallel")
        if pipeline is not None and getattr(pipeline, "num_micro_batches", None) is None:
            return self.strategy.with_method(pipeline.model_copy(update={"num_micro_batches": parts}))
        if pipeline is not None or parts == 1 or "gradient_accumulation" in self.strategy:
            return self.strategy
        return self.strategy.with_method(("gradient_accumulation", parts))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :attr:`complete_strategy` to a file, as :meth:`Strategy.save` does: ``accelerate(strategy=path)``."""
        self.complete_strategy.save(path)

    def summary(self) -> str:
        """One line: the strategy, how a batch is cut, how fast it is and what it holds."""
        known, said = self.forecast, [short_strategy(self.strategy, self.step.axes)]
        said.append(f"{self.step.num_micro_batches} x {self.micro_batch} samples")
        if known is not None:
            said.append(f"{seconds(known.time.step_time_s)} a step")
            tokens = known.tokens_per_s
            said.append(f"{number(known.samples_per_s)} samples/s" if tokens is None else f"{number(tokens)} tokens/s")
        limit = "" if self.limit_bytes is None else f" of {readable_bytes(self.limit_bytes)}"
        said.append(f"{readable_bytes(self.needed_bytes)}{limit}{'' if self.fits_device else ', too much'}")
        if not self.fits_host:
            said.append(f"{self.host_text()}, too much")
        return "; ".join(said)

    def host_text(self) -> str:
        """What is offloaded to host memory, and the room there: ``"host 90 GiB of 230 GiB"``."""
        limit = "" if self.host_limit_bytes is None else f" of {readable_bytes(self.host_limit_bytes)}"
        return f"host {readable_bytes(self.host_bytes)}{limit}"

    def __str__(self) -> str:
        return self.summary()


class Subject(Protocol):
    """What plans are made for: a model and how it is trained, on a world of a given size."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    @property
    def batch_size(self) -> int | None:
        """Samples per step over all ranks."""

    @property
    def half_dtype(self) -> str:
        """What half precision is on its devices: ``bf16`` wherever they have it."""

    def plan(self, strategy: Strategy, num_micro_batches: int | None = None) -> Plan:
        """Predicts one strategy.

        Args:
            strategy: What is asked for; it is resolved for the world.
            num_micro_batches: Micro-batches per step; None: as many as the subject was asked for.

        Raises:
            MeshwrightError: When the strategy cannot train this model on this world, saying why.
        """


def host_bytes(step: Step) -> int:
    """Bytes of host memory beside a device; where both are one, they are of the device's limit."""
    known = step.activations
    offloads = step.hosted is not None or (known is not None and known.hosted_bytes > 0)
    return memory(step).host_total if offloads and not step.on_cpu else 0


def most_host_bytes(steps: Iterable[Step]) -> int:
    """Of the rank that holds most; many may have one step."""
    return max(map(host_bytes, {id(step): step for step in steps}.values()))


def needed_bytes(step: Step, held: Memory) -> int:
    """Bytes of the memory that is limited: the device's, with the host's where they are one."""
    return held.total + (held.host_total if step.on_cpu else 0)
