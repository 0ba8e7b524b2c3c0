"""``sequence_parallel``: each rank works on a part of the tokens; attention exchanges tokens for heads (Ulysses)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from meshwright.cost import Step, inline_traffic
from meshwright.errors import ModelError, StrategyError
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.sequence.attention import SequenceRanks
from meshwright.methods.sequence.proof import prove_blocks
from meshwright.methods.sequence.tokens import block_lists, cut_tokens, over_heads
from meshwright.methods.tensor.exchange import TensorAxis
from meshwright.nn import wrap_method

AXIS = "sequence"


class SequenceParallel(Method):
    """Ranks along the axis ``sequence`` take the same samples; each runs the blocks on a contiguous part of the tokens.

    Inside attention an all-to-all exchanges tokens for heads, and another one goes back (Jacobs et al. 2023,
    DeepSpeed-Ulysses). The model stays as it is: its blocks lie in an ``nn.ModuleList`` and call
    ``torch.nn.functional.scaled_dot_product_attention``, as plain models do and transformers' with ``sdpa``.

    What is before the blocks (embeddings, masks, positions) and behind them (norm, head, loss) runs on all tokens on
    every rank: tokens are cut before the first block and gathered behind the last, so that positions, masks and a loss
    across the cut (the next token's) are those of one process. Every rank computes the same loss; averaging gradients
    over the axis, as over ``data``, gives those of one process, since each collective's backward is its transpose.
    """

    method_name: ClassVar[str] = "sequence_parallel"
    phase: ClassVar[Phase] = Phase.SEQUENCE
    summary: ClassVar[str] = "splits the tokens over the sequence axis; attention exchanges them for heads"

    @staticmethod
    def check_axes(axes: Mapping[str, int]) -> None:
        """Refuses axes beside which it does not work.

        Raises:
            StrategyError: Naming them.
        """
        others = [axis for axis in ("tensor", "pipeline") if axes.get(axis, 1) > 1]
        if others and axes.get(AXIS, 1) > 1:
            raise StrategyError(
                f"sequence_parallel does not go together with the axis {others[0]!r} in this version",
                expected="the axes sequence, data, zero and replica",
                got=str(dict(axes)),
                fix="use tensor_parallel with sequence=True for both, or fsdp to lower a rank's memory",
            )

    def check(self, job: Job) -> None:
        """Refuses models whose blocks cannot work on a part of the tokens, found out on a sample where there is one."""
        if job.size(AXIS) == 1:
            return
        self.check_axes(dict(job.axes))
        config = getattr(job.model, "config", None)
        if getattr(config, "output_router_logits", False):
            raise ModelError(
                "sequence_parallel: a loss of routers over all tokens is not computed from parts of them",
                expected="output_router_logits=False",
                got="True",
                fix="switch it off in the model's config",
            )
        block_lists(job.model)
        notice = prove_blocks(job.model, job.sample, job.size(AXIS))
        if notice:
            job.notices.append(notice)

    def apply(self, job: Job) -> None:
        """Cuts and gathers tokens in hooks around the blocks, and takes over attention inside them."""
        if job.size(AXIS) == 1:
            return
        ranks = SequenceRanks(TensorAxis(job.require_mesh()[AXIS]))
        for blocks in block_lists(job.model):
            for path, block in blocks:
                wrap_method(block, "forward", over_heads(path, ranks))
            cut_tokens(blocks, ranks)
        config = getattr(job.model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
            job.notices.append("sequence_parallel: config.use_cache was set to False; a rank has a part of the tokens")

    def cost(self, step: Step) -> Step:
        """What is exchanged in every micro-batch; activations and operations are traced with a part of the tokens."""
        return step.send(*inline_traffic(step, AXIS, (each for each in step.boundaries if each.axis == AXIS)))
