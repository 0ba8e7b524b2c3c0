"""Find what can be found in time: the limit of a search, and which plans by formulas are traced within it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from meshwright.errors import MeshwrightError, StrategyError, readable_bytes
from meshwright.methods import Role, find_method
from meshwright.planner.plans import Plan, Subject, method_names
from meshwright.planner.search.search_space import MODEL_ERROR, Family
from meshwright.planner.search.search_state import Found, Objective, SearchState, family_of_plan, rank_of_plan
from meshwright.planner.trace.op_recording import interrupts

USUAL_LIMIT_S = 20.0
"""Seconds of processor time after which a search that a user starts ends with the best so far."""


class OutOfTimeError(BaseException):
    """The time is up. No plain exception: what traces a model takes every such for a failure of the model."""


class TimeLimit:
    """A span of this process's processor time, which other programs on the machine do not shorten.

    Args:
        seconds: How long; None: for ever.
        enough_s: Seconds after which who has found anything stops; None: not before the time is up.
    """

    def __init__(self, seconds: float | None = None, enough_s: float | None = None) -> None:
        self.seconds = seconds
        self._enough = math.inf if enough_s is None else time.process_time() + enough_s
        self._end = math.inf if seconds is None else time.process_time() + seconds
        self.place = ""  # the module that was called last

    @property
    def is_over(self) -> bool:
        """Return whether the time is up."""
        return time.process_time() > self._end

    @property
    def is_long_over(self) -> bool:
        """Return whether half as long again is up, too."""
        return time.process_time() > self._end + (self.seconds or 0.0) / 2

    @property
    def is_enough(self) -> bool:
        """Return whether who has found anything stops."""
        return self.is_over or time.process_time() > self._enough

    @property
    def left_s(self) -> float | None:
        """Return the seconds that are left, at least 0; None: for ever."""
        return None if self._end == math.inf else max(self._end - time.process_time(), 0.0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise :class:`OutOfTimeError` after the time is up: as a module is called, or while it computes."""
        if self._end == math.inf:
            yield
            return
        hook = register_module_forward_pre_hook(self._enter)
        interrupts.append(self._check)
        try:
            yield
        finally:
            interrupts.remove(self._check)
            hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not type(module).__module__.startswith("meshwright."):  # what runs it is no news to a user
            self.place = type(module).__name__
        self._check()

    def _check(self) -> None:
        if self.is_over:
            raise OutOfTimeError


_SLOW_TRACE = (
    "A module that computes its tokens one after the other in Python takes minutes to trace: shorten seq, or install "
    "its kernels"
)
_TIME_WAS_UP = "The time was up before a strategy was found that fits"
_WITHIN = "a strategy within {:.3g} s of processor time"


def out_of_time(limit: TimeLimit, smallest: Plan | None = None) -> StrategyError:
    """Return the error for a search whose time was up before it found anything.

    Args:
        limit: The time.
        smallest: What needs the least memory of all that did not fit.
    """
    where = f"; it was running {limit.place}" if limit.place else ""
    if smallest is not None:
        needs = smallest.host_text() if smallest.fits_device else readable_bytes(smallest.needed_bytes)
        where += f"; the smallest so far, {method_names(smallest.strategy)}, needs {needs}"
        where += "" if smallest.fits_device else f" of {readable_bytes(smallest.limit_bytes or 0)}"
    return StrategyError(
        _TIME_WAS_UP,
        expected=_WITHIN.format(limit.seconds),
        got=f"none{where}",
        fix="give it more time (limit_s, --limit-s), or name a strategy to predict that alone. "
        + (_SLOW_TRACE if smallest is None else "More devices, or such with more memory, need less of each"),
    )


def of_whole_search(error: StrategyError, limit_s: float | None) -> StrategyError:
    """Return an error with the seconds of the whole search, where it says so of what was left for its last part."""
    if error.what != _TIME_WAS_UP or limit_s is None:
        return error
    return StrategyError(error.what, expected=_WITHIN.format(limit_s), got=error.got, fix=error.fix)


# --- Tracing what a search by formulas has found. A formula predicts a strategy of a known family in a millisecond, a
# trace of the model in a second: formulas choose among thousands of candidates, and users see figures of the model.

_TRIES, _LEAST_S = 3, 1.0
"""Searches by formulas: where nothing fits that was found, by their memory, the limit is lowered by as much. And the
seconds that each has in any case."""

_SAME_REASON = 3
"""Traces that do not fit before any does, after which the limit is lowered: formulas are off by the same for most."""

