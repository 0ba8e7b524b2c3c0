"""Spread Blocks over pipeline stages: `PipelineTransformerBlockList`, and the check of how ranks call it.

The pass itself is in ``pipeline_pass.py``; which blocks a stage holds, in ``block_list.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.comm import all_gather
from meshwright.comm.transport import Members, members_of
from meshwright.compat.bmtrain.block import Block
from meshwright.compat.bmtrain.block_list import TransformerBlockList, check_listed, stage_bounds, staged
from meshwright.compat.bmtrain.pipeline_pass import PipelineRun, new_chain, scale_gradients
from meshwright.errors import LaunchError, ModelError
from meshwright.inspect import recording_active
from meshwright.runtime import agreed, gather_from, pipe_size, pipeline_mesh, settings
from meshwright.runtime.torch_internals.pytree import tree_flatten, tree_unflatten


class PipelineTransformerBlockList(TransformerBlockList):
    """A TransformerBlockList whose blocks are spread over the stages of a pipeline. Seed: BMTrain 0.2.0.

    ``init_distributed(pipe_size=)`` sets the number of stages; with one stage it is a :class:`TransformerBlockList`.
    Training loops stay as they are: every rank has all layers outside the list, feeds its own batch and gets its own
    result. The batches of a pipeline's ranks together are divided into ``num_micro_batches``, which run through the
    stages in GPipe's order (Huang et al. 2019): all forward, then, in backward, all of them in reverse.

    A stage holds only its own blocks' parameters, sharded over the ``world / pipe_size`` ranks that run it. Names and
    checkpoints are those of the whole model. Gradients are the mean over all ranks, as everywhere. Tensors that blocks
    record for :func:`meshwright.inspect.inspect_tensor` come back to the rank whose samples they are of.

    Every rank must call it, and run backward through something computed from its result.

    Args:
        modules: Blocks, which move from all ranks onto those of their stage and keep their options, or modules that
            are then wrapped. A module may stand in several places of one stage; they share its weights.
        num_hidden: As for :class:`TransformerBlockList`. Hidden states have samples along dim 0 here, and keep shape
            and dtype from block to block.

    Raises:
        ModelError: Where TransformerBlockList raises it; for a Block that has run, fewer modules than stages, and a
            module on two stages.
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
        """Run all blocks.

        Args:
            args: ``num_hidden`` hidden states (B, …), of equal shapes on the ranks of a pipeline, then arguments of
                every block.
            batch_related: Which of the other arguments have a row per sample, as a mask does: their numbers, counted
                from 0 after the hidden states, and keywords. None: all tensors of B rows and as many dims as the first
                hidden state; those of B rows and other dims are refused. Other arguments must be equal on all ranks.
            return_hidden_states: Return the inputs of all blocks, too.
            kwargs: Keyword arguments of every block.

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
        # A stage's gradients are of the sum of its pipeline's losses, and FSDP2 averages over the other ranks only.
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
                # The stage's other ranks gather these blocks: without this they would wait, or mix parameters up.
                for missed in blocks[index:]:
                    missed.after_failure()
                raise
            inputs += entered
        return hidden, inputs


# --- The arguments of a call, and whether all ranks call alike

Key = int | str
Divided = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Hidden states, and further positional arguments of every block."""


class PipelineCall(NamedTuple):
    """One rank's call of a pipelined list."""

    hidden: tuple[torch.Tensor, ...]
    arguments: Arguments
    micros: int
    recording: bool
    """Whether an inspector collects what blocks record."""


def checked_call(
    divide: Callable[[], Divided], kwargs: dict[str, Any], related: Collection[Key] | None, num_stages: int
) -> PipelineCall:
    """Check a call; on CPU together with all ranks, so that an error on one of them is raised on all.

    On CUDA, where that would make the host wait, a rank raises the errors of its own call only.

    Args:
        divide: Returns the call's hidden states and other positional arguments.
        kwargs: The call's keyword arguments.
        related: The call's ``batch_related``.
        num_stages: Ranks of a pipeline.

    Raises:
        ModelError: See :class:`meshwright.nn.PipelineTransformerBlockList`.
        LaunchError: On CPU, when the calls of a pipeline's ranks differ.
    """
    calls: list[PipelineCall] = []

    def describe() -> _Outline:
        hidden, constants = divide()
        _check_hidden(hidden)
        micros = _num_micro_batches(len(hidden[0]) * num_stages, num_stages)
        call = PipelineCall(hidden, Arguments.of(constants, kwargs, hidden[0], related), micros, recording_active())
        calls.append(call)
        return _Outline.of(call)

    if settings().device.type != "cpu":
        describe()
    else:
        outlines = gather_from(describe)
        apart = len(outlines) // num_stages
        for place, outline in enumerate(outlines):
            _check_alike(outline, outlines[place % apart], place, place % apart)
            _check_alike(outline.of_world(), outlines[0].of_world(), place, 0)
    return calls[0]


