"""One rank of one system: sets up, takes a first step, then trains when it is told to.

Commands come as lines of JSON on standard input, and what was measured leaves by a pipe of its own: the systems print
what they like.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from peers.case import Case, Step
from peers.systems import SYSTEMS

_BATCHES = 64  # then they come again


class Worker:
    def __init__(self, case: Case, system: str, reply: Any, started_s: float) -> None:
        self.case, self.system, self.reply, self.started_s = case, SYSTEMS[system], reply, started_s
        self.index = 0
        self.step: Step | None = None
        self.batches: list[torch.Tensor] = []

    def say(self, **message: Any) -> None:
        self.reply.write(json.dumps(message) + "\n")
        self.reply.flush()

    def start(self) -> None:
        """From the start of the process to the end of the first step."""
        self.step = self.system.setup(self.case)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.batches = self.case.batches(rank, world, _BATCHES)
        loss = self.train()
        self.wait()
        self.say(
            startup_s=time.time() - self.started_s,
            startup_cpu_s=time.process_time(),
            loss=loss.item(),
            strategy=getattr(self.step, "strategy", None),
        )

    def train(self) -> torch.Tensor:
        assert self.step is not None
        loss = self.step(self.batches[self.index % _BATCHES])
        self.index += 1
        return loss

    def turn(self, steps: int) -> None:
        """A few steps; ranks start together."""
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        losses = [self.train() for _ in range(steps)]
        self.wait()
        self.say(
            step_time_s=(time.perf_counter() - start) / steps,
            step_cpu_s=(time.process_time() - cpu) / steps,
            losses=[loss.item() for loss in losses],
        )

    def peak(self) -> None:
        """Most bytes of tensors that this rank holds in a step; on the CPU counted after each of torch's operations."""
        if self.case.device == "cuda":  # of a step, not of what trials and the start held
            torch.cuda.reset_peak_memory_stats()
        self.train()
        self.say(peak_memory_bytes=self._cuda_peak() if self.case.device == "cuda" else self._cpu_peak(),
                 resident_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # fmt: skip

    def _cuda_peak(self) -> int:
        self.wait()
        return torch.cuda.max_memory_allocated()

    def _cpu_peak(self) -> int:
        return self.live.peak

    def wait(self) -> None:
        if self.case.device == "cuda":
            torch.cuda.synchronize()


class Counting(Worker):
    """A process that is not timed: every tensor is counted from the first on."""

    def start(self) -> None:
        from tests.live_bytes import LiveBytes

        with LiveBytes() as self.live:
            super().start()

    def peak(self) -> None:
        import gc

        gc.collect()
        with self.live:
            self.live.peak = 0
            super().peak()


def commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    told = json.loads(sys.argv[1])
    reply = os.fdopen(told["reply"], "w")
    kind = Counting if told["counting"] else Worker
    worker = kind(Case(**told["case"]), told["system"], reply, told["started_s"])
    worker.start()
    for command in commands():
        if "turn" in command:
            worker.turn(command["turn"])
        elif "peak" in command:
            worker.peak()
        else:
            break
    os._exit(0)  # some systems wait for each other at the end, or say what they do not like


if __name__ == "__main__":
    main()
