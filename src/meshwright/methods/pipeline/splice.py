"""One model, run stage by stage: foreign blocks pass the hidden state by, and a stage ends where its last block ends.

A model's own forward runs on every rank. Before a stage's first block it computes with whatever comes along; there the
hidden state received takes its place. What it prepares for the blocks besides (masks, rotary tables) is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from meshwright.errors import ModelError
from meshwright.inspect import Record, Watched, captured
from meshwright.methods.pipeline.cut import Cut
from meshwright.methods.pipeline.draws import BlockDraws, drawing
from meshwright.methods.pipeline.trace import carried_positions


@dataclass(frozen=True)
class Form:
    """What a block returns, around its tensors: travels to the next stage, whose model expects the same."""

    outline: Any  # the output itself with its leaves numbered
    values: tuple[Any, ...]  # per leaf: its value, if it is a plain one
    places: tuple[int, ...]  # of the leaves that the next block takes: the hidden state

    def filled(self, tensors: list[torch.Tensor]) -> Any:
        """A block's output with these tensors as its hidden state; other tensors of it are None."""
        leaves = list(self.values)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_map(leaves.__getitem__, self.outline)


class Handed(NamedTuple):
    """What a stage that is not the last computes."""

    tensors: list[torch.Tensor]
    form: Form


class _Stop(Exception):
    """Leaves the model's forward at the end of a stage."""

    def __init__(self, handed: Handed) -> None:
        super().__init__()
        self.handed = handed


@dataclass
class _Running:
    """The stage that runs now."""

    first: int  # its blocks: first … end - 1
    end: int
    inbox: Handed | None  # None: the first stage
    draws: BlockDraws
    output: Any = None  # of the block that ran last
    inputs: list[Any] = field(default_factory=list)  # of that block, flattened
    records: list[Record] = field(default_factory=list)  # of what the model's code inspects


class Splice:
    """Runs single stages of a model whose blocks call :meth:`around_block` around themselves."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.dtype: torch.dtype | None = None  # what the stand-ins of embeddings compute in; None: as the weights
        self._running: _Running | None = None
        self._recorded: dict[int, list[list[Watched]]] = {}  # by stage, of every run

    @property
    def is_running(self) -> bool:
        """Whether a stage runs now."""
        return self._running is not None

    def run(self, stage: int, inbox: Handed | None, forward: Callable[[], Any], seed: int) -> Any:
        """Runs a stage.

        Args:
            stage: Its number.
            inbox: What the stage before handed on; None for the first.
            forward: Calls the model, whose forward :meth:`until_handed` guards.
            seed: Of this micro-batch, the same for all stages.

        Returns:
            A :class:`Handed`, or what ``forward`` returns where the stage is the last.
        """
        with self._stage(stage, inbox, BlockDraws(stage, seed)), drawing(seed):
            return forward()

    def take_records(self) -> dict[int, list[list[Watched]]]:
        """What each stage has recorded, run by run, since it was last asked; empty lists where nobody inspects."""
        taken, self._recorded = self._recorded, {}
        return taken

    @contextlib.contextmanager
    def _stage(self, stage: int, inbox: Handed | None, draws: BlockDraws) -> Iterator[None]:
        first, end = self.cut.bounds[stage : stage + 2]
        with captured() as records:
            self._running = _Running(first, end, inbox, draws, records=records)
            try:
                yield
            finally:
                self._running = None
        self._recorded.setdefault(stage, []).append([Watched.of(record) for record in records])

    @staticmethod
    def until_handed(forward: Callable[[], Any]) -> Any:
        """The model's forward, which ends early when the stage's last block has run."""
        try:
            return forward()
        except _Stop as stop:
            return stop.handed

    def around_block(self, index: int) -> Callable[..., Any]:
        """What happens in the place of block ``index``; called with the block's own call, None for a foreign one."""

        def around(call: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
            running = self._running
            if running is None:
                raise ModelError(
                    "pipeline_parallel: a block was called by itself",
                    expected="calls of the whole model",
                    got=f"a call of block {index}",
                    fix="call the model that accelerate returned",
                )
            if index >= running.end:
                raise _Stop(_handed(running, args, kwargs))
            if index < running.first:
                assert running.inbox is not None
                return running.inbox.form.filled(running.inbox.tensors)
            assert call is not None
            self._check_inputs(running, index, args, kwargs)
            if index == running.first:
                running.draws.enter()
            output = call(*args, **kwargs)
            if index == running.end - 1:
                running.draws.leave()
            running.output = output
            return output

        return around

    def _check_inputs(self, running: _Running, index: int, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        if index > running.first:
            _check_nothing_else(running, leaves)
        elif running.inbox is not None:
            carried_positions(list(running.inbox.tensors), leaves)
            running.records.clear()  # what comes before a stage's blocks, the stage before has recorded
        running.inputs = leaves


def _handed(running: _Running, args: Any, kwargs: Any) -> Handed:
    leaves = tree_leaves((args, kwargs))
    _check_nothing_else(running, leaves)
    outputs, spec = tree_flatten(running.output)
    places = tuple(carried_positions(outputs, leaves))
    values = tuple(leaf if isinstance(leaf, int | float | str) else None for leaf in outputs)
    outline = tree_unflatten(list(range(len(outputs))), spec)
    return Handed([outputs[place] for place in places], Form(outline, values, places))


def _check_nothing_else(running: _Running, leaves: list[Any]) -> None:
    """Refuses inputs of a block that depend on earlier blocks in another way than through the last one's output."""
    outputs = tree_leaves(running.output)
    carried = carried_positions(outputs, leaves)
    known = {id(leaf) for leaf in running.inputs} | {id(outputs[place]) for place in carried}
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    strange = [leaf for leaf in tensors if id(leaf) not in known]
    if strange:
        raise ModelError(
            "pipeline_parallel: a block's input depends on earlier blocks, and not through the last one's output",
            expected="blocks that take what the block before returned, and what is the same for all blocks",
            got=f"a tensor of shape {tuple(strange[0].shape)} that needs a gradient",
            fix="let every block hand on what later ones need, or train this model with fsdp",
        )
