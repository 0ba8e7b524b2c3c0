"""A stack of Blocks spread over the stages of a pipeline. Seed: BMTrain."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.distributed import all_gather
from meshwright.distributed.header import check_call
from meshwright.distributed.members import Members, members_of
from meshwright.distributed.routes import new_chain, scale_gradients
from meshwright.errors import InspectError, ModelError
from meshwright.inspect import recording_active
from meshwright.nn.block import Block
from meshwright.nn.block_list import TransformerBlockList
from meshwright.nn.pipeline_run import PipelineRun
from meshwright.nn.stages import stage_bounds, staged
from meshwright.runtime import agreed, pipe_size, pipeline_mesh, settings

Key = int | str


class PipelineTransformerBlockList(TransformerBlockList):
    """A TransformerBlockList whose blocks are spread over the stages of a pipeline. Seed: BMTrain 0.2.0.

    ``init_distributed(pipe_size=)`` sets the number of stages; with one stage it is a :class:`TransformerBlockList`.
    Training loops stay as they are: every rank has all layers outside the list, feeds its own batch and gets its own
    result. The batches of a pipeline's ranks together are cut into ``num_micro_batches``, which run through the stages
    in GPipe's order (Huang et al. 2019): all forward, then, in backward, all of them in reverse.

    A stage holds only its own blocks' parameters, sharded over the ``world / pipe_size`` ranks that run it. Names and
    checkpoints are those of the whole model. Gradients are the mean over all ranks, as everywhere.

    Every rank calls it, and goes backward through something that was made of its result.

    Args:
        modules: No Blocks: the list wraps them. A module in several places shares its weights, within one stage.
        num_hidden: As for :class:`TransformerBlockList`. Hidden states have samples along dim 0 here, and keep shape
            and dtype from block to block.

    Raises:
        ModelError: For what TransformerBlockList refuses, Blocks, fewer modules than stages, and a module on two.
    """

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1) -> None:
        listed = list(modules)
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
            LaunchError: On CPU, on every rank of the pipeline, when shapes or dtypes differ between them.
            InspectError: Inside ``inspect_tensor()``, which cannot follow a tensor over stages yet.
        """
        hidden, constants = self._divided(args)
        if pipe_size() == 1:
            return super().forward(*args, return_hidden_states=return_hidden_states, **kwargs)
        _check_hidden(hidden)
        members = members_of(pipeline_mesh())
        for state in hidden:
            check_call("PipelineTransformerBlockList", state, members, backward_communicates=False)
        micros = _num_micro_batches(len(hidden[0]) * members.size, members.size)
        others = _Arguments.of(constants, kwargs, hidden[0], batch_related)
        # A stage's gradients are those of the sum of its pipeline's losses; FSDP2 averages over the other ranks alone.
        chain, tensors = scale_gradients(new_chain(hidden[0].device), members.size, [*hidden, *others.tensors])
        chain, others = others.gathered(chain, tensors[len(hidden) :], members)
        bounds = stage_bounds(len(self), members.size)
        run = PipelineRun(self._run_own, members, micros, [end - start for start, end in pairwise(bounds)])
        parts = [others.part(micro, micros) for micro in range(micros)]
        chain, results = run(chain, tensors[: len(hidden)], parts, return_hidden_states)
        _, results = scale_gradients(chain, 1 / members.size, results)
        return results[0] if len(results) == 1 else tuple(results)

    def _run_own(self, hidden: tuple[Any, ...], arguments: Any) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        constants, kwargs = arguments
        return self._run([block for block in self if isinstance(block, Block)], hidden, constants, kwargs)


