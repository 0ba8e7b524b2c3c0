"""The training loop of ``meshwright train``: steps, checkpoints, and rank 0 telling what happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from meshwright.accelerated import StepResult
from meshwright.cli.observer import Observer
from meshwright.cli.report import print_report
from meshwright.cli.request import Options
from meshwright.cli.session import Session, open_session
from meshwright.optim import OuterOptimizer
from meshwright.runtime import gather_objects, peak_memory_bytes, print_rank, rank, shutdown_distributed


def train(options: Options) -> None:
    """Trains, as one rank of the world; collective.

    Raises:
        MeshwrightError: What ``open_session`` or a checkpoint raises.
    """
    session = open_session(options)
    run, start = session.prepared.config.run, session.state.step
    if start >= run.steps:
        print_rank(f"meshwright: {session.run_dir} is at step {start} of {run.steps} already: nothing to do")
        shutdown_distributed()
        return
    observer = Observer(session) if rank() == 0 else None
    with observer or contextlib.nullcontext():
        assert session.accelerated.dataloader is not None
        batches = iter(session.accelerated.dataloader)
        for step in range(start + 1, run.steps + 1):
            _step(session, observer, batches, is_first=step == start + 1)
            if step == run.steps and isinstance(session.accelerated.optim, OuterOptimizer):
                session.accelerated.optim.synchronize()  # else the end of the last block would be in no weights
            if step == run.steps or (run.checkpoint_every is not None and step % run.checkpoint_every == 0):
                session.store.save(session.state)
    peak_bytes = max(gather_objects(peak_memory_bytes(session.accelerated.device)))
    if observer is not None:
        print_report(session, observer.records, peak_bytes)
    shutdown_distributed()


def _step(session: Session, observer: Observer | None, batches: Iterator[Any], *, is_first: bool) -> None:
    """One optimizer step, counted and told."""
    accelerated, state = session.accelerated, session.state
    assert accelerated.optim is not None
    lr = float(accelerated.optim.param_groups[0]["lr"])
    started_s = time.perf_counter()
    if is_first:
        result, measured = accelerated.measured_step(next(batches))
    else:
        result, measured = accelerated.step(next(batches)), None
    state.step += 1
    state.samples_seen += session.prepared.config.run.batch_size
    if observer is not None:
        record = _record(session, result, lr, started_s)
        if measured is not None:
            observer.show_measured(measured)
        observer.show_step(record)


def _record(session: Session, result: StepResult, lr: float, started_s: float) -> dict[str, Any]:
    """One line of ``metrics.jsonl``."""
    loss, grad_norm = float(result.loss), float(result.grad_norm)  # waits for the device: only now is the step over
    step_time_s = time.perf_counter() - started_s
    return {
        "step": session.state.step,
        "loss": loss,
        "lr": lr,
        "grad_norm": grad_norm,
        "tokens_per_s": session.tokens_per_step / step_time_s,
        "step_time_s": step_time_s,
        "peak_memory_bytes": peak_memory_bytes(session.accelerated.device),
        "skipped": result.skipped,
        "mfu": _mfu(session, step_time_s),
    }


def _mfu(session: Session, step_time_s: float) -> float | None:
    """Model FLOPs utilisation, as PaLM defines it (Chowdhery et al. 2022): recomputed operations do not count."""
    accelerated, flops = session.accelerated, session.accelerated.plan.step.flops
    if flops is None or session.peak_flops_per_s is None:
        return None
    flops_per_step = flops * accelerated.num_micro_batches * accelerated.num_replicas
    return flops_per_step / (step_time_s * session.peak_flops_per_s)
