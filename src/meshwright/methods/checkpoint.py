"""``checkpoint``: recompute activations in backward instead of keeping them. Seed: ATorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from meshwright.cost import (
    Activations,
    Block,
    BlockSaves,
    Boundary,
    Op,
    RecomputePart,
    Step,
    Traffic,
    inline_traffic,
    names_class,
)
from meshwright.methods.base import Method, Phase
from meshwright.methods.job import Job
from meshwright.methods.references import ClassReferences
from meshwright.nn import modules_of, outermost, require_blocks, wrap_methods


class Checkpoint(Method):
    """Keeps only the inputs of the named modules and runs their forward again in backward (Chen et al. 2016).

    Config: a class, a class name, a tuple of either, or ``{"wrap_class": …, "no_reentrant": False}``. None recomputes
    the model's repeated blocks. ``no_reentrant=False`` uses torch's reentrant implementation, for modules (some
    ``torch.jit.script`` ones) on which the default fails.
    """

    method_name: ClassVar[str] = "checkpoint"
    phase: ClassVar[Phase] = Phase.RECOMPUTE
    summary: ClassVar[str] = "recomputes activations in backward: less memory, about a third more compute"
    effect: ClassVar[str] = (
        "memory: activations of one block at a time. Time: one more forward. Communication: forward's again"
    )
    seed_name: ClassVar[str | None] = "ATorch: checkpoint"

    wrap_class: ClassReferences | None = None
    no_reentrant: bool = True

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads a class, a name, or several."""
        if isinstance(raw, str | type | tuple | list | set | frozenset):
            return {"wrap_class": raw}
        return super().from_short(raw)

    def check(self, job: Job) -> None:
        """Refuses classes that are not in the model, and a model without blocks when no class is named."""
        self._modules(job.model)

    def _modules(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        if self.wrap_class is None:
            return require_blocks(model, method=self.method_name, option="wrap_class")
        return list(outermost(modules_of(model, self.wrap_class, method=self.method_name)))

    def apply(self, job: Job) -> None:
        """Wraps the forward of every such module; parameter names stay as they are."""
        wrap_methods([module for _, module in self._modules(job.model)], "forward", self._recomputed)
        config = getattr(job.model, "config", None)
        if config is not None and getattr(config, "use_cache", False):
            # A key-value cache would be filled a second time by the recomputation.
            config.use_cache = False
            job.notices.append("checkpoint: config.use_cache was set to False; a cache cannot be recomputed")

    def _recomputed(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.no_reentrant:
            return torch_checkpoint(forward, *args, use_reentrant=False, **kwargs)
        # The reentrant implementation takes positional arguments only, and only those get gradients.
        names, count = list(kwargs), len(args)

        def positional(*every: Any) -> Any:
            return forward(*every[:count], **dict(zip(names, every[count:], strict=True)))

        return torch_checkpoint(positional, *args, *kwargs.values(), use_reentrant=True)

    def cost(self, step: Step) -> Step:
        """Frees what the chosen modules save and adds what one of them needs while it recomputes."""
        known = step.activations
        if known is None:
            return step
        wanted = known.block_classes if self.wrap_class is None else self.wrap_class
        chosen = [part for part in known.parts if _named(wanted, part.classes) and not _named(wanted, part.inside)]
        flops = sum(size for part in chosen for _, size in part.flops_at)
        blocks = tuple(self._computed_again(block, wanted) for block in step.blocks)
        changed = step.replace(activations=_recompute(known, chosen), recompute_flops=flops, blocks=blocks)
        return changed.send(*self._repeated(step, wanted))

    def _repeated(self, step: Step, wanted: tuple[str, ...]) -> list[Traffic]:
        """Forward's collectives over the axes tensor, sequence, context and expert that recomputation sends again.

        torch stops it at the last saved tensor: what a module sends after that is not sent again. The reentrant
        implementation runs to the end.
        """
        sent: dict[str, list[Boundary]] = {}
        for boundary in step.boundaries:
            if boundary.moment == "forward" and _named(wanted, self._again(boundary)):
                sent.setdefault(boundary.axis, []).append(dataclasses.replace(boundary, moment="backward"))
        return [each for axis, repeated in sent.items() for each in inline_traffic(step, axis, repeated)]

    def _again(self, part: Boundary | Op) -> tuple[str, ...]:
        """The classes whose recomputation runs a collective or a kernel again."""
        return part.needed_in if self.no_reentrant else part.inside

    def _computed_again(self, block: Block, wanted: tuple[str, ...]) -> Block:
        ops = tuple(dataclasses.replace(op, recomputed=_named(wanted, self._again(op))) for op in block.ops)
        return dataclasses.replace(block, ops=ops)


def _named(references: tuple[str, ...], names: tuple[str, ...]) -> bool:
    return any(names_class(reference, names) for reference in references)


def _recompute(known: Activations, chosen: list[RecomputePart]) -> Activations:
    return dataclasses.replace(
        known,
        saved_bytes=max(known.saved_bytes - sum(part.freed_bytes for part in chosen), 0),
        working_bytes=max((part.working_bytes for part in chosen), default=0),
        first_blocks=_first_blocks(known, chosen),
    )


def _first_blocks(known: Activations, chosen: list[RecomputePart]) -> tuple[BlockSaves, ...]:
    """What copying would change then: every part's own change, added up."""

    def changed(place: int, before: BlockSaves) -> BlockSaves:
        parts = [part.first_blocks[place] for part in chosen if part.first_blocks]
        return BlockSaves(
            before.freed_bytes + sum(part.freed_bytes - before.freed_bytes for part in parts),
            before.copied_bytes + sum(part.copied_bytes - before.copied_bytes for part in parts),
        )

    return tuple(changed(place, before) for place, before in enumerate(known.first_blocks))
