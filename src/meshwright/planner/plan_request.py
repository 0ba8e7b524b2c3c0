"""Plan a model on a cluster in one call: predict a given strategy, or search for the best ones and rank them."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import Cluster, find_cluster
from meshwright.errors import ConfigError, MeshwrightError, ModelError, StrategyError, readable_bytes
from meshwright.methods import SAMPLED, Role, find_method, method_of_axes, num_micro_batches
from meshwright.planner.config_models import (
    config_path,
    model_of_shape,
    transformers_model,
    why_formulas,
)
from meshwright.planner.explain import RunLength, SubjectOf, WhatIf, found_document, what_if
from meshwright.planner.family_ops import OWN, OWN_EAGER
from meshwright.planner.family_workload import FamilyModel
from meshwright.planner.model_shapes import Shape, parse_family
from meshwright.planner.outlines import is_eager, outline_of
from meshwright.planner.plans import Plan, PlannedModel, Subject, usable_bytes
from meshwright.planner.search import (
    USUAL_LIMIT_S,
    FollowUp,
    Found,
    default_space,
    experts_first,
    read_constraints,
    search,
    search_and_trace,
    search_in_stages,
)
from meshwright.planner.search.search_space import Family
from meshwright.planner.search.search_state import Objective, Rank, family_of_plan, rank_of_plan
from meshwright.planner.search.within_time import of_whole_search, worth_its_kernels
from meshwright.planner.workload import ModuleModel, NeverTracedError, Workload, token_batch
from meshwright.strategy import Strategy, read_size

HEADROOM = 0.06
"""Share of usable memory that a search leaves free.