@dataclass(frozen=True)
class _Arguments:
    """What every block gets beside hidden states: the leaves of ``(constants, kwargs)``."""

    leaves: list[Any]
    structure: Any
    per_sample: frozenset[int]
    """Which leaves are batch-related."""

    @classmethod
    def of(
        cls, constants: Sequence[Any], kwargs: dict[str, Any], hidden: torch.Tensor, related: Collection[Key] | None
    ) -> _Arguments:
        keyed: dict[Key, Any] = dict(enumerate(constants)) | kwargs
        if related is not None and set(related) - keyed.keys():
            raise ModelError(
                "batch_related names arguments that are not here",
                expected=f"some of {list(keyed)}",
                got=repr(list(related)),
                fix="count from 0 after the hidden states, or name keywords",
            )
        leaves, structure = tree_flatten((tuple(constants), kwargs))
        keys = [key for key, value in keyed.items() for _ in tree_flatten(value)[0]]
        per_sample = {
            index
            for index, (key, leaf) in enumerate(zip(keys, leaves, strict=True))
            if isinstance(leaf, torch.Tensor) and _is_per_sample(key, leaf, hidden, related)
        }
        return cls(leaves, structure, frozenset(per_sample))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def gathered(
        self, chain: torch.Tensor, tensors: Sequence[torch.Tensor], members: Members
    ) -> tuple[torch.Tensor, _Arguments]:
        """The same with other tensors in place of its own, the batch-related ones of all ranks one after the other."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        rows = [all_gather(leaves[index], members.group).flatten(0, 1) for index in sorted(self.per_sample)]
        # Their backward communicates, too: behind all of the pipeline's, on every stage.
        chain, rows = scale_gradients(chain, 1.0, rows)
        for index, each in zip(sorted(self.per_sample), rows, strict=True):
            leaves[index] = each
        return chain, _Arguments(leaves, self.structure, self.per_sample)

    def part(self, micro: int, micros: int) -> Any:
        """``(constants, kwargs)`` of one micro-batch."""
        leaves = [
            leaf.chunk(micros)[micro] if index in self.per_sample else leaf for index, leaf in enumerate(self.leaves)
        ]
        return tree_unflatten(leaves, self.structure)


def _is_per_sample(key: Key, tensor: torch.Tensor, hidden: torch.Tensor, related: Collection[Key] | None) -> bool:
    rows_fit = tensor.dim() > 0 and len(tensor) == len(hidden)
    if related is not None and key in related and not rows_fit:
        raise ModelError(
            "An argument that is said to be batch-related has no row per sample",
            expected=f"dim 0 of size {len(hidden)}, as the hidden states",
            got=f"shape {tuple(tensor.shape)} for argument {key!r}",
            fix="leave it out of batch_related",
        )
    if related is not None:
        return key in related
    if rows_fit and tensor.dim() != hidden.dim():
        raise ModelError(
            "It is unclear whether an argument has a row per sample",
            expected="batch_related=[…] with the numbers and names of such arguments",
            got=f"shape {tuple(tensor.shape)} for argument {key!r}, hidden states of shape {tuple(hidden.shape)}",
            fix=f"pass batch_related=[{key!r}] if it goes with the samples, batch_related=[] if it is one for all",
        )
    return rows_fit


def _check_hidden(hidden: Sequence[Any]) -> None:
    if recording_active():
        raise agreed(
            InspectError(
                "Tensors cannot be recorded inside a pipeline of several stages yet",
                expected="inspect_tensor() around other parts of the model only",
                got="a PipelineTransformerBlockList inside it",
                fix="inspect with init_distributed(pipe_size=1); inspect_model works with any number of stages",
            )
        )
    rows = {each.shape[:1] for each in hidden if isinstance(each, torch.Tensor)}
    wrong = [each for each in hidden if not (isinstance(each, torch.Tensor) and each.is_floating_point())]
    if wrong or len(rows) != 1 or torch.Size() in rows or torch.Size([0]) in rows:
        shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in hidden]
        raise ModelError(
            "Hidden states of a pipeline are not tensors with samples along dim 0",
            expected="floating-point tensors (B, …) with the same B of 1 or more",
            got=str(shapes),
            fix="pass what is not a hidden state after them, or change num_hidden",
        )


def _num_micro_batches(samples: int, num_stages: int) -> int:
    micros = settings().num_micro_batches or num_stages
    if samples % micros:
        raise ModelError(
            "The samples of a pipeline cannot be cut into its micro-batches",
            expected=f"a multiple of num_micro_batches={micros} (init_distributed)",
            got=f"{samples} samples on {num_stages} ranks",
            fix="change the batch size, or num_micro_batches",
        )
    return micros
