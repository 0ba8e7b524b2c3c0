"""Plan a model on a cluster in one call: predict a given strategy, or search for the best ones and rank them."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import Cluster, find_cluster
from meshwright.errors import ConfigError, MeshwrightError, ModelError, StrategyError, readable_bytes
from meshwright.methods import SAMPLED, method_of_axes, num_micro_batches
from meshwright.planner.config_models import (
    config_path,
    model_of_shape,
    outline_of,
    transformers_model,
    why_formulas,
)
from meshwright.planner.explain import WhatIf, found_document, what_if
from meshwright.planner.family_workload import FamilyModel
from meshwright.planner.model_shapes import parse_family
from meshwright.planner.plans import Plan, PlannedModel, Subject, usable_bytes
from meshwright.planner.search import (
    USUAL_LIMIT_S,
    FollowUp,
    Found,
    default_space,
    experts_first,
    read_constraints,
    search,
    search_in_stages,
)
from meshwright.planner.search.search_state import Objective, SearchState, rank_of_plan
from meshwright.planner.search.time_limit import OutOfTimeError, TimeLimit, out_of_time
from meshwright.planner.workload import ModuleModel, NeverTracedError, Workload, token_batch
from meshwright.strategy import Strategy, read_size

HEADROOM = 0.06
"""Share of usable memory that a search leaves free.

Peaks of published runs are some 5 to 8 % off their predictions, and a run that is out of memory in its third hour has
lost them.
"""
_ALTERNATIVES = 3  # fewest plans that formulas find: traces may find that the best does not fit
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
        if self.strategy is None:
            try:
                found = self._searched(progress)
            except NeverTracedError as error:
                raise _untraced(str(error)) from None
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
        if isinstance(self.model, ModuleModel):
            found = self._by_formulas(self.model, options)
            if found is not None:
                return found
            if self.limit_s is not None:
                options["limit_s"] = max(self.limit_s - (time.process_time() - started), self.limit_s / 2)
        find = search_in_stages if isinstance(self.subject, Workload) else search
        return find(self.subject, space=default_space(self.subject), **options)

    def _by_formulas(self, model: ModuleModel, options: dict[str, Any]) -> Found | None:
        """Find plans by formulas, and trace them; None where there are none for the model, or none of them works."""
        shape = model.shape
        if shape is None and model.seq is not None:
            shape = outline_of(model.module, model.seq)
        if shape is None:
            return None
        known = self.subject
        assert isinstance(known, Workload)
        assert known.limit_bytes is not None
        limit, is_free = known.limit_bytes, known.limit_is_free

        def search_within(within: int, limit_s: float | None, enough_s: float | None) -> Found:
            outline = FamilyModel(model.name, shape).subject(self.cluster, self.global_batch, within, is_free)
            own = {**options, "limit_s": limit_s, "top": max(self.top, _ALTERNATIVES)}
            space, follow_ups = default_space(outline), tuple[FollowUp, ...]()
            if shape.experts > 1 and not self.included and method_of_axes()["expert"] not in self.excluded:
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
            self.objective,  # type: ignore[arg-type]
            self.top,
            self.limit_s,
            resembles=model.shape is None,
        )

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

        What a search found for a model of a known family is predicted by the formulas, before and after a change: they
        are compared with each other, and each of some forty traces would take a second or two.
        """
        if self.strategy is None and isinstance(self.model, ModuleModel) and self.model.shape is not None:
            outline = dataclasses.replace(self, model=FamilyModel(self.model.name, self.model.shape))
            before = tuple(outline.subject.plan(plan.strategy, plan.step.num_micro_batches) for plan in found.plans)
            return outline.what_ifs(dataclasses.replace(found, plans=before))
        # Given strategies are not ranked by an objective.
        objective = self.objective if self.strategy is None else "tokens_per_s"
        limit_s = None if self.limit_s is None else self.limit_s / 2
        return what_if(self.subject_of, found, objective, limit_s=limit_s)  # type: ignore[arg-type]

    def document(self, found: Found, what_ifs: Sequence[WhatIf] = ()) -> dict[str, Any]:
        """Return the result as plain values, as ``--json`` prints it."""
        described = self.model.describe() | {"global_batch": self.global_batch}
        return found_document(found, model=described, objective=self.objective, what_ifs=what_ifs, subject=self.subject)


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
        planned = named_model(model, seq, where)
    else:
        batch = _sample(seq, sample_batch)
        name = type(model).__name__
        planned = ModuleModel(name, model, batch, loss_func, model_input_format, optim_func, seq)
    asked = PlanRequest(
        planned, where, global_batch, strategy, num_micro_batches, objective, excluded, included, top, memory_limit,
        headroom, limit_s,
    )  # fmt: skip
    return list(asked.found().plans)


