"""Bubble and memory of the pipeline schedules on 4 processes: measured, and as simulated.

Bubble: blocks that wait instead of computing (one unit in forward, one for the gradient of the input and one for that
of the weight), so that neither the number of cores nor other programs count: what is left is the order of the schedule,
the hidden states on their way, and the engine. Memory: bytes that autograd keeps at once on the first rank of a GPT,
and the same as a share of GPipe's.

    python benchmarks/pipeline.py [--micro-batches N] [--unit-ms MS] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.cost import memory
from meshwright.runtime.launch import inside_launcher, launch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt2"))

from gpt2 import GPT2
from schedule_bubble import bubble_fraction

RANKS, BLOCKS, STEPS = 4, 8, 3
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2, "dualpipev": 2}  # stages on a rank
GPT_SIZES = {"vocab_size": 257, "seq_len": 64, "dim": 64, "num_layers": BLOCKS, "num_heads": 4}


class Wait(torch.autograd.Function):
    """The identity, which takes some seconds in forward and some in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class WaitingBlock(nn.Module):
    """A linear layer whose every part takes one unit of time."""

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.unit_s = unit_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One unit here; one each for the gradients of input and weight."""
        return F.linear(Wait.apply(x, self.unit_s, self.unit_s), Wait.apply(self.weight, 0.0, self.unit_s))


class Waiting(nn.Module):
    """A model of nothing but such blocks."""

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WaitingBlock(unit_s) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs them."""
        for layer in self.layers:
            x = layer(x)
        return x


def job(model: nn.Module, schedule: str, micro_batches: int, loss: Any, sample: torch.Tensor) -> mw.Accelerated:
    strategy = [("parallel_mode", {"pipeline": RANKS}), ("pipeline_parallel", {"schedule": schedule})]
    return mw.accelerate(
        model, torch.optim.SGD, None, loss, strategy=strategy, optim_args={"lr": 1e-3},
        num_micro_batches=micro_batches, sample_batch=sample,
    )  # fmt: skip


def measured_bubble(schedule: str, micro_batches: int, unit_s: float) -> float:
    """The share of a step in which a rank does not compute; median over steps, of the slowest rank."""
    rows = torch.ones(micro_batches, 8)
    result = job(Waiting(unit_s), schedule, micro_batches, lambda x, out: out.square().mean(), rows[:1])
    result.step(rows)  # learns the shapes
    times = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        result.step(rows)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return 1 - 3 * unit_s * BLOCKS / RANKS * micro_batches / slowest.item()


class Held:
    """A tensor that autograd keeps; the bytes of all of them are counted while they live, shared storages once."""

    live: ClassVar[dict[int, tuple[int, int]]] = {}  # storage -> holders, bytes
    peak = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.key = tensor.untyped_storage().data_ptr()
        holders, _ = Held.live.get(self.key, (0, 0))
        Held.live[self.key] = (holders + 1, tensor.untyped_storage().nbytes())
        Held.peak = max(Held.peak, sum(size for _, size in Held.live.values()))

    def __del__(self) -> None:
        holders, size = Held.live[self.key]
        if holders > 1:
            Held.live[self.key] = (holders - 1, size)
        else:
            del Held.live[self.key]


def peak_activations(schedule: str, micro_batches: int) -> tuple[int, int]:
    """Bytes of activations that a rank keeps for backward at once, and as the plan predicts; weights do not count."""
    torch.manual_seed(0)
    ids = torch.randint(0, 257, (micro_batches, 64))
    result = job(GPT2(**GPT_SIZES), schedule, micro_batches, next_token, ids[:1])
    result.step(ids)
    weights = {p.untyped_storage().data_ptr() for p in result.model.parameters()}
    Held.live, Held.peak = {}, 0

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else Held(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor if isinstance(held, Held) else held):
        result.step(ids)
    return Held.peak, memory(result.plan.steps[dist.get_rank()]).activations or 0


def next_token(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=100.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not inside_launcher():
        sys.exit(launch([__file__, *sys.argv[1:]], RANKS))
    mw.init_distributed()
    torch.set_num_threads(1)
    figures: dict[str, dict[str, float]] = {}
    for schedule, stages in SCHEDULES.items():
        count = options.micro_batches
        kept, foreseen = peak_activations(schedule, count)
        figures[schedule] = {
            "bubble": measured_bubble(schedule, count, options.unit_ms / 1000),
            "bubble_simulated": bubble_fraction(schedule, RANKS, stages, count),
            "activation_bytes": kept,
            "activation_bytes_simulated": foreseen,
        }
        if mw.rank() == 0:
            report(schedule, figures[schedule], figures["gpipe"])
    if mw.rank() == 0 and options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def report(schedule: str, own: dict[str, float], gpipe: dict[str, float]) -> None:
    """One line of the table."""
    kept, foreseen = (own[key] / gpipe[key] for key in ("activation_bytes", "activation_bytes_simulated"))
    print(
        f"{schedule:12} bubble {own['bubble']:6.3f} (simulated {own['bubble_simulated']:.3f})   activations of rank 0 "
        f"{own['activation_bytes'] / 2**20:6.2f} MiB (simulated {own['activation_bytes_simulated'] / 2**20:.2f}), "
        f"/ gpipe {kept:.3f} (simulated {foreseen:.3f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
