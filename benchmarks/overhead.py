"""Step time of our ways to train over loops written by hand with torch's own parts, in interleaved runs.

``data``, ``zero2``, ``fsdp``, ``tensor`` and ``pipeline`` are ``Accelerated.step`` under that strategy, beside DDP,
``fully_shard``, ``parallelize_module`` and torch's 1F1B schedule; ``wrapped`` is BMTrain's way, a model of
``BMTrainModelWrapper`` with ``OptimManager`` and ``AdamOptimizer``, against ``fully_shard`` with recomputed blocks.

Same model, data, optimizer, clipping and threads; 2 processes. The two take turns, a few steps each, so that a machine
whose speed drifts slows both alike; the ratio is the median over all turns of (ours / raw). Beside it stand the least
processor time of a turn, by step, and the calls that Python makes in one step, of functions and of built-in ones, which
no other program disturbs. A loop within a built-in function is one call.

    python benchmarks/overhead.py [--rounds N] [--ranks N] [--json FILE]
    python benchmarks/overhead.py --tiny      48 blocks of width 8: next to nothing but Python
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from meshwright.runtime import settings, synchronize_device
from meshwright.runtime.launch import inside_launcher, launch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt2"))

from gpt2 import GPT2

SIZES = {"vocab_size": 257, "seq_len": 128, "dim": 256, "num_layers": 6, "num_heads": 4}
TINY = {"vocab_size": 16, "seq_len": 8, "dim": 8, "num_layers": 48, "num_heads": 2}
KINDS = ("data", "zero2", "fsdp", "tensor", "pipeline", "wrapped")
ALONE = ("data", "zero2", "fsdp", "wrapped")  # those that one rank can run
PIPELINED = 4  # micro-batches of a pipeline
BATCH, MAX_NORM, STEPS_PER_TURN = 4, 1.0, 4
OPTIM = {"lr": 1e-3, "fused": True}


def loss_func(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def build(device: torch.device, kind: str = "data") -> GPT2:
    torch.manual_seed(0)
    return GPT2(**SIZES, tie_weights=kind != "pipeline").to(device)


def raw(kind: str, device: torch.device) -> Callable[[torch.Tensor], None]:
    """The loop a careful user writes: DDP, or FSDP2 block by block, with torch's own clipping."""
    if kind in ("tensor", "pipeline"):
        return (raw_tensor if kind == "tensor" else raw_pipeline)(device)
    model: torch.nn.Module = build(device)
    if kind == "data":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        if kind == "wrapped":
            block_class = type(model.blocks[0])  # type: ignore[index]
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, block_class))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, reshard_after_forward=kind != "zero2")
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optim = torch.optim.AdamW(model.parameters(), **OPTIM)

    def step(ids: torch.Tensor) -> None:
        optim.zero_grad()
        loss_func(ids, model(ids)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optim.step()

    return step


def raw_tensor(device: torch.device) -> Callable[[torch.Tensor], None]:
    """Blocks split by torch's own styles. torch clips and updates plain parameters and DTensors only apart."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = build(device)
    for block in model.blocks:
        parallelize_module(
            block, mesh,
            {
                "attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel(),
                "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(),
            },
        )  # fmt: skip
    plain = [each for each in model.parameters() if not isinstance(each, DTensor)]
    split = [each for each in model.parameters() if isinstance(each, DTensor)]
    optim = torch.optim.AdamW([{"params": plain}, {"params": split}], **OPTIM)

    def step(ids: torch.Tensor) -> None:
        optim.zero_grad()
        loss_func(ids, model(ids)).backward()
        norms = [torch.nn.utils.get_total_norm([each.grad for each in group]) for group in (plain, split)]
        norm = torch.stack([norms[0], norms[1].full_tensor()]).norm()  # type: ignore[attr-defined]
        for group in (plain, split):
            torch.nn.utils.clip_grads_with_norm_(group, MAX_NORM, norm)
        optim.step()

    return step


class FirstHalf(torch.nn.Module):
    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding
        self.blocks = model.blocks[: len(model.blocks) // 2]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return x


class SecondHalf(torch.nn.Module):
    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[len(model.blocks) // 2 :], model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def raw_pipeline(device: torch.device) -> Callable[[torch.Tensor], None]:
    """torch's 1F1B over two stages cut by hand."""
    rank = dist.get_rank()
    part = (FirstHalf, SecondHalf)[rank](build(device, "pipeline"))
    stage = PipelineStage(part, rank, 2, device)
    schedule = Schedule1F1B(stage, PIPELINED, loss_fn=lambda logits, ids: loss_func(ids, logits))
    optim = torch.optim.AdamW(part.parameters(), **OPTIM)

    def step(ids: torch.Tensor) -> None:
        optim.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=losses)
        square = torch.nn.utils.get_total_norm([each.grad for each in part.parameters()]) ** 2
        dist.all_reduce(square)
        torch.nn.utils.clip_grads_with_norm_(part.parameters(), MAX_NORM, square.sqrt())
        optim.step()

    return step


