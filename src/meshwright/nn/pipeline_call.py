"""What a pipelined list is called with, and that its ranks call it alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.distributed import all_gather
from meshwright.distributed.members import Members
from meshwright.distributed.routes import scale_gradients
from meshwright.errors import LaunchError, ModelError
from meshwright.inspect import recording_active
from meshwright.runtime import agreed, gather_from, settings

Key = int | str
Divided = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Hidden states, and what every block gets by position."""


class PipelineCall(NamedTuple):
    """One rank's call."""

    hidden: tuple[torch.Tensor, ...]
    arguments: Arguments
    micros: int
    recording: bool
    """Whether an inspector collects what blocks record."""


def checked_call(
    divide: Callable[[], Divided], kwargs: dict[str, Any], related: Collection[Key] | None, num_stages: int
) -> PipelineCall:
    """Checks a call. On CPU all ranks do so together, and what is wrong on one of them is raised on all.

    On CUDA, where the host would have to wait for that, a rank raises what is wrong with its own call.

    Args:
        divide: Gives the call's positional arguments.
        kwargs: Its keywords.
        related: Its ``batch_related``.
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
    """What must be alike on all ranks of a pipeline."""

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
        """What must be alike on all pipelines, too."""
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
                    fix="give all ranks of a pipeline tensors of one shape and dtype, and the same surroundings "
                    "(no_grad, inspect_tensor) on all ranks",
                )
            )


@dataclass(frozen=True)
class Arguments:
    """What every block gets beside hidden states: the leaves of ``(constants, kwargs)``."""

    leaves: list[Any]
    structure: Any
    per_sample: frozenset[int]
    """Which leaves are batch-related."""

    @classmethod
    def of(
        cls, constants: Sequence[Any], kwargs: dict[str, Any], hidden: torch.Tensor, related: Collection[Key] | None
    ) -> Arguments:
        """Finds out which are batch-related.

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
        """All tensors among the leaves, in their order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def gathered(
        self, chain: torch.Tensor, tensors: Sequence[torch.Tensor], members: Members
    ) -> tuple[torch.Tensor, Arguments]:
        """The same with other tensors in place of its own, the batch-related ones of all ranks one after the other."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        rows = [all_gather(leaves[index], members.group).flatten(0, 1) for index in sorted(self.per_sample)]
        # Their backward communicates, too: behind all of the pipeline's, on every stage.
        chain, rows = scale_gradients(chain, 1.0, rows)
        for index, each in zip(sorted(self.per_sample), rows, strict=True):
            leaves[index] = each
        return chain, Arguments(leaves, self.structure, self.per_sample)

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