_SURELY_WORTH = 2 * MODEL_ERROR
"""Share by which other kernels make a plan better, from which on they are taken to be worth it in all plans."""


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
    included: Collection[str] = (),
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
        included: Names of methods that every plan keeps.
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
            if limit.is_over and left is not None:
                return _timed(left, started)
            if left is not None or within == limit_bytes:
                raise  # it says what is too small, whatever time is left
            if limit.is_over:
                if error.what == _TIME_WAS_UP:
                    raise
                raise _fits_nowhere(error, limit, formulas.within) from error
            within = limit_bytes
            continue
        plans = found.plans
        if resembles:
            plans = tuple(sorted(plans, key=_traced_late))
            found = replace(found, too_large=())  # figures of another model
        traces = _Traces(SearchState(top), limit_bytes, objective, included, trusts=not resembles)
        _trace(plans, subject, traces, limit, most=top + resembles)
        state = traces.state
        if state.plans:
            return _timed(_with_traces(found, traces), started)
        ruled_out = {*(str(plan.strategy) for plan in state.too_large), *dict(traces.refused)}
        left = _by_formulas_alone(found, top, formulas.gap, ruled_out)
        if state.stopped and left is not None:
            return _timed(left, started)
        if state.stopped or not state.too_large:
            return None
        least = state.too_large[0]
        within = int(within * min((least.limit_bytes or 0) / least.needed_bytes, 1.0))
    return None


def _fits_nowhere(error: StrategyError, limit: TimeLimit, within: float) -> StrategyError:
    """Return the error of a search by formulas in a part of the memory, where no time is left for all of it."""
    return StrategyError(
        _TIME_WAS_UP,
        expected=_WITHIN.format(limit.seconds),
        got=f"none by formulas in {within:.0%} of the memory: {error.got}",
        fix=f"{error.fix}; or give it more time (limit_s, --limit-s)",
    )


def _seconds_of(limit: TimeLimit, formulas: _Formulas) -> tuple[float | None, float | None]:
    """Return the seconds that a search may take, and after how many it ends once it has found any."""
    if limit.left_s is None:
        return None, None
    left_s = max(limit.left_s, _LEAST_S)
    return left_s, left_s * formulas.searching


def _timed(found: Found, started: float) -> Found:
    return replace(found, seconds=time.perf_counter() - started)


def _with_traces(found: Found, traces: _Traces) -> Found:
    """Return what was found with the plans that were traced, in place of those by formulas."""
    state = traces.state
    return replace(
        found,
        plans=tuple(plan for _, plan in state.plans),
        too_large=(*state.too_large, *found.too_large),
        refused=(*found.refused, *traces.refused),
        num_predicted=found.num_predicted + state.num_predicted,
        is_complete=found.is_complete and not state.stopped,
        out_of_time=found.out_of_time or state.stopped,
    )


def _traced_late(plan: Plan) -> bool:
    """Return whether tracing a plan takes long: axes divide layers, tokens or the list of blocks."""
    return any(size > 1 and axis not in ("data", "zero") for axis, size in plan.step.axes)


def _by_formulas_alone(found: Found, top: int, gap: str, ruled_out: Collection[str]) -> Found | None:
    """Return what formulas have found, the best of each family less what traces have ruled out; None if nothing."""
    firsts: dict[Family, Plan] = {}
    for plan in found.plans:
        if str(plan.strategy) not in ruled_out:
            firsts.setdefault(family_of_plan(plan), plan)
    plans = tuple(replace(plan, gaps=(*plan.gaps, gap)) for plan in [*firsts.values()][:top])
    return replace(found, plans=plans, is_complete=False, out_of_time=True) if plans else None


def worth_its_kernels(plan: Plan, subject: Subject, objective: Objective, included: Collection[str]) -> Plan:
    """Return a plan without what replaces kernels, where that ranks better; see [Note: kernels].

    Args:
        plan: A plan.
        subject: What predicted it; a trace serves both.
        objective: What plans are ranked by.
        included: Names of methods that every plan keeps.
    """
    plainer = _without_kernels(plan, subject, included)
    if plainer is None or rank_of_plan(plan, objective) < rank_of_plan(plainer, objective):
        return plan
    return plainer


def _without_kernels(plan: Plan, subject: Subject, included: Collection[str]) -> Plan | None:
    """Return the plan without what replaces kernels; None where it has no such, or does not fit without."""
    kernels = find_method(plan.strategy, lambda each: each.role is Role.KERNELS)
    if kernels is None or kernels.method_name in included:
        return None
    try:
        plainer = subject.plan(plan.strategy.without(kernels.method_name), plan.step.num_micro_batches)
    except (OutOfTimeError, MeshwrightError):  # what has been predicted is not lost for it
        return None
    if not plainer.fits:
        return None
    # A resolved strategy no longer knows what was left out of it, and why.
    others = (each for each in plan.notices if not each.startswith(kernels.method_name))
    return replace(plainer, notices=tuple(dict.fromkeys([*others, *plainer.notices])))


