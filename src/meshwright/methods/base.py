"""Define what a method is, which rules it declares, and the types that its config uses.

A method is one file with a frozen, validated config, ``check``, and the twins ``apply``, which changes the real
:class:`~meshwright.methods.job.Job`, and ``cost``, which changes the simulated :class:`~meshwright.cost.Step` alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator

from meshwright.cost import Device, Step
from meshwright.methods.job import Job as Job  # methods import it from here, too
from meshwright.methods.planner_hooks import PlannerHooks
from meshwright.nn import class_name
from meshwright.strategy import Strategy

SHARDING = ("zero1", "zero2", "fsdp")
"""The methods that shard parameters."""

INNER_AXES = ("tensor", "sequence", "context", "expert")
"""The axes that divide a sample's work or a layer's weights, innermost first; data parallelism lies around them."""

SHARD_AXES = ("zero", "data", "sequence", "context", "expert")
"""The axes that parameters can be sharded over: the first that the mesh has."""


def _always(*methods: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A rule that two methods cannot be in one strategy."""

    other: str
    """Name of the other method."""
    reason: str
    """Clause that completes "a does not go together with b:"."""
    fix: str
    when: Callable[[Any, Any], bool] = _always
    """Predicate on both configs, the method's own and the other's: whether they conflict."""
    own_keys: str = ""
    """The method's keys for which ``when`` holds, as a user writes them; empty if it holds for all."""
    other_keys: str = ""
    """The other method's keys for which ``when`` holds; empty if it holds for all."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """A rule that a strategy with one method must have one of several others."""

    any_of: tuple[str, ...]
    reason: str
    """Clause that completes "a needs one of …:"."""
    fix: str
    when: Callable[[Any], bool] = _always
    """Predicate on the method's config: whether it needs one."""
    own_keys: str = ""
    """The method's keys for which ``when`` holds, as a user writes them; empty if it holds for all."""


# --- The phases, and the base class of all methods


class Phase(IntEnum):
    """The order in which methods are applied, whatever order a strategy lists them in."""

    MESH = 0
    REPLACE = 1  # while the model is whole: weights that the pipeline cut frees could not be taken over
    PIPELINE = 2  # cuts the model: all later methods see one rank's part
    FP8 = 3  # the layers of one rank's part
    TENSOR = 4
    SEQUENCE = 5
    CONTEXT = 6  # wraps the attention that SEQUENCE has changed
    RECOMPUTE = 7  # inside the sharding hooks, so that recomputation finds gathered parameters
    COMPILE = 8
    PRECISION = 9  # before sharding, which must know the precision it gathers in
    OFFLOAD = 10  # around recomputation, and before sharding, which must know which parameters live on the host
    SHARD = 11
    REPLICATE = 12
    OPTIMIZER = 13
    WATCH = 14  # wraps the optimizer as all other methods have left it


class Method(PlannerHooks):
    """An optimisation. Its fields are its config; ``apply`` changes a real job as ``cost`` changes a simulated step."""

    phase: ClassVar[Phase]
    shards: ClassVar[bool] = False  # whether it shards parameters; a strategy has at most one such method
    summary: ClassVar[str]  # one line on what it does
    effect: ClassVar[str] = ""  # one line on what that does to memory, time and communication
    seed_name: ClassVar[str | None] = None  # "system: its name there"; None for Meshwright's own methods
    axis: ClassVar[str | None] = None  # the mesh axis that only this method uses
    needs: ClassVar[tuple[Need, ...]] = ()
    conflicts: ClassVar[tuple[Conflict, ...]] = ()  # each conflict is declared by one of its two methods
    short_forms: ClassVar[Mapping[type, str]] = {}  # the key that a bare config of a type stands for: ("half", "bf16")

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read a bare config by ``short_forms``."""
        for kind, key in cls.short_forms.items():
            if isinstance(raw, kind) and not isinstance(raw, bool):
                return {key: raw}
        return super().from_short(raw)

    def is_active(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the method changes anything on a mesh: a method with an axis needs several ranks along it."""
        return self.axis is None or sizes.get(self.axis, 1) > 1

    @property
    def of_state(self) -> bool:
        """Return whether the method changes only parameters and their states, not what blocks compute and save."""
        return False

    def check(self, job: Job) -> None:
        """Refuse a job that the method cannot be applied to, before anything is changed.

        Raises:
            MeshwrightError: Saying what, expected, got, and what to do.
        """

    def left_out_on(self, device: torch.device | Device) -> str | None:
        """Return why a strategy goes without the method on a device, as a sentence for the user; None if it works."""
        return None

    def check_mesh(self, sizes: Mapping[str, int], shard_axis: str | None) -> None:
        """Refuse a mesh that the method's keys do not fit; a search skips such strategies.

        Args:
            sizes: Ranks along every axis.
            shard_axis: The axis that parameters are sharded over; None: they are not.

        Raises:
            StrategyError: Naming the key.
        """

    def check_experts(self, sizes: Mapping[str, int]) -> None:
        """Refuse a mesh on which the method cannot train a model with stacked experts, before the model is looked at.

        Args:
            sizes: Ranks along every axis.

        Raises:
            MeshwrightError: As ``check`` does for such a model.
        """

    @abstractmethod
    def apply(self, job: Job) -> None:
        """Change the real job."""

    @abstractmethod
    def cost(self, step: Step) -> Step:
        """Change the simulated step in the same way."""


# --- Class references in configs: users write classes or names, strategies store qualified names


def _to_names(value: Any) -> Any:
    """Turn a class, a name, or a tuple, list or set of them into names."""
    if value is None:
        return None
    listed = [value] if isinstance(value, str | type) else value
    if not isinstance(listed, tuple | list | set | frozenset):
        return value
    names = [class_name(item) if isinstance(item, type) else item for item in listed]
    return sorted(names) if isinstance(listed, set | frozenset) else names


ClassReferences = Annotated[tuple[str, ...], BeforeValidator(_to_names)]
"""Classes or class names, bare or qualified, stored as names."""


# --- Precisions by name: ``fp32``, ``bf16``, ``fp16`` in configs, in whatever spelling the user wrote

_NAMES = {
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "fp32": "fp32", "float32": "fp32", "torch.float32": "fp32",
}  # fmt: skip
_TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def dtype_name(value: Any) -> Any:
    """Return the short name of a precision; a value that names none is returned as it is."""
    return _NAMES.get(str(value), value)


DType = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(dtype_name)]
HalfDType = Annotated[Literal["fp16", "bf16"], BeforeValidator(dtype_name)]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a precision's name."""
    return _TORCH[name]


def half_dtype(device: torch.device) -> str:
    """Return the half precision to use on a device: ``bf16``, or ``fp16`` on CUDA devices before Ampere."""
    # Older CUDA devices only emulate bf16. CPUs without bf16 instructions multiply it in fp32; they have no fast fp16.
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "fp16"


def itemsize(name: str) -> int:
    """Return the bytes per element of a precision."""
    return _TORCH[name].itemsize


def parts_between_layers(strategy: Strategy, size_of: Callable[[str], int]) -> int:
    """Return the number of parts into which split layers divide the tokens between them.

    Args:
        strategy: Any strategy.
        size_of: Returns the size of an axis, 1 if the mesh has none.
    """
    parts = 1
    for method in strategy.methods:
        if isinstance(method, Method) and method.axis is not None and method.divides_between_layers:
            parts *= size_of(method.axis)
    return parts
