"""``context_parallel``: each rank works on a part of the tokens; keys and values travel around a ring."""

from __future__ import annotations

from typing import ClassVar, Final

from meshwright.cost import Step, send_boundaries
from meshwright.methods.base import Method, Phase
from meshwright.methods.context.attention import ContextRanks
from meshwright.methods.job import Job
from meshwright.methods.sequence.order import TokenOrder
from meshwright.methods.sequence.setup import check_parts, whole_input_gradients, without_cache
from meshwright.methods.sequence.tokens import work_on_parts
from meshwright.methods.tensor.exchange import TensorAxis

AXIS: Final = "context"


class ContextParallel(Method):
    """Ranks along the axis ``context`` take the same samples; each runs the blocks on a part of the tokens.

    Inside attention each rank keeps its queries, and keys and values travel around the ring of ranks, the next ones
    while it attends to those it has; outputs are merged by their log-sum-exp (Liu et al. 2023, Ring Attention). The
    number of heads does not matter, and grouped keys and values travel as they are. What the model must be like, and
    what happens before and behind the blocks, is as in ``sequence_parallel``.

    Config: None, or ``{"balance": False}``.
    """

    method_name: ClassVar[str] = "context_parallel"
    phase: ClassVar[Phase] = Phase.CONTEXT
    summary: ClassVar[str] = "splits the tokens over the context axis; keys and values travel around a ring"
    effect: ClassVar[str] = (
        "memory: activations / n. Time: the blocks' / n. Communication: keys and values n - 1 times around a ring"
    )
    seed_name: ClassVar[str | None] = "ColossalAI: ring_attn"
    axis: ClassVar[str | None] = AXIS

    balance: bool = True
    """Rank r of n has the chunks r and 2 n - 1 - r of the tokens, so that causal attention is as much work on each.

    False gives it one contiguous part: half as many chunks for the axis to divide, and the last rank works the most.
    """

    def _order(self, size: int) -> TokenOrder:
        return TokenOrder(self.method_name, size, 0, self.balance)

    def check(self, job: Job) -> None:
        """Refuses models whose blocks cannot work on a part of the tokens, found out on a sample where there is one."""
        if job.size(AXIS) > 1:
            check_parts(job, self._order(job.size(AXIS)))

    def apply(self, job: Job) -> None:
        """Cuts and gathers tokens in hooks around the blocks, and takes over attention inside them."""
        if job.size(AXIS) > 1:
            axis = TensorAxis(job.require_mesh()[AXIS])
            work_on_parts(job.model, ContextRanks(axis, balance=self.balance, within=job.size("sequence")))
            whole_input_gradients(job.model, axis)
            without_cache(job, self.method_name)

    def cost(self, step: Step) -> Step:
        """What travels in every micro-batch; activations and operations are traced with a part of the tokens."""
        return send_boundaries(step, AXIS)