@dataclass
class _Traces:
    """Traces of the plans that formulas have found.

    Args:
        state: Plans by their traces.
        refused: Strategies that the model refuses, and why.
        refusing: Methods that say so: in another size they are likely to say it again, which takes as long to find out.
        fitting: Families of which a plan fits: what is left of them is next best.
        lacking: For families of which none has fitted yet, the bytes of the last trace over those of the formulas.
        limit_bytes: Bytes that a device may hold.
        objective: What plans are ranked by.
        included: Names of methods that every plan keeps.
        trusts: Whether the formulas are those of the model's own family, within ``MODEL_ERROR`` of most traces.
        keeps_kernels: Whether what replaces kernels was worth so much in a plan that it is taken to be in all.
    """

    state: SearchState
    limit_bytes: int
    objective: Objective
    included: Collection[str] = ()
    trusts: bool = True
    keeps_kernels: bool = False
    refused: list[tuple[str, str]] = field(default_factory=list)
    refusing: set[str] = field(default_factory=set)
    fitting: set[Family] = field(default_factory=set)
    lacking: dict[Family, float] = field(default_factory=dict)

    def is_worth(self, plan: Plan, most: int) -> bool:
        """Return whether to trace a plan.

        It may fit, and none of its family does so far, nor so many of others; or the formulas promise more than the
        best trace has kept, by more than their error.
        """
        family = family_of_plan(plan)
        if plan.needed_bytes * self.lacking.get(family, 0.0) > self.limit_bytes:
            return False
        return self._promises(plan) or (family not in self.fitting and len(self.fitting) < most)

    def _promises(self, plan: Plan) -> bool:
        if not self.trusts or not self.state.plans:
            return False
        (best, *_), _ = self.state.plans[0]
        return rank_of_plan(plan, self.objective)[0] * (1 + MODEL_ERROR) < best

    def turn(self, plan: Plan) -> tuple[bool, bool]:
        """Return the key by which plans wait: behind the others what was refused, and once one fits what takes long.

        A trace of layers and stages takes seconds, and an answer is to show more than one family.
        """
        return not self.refusing.isdisjoint(plan.strategy.names), bool(self.fitting) and _traced_late(plan)

    def with_best_kernels(self, plan: Plan, subject: Subject) -> Plan:
        """Return a traced plan, or the one without what replaces kernels, where that ranks better.

        What these are worth to the model itself, formulas of a model like it do not tell; but once will do, where it is
        much: every trace takes time from a family that is not shown for it.
        """
        plainer = None if self.keeps_kernels else _without_kernels(plan, subject, self.included)
        if plainer is None:
            return plan
        own, other = rank_of_plan(plan, self.objective), rank_of_plan(plainer, self.objective)
        self.keeps_kernels = own[0] * (1 + _SURELY_WORTH) < other[0]
        return plan if own < other else plainer

    def refuse(self, plan: Plan, error: MeshwrightError) -> None:
        """Note that the model refuses a plan."""
        self.refused.append((str(plan.strategy), error.what))
        self.refusing.update({error.what.partition(":")[0]}.intersection(plan.strategy.names))

    def add(self, plan: Plan, traced: Plan) -> None:
        """Note the trace of a plan."""
        self.state.num_predicted += 1
        if traced.fits:
            self.state.add(rank_of_plan(traced, self.objective), traced)
            self.fitting.add(family_of_plan(plan))
        else:
            self.state.add_too_large(traced)
            self.lacking[family_of_plan(plan)] = traced.needed_bytes / max(plan.needed_bytes, 1)


def _trace(plans: Sequence[Plan], subject: Subject, traces: _Traces, limit: TimeLimit, most: int) -> None:
    """Trace plans until so many fit, and no other promises more; these stand in for those that do not fit."""
    waiting = list(plans)
    with limit.watched():
        while waiting:
            plan = waiting.pop(0)
            if not traces.is_worth(plan, most):
                continue
            try:
                traced = subject.plan(plan.strategy, plan.step.num_micro_batches)
            except OutOfTimeError:
                traces.state.stopped = True
                break
            except MeshwrightError as error:
                traces.refuse(plan, error)
                waiting.sort(key=traces.turn)
                continue
            traces.add(plan, traces.with_best_kernels(traced, subject) if traced.fits else traced)
            waiting.sort(key=traces.turn)
            if not traces.fitting and len(traces.state.too_large) == _SAME_REASON:
                break
