"""What a caller of ``plan`` asks for, checked; and the plans that answer it."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.cost import Cluster
from meshwright.errors import ConfigError, ModelError, StrategyError
from meshwright.methods import SAMPLED
from meshwright.planner import Plan, Subject, Workload, readable_bytes
from meshwright.planner.explain import WhatIf, found_document, what_if
from meshwright.planner.search import Found, default_space, read_wishes, search, search_in_stages
from meshwright.planning.models import PlannedModel
from meshwright.strategy import Strategy, read_size


@dataclass(frozen=True)
class PlanRequest:
    """A model on a cluster, and what is wanted of its plans; see :func:`~meshwright.planning.plan`."""

    model: PlannedModel
    cluster: Cluster
    global_batch: int
    strategy: Any = None
    num_micro_batches: int | None = None
    objective: str = "tokens_per_s"
    excluded: Sequence[str] = ()
    included: Sequence[Any] = ()
    top: int = 10
    memory_limit: int | str | None = None  # read: bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_limit", read_size(self.memory_limit, "memory_limit"))
        _check_limit(self.memory_limit, self.cluster)  # type: ignore[arg-type]
        for name, value in (("global_batch", self.global_batch), ("top", self.top)):
            _check_count(name, value)
        if self.num_micro_batches is not None:
            _check_count("num_micro_batches", self.num_micro_batches)
            if self.strategy is None:
                raise _contradiction("num_micro_batches without a strategy", "a search chooses how a batch is cut")
        if self.strategy is not None and (self.excluded or self.included):
            raise _contradiction("a strategy beside excluded or included methods", "nothing is searched then")

    def subject_of(self, cluster: Cluster, samples: int) -> Subject:
        """What plans are made for, on some cluster and for so many samples per step."""
        limit = read_size(self.memory_limit, "memory_limit")
        if limit is not None:  # of a device that has more memory, as much more
            limit = round(limit * (cluster.device.memory_bytes / self.cluster.device.memory_bytes))
        return self.model.subject(cluster, samples, limit)

    @functools.cached_property
    def subject(self) -> Subject:
        """What these plans are made for."""
        return self.subject_of(self.cluster, self.global_batch)

    def found(self, progress: Callable[[int, int], None] | None = None) -> Found:
        """The plans: of the strategy given, else of a search.

        Args:
            progress: Called while a search goes on, with what it counts: simulated plans, and candidates.

        Raises:
            StrategyError: When no strategy fits, or the one given cannot be or does not divide the batch.
            ModelError: When the model cannot be traced.
        """
        if self.strategy is None:
            looked = search_in_stages if isinstance(self.subject, Workload) else search
            found = looked(
                self.subject,
                space=default_space(self.subject),
                objective=self.objective,  # type: ignore[arg-type]
                excluded=self.excluded,
                included=self.included,
                top=self.top,
                progress=progress,
            )
            found = dataclasses.replace(
                found,
                plans=tuple(map(self._in_full, found.plans)),
                too_large=tuple(map(self._in_full, found.too_large)),
            )
        else:
            found = self.planned([Strategy(self.strategy)])
        for plan in found.plans[:1]:
            _check_traced(plan)
            _check_included(plan, read_wishes(self.excluded, self.included))
        return found

    def _in_full(self, plan: Plan) -> Plan:
        """A search lets one rank of a long pipeline stand for others; here each holds what it holds."""
        if len({id(step) for step in plan.steps}) == len(plan.steps):
            return plan
        return self.subject.plan(plan.strategy, plan.step.num_micro_batches)

    def planned(self, strategies: Sequence[Strategy]) -> Found:
        """Plans of given strategies, in their order, whether they fit or not.

        Raises:
            StrategyError: When one cannot be, or does not divide the batch.
        """
        started, subject = time.perf_counter(), self.subject
        plans = tuple(subject.plan(strategy, self.num_micro_batches) for strategy in strategies)
        for plan in plans:
            _check_divides(plan, self.global_batch)
        return Found(plans, num_considered=len(plans), num_predicted=len(plans), seconds=time.perf_counter() - started)

    def what_ifs(self, found: Found) -> tuple[WhatIf, ...]:
        """What would change the result."""
        # Of strategies that are given nothing is ranked.
        return what_if(self.subject_of, found, self.objective if self.strategy is None else "tokens_per_s")  # type: ignore[arg-type]

    def document(self, found: Found, what_ifs: Sequence[WhatIf] = ()) -> dict[str, Any]:
        """All of it as plain values: what ``--json`` prints."""
        described = self.model.describe() | {"global_batch": self.global_batch}
        return found_document(found, model=described, objective=self.objective, what_ifs=what_ifs, subject=self.subject)


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


def _check_divides(plan: Plan, samples: int) -> None:
    """A rank computes whole samples: a plan of another batch than asked for would have that one's seconds."""
    replicas = math.prod(size for axis, size in plan.step.axes if axis in SAMPLED)
    parts = replicas * plan.step.num_micro_batches
    if samples % parts == 0:
        return
    below = samples - samples % parts
    nearest = f"{below} or {below + parts}" if below else f"{parts}"
    helps = "" if plan.step.num_micro_batches == 1 else ", or another number of micro-batches"
    raise StrategyError(
        "The batch does not divide between the replicas of a strategy and their micro-batches",
        expected=f"a global_batch that is a multiple of {parts}: {replicas} replicas x "
        f"{plan.step.num_micro_batches} micro-batches",
        got=f"global_batch={samples} for {plan.strategy}",
        fix=f"use {nearest}{helps}",
    )


def _check_included(plan: Plan, wished: Iterable[str]) -> None:
    """What training leaves out of a strategy on such devices is no plan with it."""
    for name in wished:
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
    """Without activations a plan's memory says nothing."""
    if plan.step.activations is not None:
        return
    gap = next((gap for gap in plan.gaps if "activations" in gap), "; ".join(plan.gaps))
    raise ModelError(
        "The model cannot be traced, so its memory cannot be predicted",
        expected="a forward pass and a loss that run without data",
        got=gap or "no sample to trace it with",
        fix="give a sample that the model takes (of a model of transformers: by --model MODULE:FUNCTION --sample), and "
        "keep what needs values (.item(), if tensor:) out of forward",
    )
