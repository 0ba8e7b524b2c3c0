"""The training loop of ``meshwright train``: steps, checkpoints, and rank 0 telling what happens."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from meshwright.accelerated import StepResult
from meshwright.cli.anomalies import Anomalies
from meshwright.cli.observer import Observer
from meshwright.cli.report import print_report
from meshwright.cli.request import Options
from meshwright.cli.session import Session, open_session
from meshwright.errors import UnsoundStepError
from meshwright.optim import OuterOptimizer
from meshwright.runtime import (
    StopSignals,
    gather_objects,
    peak_memory_bytes,
    print_rank,
    rank,
    shutdown_distributed,
)
from meshwright.runtime.watch import Watch

_ASK_REPLICAS_EVERY = 10


def train(options: Options) -> int:
    """Trains, as one rank of the world; collective.

    Returns:
        0, or 128 + the signal that ended the run early, after a checkpoint.

    Raises:
        MeshwrightError: What ``open_session`` or a checkpoint raises.
    """
    session = open_session(options)
    run, start = session.prepared.config.run, session.state.step
    if start >= run.steps:
        print_rank(f"meshwright: {session.run_dir} is at step {start} of {run.steps} already: nothing to do")
        shutdown_distributed()
        return 0
    observer = Observer(session) if rank() == 0 else None
    with observer or contextlib.nullcontext(), StopSignals(run.grace_s) as signals, Watch(run.hang_limit_s) as watch:
        stopped_by = _steps(session, observer, signals, watch)
    peak_bytes = max(gather_objects(peak_memory_bytes(session.accelerated.device)))
    if observer is not None:
        print_report(session, observer.records, peak_bytes)
    if stopped_by:
        name = signal.Signals(stopped_by).name
        print_rank(f"meshwright: stopped by {name} after step {session.state.step}, which is saved", file=sys.stderr)
    shutdown_distributed()
    return 128 + stopped_by if stopped_by else 0


def _steps(session: Session, observer: Observer | None, signals: StopSignals, watch: Watch) -> int:
    """Steps and checkpoints up to the end of the run, or to the signal that is returned."""
    run, start, accelerated = session.prepared.config.run, session.state.step, session.accelerated
    assert accelerated.dataloader is not None
    batches = iter(accelerated.dataloader)
    outer = accelerated.optim if isinstance(accelerated.optim, OuterOptimizer) else None
    anomalies = Anomalies(session, observer)
    while session.state.step < run.steps:
        watch.beat()
        anomalies.begin()
        try:
            result = _step(session, observer, batches, is_first=session.state.step == start)
        except UnsoundStepError as error:
            with watch.paused():
                anomalies.end(error)
            raise
        with watch.paused() if result.spike == "rollback" else contextlib.nullcontext():
            if anomalies.look(result):
                continue
        step = session.state.step
        is_last = step == run.steps
        # Replicas that meet rarely are not made to wait for each other after every step.
        asked = signals.asked() if outer is None or step % _ASK_REPLICAS_EVERY == 0 else 0
        if is_last and outer is not None:
            outer.synchronize()  # else the end of the last block would be in no weights
        if is_last or asked or (run.checkpoint_every is not None and step % run.checkpoint_every == 0):
            with watch.paused():
                session.store.save(session.state, non_blocking=run.background_checkpoints and not (is_last or asked))
        if asked and not is_last:
            return asked
    return 0


def _step(session: Session, observer: Observer | None, batches: Iterator[Any], *, is_first: bool) -> StepResult:
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
    return result


def _record(session: Session, result: StepResult, lr: float, started_s: float) -> dict[str, Any]:
    """One line of ``metrics.jsonl``."""
    loss, grad_norm = float(result.loss), float(result.grad_norm)  # waits for the device: only now is the step over
    step_time_s = time.perf_counter() - started_s
    samples = session.prepared.config.run.batch_size
    tokens = samples * session.tokens_per_sample if session.tokens_per_sample is not None else None
    return {
        "step": session.state.step,
        "loss": loss,
        "lr": lr,
        "grad_norm": grad_norm,
        "tokens_per_s": tokens / step_time_s if tokens is not None else None,
        "step_time_s": step_time_s,
        "peak_memory_bytes": peak_memory_bytes(session.accelerated.device),
        "skipped": result.skipped,
        "mfu": _mfu(session, step_time_s),
        "samples_per_s": samples / step_time_s,
    }


def _mfu(session: Session, step_time_s: float) -> float | None:
    """Model FLOPs utilisation, as PaLM defines it (Chowdhery et al. 2022): recomputed operations do not count."""
    accelerated, flops = session.accelerated, session.accelerated.plan.step.flops
    if flops is None or session.peak_flops_per_s is None:
        return None
    flops_per_step = flops * accelerated.num_micro_batches * accelerated.num_replicas
    return flops_per_step / (step_time_s * session.peak_flops_per_s)