def named_model(name: str, seq: int | None, cluster: Cluster) -> PlannedModel:
    """Find the model that a text names: ``hf:PATH``, a known model, or a family with its dimensions.

    Raises:
        ConfigError, ModelError: When there is no such model, or ``seq`` is not a length.
    """
    if seq is not None and seq < 1:
        raise ConfigError("seq is not a length", expected="1 or more tokens", got=repr(seq), fix="correct the number")
    path = config_path(name)
    if path is not None:
        return transformers_model(path, seq, on_meta=not cluster.device.is_host)
    shape = parse_family(name)
    shape = shape if seq is None else dataclasses.replace(shape, seq=seq)
    return model_of_shape(name, shape) or FamilyModel(name, shape, gap=why_formulas(shape))


def _sample(seq: int | None, sample_batch: Any) -> Any:
    if (seq is None) == (sample_batch is None):
        raise ConfigError(
            "A module needs a sample",
            expected="seq for a model that takes token ids, or sample_batch for any other",
            got="neither" if seq is None else "both",
            fix="pass one of them",
        )
    return token_batch(seq) if seq is not None else sample_batch


# --- Tracing what a search by formulas has found. A formula predicts a strategy of a known family in a millisecond, a
# trace of the model in a second: formulas choose among thousands of candidates, and users see figures of the model.

_TRIES, _LEAST_S = 3, 1.0
"""Searches by formulas: where nothing fits that was found, by their memory, the limit is lowered by as much. And the
seconds that each has in any case."""

_SAME_REASON = 3
"""Traces that do not fit before any does, after which the limit is lowered: formulas are off by the same for most."""


@dataclass(frozen=True)
class _Formulas:
    """Limits of a search by formulas, before the model itself is traced.

    Args:
        searching: The part of the time that is left which a search by them may take.
        within: The part of a device that plans may take by them.
        gap: What is said of a plan that only they predict.
    """

    searching: float
    within: float
    gap: str


_OF_THE_FAMILY = _Formulas(
    0.5,
    1.0,
    "formulas of the model's family predict this plan: the time was up before the model itself was traced",
)
# What lies at the limit by another model's formulas mostly turns out too large, which traces take seconds to tell.
_OF_ANOTHER = _Formulas(
    0.3,
    0.9,
    "formulas of a decoder of about these dimensions predict this plan, and can be far off: the time was up "
    "before the model itself was traced (--limit-s gives more)",
)


