"""Forward and backward of one micro-batch on one rank, with the gathers and reductions that run beside them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshwright.cost.timeline import Task, makespan_s

_PLAYED = 8  # of many blocks: after so many, each further one takes the same


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch by block, without those beside computing."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    outside_forward_s: float
    outside_backward_s: float
    gather_forward_s: float  # per block
    gather_backward_s: float  # per block
    reduce_s: float  # per block
    gather_outside_s: float  # of what is outside the blocks
    reduce_outside_s: float
    interference: float
    shared: float = 0.0
    gathers_ahead: bool = True  # in backward: while the block before computes, and not after it

    @property
    def forward_total_s(self) -> float:
        """Computing in forward."""
        return sum(self.forward_s) + self.outside_forward_s

    @property
    def backward_total_s(self) -> float:
        """Computing in backward."""
        return sum(self.backward_s) + self.outside_backward_s

    @property
    def compute_s(self) -> float:
        """Computing in both."""
        return self.forward_total_s + self.backward_total_s

    @property
    def all_gathers_s(self) -> float:
        """All gathers of forward and backward, were they alone."""
        return self.gather_outside_s + (self.gather_forward_s + self.gather_backward_s) * len(self.forward_s)

    @property
    def all_reductions_s(self) -> float:
        """All reductions, were they alone."""
        return self.reduce_outside_s + self.reduce_s * len(self.forward_s)


def pass_s(passes: Passes, *, gather: bool, reduce: bool) -> float:
    """Seconds of the micro-batch; of many blocks, the mean one is played a few times and then continued."""
    count = len(passes.forward_s)
    if not (gather and passes.all_gathers_s) and not (reduce and passes.all_reductions_s):
        return passes.compute_s
    if count <= _PLAYED:
        return makespan_s(pass_tasks(passes, gather=gather, reduce=reduce))
    forward, backward = sum(passes.forward_s) / count, sum(passes.backward_s) / count

    def of(blocks: int) -> float:
        fewer = dataclasses.replace(passes, forward_s=(forward,) * blocks, backward_s=(backward,) * blocks)
        return makespan_s(pass_tasks(fewer, gather=gather, reduce=reduce))

    few = of(_PLAYED)
    return few + (count - _PLAYED) * (few - of(_PLAYED - 1))


def pass_tasks(passes: Passes, *, gather: bool, reduce: bool) -> list[Task]:
    """The micro-batch as tasks on the streams ``compute`` and ``link``.

    Two blocks are whole at once: a gather waits for the computation of the block before the last.
    """
    tasks: list[Task] = []
    count = len(passes.forward_s)

    def add(name: str, stream: str, seconds: float, *after: int) -> int:
        tasks.append(Task(name, stream, seconds, tuple(index for index in after if index >= 0)))
        return len(tasks) - 1

    gathers = gather and passes.gather_forward_s > 0
    again = gather and passes.gather_backward_s > 0
    sends = passes.reduce_s if reduce else 0.0
    slowed_forward = _slowed(passes, passes.gather_forward_s if gathers else 0.0, sum(passes.forward_s))
    beside = (passes.gather_backward_s if again and passes.gathers_ahead else 0.0) + sends
    slowed_backward = _slowed(passes, beside, sum(passes.backward_s))
    before = add("gather outside", "link", passes.gather_outside_s) if gathers else -1
    computed: list[int] = []
    for index in range(count):
        ready = before
        if gathers:
            waits = computed[index - 2] if index >= 2 else -1
            ready = add(f"gather {index}", "link", passes.gather_forward_s, waits)
        computed.append(add(f"forward {index}", "compute", passes.forward_s[index] * slowed_forward, ready))
    add("forward outside", "compute", passes.outside_forward_s, before)
    last = add("backward outside", "compute", passes.outside_backward_s)
    done: list[int] = [last]
    order = list(reversed(range(count)))
    ready = add(f"gather {order[0]} again", "link", passes.gather_backward_s) if again and order else -1
    for turn, index in enumerate(order):
        # The next gather is issued before the reduction of this block: on one link it would else wait for it.
        following = order[turn + 1] if turn + 1 < count else None
        name = f"gather {following} again"
        after = -1
        if again and following is not None and passes.gathers_ahead:
            after = add(name, "link", passes.gather_backward_s, done[-1])
        done.append(add(f"backward {index}", "compute", passes.backward_s[index] * slowed_backward, ready))
        if again and following is not None and not passes.gathers_ahead:
            after = add(name, "link", passes.gather_backward_s, done[-1])
        if sends:
            add(f"reduce {index}", "link", sends, done[-1])
        ready = after
    if sends:
        add("reduce outside", "link", passes.reduce_outside_s, done[-1])
    return tasks


def _slowed(passes: Passes, per_block_s: float, compute_s: float) -> float:
    """Computing beside a collective shares memory and multiprocessors with it."""
    if compute_s <= 0:
        return 1.0
    busy = per_block_s * len(passes.forward_s) / compute_s
    return 1 + passes.interference * min(1.0, busy) + passes.shared * busy
