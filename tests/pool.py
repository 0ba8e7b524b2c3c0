"""Living worker processes for tests across ranks: torch is imported once, not once per test."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests import on_device

_CALL_TIMEOUT_S = 180.0
_STRAGGLER_TIMEOUT_S = 20.0  # how long the others may go on after one rank has failed
_KILLED = (-9, 255)  # by SIGKILL; with the fork server, which alone knows how its workers end
_CRASHED = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)  # in native code
_UNCONNECTED = "Gloo connectFullMesh failed"
_EXIT_TIMEOUT_S = 5.0  # between the end of a worker's pipe and that of the worker
_CALLS_IN_A_WORLD = 8  # gloo polls for every process group that was ever made, a hundred times a second
_PAUSES = sys.platform == "linux"  # where the kernel ends paused workers with their parent, whatever ended it
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class RemoteFailure(AssertionError):
    """A worker raised: carries its traceback."""


class _Killed(RemoteFailure):
    """Something outside killed a worker."""


class _Crashed(RemoteFailure):
    """A worker died in native code: of a damaged heap, or of memory that is not its own."""


class _Unconnected(RemoteFailure):
    """A rank's connection to another was lost while gloo made a group."""


class Crash(UserWarning):
    """Tell of a failure below Python, in native code or between sockets, that did not come again."""


class Pool:
    """``size`` gloo ranks that stay alive between calls, paused; rebuilt after a call that failed or hung.

    Paused, since gloo's threads poll between calls, too: four idle ranks take a tenth of two cores.
    """

    def __init__(self, size: int, timeout_s: float = _CALL_TIMEOUT_S, device: str = "cpu") -> None:
        self.size, self._timeout_s, self._device = size, timeout_s, device
        self._workers: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._calls = 0  # in this world

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Runs a module-level function on every rank; returns one result per rank, in rank order."""
        try:
            return self._run(function, *args, **kwargs)
        except _Killed:  # by the system, not by the test: the fork server takes all workers with it
            return self._run(function, *args, **kwargs)
        except (_Crashed, _Unconnected) as failure:
            # glibc has found a damaged heap in a thread of gloo twice in some ten million collectives, without a trace
            # of who damaged it; a group's listener once closed the connection it waited for, and waited on. What fails
            # so always fails; what does not is told, with the stacks of all threads.
            result = self._run(function, *args, **kwargs)
            name = getattr(function, "__name__", function)
            how = "crashed" if isinstance(failure, _Crashed) else "found ranks unconnected"
            warnings.warn(f"{name} {how} and was run again: {failure}", Crash, 2)
            return result

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if not all(worker.is_alive() for worker in self._workers):
            self.stop()
        if not self._workers:
            self._start()
        if self._calls == _CALLS_IN_A_WORLD:
            self._calls = 0
            self._call(leave_world, free_port())
        self._calls += 1
        return self._call(function, *args, **kwargs)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        self._signal("SIGCONT")
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = self._collect()
        self._signal("SIGSTOP")
        errors = [(rank, answer[1]) for rank, answer in enumerate(answers) if answer and not answer[0]]
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        ends = [worker.exitcode for worker in self._workers]
        if silent or errors:
            self.stop()  # groups may be out of step, or a rank dead: one failure stays one
        if errors:
            others = "".join(f"rank {rank}, too: …{text[-600:]}" for rank, text in errors[1:])
            unheard = f"ranks {silent} did not answer\n" if silent else ""
            text = f"rank {errors[0][0]} of {self.size} failed:\n{errors[0][1]}{others}{unheard}"
            died = _Killed if any(end in _KILLED for end in ends) else None
            died = _Crashed if any(end in _CRASHED for end in ends) else died
            lost = _Unconnected if any(_UNCONNECTED in error for _, error in errors) else RemoteFailure
            raise (died or lost)(text)
        if silent:
            raise RemoteFailure(f"ranks {silent} of {self.size} did not answer")
        return [answer[1] for answer in answers if answer]

    def _signal(self, name: str) -> None:
        for worker in self._workers if _PAUSES else ():
            if worker.pid is not None and worker.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, getattr(signal, name))

    def _collect(self) -> list[tuple[bool, Any] | None]:
        answers: list[tuple[bool, Any] | None] = [None] * self.size
        deadline = time.monotonic() + self._timeout_s
        while None in answers and time.monotonic() < deadline:
            waiting = [pipe for pipe, answer in zip(self._pipes, answers, strict=True) if answer is None]
            for pipe in wait(waiting, timeout=1.0):
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self._workers[rank].join(_EXIT_TIMEOUT_S)
                    answers[rank] = (False, f"the process died with exit code {self._workers[rank].exitcode}\n")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _STRAGGLER_TIMEOUT_S)
        return answers

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        atexit.register(self.stop)  # before multiprocessing's own, which would wait for paused workers
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, rank, self.size, port, self._device), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)

    def stop(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers, self._pipes, self._calls = [], [], 0
        atexit.unregister(self.stop)


def leave_world(port: int) -> None:
    """Lets go of all process groups that tests have made; the next call makes a world anew, at another port."""
    from meshwright.runtime import shutdown_distributed

    shutdown_distributed()
    os.environ["MASTER_PORT"] = str(port)


def free_port() -> int:
    """A port nobody listens on, below those that the system hands out: no connection will take it meanwhile."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):  # not that of a process with the same seed
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("100 ports are taken")


def _serve(pipe: Connection, rank: int, size: int, port: int, device: str) -> None:
    if _PAUSES:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    faulthandler.enable()  # where a worker was that died of a signal
    import torch

    torch._C._set_print_stack_traces_on_fatal_signal(True)  # and where its threads were that are not Python's

    import meshwright.runtime as runtime

    torch.set_num_threads(1)
    with on_device.rank_of_pool(device, size) as backend:
        while True:
            try:
                function, args, kwargs = pipe.recv()
            except EOFError:
                return
            try:
                runtime.init_distributed(backend=backend, timeout_s=120.0)
                runtime.seed_everything(0)
                result = function(*args, **kwargs)
                if torch.distributed.is_initialized():
                    torch.distributed.barrier()
                gc.collect()  # before the answer: paused after it, ranks would begin their next call with it, unevenly
                pipe.send_bytes(on_device.packed((True, result)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
