"""Compile the blocks of a model, or the whole model, in place (`compile`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import nn

from meshwright.cost import Block, Op, Step
from meshwright.cost.calibration import COMPILED_CALL, COMPILED_KERNEL
from meshwright.errors import StrategyError, did_you_mean, join_names
from meshwright.methods.base import SHARDING, Conflict, Job, Method, Phase
from meshwright.methods.checkpoint import Checkpoint
from meshwright.methods.expert.expert_layers import loops_over_experts
from meshwright.methods.planner_hooks import Role, SearchScope
from meshwright.methods.replace.attention_backends import fuse_sinks
from meshwright.methods.tensor.split_layers import local_parts, swapped_parameters
from meshwright.methods.tokens.attention_calls import grouped_keys
from meshwright.nn import compile_forward, find_blocks, is_compiled, require_blocks
from meshwright.nn.recompute_buffers import PlainWhereBuffersChange
from meshwright.runtime.torch_internals.modules import AnyBatchOrInstanceNorm

_CAPTURING = ("reduce-overhead", "max-autotune")  # modes in which torch captures CUDA graphs
_MODES = ("default", *_CAPTURING, "max-autotune-no-cudagraphs")


def _fused(block: Block) -> Block:
    """Return a traced block whose kernels between products are fused; those of a family are counted as they run.

    See [Note: kernels of compiled blocks] in ``planner/trace/fused_kernels.py``.
    """

    def fused(op: Op) -> Op:
        moved, share = (op.num_bytes, 1.0) if op.when_fused is None else op.when_fused
        return dataclasses.replace(op, num_bytes=moved, launches=share * COMPILED_KERNEL)

    if all(op.when_fused is None for op in block.ops):
        return block
    names = (block.name,)
    ways: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    calls = (
        Op("move", traced=True, moment=way, launches=launches, inside=names, needed_in=names)
        for way, launches in zip(ways, COMPILED_CALL, strict=True)
    )
    return dataclasses.replace(block, ops=(*map(fused, block.ops), *calls))


# [Note: compiled blocks that run again] Torch compiles a block that is recomputed as a graph within a graph, and does
# not if that has a break, or changes what lies outside: experts ask how many rows they get. Layers that a tensor axis
# splits note an input that they share while they run, and where ranks share samples, attention is replaced meanwhile:
# recomputation need not do that again (``_IN_FORWARD_ALONE``). Where a DTensor is taken apart inside, torch fails to
# save its mesh, and without recomputation the graph breaks. So DTensors are always taken apart before. See also
# [Note: rings in compiled code].

_BREAKING_AXIS = "expert"  # over which blocks send what torch cannot capture
_IN_FORWARD_ALONE = "skip_fwd_side_effects_in_bwd_under_checkpoint"  # a setting of dynamo


@contextlib.contextmanager
def _own_parts(module: nn.Module) -> Iterator[None]:
    """Let a module compute with this rank's parts in place of DTensors; gradients pass through."""
    with contextlib.ExitStack() as stack:
        for each in module.modules():
            stack.enter_context(swapped_parameters(each, local_parts(each)))
        yield


_OVER_IMAGES = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_OVER_TOKENS = (nn.Conv1d, nn.ConvTranspose1d)


def _is_left_alone(module: nn.Module) -> bool:
    """Return whether a search compiles no block with such a module; a forward of the instance would stay as it is."""
    # What compiled code saves of dense convolutions is not predicted well (25 % too little of a ResNet's blocks).
    is_dense = isinstance(module, _OVER_IMAGES) and module.groups == 1
    # Beside recomputation a block with running statistics is not compiled: see PlainWhereBuffersChange.
    has_statistics = isinstance(module, AnyBatchOrInstanceNorm) and module.track_running_stats
    has_norms = bool(getattr(module, "lora_magnitude_vector", None))
    loops = isinstance(module, _OVER_TOKENS)  # of state spaces
    return is_dense or loops or has_statistics or has_norms or "forward" in vars(module)


