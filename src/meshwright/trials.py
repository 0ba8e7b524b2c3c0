"""Candidates in the ranks that live already: each applied to a copy of the model, trained a few steps, and dropped."""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from meshwright.accelerated import Accelerated
from meshwright.planner import Plan
from meshwright.planner.measure import Outcome, RunCandidate, step_times
from meshwright.request import Request
from meshwright.runtime import gather_objects, preserved_rng


def run_live(request: Request, build: Callable[[Request, Plan], Accelerated], device: torch.device) -> RunCandidate:
    """Runs candidates on all ranks of this world; collective.

    The request's model, optimizer, data and the random generators stay as they are. Beside them a copy of model and
    optimizer is trained, so that a device must hold both. Ranks vote: what fails on one has failed.

    Args:
        request: What is asked for.
        build: Applies a plan to the model of a request.
        device: Of this rank.
    """

    def run(plan: Plan, num_steps: int, time_limit: float) -> Outcome:
        start_s = time.perf_counter()
        step_time_s, error = None, None
        with preserved_rng():
            try:
                step_time_s = _train(request, build, plan, num_steps, device)
            except Exception as failed:  # of a candidate anything may fail, in the user's code too
                error = f"{type(failed).__name__}: {(str(failed).splitlines() or [''])[0][:300]}"
        _forget(device)
        errors = [each for each in gather_objects(error) if each is not None]
        seconds = gather_objects(time.perf_counter() - start_s)[0]
        return Outcome(None if errors else step_time_s, seconds, errors[0] if errors else None, seconds > time_limit)

    return run


def _train(
    request: Request, build: Callable[[Request, Plan], Accelerated], plan: Plan, num_steps: int, device: torch.device
) -> float:
    trial = _copied(request)
    batch: Any = trial.sample_of(plan.micro_batch * plan.step.num_micro_batches)
    accelerated = build(trial, plan)
    if batch is None:  # an iterable dataset: a fresh iterator of it
        batch = next(iter(accelerated.dataloader))  # type: ignore[arg-type]
    return step_times(lambda: accelerated.step(batch), num_steps, device)


def _copied(request: Request) -> Request:
    """With a model and an optimizer of its own; an optimizer's parameters stay those of the model."""
    model, optim = copy.deepcopy((request.model, request.optim_func))
    return dataclasses.replace(request, model=model, optim_func=optim)


def _forget(device: torch.device) -> None:
    gc.collect()  # sharded modules are cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
