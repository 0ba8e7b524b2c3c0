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
from meshwright.errors import ModelError, StrategyError
from meshwright.kept_modules import kept_modules, modules_used_by
from meshwright.planner import Plan
from meshwright.planner.measure import Outcome, RunCandidate, step_times
from meshwright.request import Request
from meshwright.runtime import gather_objects, preserved_rng, same_on_every_rank, told_by_all

_PATIENCE_S = 30.0


def run_live(request: Request, build: Callable[[Request, Plan], Accelerated], device: torch.device) -> RunCandidate:
    """Runs candidates on all ranks of this world; collective.

    The request's model, optimizer, data and the random generators stay as they are, and so do modules that its
    functions use, such as a loss with statistics. Beside them a copy of model and optimizer is trained, so that a
    device must hold both. A candidate that fails on every rank has failed; one whose time is up ends with its step.

    Args:
        request: What is asked for.
        build: Applies a plan to the model of a request.
        device: Of this rank.
    """
    functions = (request.loss_func, request.prepare_input, request.optim_param_func)
    others = modules_used_by(function for function in functions if function is not None)

    def run(plan: Plan, num_steps: int, time_limit: float) -> Outcome:
        start_s = time.perf_counter()
        with same_on_every_rank():
            trial = [_copied(request)]
        times_s: tuple[float, ...] = ()
        error = ""
        with preserved_rng(), kept_modules(others, request.model):
            try:
                times_s = _train(trial.pop(), build, plan, num_steps, device, start_s + time_limit)
            except Exception as failed:  # of a candidate anything may fail, in the user's code too
                error = _said(failed)
        _forget(device)
        error = _common(plan, error, time.perf_counter() - start_s)
        seconds = gather_objects(time.perf_counter() - start_s)[0]
        if error:
            return Outcome((), seconds, error)
        late = len(times_s) < num_steps
        return Outcome(times_s, seconds, None if times_s else f"no step was timed in {seconds:.1f} s", timed_out=late)

    return run


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def _common(plan: Plan, error: str, seconds: float) -> str:
    """What the first rank's error says; empty when there is none.

    Raises:
        StrategyError: On a rank that fails when others, which wait for it in a collective, do not: they cannot be
            called back, and would wait for ever if this rank stayed.
    """
    errors = told_by_all("candidate", error, _PATIENCE_S + 2 * seconds if error else None)
    if None in errors:
        raise StrategyError(
            "A candidate failed on some ranks while others wait for them in a collective",
            expected="a candidate that fails on every rank or on none",
            got=f"{plan.strategy}: {error}",
            fix="exclude a method of it, lower memory_limit if memory is short, or leave time_limit out",
        )
    return next((each for each in errors if each), "")


def _train(
    request: Request,
    build: Callable[[Request, Plan], Accelerated],
    plan: Plan,
    num_steps: int,
    device: torch.device,
    end_s: float,
) -> tuple[float, ...]:
    trial = _copied(request)
    batch: Any = trial.sample_of(plan.micro_batch * plan.step.num_micro_batches)
    accelerated = build(trial, plan)
    if batch is None:  # an iterable dataset: a fresh iterator of it
        batch = next(iter(accelerated.dataloader))  # type: ignore[arg-type]
    return step_times(lambda: accelerated.step(batch), num_steps, device, end_s - time.perf_counter())


def _copied(request: Request) -> Request:
    """With a model and an optimizer of its own; an optimizer's parameters stay those of the model."""
    try:
        model, optim = copy.deepcopy((request.model, request.optim_func))
    except Exception as error:
        raise ModelError(
            "time_limit runs candidates on copies of the model, and this one cannot be copied",
            expected="a model, and an optimizer if it is built already, that copy.deepcopy copies",
            got=_said(error),
            fix="leave time_limit out to choose by prediction, or give what cannot be copied a __deepcopy__",
        ) from error
    return dataclasses.replace(request, model=model, optim_func=optim)


def _forget(device: torch.device) -> None:
    gc.collect()  # sharded modules are cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