class Compile(Method):
    """Compiles every repeated block with ``torch.compile``; blocks of one class share the compiled code.

    Parameter names stay. Only blocks are compiled, so the time to compile does not grow with the number of layers, and
    gathering, reducing and recomputing happen between compiled blocks.

    Config: None, ``"whole"`` for the whole model as one, or keys.
    """

    method_name: ClassVar[str] = "compile"
    phase: ClassVar[Phase] = Phase.COMPILE
    role: ClassVar[Role | None] = Role.KERNELS
    summary: ClassVar[str] = "compiles each block with torch.compile: fewer, larger kernels"
    effect: ClassVar[str] = (
        "time: fewer kernels, compiling in the first step. Memory: less, without what is fused. Communication: none"
    )
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="pipeline_parallel",
            reason="it runs the blocks of the model in an order of its own",
            fix="leave whole out: blocks are compiled then",
            when=lambda own, other: own.whole,
            own_keys="whole=True",
        ),
        Conflict(
            other="checkpoint",
            reason="torch cannot compile reentrant recomputation",
            fix="leave no_reentrant out",
            when=lambda own, other: not other.no_reentrant,
            other_keys="no_reentrant=False",
        ),
        Conflict(
            other="checkpoint",
            reason="both decide what is recomputed",
            fix="leave one of the two out",
            when=lambda own, other: own.activation_budget is not None,
            own_keys="activation_budget",
        ),
        *(
            Conflict(
                other=name,
                reason="a whole model whose parameters are gathered block by block is not one graph",
                fix="leave whole or fullgraph out",
                when=lambda own, other: own.whole and own.fullgraph,
                own_keys="whole=True and fullgraph=True",
            )
            for name in SHARDING
        ),
    )

    whole: bool = False
    """Compile the model as one; otherwise each of its repeated blocks."""
    backend: str = "inductor"
    mode: str | None = None
    """Mode of inductor: ``default``, ``reduce-overhead``, ``max-autotune`` or ``max-autotune-no-cudagraphs``."""
    dynamic: bool | None = None
    """Whether shapes may change without compiling again; None decides by the shapes that it sees.

    Blocks with convolutions over images are compiled for each shape then: those of one class have other shapes in every
    stage of a model, and inductor fails on batch normalisation of sizes that it does not know."""
    fullgraph: bool = False
    """Refuse a block that cannot be compiled as one graph, in its first step."""
    activation_budget: Annotated[float, Field(ge=0, le=1)] | None = None
    """Part of the activations that compiled code may save for backward: 1 as many as is fastest, 0 its inputs alone;
    between, torch recomputes what costs least."""

    @classmethod
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Try blocks on GPUs, but for those whose code runs loops, or does not gain by it.

        State spaces run over tokens in loops or by kernels of their own, and experts that are called one by one get
        rows of their own number in every step. Stacked experts are one product, and their block one graph. DoRA's
        norms break it.
        """
        if scope.half_dtype is None:
            return ()
        if scope.model is None:
            return (cls.parse(None),)
        blocks = [block for _, block in find_blocks(scope.model)]
        left = any(map(_is_left_alone, (each for block in blocks for each in block.modules())))
        if not blocks or left or loops_over_experts(scope.model) or any(map(is_compiled, scope.model.modules())):
            return ()
        return (cls.parse(None),)

    def fuses_blocks(self, sizes: Mapping[str, int], *, recomputes: bool) -> bool:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`, and [Note: compiled blocks that run again]."""
        return self.backend != "eager" and not (recomputes and sizes.get(_BREAKING_AXIS, 1) > 1)

    @property
    def surcharge(self) -> float:
        """Ask for what the first step and each new shape take to compile, and for blocks that compile only in part."""
        return 0.02

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read ``"whole"``."""
        return {"whole": True} if raw == "whole" else super().from_short(raw)

    def notices(self) -> list[str]:
        """Return a notice on what a plan cannot predict."""
        return [
            "compile: activations are predicted as without activation_budget; what it saves is the compiler's decision"
        ] * (self.activation_budget not in (None, 0, 1))

    def check(self, job: Job) -> None:
        """Refuse backends that are not installed, models without blocks, and CUDA graphs of what cannot be captured."""
        self._check_backend(job.device)
        self._targets(job.model)
        if self.is_captured(job.device):
            self._check_capture(job.num_micro_batches)

    def is_captured(self, device: torch.device) -> bool:
        """Return whether torch captures the compiled code as CUDA graphs."""
        return device.type == "cuda" and (self.mode in _CAPTURING or self.backend == "cudagraphs")

    def _check_capture(self, num_micro_batches: int) -> None:
        asked = f"mode={self.mode!r}" if self.mode else f"backend={self.backend!r}"
        if num_micro_batches > 1:
            # autograd makes the first gradient ``.grad`` as it is, in the memory of a graph, which the next backward
            # writes to before it is added: pytorch issues 169545 (an error) and 96693 (wrong sums).
            raise StrategyError(
                "compile: gradients of several micro-batches cannot be added up in the memory of a CUDA graph",
                expected="one micro-batch in a step, or a mode without CUDA graphs",
                got=f"{asked} and {num_micro_batches} micro-batches",
                fix="leave the mode out, or use 'max-autotune-no-cudagraphs'",
            )
        if self.dynamic:
            raise StrategyError(
                "compile: a CUDA graph is of one shape",
                expected="equal shapes in every step, or a mode without CUDA graphs",
                got=f"{asked} and dynamic=True",
                fix="leave dynamic or the mode out",
            )

    def _check_backend(self, device: torch.device) -> None:
        from meshwright.runtime.torch_internals.compilers import dynamo, missing_compiler

        backends = dynamo.list_backends(exclude_tags=())
        for option, value, known in (("backend", self.backend, backends), ("mode", self.mode or "default", _MODES)):
            if value not in known:
                raise StrategyError(
                    f"compile has no {option} {value!r}{did_you_mean(value, known)}",
                    expected=f"one of {join_names(known, limit=20)}",
                    got=repr(value),
                    fix="correct the name",
                )
        if self.backend != "inductor":
            if self.mode is not None:
                raise StrategyError(
                    f"compile: a mode is inductor's, and the backend is {self.backend}",
                    expected="a mode with the backend inductor alone",
                    got=f"mode={self.mode!r}, backend={self.backend!r}",
                    fix="leave one of the two out",
                )
            return
        missing = missing_compiler(device.type)
        if missing:
            raise StrategyError(
                f"compile: inductor cannot compile for {device.type} here",
                expected=missing,
                got="none",
                fix="install it, or use the backend 'aot_eager', which fuses nothing",
            )

    def _targets(self, model: nn.Module) -> list[nn.Module]:
        if self.whole:
            return [model]
        return [
            block
            for _, block in require_blocks(
                model, method=self.method_name, fix="compile the whole model: ('compile', 'whole')"
            )
        ]

    def apply(self, job: Job) -> None:
        """Compile in place; torch does the work in the first step."""
        if self.backend != "eager" and not self.fuses_blocks(dict(job.axes), recomputes=bool(job.recomputed)):
            job.notices.append("compile: torch compiles no block that runs again beside an expert axis")
        from meshwright.runtime.torch_internals.compilers import dynamo, functorch_config

        patches: list[tuple[Any, dict[str, Any]]] = []
        if self.activation_budget is not None:
            patches.append((functorch_config, {"activation_memory_budget": self.activation_budget}))
        is_split = job.size("tensor") > 1 and not self.whole  # whose parts are sharded as it begins
        shares_samples = job.size("sequence") > 1 or job.size("context") > 1
        if shares_samples:
            fuse_sinks(job.model)
        if job.recomputed and hasattr(dynamo.config, _IN_FORWARD_ALONE):
            patches.append((dynamo.config, {_IN_FORWARD_ALONE: True}))

        @contextlib.contextmanager
        def context(module: nn.Module) -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for settings, changes in patches:
                    stack.enter_context(settings.patch(**changes))
                if is_split:
                    stack.enter_context(_own_parts(module))
                if shares_samples:
                    stack.enter_context(grouped_keys())
                yield

        targets = self._targets(job.model)
        over_images = any(isinstance(each, _OVER_IMAGES) for target in targets for each in target.modules())
        dynamic = False if self.dynamic is None and over_images else self.dynamic
        options = {"backend": self.backend, "dynamic": dynamic, "fullgraph": self.fullgraph}
        if self.mode is not None:
            options["mode"] = self.mode
            if self.mode == "reduce-overhead" and not self.is_captured(job.device):
                job.notices.append(
                    f"compile: {job.device.type} has no CUDA graphs; mode 'reduce-overhead' changes nothing"
                )
        compile_forward(targets, context, PlainWhereBuffersChange() if job.recomputed else None, **options)

    def cost(self, step: Step) -> Step:
        """Fuse what runs between products, and run backward in one part.

        A budget of 0 recomputes the blocks; else they save what lies in memory between their kernels (see
        [Note: saves of compiled blocks] in ``planner/trace/fused_kernels.py``). The backend ``eager`` fuses nothing.
        """
        known = step.activations
        recomputes = known is not None and bool(known.recomputed)
        fuses = self.fuses_blocks(dict(step.axes), recomputes=recomputes)
        if recomputes and not fuses and self.backend != "eager":
            return step
        if known is not None:
            activations = known.at_once()  # first: what is saved at most depends on it
            step = step.replace(activations=activations.fused() if fuses else activations)
        # Compiled backward waits for what eager layers gather beside products.
        step = step.replace(traffic=tuple(dataclasses.replace(each, beside="") for each in step.traffic))
        if not step.on_cpu:
            step = step.replace(
                blocks=tuple(_fused(each) if self.whole or each.name != "outside" else each for each in step.blocks)
            )
        return Checkpoint().cost(step) if self.activation_budget == 0 and not self.whole else step
