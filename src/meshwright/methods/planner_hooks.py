"""Define the questions that the planner asks a method: which configs to try, and how it changes a traced forward pass.

The planner knows no method by name: it asks all methods of a strategy. A method overrides the answers that differ from
the defaults here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from torch import nn

from meshwright.strategy import MethodConfig

if TYPE_CHECKING:
    from meshwright.cost import ProductDtype
    from meshwright.methods.tensor.block_trials import SampleRun
    from meshwright.strategy import Strategy


class Role(Enum):
    """The decisions of a search. A method with a role is one of the options of that decision."""

    SHARDING = "sharding"
    PRECISION = "precision"
    RECOMPUTATION = "recomputation"
    OFFLOADING = "offloading"
    LOSS = "loss"
    KERNELS = "kernels"


@dataclass(frozen=True)
class SearchScope:
    """Facts about a search that a method needs to list the configs to try.

    Args:
        world: Number of ranks.
        half_dtype: Half precision of the devices; None tries no lower precision.
        is_slow: Whether a prediction takes seconds, so that only the configs that usually win are worth it.
        model: The model, if it is a module; None: one of a family of language models.
        follows_graph: Whether replicas are averaged by a DDP that follows the graph of what the model returns.
        trained: Share of the parameters that train.
    """

    world: int = 1
    half_dtype: str | None = None
    is_slow: bool = False
    model: nn.Module | None = None
    follows_graph: bool = False
    trained: float = 1.0


AttentionKernel = Literal["", "masked"]
"""Fused attention as fast as torch's own, or under a mask that returns the log-sum-exp (``Efficiency.masked``)."""

attention_kernel: ContextVar[AttentionKernel] = ContextVar("attention_kernel", default="")
"""Which kernel attention would run on a GPU, for traces, which may be made on another device."""


@contextmanager
def attending_by(kernel: AttentionKernel) -> Iterator[None]:
    """Say by which kernel the attention inside runs; see :data:`attention_kernel`."""
    before = attention_kernel.set(kernel)
    try:
        yield
    finally:
        attention_kernel.reset(before)


def within_node(divisors: Sequence[int], node: int) -> tuple[int, ...]:
    """Return the divisors that are sizes of an axis within a node of ``node`` ranks."""
    return tuple(size for size in divisors if size <= node and node % size == 0)


class ComputeDtypes(NamedTuple):
    """The precisions of one forward pass, by name."""

    parameters: str | None = None  # in which parameters compute; None keeps their own
    autocast: str | None = None
    output: str | None = None  # to which the model's output is cast for the loss; None leaves it


