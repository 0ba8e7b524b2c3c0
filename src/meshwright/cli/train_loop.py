"""Run the training loop of ``meshwright train``: steps, checkpoints, anomalies and rollbacks."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.cli.run_display import Observer, print_report
from meshwright.cli.run_failures import RunFailures
from meshwright.cli.run_files import ANOMALIES, FAILURES, PROFILE, append_line, append_unwritten
from meshwright.cli.session import Session, open_session
from meshwright.cli.train_options import Options
from meshwright.cli.validation import StoppedError
from meshwright.data import IndexOrder
from meshwright.errors import CheckpointError, LossSpikeError, UnsoundStepError
from meshwright.inspect import layer_norms
from meshwright.optim import OuterOptimizer
from meshwright.runtime import (
    StopSignals,
    agreed,
    largest,
    peak_memory_bytes,
    print_rank,
    rank,
    shutdown_distributed,
    world_size,
)
from meshwright.runtime.launch import restarts_left
from meshwright.runtime.lazy import settling
from meshwright.runtime.terminal import outliving_readers
from meshwright.runtime.watch import Watch
from meshwright.store.entries import generator_tensors, set_generators
from meshwright.store.manifest import step_name
from meshwright.training.accelerated import StepResult

if TYPE_CHECKING:
    from meshwright.training.step_profile import StepProfile

_ROLLBACKS = 3  # to one checkpoint, each followed by other batches
_DONE = {"skip": "skipped", "warn": "taken", "rollback": "rolled back"}


class Anomalies:
    """Records, and rolls back or saves, steps that ``skip_nonfinite`` and ``loss_spike`` report.

    Args:
        session: The run.
        observer: Rank 0's display; None on the others.
    """

    def __init__(self, session: Session, observer: Observer | None) -> None:
        self._session, self._observer = session, observer
        names = session.accelerated.strategy.names
        self._active = "skip_nonfinite" in names or "loss_spike" in names
        self._generators = generator_tensors() if self._active else {}
        self._rollbacks: dict[int, int] = {}  # by the step of the checkpoint

    def begin(self) -> None:
        """Save the generators before a step: if it ends the run, its random numbers must not count as drawn."""
        if self._active:
            self._generators = generator_tensors()

    def end(self, error: UnsoundStepError) -> None:
        """Record the samples of the step that ended the run, and save the state before it; collective."""
        session, state = self._session, self._session.state
        what = "loss spike" if isinstance(error, LossSpikeError) else "not finite"
        self._write(what, "stopped", state.step + 1, state.samples_seen, {"message": str(error)})
        set_generators(self._generators)
        try:
            session.store.wait()
        except CheckpointError as failed:  # of an earlier state: save this one all the same
            error.add_note(f"An earlier checkpoint is missing: {failed}")
        saved = session.store.newest()
        if saved is None or saved.name != step_name(state.step):
            saved = session.store.save(state)
        error.add_note(f"The state after step {state.step} is in {saved}, and the samples of step {state.step + 1} are")
        error.add_note(f"in {session.run_dir / ANOMALIES}.")

    def look(self, result: StepResult) -> bool:
        """Record a completed step that skipped its update or was a loss spike, and roll back where the method says so.

        Returns:
            Whether the run went back to a checkpoint, which is collective.
        """
        if not self._active or not (result.skipped or result.spike):
            return False
        state, batch_size = self._session.state, self._session.prepared.config.run.batch_size
        figures = {"loss": float(result.loss), "grad_norm": float(result.grad_norm)}
        what, done = "loss spike" if result.spike else "not finite", _DONE[result.spike or "skip"]
        self._write(what, done, state.step, state.samples_seen - batch_size, figures)
        if result.spike != "rollback":
            return False
        self._roll_back()
        return True

    def _write(self, what: str, done: str, step: int, first: int, figures: Mapping[str, object]) -> None:
        # ``samples`` are indices into the dataset, null for a stream; ``first_sample`` is their position in the run.
        if self._observer is None:
            return
        batch_size = self._session.prepared.config.run.batch_size
        order = self._session.order
        samples = order.samples(first, batch_size) if isinstance(order, IndexOrder) else None
        record = {"step": step, "what": what, "done": done, **figures, "first_sample": first, "samples": samples}
        append_line(self._session.run_dir / ANOMALIES, record)

    def _roll_back(self) -> None:
        """Load the newest checkpoint and continue with the next batches; those in between are skipped."""
        session, state = self._session, self._session.state
        spiked, seen = state.step, state.samples_seen
        now = state.extra, state.strategy
        if session.store.newest() is None:
            raise self._error("there is no checkpoint to go back to yet", "set run.checkpoint_every lower, or use skip")
        info = session.store.load(state)
        state.extra, state.strategy = now
        state.samples_seen = seen
        times = self._rollbacks[info.step] = self._rollbacks.get(info.step, 0) + 1
        if times > _ROLLBACKS:
            what = f"the run has gone back to step {info.step} {_ROLLBACKS} times, and the loss rose again"
            raise self._error(what, "resume from an earlier checkpoint, or with a lower learning rate")
        if session.snapshots is not None:
            session.snapshots.forget(state)
        if self._observer is not None:
            self._observer.rewind(info.step)
        text = f"back from step {spiked} to step {info.step}; the batches in between are skipped"
        print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)

    def _error(self, what: str, fix: str) -> LossSpikeError:
        step = self._session.state.step
        error = LossSpikeError(
            f"A loss spike cannot be undone: {what}", expected="a checkpoint to go on from", got=f"step {step}", fix=fix
        )
        agreed(error)
        return error


# --- Steps and checkpoints

_ASK_REPLICAS_EVERY = 10


def train(options: Options) -> int:
    """Train as one rank of the world; collective.

    Returns:
        0, or 128 + the signal that ended the run early, after a checkpoint.

    Raises:
        MeshwrightError: As ``open_session`` and saving do.
    """
    started_s = time.monotonic()
    with outliving_readers():
        session = open_session(options)
        try:
            return _run(session, time.monotonic() - started_s)
        finally:
            if session.lock is not None:
                session.lock.release()


def _run(session: Session, opening_s: float) -> int:
    """Train a session, which took so long to open, up to its end; return the exit status."""
    run, start = session.prepared.config.run, session.state.step
    if start >= run.steps:
        print_rank(f"meshwright: {session.run_dir} is at step {start} of {run.steps} already: nothing to do")
        shutdown_distributed()
        return 0
    observer = Observer(session) if rank() == 0 else None
    failures = observer.failures if observer is not None else RunFailures(session.run_dir, start)
    # With snapshots a false alarm costs seconds, and a restart, of which half are kept for what fails for certain. What
    # compiles may wait for other processes for long.
    compiles = "compile" in session.accelerated.strategy.names
    is_early = session.snapshots is not None and restarts_left(0.5) and not compiles
    restart_s = opening_s if is_early else None
    watching = Watch(run.hang_limit_s, failures.told, failures.hung, restart_s=restart_s)
    with observer or contextlib.nullcontext(), StopSignals(run.grace_s) as signals, watching as watch:
        with _profiled(session) as profile, settling() as settle:
            stopped_by = _steps(session, observer, signals, watch, failures, settle)
        if observer is not None and profile is not None:
            observer.show_profile(profile)
    (peak_bytes,) = largest([peak_memory_bytes(session.accelerated.device)])
    if observer is not None:
        print_report(session, observer.records, peak_bytes)
    if stopped_by:
        name = signal.Signals(stopped_by).name
        print_rank(f"meshwright: stopped by {name} after step {session.state.step}, which is saved", file=sys.stderr)
    if session.snapshots is not None:
        session.snapshots.close()  # what lasts is the checkpoint
    shutdown_distributed()
    return 128 + stopped_by if stopped_by else 0


def _profiled(session: Session) -> contextlib.AbstractContextManager[StepProfile | None]:
    """Profile the steps that ``run.profile`` names, if there are some ahead."""
    table, start = session.prepared.config.run.profile, session.state.step
    if table is None:
        return contextlib.nullcontext()
    first, last = (each - start for each in table.steps)
    if last < 1:
        text = f"steps {table.steps[0]} to {table.steps[1]} are over: nothing is profiled"
        print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)
        return contextlib.nullcontext()
    steps = max(first, 1), last
    return session.accelerated.profile(session.run_dir / PROFILE, steps, trace=table.trace, memory=table.memory)


def _steps(
    session: Session,
    observer: Observer | None,
    signals: StopSignals,
    watch: Watch,
    failures: RunFailures,
    settle: Callable[[], None],
) -> int:
    """Train and save up to the end of the run; return the signal that ended it early, or 0."""
    run, start, accelerated = session.prepared.config.run, session.state.step, session.accelerated
    assert accelerated.dataloader is not None
    batches = iter(accelerated.dataloader)
    outer = accelerated.optim if isinstance(accelerated.optim, OuterOptimizer) else None
    anomalies = Anomalies(session, observer)
    sums = accelerated.add_up(signals.numbers)  # they come with the loss: no rank waits for others after a step
    while session.state.step < run.steps:
        watch.beat()
        anomalies.begin()
        is_first = session.state.step == start
        try:
            result = _step(session, observer, batches, is_first=is_first)
        except UnsoundStepError as error:
            with watch.paused():
                anomalies.end(error)
            raise
        if is_first:
            watch.warm()
            settle()  # all that lasts has been made
        _check_finite(session, failures, result)
        with watch.paused() if result.spike == "rollback" else contextlib.nullcontext():
            if anomalies.look(result):
                continue
        step = session.state.step
        session.callbacks.call("on_step", step, result)
        if run.norms_every is not None and step % run.norms_every == 0:
            norms = layer_norms(accelerated.model)
            if observer is not None:
                observer.show_norms(norms)
        is_last = step == run.steps
        # With an outer optimizer replicas synchronize rarely, and do not hear of each other's signals by the loss.
        asked = signals.among(sums()) if outer is None else signals.asked() if step % _ASK_REPLICAS_EVERY == 0 else 0
        if is_last and outer is not None:
            outer.synchronize()  # otherwise the last local steps would be lost
        # Who is asked to stop has little time, and a checkpoint to write: also within a validation, which may be long.
        over = False
        try:
            over = not asked and _validated(session, observer, signals, watch, is_last=is_last)
        except StoppedError:
            asked = signals.asked()
        ends = is_last or over or bool(asked)
        if ends or (run.checkpoint_every is not None and step % run.checkpoint_every == 0):
            _save(session, watch, failures, is_last=ends)
        if not ends and session.snapshots is not None:
            session.snapshots.take(session.state)
        if ends:
            session.callbacks.call("on_stop", step)
            return 0 if is_last or over else asked
    return 0


def _check_finite(session: Session, failures: RunFailures, result: StepResult) -> None:
    """Go back to the state before a step that is not finite, where there are snapshots."""
    if session.snapshots is None or result.skipped or result.spike is not None:
        return
    loss, grad_norm = float(result.loss), float(result.grad_norm)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        failures.not_finite(session.state.step, loss, grad_norm)


def _save(session: Session, watch: Watch, failures: RunFailures, *, is_last: bool) -> None:
    with watch.paused():
        in_background = session.prepared.config.run.background_checkpoints and not is_last
        try:
            path = session.store.save(session.state, non_blocking=in_background)
        except CheckpointError as error:
            # With snapshots a disk that is full for a while is no reason to end: the next checkpoint is tried again.
            if session.snapshots is None or is_last or not getattr(error, "agreed", False):
                raise
            failures.not_saved(session.state.step, error)
            return
    append_unwritten(session.run_dir / FAILURES)  # there is room again
    session.callbacks.call("on_checkpoint", session.state.step, path)


def _validated(
    session: Session, observer: Observer | None, signals: StopSignals, watch: Watch, *, is_last: bool
) -> bool:
    """Validate and write samples if it is time to; return whether the run shall end early. Collective.

    Raises:
        StoppedError: On every rank, when one was asked to stop.
    """
    validation, step, config = session.validation, session.state.step, session.prepared.config
    if step % config.eval.every and step != config.run.steps:
        return False
    if session.samples is not None:
        with watch.paused():
            texts = session.samples.write()
        if observer is not None:
            observer.show_samples(texts)
    if validation is None:
        return False
    with watch.paused():
        shown = observer.show_validating if observer is not None else None
        result = validation.run(shown, lambda: signals.asked() != 0)
    if observer is not None:
        observer.show_validation(result)
    session.callbacks.call("on_eval", step, result.figures())
    if validation.is_over and not is_last:
        text = f"the validation loss has not been lower for {validation.without_a_lower} times: the run ends here"
        print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)
    return validation.is_over


def _step(session: Session, observer: Observer | None, batches: Iterator[Any], *, is_first: bool) -> StepResult:
    """Take one optimizer step, count it and show it."""
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
    load = accelerated.expert_load
    imbalance = load.imbalance() if load is not None else None  # collective; only reading it waits
    if observer is not None:
        record = _record(session, result, lr, started_s)
        if imbalance is not None:
            record["expert_imbalance"] = float(imbalance)
        if measured is not None:
            observer.show_measured(measured)
        observer.show_step(record)
    return result


def _record(session: Session, result: StepResult, lr: float, started_s: float) -> dict[str, Any]:
    """Return the step's line of ``metrics.jsonl``."""
    # Reading the loss waits for the device: only then is the step over.
    loss, grad_norm = float(result.loss), float(result.grad_norm)
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
        "time_s": time.time(),
    }


def _mfu(session: Session, step_time_s: float) -> float | None:
    """Return the model FLOPs utilisation of PaLM (Chowdhery et al. 2022), without recomputed operations."""
    accelerated, plan = session.accelerated, session.accelerated.plan
    known = [step.flops for step in plan.steps or (plan.step,) if step.flops is not None]
    if len(known) < max(len(plan.steps), 1) or session.peak_flops_per_s is None:
        return None
    of_a_rank = sum(known) / len(known) * accelerated.num_micro_batches
    flops_per_s = of_a_rank * world_size() / step_time_s
    if accelerated.device.type == "cpu":
        # A CPU's peak was measured, in fp32 and beside whatever else ran: what a step reaches is no more than the peak.
        session.peak_flops_per_s = max(session.peak_flops_per_s, flops_per_s)
    return flops_per_s / session.peak_flops_per_s
