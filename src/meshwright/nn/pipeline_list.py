"""A stack of Blocks spread over the stages of a pipeline. Seed: BMTrain."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Any

from torch import nn

from meshwright.distributed.members import members_of
from meshwright.distributed.routes import new_chain, scale_gradients
from meshwright.nn.block import Block
from meshwright.nn.block_list import TransformerBlockList, check_listed
from meshwright.nn.pipeline_call import Key, checked_call
from meshwright.nn.pipeline_run import PipelineRun
from meshwright.nn.stages import stage_bounds, staged
from meshwright.runtime import pipe_size, pipeline_mesh


class PipelineTransformerBlockList(TransformerBlockList):
    """A TransformerBlockList whose blocks are spread over the stages of a pipeline. Seed: BMTrain 0.2.0.

    ``init_distributed(pipe_size=)`` sets the number of stages; with one stage it is a :class:`TransformerBlockList`.
    Training loops stay as they are: every rank has all layers outside the list, feeds its own batch and gets its own
    result. The batches of a pipeline's ranks together are cut into ``num_micro_batches``, which run through the stages
    in GPipe's order (Huang et al. 2019): all forward, then, in backward, all of them in reverse.

    A stage holds only its own blocks' parameters, sharded over the ``world / pipe_size`` ranks that run it. Names and
    checkpoints are those of the whole model. Gradients are the mean over all ranks, as everywhere. What blocks record
    for :func:`meshwright.inspect.inspect_tensor` comes back to the rank whose samples they are, like hidden states.

    Every rank calls it, and goes backward through something that was made of its result.

    Args:
        modules: Blocks, which move from all ranks onto those of their stage and keep their options, or modules that
            are then wrapped. A module in several places shares its weights, within one stage.
        num_hidden: As for :class:`TransformerBlockList`. Hidden states have samples along dim 0 here, and keep shape
            and dtype from block to block.

    Raises:
        ModelError: For what TransformerBlockList refuses, a Block that has run, fewer modules than stages, and a module
            on two.
    """

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1) -> None:
        listed = list(modules)
        check_listed(listed, num_hidden)  # before any block moves
        super().__init__(staged(listed) if pipe_size() > 1 else listed, num_hidden)

    def forward(
        self,
        *args: Any,
        batch_related: Collection[Key] | None = None,
        return_hidden_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs all blocks.

        Args:
            args: ``num_hidden`` hidden states (B, …), alike in shape on the ranks of a pipeline, then what every block
                gets.
            batch_related: Which of the other arguments have a row per sample, as a mask does: their numbers, counted
                from 0 after the hidden states, and keywords. None: all tensors of B rows and as many dims as the first
                hidden state; those of B rows and other dims are refused. What is not batch-related must be equal on
                all ranks.
            return_hidden_states: Return the inputs of all blocks, too.
            kwargs: What every block gets.

        Returns:
            As :class:`TransformerBlockList`: this rank's last hidden states, then the inputs of all L blocks (L, B, …).

        Raises:
            ModelError: When hidden states are not such tensors, ``num_micro_batches`` does not divide the samples, or
                it is unclear which arguments are batch-related.
            LaunchError: On CPU, when shapes or dtypes differ between the ranks of a pipeline, or some ranks are under
                ``no_grad`` or ``inspect_tensor()`` and others not.
            InspectError: On every rank, when a recorded tensor has no rows of samples along dim 0.

        On CPU all of these, and what blocks raise, are raised on every rank.
        """
        if pipe_size() == 1:
            return super().forward(*args, return_hidden_states=return_hidden_states, **kwargs)
        members = members_of(pipeline_mesh())
        call = checked_call(lambda: self._divided(args), kwargs, batch_related, members.size)
        hidden, others = call.hidden, call.arguments
        # A stage's gradients are those of the sum of its pipeline's losses; FSDP2 averages over the other ranks alone.
        chain, tensors = scale_gradients(new_chain(hidden[0].device), members.size, [*hidden, *others.tensors])
        chain, others = others.gathered(chain, tensors[len(hidden) :], members)
        bounds = stage_bounds(len(self), members.size)
        lengths = [end - start for start, end in pairwise(bounds)]
        run = PipelineRun(self._run_own, members, call.micros, lengths, recording=call.recording)
        parts = [others.part(micro, call.micros) for micro in range(call.micros)]
        chain, results, recorded = run(chain, tensors[: len(hidden)], parts, return_hidden_states)
        _, everything = scale_gradients(chain, 1 / members.size, [*results, *recorded])
        run.hand_over(everything[len(results) :])
        results = everything[: len(results)]
        return results[0] if len(results) == 1 else tuple(results)

    def _run_own(self, hidden: tuple[Any, ...], arguments: Any) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        constants, kwargs = arguments
        blocks = [block for block in self if isinstance(block, Block)]
        inputs: list[tuple[Any, ...]] = []
        for index, block in enumerate(blocks):
            try:
                hidden, entered = self._run([block], hidden, constants, kwargs)
            except Exception:
                for missed in blocks[index:]:  # without it, the stage's other ranks would wait, or mix parameters up
                    missed.after_failure()
                raise
            inputs += entered
        return hidden, inputs
