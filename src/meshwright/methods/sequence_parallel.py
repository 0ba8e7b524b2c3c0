"""``sequence_parallel``: each rank works on a part of the tokens; attention exchanges tokens for heads (Ulysses)."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Final

from meshwright.cost import Step, send_boundaries
from meshwright.errors import StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.sequence.attention import SequenceRanks, check_heads
from meshwright.methods.sequence.order import TokenOrder
from meshwright.methods.sequence.setup import check_parts, whole_input_gradients, without_cache
from meshwright.methods.sequence.tokens import work_on_parts
from meshwright.methods.tensor.exchange import TensorAxis

AXIS: Final = "sequence"

# What ATorch asks for: a size, and the method of the model's modules that it calls with it.
_REFUSED = frozenset({"sp_size", "module", "set_sp_func_name", "batch_sp_processing_fn"})


class SequenceParallel(Method):
    """Ranks along the axis ``sequence`` take the same samples; each runs the blocks on a contiguous part of the tokens.

    Inside attention an all-to-all exchanges tokens for heads, and another one goes back (Jacobs et al. 2023,
    DeepSpeed-Ulysses). The model stays as it is: its blocks lie in an ``nn.ModuleList`` and call
    ``torch.nn.functional.scaled_dot_product_attention``, as plain models do and transformers' with ``sdpa``.

    What is before the blocks (embeddings, masks, positions) and behind them (norm, head, loss) runs on all tokens on
    every rank: tokens are cut before the first block and gathered behind the last, so that positions, masks and a loss
    across the cut (the next token's) are those of one process. Every rank computes the same loss; averaging gradients
    over the axis, as over ``data``, gives those of one process, since each collective's backward is its transpose.

    Beside ``context_parallel`` the tokens of each context rank are divided once more, and the ring goes around these
    ranks (Fang and Zhao 2024, USP).
    """

    method_name: ClassVar[str] = "sequence_parallel"
    phase: ClassVar[Phase] = Phase.SEQUENCE
    summary: ClassVar[str] = "splits the tokens over the sequence axis; attention exchanges them for heads"
    effect: ClassVar[str] = (
        "memory: activations / n. Time: the blocks' / n. Communication: four all-to-alls per attention and pass"
    )
    seed_name: ClassVar[str | None] = "ColossalAI: all_to_all"
    axis: ClassVar[str | None] = AXIS

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuses ATorch's keys, of which the mesh says one and the model none."""
        given = sorted(_REFUSED.intersection(keys))
        if given:
            raise StrategyError(
                f"{cls.method_name}: keys of ATorch mean nothing here",
                expected="no keys",
                got=", ".join(given),
                fix="leave them out, and give the size of the axis sequence: ('parallel_mode', [('sequence', 2)])",
            )
        return keys

    def check(self, job: Job) -> None:
        """Refuses models whose blocks cannot work on a part of the tokens, found out on a sample where there is one."""
        size = job.size(AXIS)
        if size > 1:
            divisor = size * job.size("tensor")  # which has divided the heads before
            check_parts(job, TokenOrder(self.method_name, size, 0), functools.partial(check_heads, ranks=divisor))

    def apply(self, job: Job) -> None:
        """Cuts and gathers tokens in hooks around the blocks, and takes over attention inside them."""
        if job.size(AXIS) > 1:
            axis = TensorAxis(job.require_mesh()[AXIS])
            work_on_parts(job.model, SequenceRanks(axis, job.size("context")))
            whole_input_gradients(job.model, axis)
            without_cache(job, self.method_name)

    def cost(self, step: Step) -> Step:
        """What is exchanged in every micro-batch; activations and operations are traced with a part of the tokens."""
        return send_boundaries(step, AXIS)