def wrapped(device: torch.device) -> Callable[[torch.Tensor], None]:
    """The loop of BMTrain's README."""
    model = mw.BMTrainModelWrapper(build(device))
    optimizer = mw.optim.AdamOptimizer(model.parameters(), lr=1e-3, weight_decay=1e-2)
    manager = mw.optim.OptimManager()
    manager.add_optimizer(optimizer)

    def step(ids: torch.Tensor) -> None:
        manager.zero_grad()
        manager.backward(loss_func(ids, model(ids)))
        manager.clip_grad_norm(optimizer.param_groups, MAX_NORM)
        manager.step()

    return step


STRATEGIES: dict[str, list[Any]] = {
    "data": [],
    "tensor": [("parallel_mode", {"tensor": 2}), "tensor_parallel"],
    "pipeline": [("parallel_mode", {"pipeline": 2}), ("pipeline_parallel", {"schedule": "1f1b"}),
                 ("gradient_accumulation", PIPELINED)],
}  # fmt: skip


def ours(kind: str, device: torch.device) -> Callable[[torch.Tensor], None]:
    if kind == "wrapped":
        return wrapped(device)
    accelerated = mw.accelerate(
        build(device, kind),
        torch.optim.AdamW,
        None,
        loss_func,
        strategy=STRATEGIES.get(kind, [kind]),
        optim_args=OPTIM,
        sample_batch=torch.zeros(BATCH, SIZES["seq_len"], dtype=torch.long),
        max_grad_norm=MAX_NORM,
    )

    def step(ids: torch.Tensor) -> None:
        accelerated.step(ids)

    return step


def turn(step: Callable[[torch.Tensor], None], ids: torch.Tensor) -> tuple[float, float]:
    """Seconds per step of one turn, and those of this rank's processor; ranks start together."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(STEPS_PER_TURN):
        step(ids)
    synchronize_device(ids.device)
    return (time.perf_counter() - start) / STEPS_PER_TURN, (time.process_time() - cpu_start) / STEPS_PER_TURN


def calls(step: Callable[[torch.Tensor], None], ids: torch.Tensor) -> int:
    """Calls of functions, in Python and built in, that one step makes on this rank."""
    found = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step(ids)
    finally:
        sys.setprofile(None)
    return found


def compare(kind: str, rounds: int, device: torch.device) -> dict[str, float | str]:
    steps = {"raw": raw(kind, device), "ours": ours(kind, device)}
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, SIZES["seq_len"]), device=device)
    times: dict[str, list[float]] = {"raw": [], "ours": []}
    cpu: dict[str, list[float]] = {"raw": [], "ours": []}
    for index in range(rounds + 1):
        for name in ("raw", "ours") if index % 2 else ("ours", "raw"):
            elapsed, busy = turn(steps[name], ids)
            if index > 0:  # the first round warms up
                times[name].append(elapsed)
                cpu[name].append(busy)
    ratios = [mine / theirs for mine, theirs in zip(times["ours"], times["raw"], strict=True)]
    return {
        "case": kind,
        "raw_step_time_s": statistics.median(times["raw"]),
        "step_time_s": statistics.median(times["ours"]),
        "ratio": statistics.median(ratios),
        "raw_cpu_s": min(cpu["raw"]),
        "cpu_s": min(cpu["ours"]),
        "cpu_ratio": min(cpu["ours"]) / min(cpu["raw"]),
        "raw_calls": (raw_calls := calls(steps["raw"], ids)),
        "calls": (own := calls(steps["ours"], ids)),
        "calls_ratio": own / raw_calls,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns of each (default 20)")
    parser.add_argument("--only", action="append", choices=KINDS, help="only this one; may be repeated")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--tiny", action="store_true", help="48 blocks of width 8, where a step is nothing but Python")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if not inside_launcher():
        return launch([__file__, *sys.argv[1:]], arguments.ranks)
    if arguments.tiny:
        SIZES.update(TINY)
    mw.init_distributed()
    results = []
    mw.print_rank(
        f"{'strategy':10} {'raw':>9} {'ours':>9} {'ours / raw':>11} {'least CPU':>9} {'ours':>9} {'ours / raw':>11}"
        f" {'calls':>9} {'ours':>9} {'ours / raw':>11}"
    )
    for kind in arguments.only or (KINDS if mw.world_size() == 2 else ALONE):
        result = compare(kind, arguments.rounds, settings().device)
        results.append(result)
        mw.print_rank(
            f"{kind:10} {1e3 * float(result['raw_step_time_s']):7.1f}ms {1e3 * float(result['step_time_s']):7.1f}ms "
            f"{result['ratio']:11.3f} {1e3 * float(result['raw_cpu_s']):7.1f}ms {1e3 * float(result['cpu_s']):7.1f}ms "
            f"{result['cpu_ratio']:11.3f} {result['raw_calls']:9d} {result['calls']:9d} {result['calls_ratio']:11.3f}",
            flush=True,
        )
    if arguments.json and mw.rank() == 0:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "cases": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
