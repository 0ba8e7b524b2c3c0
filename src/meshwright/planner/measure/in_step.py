"""What a step adds to its parts: the same kernels and collectives, timed alone and inside training steps.

A kernel timed alone finds its memory allocated and its ranks in step; in a training step memory comes and goes, shards
are copied in and out of one buffer, and a collective that blocks wait for begins when the last rank arrives. Small
models, not those that are predicted later, tell by how much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from meshwright.cost import Cluster
from meshwright.cost.rank import rank_of
from meshwright.distributed.benchmark import benchmark_operation
from meshwright.distributed.members import members_of
from meshwright.planner.measure.timing import Clock, Timing, calls_of, slowest, time_together, together
from meshwright.planner.workload import Workload
from meshwright.runtime import Settings, gather_objects, world_size
from meshwright.strategy import Strategy

_HEAD_WIDTH, _DEPTH = 64, 3
_LAYERS, _LINEARS = 4, 3  # of the sharded stack
_REPEATED = 8  # collectives that are waited for, in one run
_TURNS = 5


class _Layer(nn.Module):
    """A transformer's, in its plainest form."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD_WIDTH
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states, ``(samples, tokens, width)``."""
        parts = self.taken(self.before(hidden)).unflatten(-1, (3, self.heads, _HEAD_WIDTH)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.given(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.behind(hidden))))


def _loss(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return model(hidden).square().mean()


def kernels_in_step(now: Settings, cluster: Cluster, clock: Clock, window_s: float) -> float:
    """Seconds of a small model's forward and backward over those predicted; the ranks run side by side. Collective."""
    shapes = ((1024, 2, 1024), (2048, 2, 2048)) if now.device.type == "cuda" else ((320, 8, 128), (512, 4, 256))
    ratios = []
    for width, samples, tokens in shapes:
        model = nn.Sequential(*(_Layer(width) for _ in range(_DEPTH))).to(now.device)
        hidden = torch.randn(samples, tokens, width, device=now.device)

        def run(model: nn.Module = model, hidden: torch.Tensor = hidden) -> None:
            model.zero_grad(set_to_none=True)
            _loss(model, hidden).backward()

        measured_s = _seconds(run, now, clock, window_s)
        ratios.append(measured_s / _predicted_s(model, hidden, now, cluster))
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _predicted_s(model: nn.Module, hidden: torch.Tensor, now: Settings, cluster: Cluster) -> float:
    assert cluster.calibration is not None
    alone = Workload(
        model, now.device, torch.optim.SGD, lambda samples: hidden[:samples], _loss, len(hidden), 1, 1, 0, None
    )
    return rank_of(alone.plan(Strategy(())).step, cluster, cluster.calibration).passes.compute_s


def shards_in_step(now: Settings, clock: Clock) -> float:
    """Seconds that ``fully_shard`` adds to steps of next to no computing, over its bare collectives'. Collective."""
    width = 4096 if now.device.type == "cuda" else 512
    hidden = torch.randn(8, width, device=now.device)
    mesh = init_device_mesh(now.device.type, (world_size(),))

    def stack(*, sharded: bool) -> Callable[[], None]:
        layers = [nn.Sequential(*(nn.Linear(width, width) for _ in range(_LINEARS))) for _ in range(_LAYERS)]
        model = nn.Sequential(*layers).to(now.device)
        for part in (*layers, model) if sharded else ():
            fully_shard(part, mesh=mesh)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            _loss(model, hidden).backward()

        return run

    message = torch.zeros(_LINEARS * width * (width + 1) // world_size() * world_size(), device=now.device)
    gather, scatter = (
        benchmark_operation(kind, message, members_of(None)) for kind in ("all_gather", "reduce_scatter")
    )

    def bare() -> None:
        # Forward and backward gather every layer; the last stays gathered in between.
        for _ in range(2 * _LAYERS - 1):
            gather()
        for _ in range(_LAYERS):
            scatter()

    return _beyond(stack(sharded=False), stack(sharded=True), bare, now, clock)


def waits_in_step(now: Settings, clock: Clock) -> float:
    """Seconds of all-reduces that computing waits for, over those of bare ones. Collective."""
    rows, width = (8192, 4096) if now.device.type == "cuda" else (1024, 512)
    left, right = torch.ones(rows, width, device=now.device), torch.ones(width, width, device=now.device)
    reduce = benchmark_operation("all_reduce", torch.zeros(rows, width, device=now.device), members_of(None))

    def repeat(*parts: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(_REPEATED):
                for part in parts:
                    part()

        return run

    def computing() -> None:
        F.gelu(left @ right)

    return _beyond(repeat(computing), repeat(computing, reduce), repeat(reduce), now, clock)


def _beyond(
    without: Callable[[], None], with_them: Callable[[], None], bare: Callable[[], None], now: Settings, clock: Clock
) -> float:
    """What collectives add to a step over what they take alone, never less than that; the three take turns."""
    runs = (without, with_them, bare)
    for run in runs:
        run()
    turns = [[slowest(gather_objects(_once(run, now.device))).of(clock) for run in runs] for _ in range(_TURNS)]
    return max(statistics.median((both - alone) / link for alone, both, link in turns), 1.0)


def _once(run: Callable[[], None], device: torch.device) -> Timing:
    together()
    return calls_of(run, device, 1)


def _seconds(run: Callable[[], None], now: Settings, clock: Clock, window_s: float) -> float:
    return slowest(gather_objects(time_together(run, now.device, window_s=window_s, windows=_TURNS))).of(clock)