def search_and_trace(
    search: Callable[[int, float | None, float | None], Found],
    subject: Subject,
    limit_bytes: int,
    objective: Objective,
    top: int,
    limit_s: float | None,
    *,
    resembles: bool = False,
) -> Found | None:
    """Search by formulas, trace what is found, and rank it by what the traces say.

    Args:
        search: Searches by formulas within bytes of a device and seconds; it ends after others once it has found any.
        subject: The model that is traced.
        limit_bytes: Bytes that a device may hold.
        objective: What plans are ranked by.
        top: How many plans are kept.
        limit_s: Seconds of processor time, after which the plans that are left stay untraced and are left out; None:
            no limit. A search takes a part of what is left, and all of it where nothing has been found by then.
        resembles: Whether the formulas are those of another model that this one resembles. Then what is traced soonest
            is traced first, so that there is a figure of the model itself.

    Returns:
        What was found; None where no plan that formulas find fits by its trace. Where the time is up before any trace
        ends, it is what the formulas have found, each plan with a gap that says so.

    Raises:
        StrategyError: When nothing fits by the formulas, or nothing was found in time.
    """
    started, limit = time.perf_counter(), TimeLimit(limit_s)
    formulas = _OF_ANOTHER if resembles else _OF_THE_FAMILY
    within = int(limit_bytes * formulas.within)
    left: Found | None = None  # what no trace has ruled out
    for _ in range(_TRIES):
        try:
            found = search(within, *_seconds_of(limit, formulas))
        except StrategyError as error:
            if limit.is_over:
                return _timed(_left_in_time(left, limit, error), started)
            if left is None and within < limit_bytes:
                within = limit_bytes
                continue
            raise
        plans = found.plans
        if resembles:
            plans = tuple(sorted(plans, key=_traced_late))
            found = dataclasses.replace(found, too_large=())  # figures of another model
        state, refused = _traced(plans, subject, objective, top, limit, most=top + resembles)
        if state.plans:
            return _timed(_with_traces(found, state, refused), started)
        ruled_out = {*(str(plan.strategy) for plan in state.too_large), *dict(refused)}
        left = _by_formulas_alone(found, top, formulas.gap, ruled_out)
        if state.stopped and left is not None:
            return _timed(left, started)
        if state.stopped or not state.too_large:
            return None
        least = state.too_large[0]
        within = int(within * min((least.limit_bytes or 0) / least.needed_bytes, 1.0))
    return None


def _seconds_of(limit: TimeLimit, formulas: _Formulas) -> tuple[float | None, float | None]:
    """Return the seconds that a search may take, and after how many it ends once it has found any."""
    if limit.left_s is None:
        return None, None
    left_s = max(limit.left_s, _LEAST_S)
    return left_s, left_s * formulas.searching


def _left_in_time(left: Found | None, limit: TimeLimit, error: StrategyError) -> Found:
    if left is None:
        raise out_of_time(limit) from error
    return left


def _timed(found: Found, started: float) -> Found:
    return dataclasses.replace(found, seconds=time.perf_counter() - started)


def _with_traces(found: Found, state: SearchState, refused: Sequence[tuple[str, str]]) -> Found:
    """Return what was found with the plans that were traced, in place of those by formulas."""
    return dataclasses.replace(
        found,
        plans=tuple(plan for _, plan in state.plans),
        too_large=(*state.too_large, *found.too_large),
        refused=(*found.refused, *refused),
        num_predicted=found.num_predicted + state.num_predicted,
        is_complete=found.is_complete and not state.stopped,
        out_of_time=found.out_of_time or state.stopped,
    )


def _traced_late(plan: Plan) -> bool:
    """Return whether tracing a plan takes long: axes divide layers, tokens or the list of blocks."""
    return any(size > 1 and axis not in ("data", "zero") for axis, size in plan.step.axes)


def _by_formulas_alone(found: Found, top: int, gap: str, ruled_out: Collection[str]) -> Found | None:
    """Return what formulas have found, less what traces have ruled out; None where nothing is left."""
    left = [plan for plan in found.plans if str(plan.strategy) not in ruled_out][:top]
    plans = tuple(dataclasses.replace(plan, gaps=(*plan.gaps, gap)) for plan in left)
    return dataclasses.replace(found, plans=plans, is_complete=False, out_of_time=True) if plans else None


def _traced(
    plans: Sequence[Plan], subject: Subject, objective: Objective, top: int, limit: TimeLimit, most: int
) -> tuple[SearchState, list[tuple[str, str]]]:
    """Return the state of a search that has traced these plans, up to the most that fit, and those that are refused."""
    state, refused = SearchState(top), list[tuple[str, str]]()
    with limit.watched():
        for plan in plans:
            try:
                traced = subject.plan(plan.strategy, plan.step.num_micro_batches)
            except OutOfTimeError:
                state.stopped = True
                break
            except MeshwrightError as error:
                refused.append((str(plan.strategy), error.what))
                continue
            state.num_predicted += 1
            if traced.fits:
                state.add(rank_of_plan(traced, objective), traced)
                most -= 1
                if most == 0:  # the others stand in for those that do not fit
                    break
            else:
                state.add_too_large(traced)
                if len(state.too_large) == _SAME_REASON and not state.plans:
                    break
    return state, refused