class _Outline(NamedTuple):
    """The properties of a call that all ranks of a pipeline must share."""

    hidden: list[str]
    per_sample: list[str]
    gradients: str
    recording: str

    @classmethod
    def of(cls, call: PipelineCall) -> _Outline:
        per_sample = [call.arguments.leaves[index] for index in sorted(call.arguments.per_sample)]
        return cls(
            [_described(each) for each in call.hidden],
            [_described(each) for each in per_sample],
            "with gradients" if torch.is_grad_enabled() else "under no_grad",
            "inspected" if call.recording else "not inspected",
        )

    def of_world(self) -> _Outline:
        """Return the properties that must be equal on all pipelines, too."""
        return self._replace(hidden=[], per_sample=[])


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _check_alike(found: _Outline, expected: _Outline, place: int, first: int) -> None:
    for name, ours, theirs in zip(_Outline._fields, found, expected, strict=True):
        if ours != theirs:
            raise agreed(
                LaunchError(
                    "Ranks do not call the same pipeline alike",
                    expected=f"{name}: {theirs}, as on rank {first}",
                    got=f"{ours} on rank {place}",
                    fix="give all ranks of a pipeline tensors of one shape and dtype, and call it in the same contexts "
                    "(no_grad, inspect_tensor) on all ranks",
                )
            )


@dataclass(frozen=True)
class Arguments:
    """Arguments of every block beside hidden states, as the leaves of ``(constants, kwargs)``."""

    leaves: list[Any]
    structure: Any
    per_sample: frozenset[int]
    """The leaves that are batch-related."""

    @classmethod
    def of(
        cls, constants: Sequence[Any], kwargs: dict[str, Any], hidden: torch.Tensor, related: Collection[Key] | None
    ) -> Arguments:
        """Flatten arguments and find out which are batch-related.

        Raises:
            ModelError: When that is unclear, or ``related`` is wrong about it.
        """
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
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def gathered(
        self, chain: torch.Tensor, tensors: Sequence[torch.Tensor], members: Members
    ) -> tuple[torch.Tensor, Arguments]:
        """Replace the tensors, and gather the batch-related ones from all ranks along dim 0."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        rows = [all_gather(leaves[index], members.group).flatten(0, 1) for index in sorted(self.per_sample)]
        # Their backward communicates, too: the chain orders it behind the pipeline's on every stage.
        chain, rows = scale_gradients(chain, 1.0, rows)
        for index, each in zip(sorted(self.per_sample), rows, strict=True):
            leaves[index] = each
        return chain, Arguments(leaves, self.structure, self.per_sample)

    def part(self, micro: int, micros: int) -> Any:
        """Return ``(constants, kwargs)`` of one micro-batch."""
        leaves = [
            leaf.chunk(micros)[micro] if index in self.per_sample else leaf for index, leaf in enumerate(self.leaves)
        ]
        return tree_unflatten(leaves, self.structure)


def _is_per_sample(key: Key, tensor: torch.Tensor, hidden: torch.Tensor, related: Collection[Key] | None) -> bool:
    rows_fit = tensor.dim() > 0 and len(tensor) == len(hidden)
    if related is not None and key in related and not rows_fit:
        raise ModelError(
            "An argument named in batch_related has no row per sample",
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
            fix=f"pass batch_related=[{key!r}] if it has a row per sample, batch_related=[] if it is the same for all",
        )
    return rows_fit


def _check_hidden(hidden: Sequence[Any]) -> None:
    rows = {each.shape[:1] for each in hidden if isinstance(each, torch.Tensor)}
    wrong = [each for each in hidden if not (isinstance(each, torch.Tensor) and each.is_floating_point())]
    if wrong or len(rows) != 1 or torch.Size() in rows or torch.Size([0]) in rows:
        shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in hidden]
        raise ModelError(
            "Hidden states of a pipeline are not tensors with samples along dim 0",
            expected="floating-point tensors (B, …) with the same B of 1 or more",
            got=str(shapes),
            fix="pass other arguments after the hidden states, or change num_hidden",
        )


def _num_micro_batches(samples: int, num_stages: int) -> int:
    micros = settings().num_micro_batches or num_stages
    if samples % micros:
        raise ModelError(
            "The samples of a pipeline cannot be divided into its micro-batches",
            expected=f"a multiple of num_micro_batches={micros} (init_distributed)",
            got=f"{samples} samples on {num_stages} ranks",
            fix="change the batch size, or num_micro_batches",
        )
    return micros