class PlannerHooks(MethodConfig):
    """The answers of a method to the planner."""

    role: ClassVar[Role | None] = None  # the decision of a search that it is an option of
    product_dtype: ClassVar[ProductDtype | None] = None  # precision of products in its layers; None leaves it
    replaces_modules: ClassVar[bool] = False  # in the plain model: predictions are made for the changed one

    @property
    def not_simulated(self) -> str:
        """Return what a prediction from a family's dimensions alone leaves out; empty: nothing."""
        return ""

    @classmethod
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Return the configs that a search tries, the smallest change first; by default, the config without keys.

        With an empty tuple, a search uses the method only if a user includes it.
        """
        return (cls.parse(None),)

    @classmethod
    def is_optional(cls, scope: SearchScope) -> bool:
        """Return whether a search tries plans without the method; not where any plan gains by its first config."""
        return True

    @classmethod
    def axis_sizes(cls, divisors: Sequence[int], node: int) -> tuple[int, ...]:
        """Return the sizes of the method's axis that a search tries.

        With an empty tuple, a search uses the axis only if a user includes the method.

        Args:
            divisors: Divisors of the number of ranks, from 1.
            node: Number of ranks of a node.
        """
        return ()

    @classmethod
    def parts_of(cls, model: nn.Module) -> int:
        """Return into how many equal parts the method's axis can divide most of a model's weights; 1: it does not.

        A search of such a model tries the axis without being told to.
        """
        return 1

    def is_tried_on(self, sizes: Mapping[str, int]) -> bool:
        """Return whether a search tries the method on a mesh of these sizes, where it may leave it out.

        What seldom helps there makes a search longer, and its plans in the usual time worse.
        """
        return True

    def on_half(self, half_dtype: str) -> Self:
        """Return the config with the half precision of the devices filled in, if it computes in one and names none."""
        return self

    @property
    def asked_micro_batches(self) -> int | None:
        """Return the number of micro-batches per step that the config sets; None if it sets none."""
        return None

    @property
    def surcharge(self) -> float:
        """Return the share by which a plan must be faster, by prediction, to be worth the method.

        It stands for what a prediction does not see: what can go wrong with it, and what it asks of those who run it.
        See [Note: choice within the error].
        """
        return 0.0

    @property
    def is_uniform(self) -> bool:
        """Return whether the method treats all blocks of the model alike."""
        return True

    @property
    def has_memory_budget(self) -> bool:
        """Return whether the config is a memory budget, and the plan decides what the method does to keep it."""
        return False

    @property
    def splits_backward(self) -> bool:
        """Return whether gradients of a micro-batch's inputs are computed first, and those of weights later."""
        return False

    @property
    def moves_parameters(self) -> bool:
        """Return whether parameters live on the host, and return to the device as a sharding method gathers them."""
        return False

    @property
    def divides_between_layers(self) -> bool:
        """Return whether the method divides the tokens between split layers over its axis."""
        return False

    def fuses_blocks(self, sizes: Mapping[str, int], *, recomputes: bool) -> bool:
        """Return whether it fuses the kernels of blocks.

        Args:
            sizes: Sizes of the mesh axes.
            recomputes: Whether the blocks run again in backward.
        """
        return False

    @property
    def fuses_loss(self) -> bool:
        """Return whether the loss is computed from the head's input, without the logits."""
        return False

    @property
    def fuses_attention(self) -> bool:
        """Return whether attention that computes all scores is replaced by one that does not."""
        return False

    @property
    def keeps_gathered(self) -> bool:
        """Return whether inputs that split layers gather are saved, and not gathered again in backward.

        A schedule that computes gradients of inputs and of weights apart would gather twice.
        """
        return self.splits_backward

    @property
    def chunks_per_rank(self) -> int:
        """Return the number of chunks of a sample's tokens that each rank of the method's axis takes."""
        return 1

    def compute_dtypes(self, *, sharded: bool) -> ComputeDtypes:
        """Return the precisions in which a forward pass runs.

        Args:
            sharded: Whether parameters are gathered, which may cast them.
        """
        return ComputeDtypes()

    def widens(self, strategy: Strategy) -> bool:
        """Return whether bf16 products are computed in fp32 on devices that are slow in bf16."""
        return False

    def traced_layers(
        self, model: nn.Module, sizes: Mapping[str, int], sample: SampleRun | None, strategy: Strategy
    ) -> Any:
        """Build the trace that runs a plain model as one rank of the method's axis; None if it divides no layers.

        Args:
            model: A plain module.
            sizes: Number of ranks along every axis.
            sample: Runs the model once, to see its data flow.
            strategy: Resolved; the method's own.

        Raises:
            ModelError: When the model cannot be divided.
        """
        return None

    def traced_tokens(self, sizes: Mapping[str, int], within: int) -> Any:
        """Return a function that makes the first of the ranks that divide a sample's tokens; None if none do.

        Args:
            sizes: Number of ranks along every axis.
            within: See :func:`~meshwright.methods.base.parts_between_layers`.
        """
        return None

    def traced_narrow(self, model: nn.Module, *, sharded: bool, tensor_ranks: int) -> Any:
        """Choose the layers of a plain model that multiply in 8 bits; None if the method leaves all as they are."""
        return None