Peaks of published runs are some 5 to 8 % off their predictions, and a run that is out of memory in its third hour has
lost them.
"""
_VOCABULARY_PARTS = 64  # words: rows of logits are aligned in parts, too, over axes up to 8
_ALTERNATIVES = 3  # fewest families that formulas find, each with a runner-up: by traces the best may not fit
_REACH = 1.3  # times worse than the best: so far the best plan of another family is shown


@dataclass(frozen=True)
class PlanRequest:
    """A request for plans of a model on a cluster; see :func:`~meshwright.planner.plan` for the fields."""

    model: PlannedModel
    cluster: Cluster
    global_batch: int
    strategy: Any = None
    num_micro_batches: int | None = None
    objective: str = "tokens_per_s"
    excluded: Sequence[str] = ()
    included: Sequence[Any] = ()
    top: int = 10
    memory_limit: int | str | None = None  # bytes, once it has been read
    headroom: float = HEADROOM
    limit_s: float | None = USUAL_LIMIT_S
    length: RunLength | None = None  # of a whole run, to say what that takes

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_limit", read_size(self.memory_limit, "memory_limit"))
        _check_limit(self.memory_limit, self.cluster)  # type: ignore[arg-type]
        for name, value in (("global_batch", self.global_batch), ("top", self.top)):
            _check_count(name, value)
        if not 0 <= self.headroom < 1:
            raise ConfigError(
                "headroom is not a share of memory",
                expected="0 or more, and less than 1, such as 0.06",
                got=repr(self.headroom),
                fix="correct the number",
            )
        if self.limit_s is not None and not self.limit_s > 0:
            raise ConfigError(
                "limit_s is not a time",
                expected="more than 0 seconds",
                got=repr(self.limit_s),
                fix="correct the number",
            )
        if self.num_micro_batches is not None:
            _check_count("num_micro_batches", self.num_micro_batches)
            if self.strategy is None:
                raise _contradiction("num_micro_batches without a strategy", "a search chooses how a batch is cut")
        if self.strategy is not None and (self.excluded or self.included):
            raise _contradiction("a strategy beside excluded or included methods", "nothing is searched then")

    def subject_of(self, cluster: Cluster, samples: int) -> Subject:
        """Return the subject of plans on a cluster, with a number of samples per step.

        A search leaves headroom. A strategy that is given, and a limit that is, are taken at their word.
        """
        limit = read_size(self.memory_limit, "memory_limit")
        is_given = limit is not None
        if limit is not None:
            # The same share of a device that has more memory, or less.
            limit = round(limit * (cluster.device.memory_bytes / self.cluster.device.memory_bytes))
        elif self.strategy is None:
            limit = round(usable_bytes(cluster.device) * (1 - self.headroom))
        return self.model.subject(cluster, samples, limit, not is_given)

    @functools.cached_property
    def subject(self) -> Subject:
        """Return the subject of plans on the request's own cluster."""
        return self.subject_of(self.cluster, self.global_batch)

    def found(self, progress: Callable[[int, int], None] | None = None) -> Found:
        """Plan the given strategy, or search for the best strategies.

        Args:
            progress: Called during a search with the numbers of simulated plans and of candidates.

        Raises:
            StrategyError: When no strategy fits, or when the given one is invalid or does not divide the batch.
            ModelError: When the model cannot be traced.
        """
        if self.length is not None:
            self.length.num_steps(self.global_batch, self.subject.tokens_per_sample)  # a refusal comes before a search
        if self.strategy is None:
            try:
                found = self._searched(progress)
            except NeverTracedError as error:
                raise _untraced(str(error)) from None
            except StrategyError as error:
                raise of_whole_search(error, self.limit_s) from error.__cause__
            found = dataclasses.replace(
                found,
                plans=tuple(_in_full(plan, self.subject) for plan in found.plans),
                too_large=tuple(_in_full(plan, self.subject) for plan in found.too_large),
            )
        else:
            found = self.planned([Strategy(self.strategy)])
        for plan in found.plans[:1]:
            _check_traced(plan)
            if self.included:
                _check_included(plan, read_constraints(self.excluded, self.included))
        return found

    def _searched(self, progress: Callable[[int, int], None] | None) -> Found:
        """Search, and search again without what the best plan has where users would ask about that.

        Autocast casts every weight: of a small model, that takes longer to launch than it saves. Offloading asks much,
        so the best plan without it is shown, however slow.
        """
        found = self._search(progress)
        if found.plans and _is_small(found.plans[0]):
            found = self._without(Role.PRECISION, found, _REACH)
        every_offloads = all(offloads for *_, offloads in map(family_of_plan, found.plans))
        if not every_offloads or self.top == 1 or self.objective == "memory":
            return found
        return self._without(Role.OFFLOADING, found, math.inf)

    def _without(self, role: Role, found: Found, reach: float) -> Found:
        """Return what was found, and the best of each family without the best plan's method of a role.

        Args:
            role: The role.
            found: Left as it is where that method was asked for, and where the time is up.
            reach: Times worse than the best: so far the best plan of another family is shown; of any, the first alone.
        """
        leading = find_method(found.plans[0].strategy, lambda each: each.role is role) if found.plans else None
        given = read_constraints(self.excluded, self.included)
        if leading is None or found.out_of_time or leading.method_name in given:
            return found
        left_s = None if self.limit_s is None else max(self.limit_s - found.seconds, 1.0)
        plainer = dataclasses.replace(self, excluded=(*self.excluded, leading.method_name), limit_s=left_s)
        try:
            other = plainer._search(None)
        except MeshwrightError:
            return found
        if reach == math.inf:
            plans = [*found.plans[: self.top - 1], *other.plans[:1]]
        else:
            both, firsts = sorted((*found.plans, *other.plans), key=self._rank), dict[Family, Plan]()
            for plan in both:  # each search counts what is near its own best
                if self._rank(plan)[0] <= reach * self._rank(both[0])[0]:
                    firsts.setdefault(family_of_plan(plan), plan)
            plans = [*firsts.values()][: self.top]
        return dataclasses.replace(
            found,
            plans=tuple(sorted(plans, key=self._rank)),
            num_considered=found.num_considered + other.num_considered,
            num_predicted=found.num_predicted + other.num_predicted,
            seconds=found.seconds + other.seconds,
            is_complete=found.is_complete and other.is_complete,
        )

    def _search(self, progress: Callable[[int, int], None] | None) -> Found:
        """Search: by formulas first where the model is of a known family or resembles one, else by traces."""
        options: dict[str, Any] = {
            "objective": self.objective,
            "excluded": self.excluded,
            "included": self.included,
            "top": self.top,
            "progress": progress,
            "reach": _REACH,
            "limit_s": self.limit_s,
        }
        started = time.process_time()
        if self._formulas is not None:
            found = self._by_formulas(self._formulas, options)
            if found is not None:
                return found
            if self.limit_s is not None:
                options["limit_s"] = max(self.limit_s - (time.process_time() - started), self.limit_s / 2)
        find = search_in_stages if isinstance(self.subject, Workload) else search
        found = find(self.subject, space=default_space(self.subject), **options)
        included = read_constraints(self.excluded, self.included)
        plans = (worth_its_kernels(plan, self.subject, self._objective, included) for plan in found.plans)
        return dataclasses.replace(found, plans=tuple(sorted(plans, key=self._rank)))

    @property
    def _objective(self) -> Objective:
        return self.objective  # type: ignore[return-value]

    def _rank(self, plan: Plan) -> Rank:
        return rank_of_plan(plan, self._objective)

    @functools.cached_property
    def _formulas(self) -> FamilyModel | None:
        """The formulas of a module's family, or of a decoder that it resembles; None where there are none.

        A family has all its parameters in fp32, and trains them; else its models are decoders like others.
        """
        model = self.model
        if not isinstance(model, ModuleModel):
            return None
        is_usual = all(each.requires_grad and each.dtype == torch.float32 for each in model.module.parameters())
        if model.shape is not None and is_usual:
            return FamilyModel(model.name, model.shape)
        shape = None if model.seq is None else outline_of(model.module, model.seq)
        return None if shape is None else FamilyModel(model.name, shape, OWN_EAGER if is_eager(model.module) else OWN)

    def _by_formulas(self, formulas: FamilyModel, options: dict[str, Any]) -> Found | None:
        """Find plans by formulas, and trace them; None where none of them works for the model."""
        known, shape = self.subject, formulas.shape
        assert isinstance(known, Workload)
        assert known.limit_bytes is not None
        limit, is_free = known.limit_bytes, known.limit_is_free

        def search_within(within: int, limit_s: float | None, enough_s: float | None) -> Found:
            outline = formulas.subject(self.cluster, self.global_batch, within, is_free)
            own = {**options, "limit_s": limit_s, "top": 2 * max(self.top, _ALTERNATIVES), "of_family": 2}
            space = default_space(outline, module=known.model)
            follow_ups = tuple[FollowUp, ...]()
            if shape.experts > 1 and self._may_divide_experts:
                space, follow_ups = experts_first(space, shape.experts, outline.world)
            found = search(outline, space=space, follow_ups=follow_ups, **own, enough_s=enough_s)
            # What is too large stays as the formulas have it, since the model would refuse a pipeline of which no cut
            # fits, and so does what there is no time to trace.
            return dataclasses.replace(
                found,
                plans=tuple(_in_full(plan, outline) for plan in found.plans),
                too_large=tuple(_in_full(plan, outline) for plan in found.too_large),
            )

        return search_and_trace(
            search_within,
            known,
            limit,
            self._objective,
            self.top,
            self.limit_s,
            included=read_constraints(self.excluded, self.included),
            resembles=isinstance(self.model, ModuleModel) and self.model.shape != shape,
        )

    @property
    def _may_divide_experts(self) -> bool:
        """Return whether the caller leaves open which axes there are."""
        working = method_of_axes()
        given = read_constraints(self.excluded, self.included)
        return working["expert"] not in self.excluded and given.keys().isdisjoint(working.values())

    def planned(self, strategies: Sequence[Strategy]) -> Found:
        """Plan given strategies in their order, whether they fit or not.

        Raises:
            StrategyError: When one is invalid, or does not divide the batch.
        """
        started, subject = time.perf_counter(), self.subject
        if isinstance(subject, Workload):
            subject = subject.elsewhere(subject.cluster, subject.batch_size, subject.limit_bytes)
            subject.must_fit = subject.must_trace = False
        plans = tuple(subject.plan(strategy, self.num_micro_batches) for strategy in strategies)
        for plan in plans:
            _check_divides(plan, self.global_batch, self.num_micro_batches)
        return Found(plans, num_considered=len(plans), num_predicted=len(plans), seconds=time.perf_counter() - started)

    def what_ifs(self, found: Found) -> tuple[WhatIf, ...]:
        """Predict the plans under changed circumstances, such as more devices or faster links.

        What a search found by formulas is predicted by them, before and after a change: they are compared with each
        other, and each of some forty traces would take a second or two. Figures are scaled to those of the best plan's
        trace, and so is the memory that plans may take.
        """
        # Given strategies are not ranked by an objective.
        objective = self._objective if self.strategy is None else "tokens_per_s"
        limit_s = None if self.limit_s is None else self.limit_s / 2
        formulas = self._formulas
        before = () if formulas is None or self.strategy is not None else self._by_formulas_again(found, formulas)
        if formulas is None or not before:
            return what_if(self.subject_of, found, objective, limit_s=limit_s)
        best, outline = found.plans[0], dataclasses.replace(self, model=formulas)
        assert best.forecast is not None
        assert before[0].forecast is not None
        slower = best.forecast.time.step_time_s / before[0].forecast.time.step_time_s
        room = before[0].needed_bytes / best.needed_bytes

        def subject_of(where: Cluster, samples: int) -> Subject:
            subject: Any = outline.subject_of(where, samples)
            return dataclasses.replace(subject, limit_bytes=round(subject.limit_bytes * room))

        found = dataclasses.replace(found, plans=before)
        others = self._padded(formulas.shape, subject_of)
        return what_if(subject_of, found, objective, limit_s=limit_s, slower=slower, others=others)

    def _padded(self, shape: Shape, subject_of: SubjectOf) -> tuple[tuple[str, SubjectOf], ...]:
        """Return the model with a vocabulary that products, and tensor axes, divide; nothing where it is so."""
        vocab = -(-shape.vocab // _VOCABULARY_PARTS) * _VOCABULARY_PARTS
        if vocab == shape.vocab:
            return ()

        def padded_of(where: Cluster, samples: int) -> Subject:
            subject: Any = subject_of(where, samples)
            return dataclasses.replace(subject, shape=dataclasses.replace(shape, vocab=vocab))

        return ((f"the vocabulary padded from {shape.vocab:,} to {vocab:,} words", padded_of),)

    def _by_formulas_again(self, found: Found, formulas: FamilyModel) -> tuple[Plan, ...]:
        """Return what the formulas say of the plans that were found; nothing where they do not know the best.

        What they take for better than the best is left out: by its trace it is not, whatever changes.
        """
        subject, plans = formulas.subject(self.cluster, self.global_batch, None), list[Plan]()
        for plan in found.plans:
            with suppress(MeshwrightError):
                plans.append(subject.plan(plan.strategy, plan.step.num_micro_batches))
        if not plans or plans[0].strategy != found.plans[0].strategy:
            return ()
        least = self._rank(plans[0])
        return tuple(plan for plan in plans if self._rank(plan) >= least)

    def document(self, found: Found, what_ifs: Sequence[WhatIf] = ()) -> dict[str, Any]:
        """Return the result as plain values, as ``--json`` prints it."""
        described = self.model.describe() | {"global_batch": self.global_batch}
        return found_document(
            found,
            model=described,
            objective=self.objective,
            what_ifs=what_ifs,
            subject=self.subject,
            length=self.length,
        )


def _in_full(plan: Plan, subject: Subject) -> Plan:
    """Complete a plan with a step for every rank; in a search, one rank of a long pipeline stands for several."""
    if len({id(step) for step in plan.steps}) == len(plan.steps):
        return plan
    return subject.plan(plan.strategy, plan.step.num_micro_batches)


def _check_limit(limit: int | None, cluster: Cluster) -> None:
    if limit is not None and limit > cluster.device.memory_bytes:
        raise ConfigError(
            "memory_limit is more than a device has",
            expected=f"at most {readable_bytes(cluster.device.memory_bytes)}, the memory of a {cluster.device.name}",
            got=readable_bytes(limit),
            fix="lower it, or describe a device with more memory in a cluster file",
        )


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is not a count", expected="1 or more", got=repr(value), fix="correct the number")


def _check_divides(plan: Plan, samples: int, given: int | None) -> None:
    """Refuse a batch that does not divide into whole samples: the plan would be for another batch."""
    replicas = math.prod(size for axis, size in plan.step.axes if axis in SAMPLED)
    asked = num_micro_batches(plan.strategy, plan.step.axes, given)
    parts = replicas * asked
    if samples % parts == 0:
        return
    below = samples - samples % parts
    nearest = f"{below} or {below + parts}" if below else f"{parts}"
    helps = "" if asked == 1 else ", or another number of micro-batches"
    raise StrategyError(
        "The batch does not divide between the replicas of a strategy and their micro-batches",
        expected=f"a global_batch that is a multiple of {parts}: {replicas} replicas x {asked} micro-batches",
        got=f"global_batch={samples} for {plan.strategy}",
        fix=f"use {nearest}{helps}",
    )


def _check_included(plan: Plan, included: Iterable[str]) -> None:
    """Refuse a plan without a method that the caller included, because the devices cannot run it."""
    for name in included:
        reason = next((each for each in plan.notices if each.startswith(f"{name} is ignored")), None)
        if reason is not None and name not in plan.strategy:
            raise StrategyError(
                f"No plan can have {name}, which is included",
                expected="methods that the devices can run",
                got=reason,
                fix=f"leave {name} out, or take other devices",
            )


def _contradiction(what: str, why: str) -> ConfigError:
    return ConfigError(
        "The options contradict each other", got=what, expected=f"one or the other: {why}", fix="drop one"
    )


def _is_small(plan: Plan) -> bool:
    """Return whether all products would take less than the step in full precision, too, at their peak."""
    known = plan.forecast
    if known is None or plan.model_flops is None:
        return False
    return plan.model_flops < known.cluster.device.peak_flops_per_s("fp32") * known.time.step_time_s


def _check_traced(plan: Plan) -> None:
    """Refuse a plan without activations: its predicted memory would mean nothing."""
    if plan.step.activations is not None:
        return
    raise _untraced(next((gap for gap in plan.gaps if "activations" in gap), "; ".join(plan.gaps)))


def _untraced(gap: str) -> ModelError:
    return ModelError(
        "The model cannot be traced, so its memory cannot be predicted",
        expected="a forward pass and a loss that run without data",
        got=gap or "no sample to trace it with",
        fix="give a sample that the model takes (of a model of transformers: by --model MODULE:FUNCTION --sample), and "
        "keep what needs values (.item(), if tensor:) out of forward",
    )


# --- ``plan``: the request in one call


def plan(
    model: str | nn.Module,
    cluster: str | Cluster,
    *,
    global_batch: int,
    seq: int | None = None,
    strategy: Any = None,
    num_micro_batches: int | None = None,
    objective: str = "tokens_per_s",
    excluded: Sequence[str] = (),
    included: Sequence[Any] = (),
    top: int = 10,
    memory_limit: int | str | None = None,
    headroom: float = HEADROOM,
    limit_s: float | None = USUAL_LIMIT_S,
    sample_batch: Any = None,
    loss_func: Callable[[Any, Any], Any] | None = None,
    model_input_format: str | None = None,
    optim_func: Callable[[Any], Optimizer] | None = torch.optim.AdamW,
) -> list[Plan]:
    """Predict memory and time of strategies for a model on a cluster, which need not exist here, best first.

    Args:
        model: A known model (``"llama-3-8b"``), a family with its dimensions
            (``"gpt:layers=24,hidden=1024,heads=16,vocab=50304"``), a transformers config (``"hf:PATH"``), or a module,
            whose parameters may be on ``meta``.
        cluster: A preset (``"h100x64"``), a cluster file, or a :class:`~meshwright.cost.Cluster`.
        global_batch: Samples per step, over all devices.
        seq: Tokens per sample; None takes the usual number of a known model. A module gets token ids
            ``[samples, seq]``.
        strategy: A Strategy, or anything it can be made from: the only one to plan, whether it fits or not. None
            searches.
        num_micro_batches: Number of micro-batches of the given strategy.
        objective: ``"tokens_per_s"``, ``"price"`` or ``"memory"``, by which plans are ranked.
        excluded: Methods that must not be used.
        included: Methods that every plan uses: names, or ``(name, config)`` with keys that stay as they are.
        top: Largest number of plans to return: the best, and the best of every other family of plans (what is divided,
            sharded and offloaded).
        memory_limit: Usable device memory, in bytes or as text such as ``"40 GiB"``; None takes all that a device has
            for tensors, less ``headroom``.
        headroom: Share of that memory that a search leaves free; a given strategy and ``memory_limit`` are taken as
            they are.
        limit_s: Seconds of processor time after which a search ends with the best so far; None: no limit.
        sample_batch: For a module: a batch of any number of samples, instead of ``seq``.
        loss_func: For a module: ``loss_func(model_input, model_output)``; None takes the loss in its output, or the
            next-token loss.
        model_input_format: For a module; see ``accelerate``.
        optim_func: For a module: builds the optimizer from parameters.

    Returns:
        Plans with their forecasts. ``str(plan)`` is one line; :mod:`meshwright.planner.explain` gives the reasons.

    Raises:
        ConfigError: For an unknown cluster, and arguments that contradict each other.
        ModelError: For an unknown model, and one that cannot be traced.
        StrategyError: When no strategy fits, naming the smallest one and the memory that it lacks.

    Example:
        >>> for each in mw.plan("llama-3-8b", "h100x64", global_batch=512):
        ...     print(each)
    """
    where = find_cluster(cluster) if isinstance(cluster, str) else cluster
    if isinstance(model, str):
        others = sample_batch is not None or loss_func is not None or model_input_format is not None
        if others or optim_func is not torch.optim.AdamW:
            raise ConfigError(
                "A model by its name has its own samples, loss and optimizer",
                expected="sample_batch, loss_func, model_input_format and optim_func beside a module alone",
                got=repr(model),
                fix="leave them out, or pass the module",
            )
        planned = named_model(model, seq)
    else:
        batch = _sample(seq, sample_batch)
        name = type(model).__name__
        planned = ModuleModel(name, model, batch, loss_func, model_input_format, optim_func, seq)
    asked = PlanRequest(
        planned, where, global_batch, strategy, num_micro_batches, objective, excluded, included, top, memory_limit,
        headroom, limit_s,
    )  # fmt: skip
    return list(asked.found().plans)


def named_model(name: str, seq: int | None = None, dtype: torch.dtype = torch.float32) -> PlannedModel:
    """Find the model that a text names: ``hf:PATH``, a known model, or a family with its dimensions; on ``meta``.

    Args:
        name: The text.
        seq: Tokens per sample; None: the model's own number.
        dtype: Type of its parameters.

    Raises:
        ConfigError, ModelError: When there is no such model, or ``seq`` is not a length; and for another type of a
            model of which formulas alone are known.
    """
    if seq is not None and seq < 1:
        raise ConfigError("seq is not a length", expected="1 or more tokens", got=repr(seq), fix="correct the number")
    path = config_path(name)
    if path is not None:
        return transformers_model(path, seq, dtype)
    shape = parse_family(name)
    shape = shape if seq is None else dataclasses.replace(shape, seq=seq)
    known = model_of_shape(name, shape, dtype)
    if known is None and dtype != torch.float32:
        raise ConfigError(
            f"{name} is predicted by formulas, which know parameters in fp32 alone",
            expected="torch.float32, or a model that transformers has a class for",
            got=str(dtype),
            fix="leave the type out",
        )
    return known or FamilyModel(name, shape, gap=why_formulas(shape))


def _sample(seq: int | None, sample_batch: Any) -> Any:
    if (seq is None) == (sample_batch is None):
        raise ConfigError(
            "A module needs a sample",
            expected="seq for a model that takes token ids, or sample_batch for any other",
            got="neither" if seq is None else "both",
            fix="pass one of them",
        )
    return token_batch(seq) if seq is not None else sample_batch
