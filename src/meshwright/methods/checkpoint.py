"""Recompute activations in backward instead of keeping them (`checkpoint`, after Chen et al. 2016)."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import PositiveFloat, PositiveInt
from torch import nn

from meshwright.cost import (
    Activations,
    Boundary,
    Op,
    Recomputed,
    Stages,
    Step,
    TracedModule,
    Traffic,
    inline_traffic,
    names_class,
)
from meshwright.cost.activations import keeps
from meshwright.errors import StrategyError
from meshwright.methods.base import ClassReferences, Job, Method, Phase
from meshwright.methods.pipeline.splice import Elsewhere
from meshwright.methods.planner_hooks import Role, SearchScope
from meshwright.methods.recompute import OPERATORS_OF, SELECTIVE, operator_names, recompute
from meshwright.nn import (
    check_forward,
    class_name,
    class_names,
    find_blocks,
    modules_of,
    outermost,
    require_blocks,
)
from meshwright.strategy import Bytes

Granularity = Literal["none", "selective", "full"]
Policy = Literal["full", "selective", "every_second"]
ModuleT = TypeVar("ModuleT")  # a path or a number
_WHICH = ("every", "layers", "each", "memory_budget")


class Checkpoint(Method):
    """Keeps only the inputs of the chosen modules and runs their forward again in backward.

    Config: the name of a policy; a class, a class name, a tuple of either; or keys, at most one of ``every``,
    ``layers``, ``each`` and ``memory_budget``. Modules are counted in the model's order, the whole model's under a
    pipeline too.
    """

    method_name: ClassVar[str] = "checkpoint"
    phase: ClassVar[Phase] = Phase.RECOMPUTE
    role: ClassVar[Role | None] = Role.RECOMPUTATION
    summary: ClassVar[str] = "recomputes activations in backward: less memory, about a third more compute"
    effect: ClassVar[str] = (
        "memory: activations of one block at a time. Time: one more forward. Communication: forward's again"
    )
    seed_name: ClassVar[str | None] = "ATorch: checkpoint"
    foreign_keys: ClassVar[Mapping[str, str]] = {
        "use_te_impl": "leave it out; 8-bit layers are recomputed by torch's checkpoint, too",
        "max_checkpoint_module_num": "write layers=N to recompute the first N modules",
        "selective_offload": "write policy='selective', or add ('offload', {'activations': 1.0})",
    }
    wrap_class: ClassReferences | None = None
    """The modules; None: the model's repeated blocks, or in a model without any, the modules that its
    ``nn.Sequential``s run, else its children."""
    no_reentrant: bool = True
    """False uses torch's reentrant implementation, for modules on which the default fails since they save other tensors
    when they run again."""
    policy: Policy | tuple[str, ...] | None = None
    """``full`` keeps nothing but inputs; ``selective`` keeps the results of products with weights, fused attention and
    functional collectives too (Korthikanti et al. 2022); ``every_second`` does so but for every second product of a
    module, as TorchTitan's selective policy; or the operators whose results are kept, such as ``aten.mm``. None:
    ``full``, and with ``memory_budget`` ``full`` or ``selective``."""
    every: PositiveInt | None = None
    """Recompute one of so many modules, from the first: 2 covers half of them."""
    layers: PositiveInt | PositiveFloat | None = None
    """Recompute the first so many modules; a float up to 1.0 is a fraction. The first are recomputed last, when the
    others' activations are freed."""
    each: tuple[Granularity, ...] | None = None
    """Recomputation of every single module; ``selective`` keeps the results that ``policy`` names."""
    memory_budget: Bytes | None = None
    """Peak memory of a rank, in bytes or as "24 GiB": the plan recomputes as few operations as fit, and records its
    choice in ``each``."""

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Read a policy, a class, a name of one, or several."""
        if isinstance(raw, str) and raw in get_args(Policy):
            return {"policy": raw}
        if isinstance(raw, str | type | tuple | list | set | frozenset):
            return {"wrap_class": raw}
        return super().from_short(raw)

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuse keys that contradict each other."""
        given = [key for key in _WHICH if keys.get(key) is not None]
        if len(given) > 1:
            raise _contradiction(f"at most one of {', '.join(_WHICH)}", " and ".join(given), "leave the others out")
        layers = keys.get("layers")
        if isinstance(layers, float) and not 0 < layers <= 1:
            raise _contradiction("layers as a count, or as a fraction up to 1.0", f"layers={layers}", "correct layers")
        keeps = keys.get("policy") not in (None, "full") or "selective" in (keys.get("each") or ())
        may_keep = given == ["memory_budget"] and not keys.get("policy")
        if keys.get("no_reentrant") is False and (keeps or may_keep):
            raise _contradiction(
                "policy='full' beside no_reentrant=False: reentrant recomputation can keep no results",
                "a policy that keeps some",
                "leave no_reentrant out, or set policy='full'",
            )
        return {**keys, "policy": operator_names(keys.get("policy"))}

    @classmethod
    def search_options(cls, scope: SearchScope) -> tuple[Self, ...]:
        """Try everything in full, and what lies between that and nothing."""
        return cls.parse({"policy": "selective"}), cls.parse({"every": 2}), cls.parse(None)

    @property
    def has_memory_budget(self) -> bool:
        """See :class:`~meshwright.methods.planner_hooks.PlannerHooks`."""
        return self.memory_budget is not None

    @property
    def is_uniform(self) -> bool:
        """Return whether all modules are treated alike."""
        return self.every in (None, 1) and self.layers is None and self.each is None

    @property
    def keeps_results(self) -> bool:
        """Return whether some module keeps results of operators, or may be chosen to."""
        if self.each is not None:
            return "selective" in self.each
        return self.policy != "full" and (self.policy is not None or self.memory_budget is not None)

    @property
    def partial(self) -> frozenset[str]:
        """The operators whose results a selectively recomputed module keeps."""
        return (
            frozenset(self.policy)
            if isinstance(self.policy, tuple)
            else OPERATORS_OF.get(self.policy or "selective", SELECTIVE)
        )

    def granularities(self, count: int) -> tuple[Granularity, ...]:
        """Return the recomputation of each of ``count`` modules; full until a memory budget has decided.

        Raises:
            StrategyError: When the config is for another number of modules.
        """
        if self.each is not None:
            if len(self.each) != count:
                raise _contradiction(f"one for each of {count} modules", f"each={len(self.each)} entries", "correct it")
            return self.each
        if isinstance(self.layers, int) and self.layers > count:
            raise _contradiction(f"layers up to {count}", f"layers={self.layers}", "name fewer, or leave layers out")
        covered: Granularity = "full" if self.policy in (None, "full") or self.memory_budget else "selective"
        first = count
        if self.layers is not None:
            first = self.layers if isinstance(self.layers, int) else math.ceil(self.layers * count)
        return tuple(covered if index < first and index % (self.every or 1) == 0 else "none" for index in range(count))

    def check(self, job: Job) -> None:
        """Refuse classes that are not in the model, and a model without blocks or parts when no class is named."""
        modules = self._modules(job.model)
        job.recomputed = self._kept([path for path, _ in modules])

    def _kept(self, modules: Sequence[ModuleT]) -> dict[ModuleT, frozenset[str]]:
        """Return the modules that are recomputed, each with the operators whose results it keeps."""
        kept = {"full": frozenset[str](), "selective": self.partial}
        each = zip(modules, self.granularities(len(modules)), strict=True)
        return {module: kept[what] for module, what in each if what != "none"}

    def _modules(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        if self.wrap_class is None:
            return find_parts(model) or require_blocks(
                model, method=self.method_name, fix="name the classes of layers with wrap_class=(…)"
            )
        named = list(outermost(modules_of(model, self.wrap_class, method=self.method_name)))
        check_forward(named, method=self.method_name)
        found = {path for path, _ in named}
        return [(path, module) for path, module in model.named_modules() if path in found]

    def apply(self, job: Job) -> None:
        """Wrap the forward of every chosen module; parameter names stay as they are."""
        if job.recomputed is None:
            self.check(job)
        alike: dict[frozenset[str], list[nn.Module]] = {}
        for path, module in job.model.named_modules():
            kept = (job.recomputed or {}).get(path)
            if kept is not None and not isinstance(module, Elsewhere):
                alike.setdefault(kept, []).append(module)
        for operators, modules in alike.items():
            recompute(modules, operators, no_reentrant=self.no_reentrant)

    def cost(self, step: Step) -> Step:
        """Free what the chosen modules save, and add what one of them needs while it recomputes."""
        known = step.activations
        if known is None:
            return step
        # A stage's blocks alone: where it recomputes none, its backward runs in two parts if the schedule says so.
        recomputed = {
            module: kept
            for module, kept in self._kept(self.covered(known)).items()
            if _is_here(known.modules[module].block, step.stages, len(known.blocks))
        }
        activations, flops = known.recompute(recomputed, to_the_end=not self.no_reentrant)
        repeated = Repeated(known, recomputed, step.stages, to_the_end=not self.no_reentrant)
        blocks = tuple(
            dataclasses.replace(
                block, ops=tuple(dataclasses.replace(op, recomputed=repeated.share_of(op)) for op in block.ops)
            )
            for block in step.blocks
        )
        changed = step.replace(activations=activations, recompute_flops=flops, blocks=blocks)
        return changed.send(*_sent_again(step, repeated))

    def covered(self, known: Activations) -> tuple[int, ...]:
        """Return the numbers of the modules that ``apply`` would wrap, in the model's order."""
        if self.wrap_class is None:
            parts = [] if known.blocks else parts_of((module.path, module.classes) for module in known.modules)
            numbers = {module.path: number for number, module in enumerate(known.modules)}
            return known.blocks or tuple(numbers[path] for path in parts)
        found: list[int] = []
        for number, module in enumerate(known.modules):  # outer modules come before inner ones
            around = known.modules[found[-1]].path + "." if found else None
            is_named = any(names_class(reference, module.classes) for reference in self.wrap_class)
            if is_named and not (around and module.path.startswith(around)):
                found.append(number)
        return tuple(found)


# --- The parts of a model without repeated blocks

_SEQUENTIAL, *_LISTS = (class_name(kind) for kind in (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def find_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the parts of a model without repeated blocks, with their paths; none where it has some."""
    if find_blocks(model):
        return []
    paths = parts_of((path, class_names(module)) for path, module in model.named_modules() if path)
    return [(path, model.get_submodule(path)) for path in paths]


def parts_of(modules: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the paths of modules to recompute one by one in a model without an ``nn.ModuleList`` of blocks.

    They are the modules with modules of their own in an ``nn.Sequential``, as in a ResNet, else the model's children;
    none if there are fewer than two: a single one would be in memory whole while it is recomputed.

    Args:
        modules: Path and names of the classes of every module inside the model, in its order.
    """
    classes = dict(modules)
    parents = {path.rpartition(".")[0] for path in classes}
    composed = [path for path in classes if path in parents and not set(_LISTS).intersection(classes[path])]
    stacked = [
        path
        for path in composed
        if _SEQUENTIAL not in classes[path] and _SEQUENTIAL in classes.get(path.rpartition(".")[0], ())
    ]
    found: list[str] = []
    for path in stacked if len(stacked) > 1 else [path for path in composed if "." not in path]:
        if not any(path.startswith(outer + ".") for outer in found):
            found.append(path)
    return found if len(found) > 1 else []


# --- ``cost``: what recomputation runs and sends again


class Repeated:
    """The kernels and collectives of a simulated step that run again in backward.

    Args:
        known: The activations of a forward.
        recomputed: See :class:`meshwright.cost.Activations`.
        stages: The pipeline's cut of the model: only this rank's blocks count.
        to_the_end: Whether modules run their whole forward again, instead of stopping at the last saved tensor.
    """

    def __init__(
        self, known: Activations, recomputed: Recomputed, stages: Stages | None, *, to_the_end: bool = False
    ) -> None:
        self._to_the_end = to_the_end
        every = [(known.modules[module], kept) for module, kept in recomputed.items()]
        self._outside = [(module, kept) for module, kept in every if module.block is None]
        self._around, self._within = _by_path(module for module, _ in every)
        inside: dict[int, list[tuple[tuple[str, ...], frozenset[str]]]] = {}
        for module, kept in every:
            if module.block is not None:
                inside.setdefault(module.block, []).append((module.classes, kept))
        # Most blocks are equal: count each kind of block, with the recomputation in it, once.
        self._kinds = collections.Counter(
            (known.modules[number].classes, tuple(inside.get(block, ())))
            for block, number in enumerate(known.blocks)
            if _is_here(block, stages, len(known.blocks))
        )

    def share_of(self, part: Op | Boundary) -> float:
        """Return the share of blocks that run a kernel or collective again, among those that run it at all."""
        if isinstance(part, Op) and part.moment == "backward":
            return 0.0
        names = part.inside if self._to_the_end else part.needed_in
        operator = part.operator if isinstance(part, Op) else ""
        if isinstance(part, Boundary) and part.path:
            return float(any(_named(module.classes[:1], names) for module in self._near(part.path)))
        outside = [_repeats(kept, operator) for module, kept in self._outside if _named(module.classes[:1], names)]
        if any(outside):
            return max(outside)
        kinds = {kind: count for kind, count in self._kinds.items() if _named(kind[0][:1], part.inside)}
        again = sum(
            count
            * max((_repeats(kept, operator) for classes, kept in modules if _named(classes[:1], names)), default=0)
            for (_, modules), count in kinds.items()
        )
        return again / sum(kinds.values()) if again else 0.0

    def _near(self, path: str) -> list[TracedModule]:
        """Return the recomputed modules around a path, and those inside it.

        A boundary of tokens knows only the block that it is in, which may be around a recomputed module.
        """
        above = [self._around[each] for each in _upwards(path) if each in self._around]
        return above + self._within.get(path, [])


def _repeats(kept: frozenset[str], operator: str) -> float:
    """Return the share of an operator's calls that run again in a module that keeps some results."""
    return sum(not keeps(kept, operator, turn) for turn in (0, 1)) / 2


def _is_here(block: int | None, stages: Stages | None, count: int) -> bool:
    if block is None or stages is None or stages.num_blocks != count:  # a pipeline over one list of blocks among others
        return True
    return any(stages.has(stage, (block,)) for stage in stages.own)


def _by_path(modules: Iterable[TracedModule]) -> tuple[dict[str, TracedModule], dict[str, list[TracedModule]]]:
    """Return each module by its own path, and lists of modules by every path above them."""
    around = {module.path: module for module in modules}
    within: dict[str, list[TracedModule]] = {}
    for path, module in around.items():
        for each in _upwards(path)[1:]:
            within.setdefault(each, []).append(module)
    return around, within


def _upwards(path: str) -> list[str]:
    """Return a path and those above it, without the model itself: ``["a.b", "a"]``."""
    names = path.split(".")
    return [".".join(names[:depth]) for depth in range(len(names), 0, -1)]


def _named(references: tuple[str, ...], names: tuple[str, ...]) -> bool:
    return any(names_class(reference, names) for reference in references)


def _sent_again(step: Step, repeated: Repeated) -> list[Traffic]:
    """Return forward's collectives over tensor, sequence, context and expert axes that recomputation sends again.

    torch stops recomputing at the last saved tensor: what a module sends after that is not sent again. The reentrant
    implementation runs to the end.
    """
    sent: dict[str, list[Boundary]] = {}
    for boundary in step.boundaries:
        share = repeated.share_of(boundary) if boundary.moment == "forward" else 0.0
        if share:
            size, count = round(boundary.num_bytes * share), max(1, round(boundary.count * share))
            again = dataclasses.replace(boundary, moment="backward", num_bytes=size, count=count)
            sent.setdefault(boundary.axis, []).append(again)
    return [each for axis, boundaries in sent.items() for each in inline_traffic(step, axis, boundaries)]


def _contradiction(expected: str, got: str, fix: str) -> StrategyError:
    return StrategyError("checkpoint: the config cannot be followed", expected=expected, got=got, fix=fix)
