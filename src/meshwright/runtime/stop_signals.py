"""Stop signals: a signal becomes a decision of all ranks at the end of a step, while there is time to save."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from meshwright.runtime.agreement import smallest

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_CTRL_C_S = 2.0  # a terminal sends Ctrl-C to every process, and a launcher passes it on once more
_listening: list[StopSignals] = []  # in this process, the innermost last


class StopSignals:
    """A context in which SIGTERM and Ctrl-C request a stop instead of ending the process.

    Every rank calls :meth:`asked` after each step, or adds up :meth:`numbers` where ranks exchange something anyway
    (``Accelerated.add_up``) and looks :meth:`among` the sums. Once any rank has had a signal, all get the same answer,
    save and leave. A rank that has not left in time, because a step or a collective never ends, is ended. A second
    Ctrl-C ends it at once.

    Signals are read by a thread: the training thread may be waiting inside a collective, where Python handles none.

    Args:
        grace_s: Seconds from the first signal until the process is ended with status 128 + signal. Clusters that
            preempt a job give it 30 s as a rule, and torchrun gives its ranks as much.
    """

    def __init__(self, grace_s: float = 25.0) -> None:
        self._grace_s = grace_s
        self._signal = 0  # the first that came
        self._over = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # No other thread may install handlers.
        if threading.current_thread() is threading.main_thread():
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            # The handlers do nothing: what counts is the byte that comes out of the socket.
            self._before = {each: signal.signal(each, lambda *_: None) for each in _SIGNALS}
            _listening.append(self)
            threading.Thread(target=self._listen, name="meshwright-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self in _listening:
            _listening.remove(self)
            self._give_back(*_SIGNALS)
            with contextlib.suppress(OSError):
                self._reader.shutdown(socket.SHUT_RDWR)
            self._writer.close()

    def _give_back(self, *which: signal.Signals) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for each in which:
            signal.signal(each, self._before[each])

    def asked(self) -> int:
        """Return the signal that any rank was sent, 0 for none; collective, the same on every rank.

        The ranks wait for each other.
        """
        return -smallest([-self._signal])[0]

    def numbers(self) -> list[int]:
        """Return for each signal whether this rank was sent it; what ranks add up is for :meth:`among`."""
        return [int(self._signal == each) for each in _SIGNALS]

    @staticmethod
    def among(sums: Sequence[float]) -> int:
        """Return the signal that any rank was sent, 0 for none, of the sums of all ranks' :meth:`numbers`."""
        return max((each for each, total in zip(_SIGNALS, sums, strict=False) if total), default=0)

    def _listen(self) -> None:
        first_s = 0.0
        while received := self._reader.recv(1):
            number = received[0]
            if number not in _SIGNALS or self._over.is_set():
                continue
            if self._signal == 0:
                self._signal, first_s = number, time.monotonic()
                threading.Thread(target=self._count_down, daemon=True).start()
            elif number == signal.SIGINT and time.monotonic() - first_s > _SAME_CTRL_C_S:
                _end(number, "interrupted again: ended without a checkpoint")
        self._reader.close()

    def _count_down(self) -> None:
        if not self._over.wait(self._grace_s):
            name = signal.Signals(self._signal).name
            _end(self._signal, f"{self._grace_s:g} s after {name} the step has not ended, or its checkpoint: ended")


def _give_back_in_child() -> None:
    """Restore SIGTERM in forked children (pools, workers), whose signals are not the rank's.

    A Ctrl-C, which a terminal sends to all of them, still ends none: the rank needs them up to the end of a step.
    """
    while _listening:
        _listening.pop()._give_back(signal.SIGTERM)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_give_back_in_child)


def _end(number: int, why: str) -> None:
    """End the process from a thread, without any cleanup that could block."""
    print(f"meshwright: rank {os.environ.get('RANK', '0')} {why}", file=sys.stderr, flush=True)
    os._exit(128 + number)
