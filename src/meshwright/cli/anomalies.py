"""Steps that do not reach the weights: written down with their samples, undone, or the end of the run."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from meshwright.accelerated import StepResult
from meshwright.cli.observer import Observer
from meshwright.cli.run_dir import ANOMALIES, append_line
from meshwright.cli.session import Session
from meshwright.data import GlobalOrder
from meshwright.errors import CheckpointError, LossSpikeError, UnsoundStepError
from meshwright.runtime import agreed, print_rank
from meshwright.store.choice import step_name
from meshwright.store.generators import generator_tensors, set_generators

_ROLLBACKS = 3
"""To one checkpoint, each with other batches behind it."""
_DONE = {"skip": "skipped", "warn": "taken", "rollback": "rolled back"}


class Anomalies:
    """What a training loop does about steps that ``skip_nonfinite`` and ``loss_spike`` object to.

    Args:
        session: Between two steps.
        observer: On rank 0; None on the others.
    """

    def __init__(self, session: Session, observer: Observer | None) -> None:
        self._session, self._observer = session, observer
        names = session.accelerated.strategy.names
        self._looks = "skip_nonfinite" in names or "loss_spike" in names
        self._generators = generator_tensors() if self._looks else {}
        self._rollbacks: dict[int, int] = {}  # by the step of the checkpoint

    def begin(self) -> None:
        """Before a step: if it ends the run, its random numbers have not been drawn."""
        if self._looks:
            self._generators = generator_tensors()

    def end(self, error: UnsoundStepError) -> None:
        """A step has ended the run: its samples are written down and the state before it is saved; collective."""
        session, state = self._session, self._session.state
        what = "loss spike" if isinstance(error, LossSpikeError) else "not finite"
        self._write(what, "stopped", state.step + 1, state.samples_seen, {"message": str(error)})
        set_generators(self._generators)
        try:
            session.store.wait()
        except CheckpointError as failed:  # of an earlier state: this one is to be saved all the same
            error.add_note(f"An earlier checkpoint is missing: {failed}")
        saved = session.store.newest()
        if saved is None or saved.name != step_name(state.step):
            saved = session.store.save(state)
        error.add_note(f"The state after step {state.step} is in {saved}, and the samples of step {state.step + 1} are")
        error.add_note(f"in {session.run_dir / ANOMALIES}.")

    def look(self, result: StepResult) -> bool:
        """After a step that was counted: writes it down where it did not reach the weights or was a spike.

        Returns:
            Whether the run went back to a checkpoint: collective then.
        """
        if not self._looks or not (result.skipped or result.spike):
            return False
        state, batch_size = self._session.state, self._session.prepared.config.run.batch_size
        told = {"loss": float(result.loss), "grad_norm": float(result.grad_norm)}
        what, done = "loss spike" if result.spike else "not finite", _DONE[result.spike or "skip"]
        self._write(what, done, state.step, state.samples_seen - batch_size, told)
        if result.spike != "rollback":
            return False
        self._roll_back()
        return True

    def _write(self, what: str, done: str, step: int, first: int, told: Mapping[str, object]) -> None:
        """The samples are indices into the dataset, null of a stream; ``first_sample`` is their position in the run."""
        if self._observer is None:
            return
        batch_size = self._session.prepared.config.run.batch_size
        order = self._session.order
        samples = order.samples(first, batch_size) if isinstance(order, GlobalOrder) else None  # a stream numbers none
        record = {"step": step, "what": what, "done": done, **told, "first_sample": first, "samples": samples}
        append_line(self._session.run_dir / ANOMALIES, record)

    def _roll_back(self) -> None:
        """Loads the newest checkpoint and goes on with the batches that come now: those in between are left out."""
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
        if self._observer is not None:
            self._observer.rewind(info.step)
        text = f"back from step {spiked} to step {info.step}; the batches in between are left out"
        print_rank(f"meshwright: {text}", file=sys.stderr, flush=True)

    def _error(self, what: str, fix: str) -> LossSpikeError:
        step = self._session.state.step
        error = LossSpikeError(
            f"A loss spike cannot be undone: {what}", expected="a checkpoint to go on from", got=f"step {step}", fix=fix
        )
        agreed(error)
        return error
