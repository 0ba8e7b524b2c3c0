"""Replace plain modules by optimised ones (`module_replace`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import field_validator
from torch import nn

from meshwright.cost import Step
from meshwright.errors import StrategyError, did_you_mean, join_names
from meshwright.methods.base import Conflict, Job, Method, Phase
from meshwright.methods.gradient_averaging import broadcast_tensors
from meshwright.methods.planner_hooks import Role, SearchScope
from meshwright.methods.replace.attention_backends import gains_by_attention, replace_attention
from meshwright.methods.replace.fused_layers import (
    LIGER,
    find_heads,
    replace_by_liger,
    replace_head,
    replace_rms_norms,
)
from meshwright.methods.replace.grouped_experts import replace_experts
from meshwright.methods.replace.model_changes import Replacement
from meshwright.methods.replace.user_pairs import ATORCH_NAMES, BUILT_IN, registered_pairs, replace_pairs
from meshwright.runtime import check_equal
from meshwright.strategy import Strategy


class ModuleReplace(Method):
    """Replaces modules by faster or smaller ones that compute the same; weights, names, hooks and modes stay.

    Config: None for all pairs, built-in and registered; a list of names; or keys. Built in are ``attention``,
    ``rms_norm``, ``experts``, ``layer_norm``, ``swiglu`` and ``rotary``, and, on request, ``fused_loss``. Users add
    their own with :func:`~meshwright.methods.register_replace_pair`.
    """

    method_name: ClassVar[str] = "module_replace"
    phase: ClassVar[Phase] = Phase.REPLACE
    role: ClassVar[Role | None] = Role.LOSS
    replaces_modules: ClassVar[bool] = True
    summary: ClassVar[str] = "exchanges modules for optimised ones: attention, norms, loss, and pairs of your own"
    effect: ClassVar[str] = "memory: no attention scores, with loss no logits. Time: fewer kernels. Communication: none"
    seed_name: ClassVar[str | None] = "ATorch: module_replace"
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            other="pipeline_parallel",
            reason="gradients of the head's weight are there before its schedule asks for them",
            fix="leave loss out of module_replace, or take a schedule that does not split backward",
            when=lambda own, other: own.fuses_loss and other.splits_backward,
            own_keys="loss=True",
            other_keys="a schedule that splits backward",
        ),
        Conflict(
            other="compile",
            reason="the head, whose logits are not computed, would be inside what is compiled",
            fix="leave whole out: compile has blocks then, and the head is outside them",
            when=lambda own, other: own.fuses_loss and other.whole,
            own_keys="loss=True",
            other_keys="whole=True",
        ),
    )

    include: tuple[str, ...] | None = None
    """Names of pairs; None: all."""
    exclude: tuple[str, ...] = ()
    """Names of pairs to leave out."""
    attention: Literal["auto", "sdpa", "flex", "flash"] = "auto"
    """Implementation of attention; ``auto`` replaces eager attention by the best available, and leaves all others."""
    loss: bool | str = False
    """Whether cross entropies are computed without the head's logits; a string is the path of the head."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read a name, or a list of names."""
        if isinstance(raw, str):
            return {"include": (raw,)}
        if isinstance(raw, tuple | list | set | frozenset):
            return {"include": tuple(sorted(raw) if isinstance(raw, set | frozenset) else raw)}
        return super().from_short(raw)

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Accept ATorch's ``{name: None, …, "verbose": True}``."""
        keys.pop("verbose", None)  # replacements are always reported
        named = tuple(key for key, value in keys.items() if key not in cls.model_fields and value in (None, {}))
        if named and "include" not in keys:
            keys = {key: value for key, value in keys.items() if key not in named} | {"include": named}
        return keys

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        listed = (value,) if isinstance(value, str) else value
        if not isinstance(listed, tuple | list | set | frozenset):
            return value
        ordered = sorted(listed) if isinstance(listed, set | frozenset) else listed
        return tuple(dict.fromkeys(ATORCH_NAMES.get(name, name) for name in ordered))

    def wants(self, name: str) -> bool:
        """Return whether modules of a pair are to be replaced."""
        return (self.include is None or name in self.include) and name not in self.exclude

    @classmethod
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Try the loss without logits, where it is clear which layer is the head.

        All else changes users' modules: only attention that need not compute all scores is always replaced.
        """
        attention = () if cls.is_optional(scope) else ("attention",)
        heads = [] if scope.model is None else [*find_heads(scope.model).values()]
        # Scores of a few classes, which may have the shape of a small table, are nothing to do without.
        has_head = scope.model is None or (len(heads) == 1 and heads[0].out_features > heads[0].in_features)
        losses = ((), ("fused_loss",)) if has_head and not scope.follows_graph else ((),)
        return tuple(cls.parse([*attention, *loss]) for loss in losses if attention or loss)

    @classmethod
    def is_optional(cls, scope: SearchScope) -> bool:
        """Return whether a search tries plans without it; not where attention would compute all scores then."""
        return scope.model is None or not gains_by_attention(scope.model)

    def is_tried_on(self, sizes: Mapping[str, int]) -> bool:
        """Leave the loss as it is where its words are divided, unless ranks have the same rows."""
        shares_rows = any(sizes.get(axis, 1) > 1 for axis in ("sequence", "context"))
        return not self.fuses_loss or sizes.get("tensor", 1) == 1 or shares_rows

    @property
    def surcharge(self) -> float:
        """Ask little for a loss without logits: other operations on logits compute them after all."""
        return 0.005 if self.fuses_loss else 0.0

    def replacement(
        self, model: nn.Module, strategy: Strategy, axes: Mapping[str, int], device: torch.device
    ) -> Replacement:
        """Find the changes to a plain model, without making them.

        Args:
            model: The model.
            strategy: All methods of the job, for the precision that it computes in.
            axes: Sizes of the mesh axes.
            device: Device of the job.

        Raises:
            MeshwrightError: When a pair is unknown, does not fit the job, or cannot be made.
        """
        self._check_names()
        dtype, found = compute_dtype(strategy), Replacement()
        if self.wants("attention"):
            only_sdpa = axes.get("sequence", 1) > 1
            replace_attention(model, self.attention, dtype, device, found, only_sdpa=only_sdpa)
        if self.wants("rms_norm"):
            replace_rms_norms(model, found)
        if self.wants("experts"):
            replace_experts(model, found, by_name=self.include is not None)
        for name in filter(self.wants, LIGER):
            replace_by_liger(name, model, device, found)
        if self.fuses_loss:
            replace_head(model, self.loss if isinstance(self.loss, str) else None, found)
        replace_pairs(model, [pair for name, pair in registered_pairs().items() if self.wants(name)], dtype, found)
        return found

    @property
    def fuses_loss(self) -> bool:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        asked = bool(self.loss) or (self.include is not None and "fused_loss" in self.include)
        return asked and "fused_loss" not in self.exclude

    @property
    def fuses_attention(self) -> bool:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        return self.wants("attention")

    @property
    def not_simulated(self) -> str:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        is_known = self.include is not None and set(self.include) <= {"attention", "fused_loss"}
        return "" if is_known else "norms and experts that it replaces are not simulated for a family"

    def _check_names(self) -> None:
        known = (*BUILT_IN, *registered_pairs())
        for name in (*(self.include or ()), *self.exclude):
            if name not in known:
                raise StrategyError(
                    f"module_replace knows no pair {name!r}{did_you_mean(name, known)}",
                    expected=f"names from {join_names(known)}",
                    got=repr(name),
                    fix="correct the name, or call register_replace_pair on every rank before",
                )

    def check(self, job: Job) -> None:
        """Refuse DDP options that search outputs for their graph: logits that are not computed have none.

        :func:`~meshwright.methods.composition.replacement_of` has checked the changes before.
        """
        if self.fuses_loss and (job.find_unused_parameters or job.ddp_options.get("static_graph")):
            raise StrategyError(
                "module_replace: the loss cannot do without logits where DDP looks for unused parameters",
                expected="find_unused_parameters=False, and no static_graph",
                got=f"find_unused_parameters={job.find_unused_parameters}, ddp_options={dict(job.ddp_options)}",
                fix="leave one of the two out",
            )

    def apply(self, job: Job) -> None:
        """Make the changes, and report them."""
        assert job.replacement is not None, "apply_strategy has found it"
        check_equal(
            "What module_replace replaces",
            str(job.replacement),
            "register the same pairs on every rank, and install the same packages",
        )
        known = {*job.model.parameters(), *job.model.buffers()}
        job.replacement.put_in(job.model)
        # A pair of a user's may bring in weights that each rank has drawn for itself.
        fresh = [each for each in (*job.model.parameters(), *job.model.buffers()) if each not in known]
        broadcast_tensors(fresh, job.device)
        job.notices.append(f"module_replace: {job.replacement}")
        # Its changes name modules, which would stay in memory on the ranks of a pipeline that release them.
        job.replacement = None

    def cost(self, step: Step) -> Step:
        """Return the step as it is: a plan traces the model with its modules replaced."""
        return step


def compute_dtype(strategy: Strategy) -> str:
    """Return the precision a strategy computes in."""
    for name in ("half", "amp_native"):
        method = strategy.get(name)
        if method is not None:
            return str(method.dtype)  # type: ignore[attr-defined]
    return "fp32"
