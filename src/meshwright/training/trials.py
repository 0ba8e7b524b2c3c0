"""Run candidate strategies for a few steps on copies of the model, and restore every module that they touch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import ModelError, StrategyError
from meshwright.nn import SavedAttributes
from meshwright.optim import local_tensor
from meshwright.planner import Plan
from meshwright.planner.measure import Outcome, RunCandidate, step_times
from meshwright.runtime import broadcast_object, first_over_store, preserved_rng, same_on_every_rank
from meshwright.training.accelerated import Accelerated
from meshwright.training.request import Request

_PATIENCE_S = 30.0  # to wait for other ranks after a failure on this one, beside twice the time of the candidate


def run_live(request: Request, build: Callable[[Request, Plan], Accelerated], device: torch.device) -> RunCandidate:
    """Return a function that runs a candidate on all ranks of this world; collective.

    A copy of the request's model and optimizer is trained, so a device must hold both. The originals stay as they are,
    and so do data, random generators, and modules that the request's functions use, such as a loss with statistics. A
    candidate fails when it fails on every rank; when its time is up, it ends after the step under way.

    Args:
        request: The arguments of ``accelerate``.
        build: Applies a plan to the model of a request.
        device: This rank's device.
    """
    functions = (request.loss_func, request.prepare_input, request.optim_param_func)
    others = modules_used_by(function for function in functions if function is not None)

    def run(plan: Plan, num_steps: int, time_limit: float) -> Outcome:
        start_s = time.perf_counter()
        with same_on_every_rank():
            trial = [_copied(request)]
        times_s: tuple[float, ...] = ()
        error = ""
        with preserved_rng(), restored_modules(others, request.model):
            try:
                times_s = _train(trial.pop(), build, plan, num_steps, device, start_s + time_limit)
            except Exception as failed:  # anything in a candidate may fail, in the user's code too
                error = _describe_error(failed)
        gc.collect()  # sharded modules are reference cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()
        error = _common_error(plan, error, time.perf_counter() - start_s)
        seconds = broadcast_object(time.perf_counter() - start_s)
        if error:
            return Outcome((), seconds, error)
        late = len(times_s) < num_steps
        return Outcome(times_s, seconds, None if times_s else f"no step was timed in {seconds:.1f} s", timed_out=late)

    return run


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def _common_error(plan: Plan, error: str, seconds: float) -> str:
    """Return an error of any rank, the same on all of them; empty when there is none.

    Raises:
        StrategyError: On a rank that fails while others wait for it in a collective: those cannot be interrupted, and
            would wait for ever if this rank went on.
    """
    first = first_over_store("candidate", error, _PATIENCE_S + 2 * seconds if error else None)
    if first is None:
        raise StrategyError(
            "A candidate failed on some ranks while others wait for them in a collective",
            expected="a candidate that fails on every rank or on none",
            got=f"{plan.strategy}: {error}",
            fix="exclude a method of it, lower memory_limit if memory is short, or leave time_limit out",
        )
    return first


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
    if batch is None:  # of an iterable dataset: by a fresh iterator
        batch = next(iter(accelerated.dataloader))  # type: ignore[arg-type]
    return step_times(lambda: accelerated.step(batch), num_steps, device, end_s - time.perf_counter())


def _copied(request: Request) -> Request:
    """Copy a request's model and optimizer together, so that the optimizer updates the copied parameters."""
    try:
        model, optim = copy.deepcopy((request.model, request.optim_func))
    except Exception as error:
        raise ModelError(
            "time_limit runs candidates on copies of the model, and this one cannot be copied",
            expected="a model, and an optimizer if it is built already, that copy.deepcopy copies",
            got=_describe_error(error),
            fix="leave time_limit out to choose by prediction, or give what cannot be copied a __deepcopy__",
        ) from error
    birth = request.birth and dataclasses.replace(request.birth, given=set(request.birth.given))
    return dataclasses.replace(request, model=model, optim_func=optim, birth=birth)


# --- Modules that the user's functions use beside the model, such as a loss with statistics


@contextlib.contextmanager
def restored_modules(modules: Iterable[nn.Module], model: nn.Module) -> Iterator[None]:
    """Restore attributes, tensors and gradients of modules on exit, from copies in host memory.

    Args:
        modules: Modules to restore, with their submodules. Sharded ones are left out: FSDP2 moves their tensors itself.
        model: Only its gradients and attributes are restored: it is not trained meanwhile, though a loss may read it.
    """
    modules = [each for each in modules if not any(isinstance(inside, FSDPModule) for inside in each.modules())]
    attributes, own = SavedAttributes(), set(model.parameters())
    every = {each: None for module in (*modules, model) for each in module.modules()}
    for module in every:
        attributes.save(module)
    parameters = {each: each.grad for module in every for each in module.parameters(recurse=False)}
    tensors = [each for each in (*parameters, *(b for m in modules for b in m.buffers())) if each not in own]
    values = [(tensor, local_tensor(tensor.detach()).to("cpu", copy=True)) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        attributes.restore()
        with torch.no_grad():
            for tensor, value in values:
                local_tensor(tensor).copy_(value)
        for parameter, gradient in parameters.items():
            parameter.grad = gradient


def modules_used_by(functions: Iterable[Any]) -> list[nn.Module]:
    """Return the modules that functions use: as a method's owner, a bound argument, or a closed-over or global name.

    Functions of the same file that they call are followed.

    Args:
        functions: Functions, methods, modules and partial functions that are called with a batch or an output.
    """
    found: dict[nn.Module, None] = {}
    seen: set[int] = set()
    waiting = list(functions)
    while waiting:
        each = waiting.pop()
        if isinstance(each, nn.Module):
            found[each] = None
        elif id(each) not in seen:
            seen.add(id(each))
            waiting.extend(_used_by(each))
    return list(found)


def _used_by(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, types.MethodType):
        owned = [each for each in vars(function.__self__).values() if isinstance(each, nn.Module)]
        return [function.__func__, *owned, *([function.__self__] if isinstance(function.__self__, nn.Module) else [])]
    if not isinstance(function, types.FunctionType):
        return []
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    closed = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            closed.append(cell.cell_contents)
    # Functions of other files belong to libraries, which use no modules of the user.
    same = [each for each in named if getattr(each, "__globals__", None) is function.__globals__]
    return [*closed, *same, *(each for each in named if isinstance(each, nn.Module))]
