"""Define what the planner asks of a method: what a search may try, and what a traced forward pass depends on.

The planner knows no method by name. It asks each method of a strategy, and takes the defaults here for an answer where
a method has nothing to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from torch import nn

from meshwright.strategy import MethodConfig

if TYPE_CHECKING:
    from meshwright.cost import ProductDtype
    from meshwright.methods.tensor.block_trials import SampleRun
    from meshwright.strategy import Strategy


class Role(Enum):
    """The decision of a search that a method is one of the answers to."""

    SHARDING = "sharding"
    PRECISION = "precision"
    RECOMPUTATION = "recomputation"
    OFFLOADING = "offloading"


@dataclass(frozen=True)
class SearchScope:
    """The state of a search that asks a method which configs to try.

    Args:
        world: Number of ranks.
        half_dtype: Half precision of the devices; None: no lower precision is to be tried.
        is_slow: Whether a prediction takes seconds, so that only the configs that usually win are worth it.
    """

    world: int = 1
    half_dtype: str | None = None
    is_slow: bool = False


def within_node(divisors: Sequence[int], node: int) -> tuple[int, ...]:
    """Return the sizes of an axis that lies in one node, whose ranks are ``node``."""
    return tuple(size for size in divisors if size <= node and node % size == 0)


class ComputeDtypes(NamedTuple):
    """The precision of one forward pass, by name."""

    parameters: str | None = None  # as they compute; None keeps their own
    autocast: str | None = None


class PlannerHooks(MethodConfig):
    """The answers of a method to the planner."""

    role: ClassVar[Role | None] = None  # which decision of a search it is an answer to
    product_dtype: ClassVar[ProductDtype | None] = None  # what products of its layers run in; None: as without it
    replaces_modules: ClassVar[bool] = False  # of the plain model: predictions are made for the changed one
    fuses_kernels: ClassVar[bool] = False  # chains of elementwise kernels become one
    not_simulated: ClassVar[str] = ""  # what a prediction from a family's dimensions alone leaves out

    @classmethod
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Return the configs that a search tries, the least change first: by default, its defaults.

        Empty: it is tried only where a user includes it.
        """
        return (cls.parse(None),)

    @classmethod
    def axis_sizes(cls, divisors: Sequence[int], node: int) -> tuple[int, ...]:
        """Return the sizes of its axis that a search tries; none: only where a user includes it.

        Args:
            divisors: Of the number of ranks, from 1.
            node: Ranks of a node.
        """
        return ()

    def on_half(self, half_dtype: str) -> Self:
        """Return the config in the half precision that devices have, where it computes in one and names none."""
        return self

    @property
    def asked_micro_batches(self) -> int | None:
        """Return the number of micro-batches that the config says a step has; None: it says none."""
        return None

    @property
    def is_uniform(self) -> bool:
        """Return whether it treats all blocks of the model alike."""
        return True

    @property
    def has_memory_budget(self) -> bool:
        """Return whether the plan must still decide what it does, so that a rank stays within a budget."""
        return False

    @property
    def moves_parameters(self) -> bool:
        """Return whether parameters leave the device, and come back as a sharding method gathers them."""
        return False

    @property
    def divides_between_layers(self) -> bool:
        """Return whether it divides what lies between split layers, too."""
        return False

    @property
    def chunks_per_rank(self) -> int:
        """Return how many chunks of a sample's tokens one rank of its axis takes."""
        return 1

    def compute_dtypes(self, *, sharded: bool) -> ComputeDtypes:
        """Return the precision in which a forward pass runs.

        Args:
            sharded: Whether parameters are gathered, which may cast them.
        """
        return ComputeDtypes()

    def widens(self, strategy: Strategy) -> bool:
        """Return whether products in bf16 are made in fp32 on devices that are slow in bf16."""
        return False

    def traced_layers(self, model: nn.Module, sizes: Mapping[str, int], sample: SampleRun) -> Any:
        """Return what makes a plain model run as one rank of its axis; None where layers and experts stay whole.

        Args:
            model: A plain module.
            sizes: Ranks along every axis.
            sample: Runs the model once, to see its data flow.

        Raises:
            ModelError: When the model cannot be divided so.
        """
        return None

    def traced_tokens(self, sizes: Mapping[str, int]) -> Any:
        """Return what makes the first of the ranks that divide a sample's tokens; None where it divides none."""
        return None

    def traced_narrow(self, model: nn.Module, *, sharded: bool, tensor_ranks: int) -> Any:
        """Return which layers of a plain model multiply in 8 bits; None: none."""
        return None
