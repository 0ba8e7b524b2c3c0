"""Seconds that ``accelerate`` takes at the start of a run, by part, beside ``fully_shard`` written by hand.

2 processes build transformers' Llama of 48 layers (width 64), meet, and start: ``raw`` shards every block and the model
with ``fully_shard`` and builds AdamW; the others are ``accelerate`` under that strategy. Systems take turns. Each start
has processes of its own, since the first one imports what it needs, compiled already, as after an installation. Seconds
are wall time from the meeting until the slower rank is done; CPU time and parts are those of rank 0, which predicts for
all ranks.

    python benchmarks/startup.py [--layers N] [--rounds N] [--system NAME …] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.runtime.launch import inside_launcher, launch

STRATEGIES: dict[str, list[Any]] = {
    "fsdp": ["fsdp"],
    "data": [],
    "tensor": [("parallel_mode", {"tensor": 2}), "tensor_parallel"],
    "pipeline": [("parallel_mode", {"pipeline": 2}), "pipeline_parallel"],
}
SYSTEMS = ("raw", *STRATEGIES)
PARTS = {  # functions of training/accelerate.py
    "check": ("_smallest_memory", "_check_request"),
    "agree": ("check_alike", "difference_between_ranks"),
    "plan": ("_decide",),
    "apply": ("_apply",),
    "optimizer": ("_build_optimizer",),
}
OPTIM: dict[str, Any] = {"lr": 1e-3, "fused": True}


def build(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def raw(model: Any) -> None:
    """The start that a careful user writes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.optim.AdamW(model.parameters(), **OPTIM)


def ours(model: nn.Module, strategy: list[Any], parts: dict[str, float]) -> None:
    begun_s = time.perf_counter()
    accelerate = mw.accelerate
    parts["import"] = time.perf_counter() - begun_s
    module = sys.modules["meshwright.training.accelerate"]
    for part, names in PARTS.items():
        for name in names:
            setattr(module, name, timed(getattr(module, name), part, parts))
    ids = torch.ones(4, 32, dtype=torch.long)
    accelerate(
        model, torch.optim.AdamW, None, lambda inputs, output: output.logits.mean(), strategy=strategy,
        optim_args=OPTIM, sample_batch=ids, num_micro_batches=2 if "pipeline_parallel" in strategy else 1,
    )  # fmt: skip


def timed(function: Callable[..., Any], part: str, parts: dict[str, float]) -> Callable[..., Any]:
    def run(*args: Any, **keys: Any) -> Any:
        begun_s = time.perf_counter()
        try:
            return function(*args, **keys)
        finally:
            parts[part] = parts.get(part, 0.0) + time.perf_counter() - begun_s

    return run


class Collectives(TorchDispatchMode):
    """How often each collective of torch is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func.overloadpacket.__name__.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def start(system: str, layers: int, *, counts: bool) -> None:
    """Start once, and print the figures on rank 0."""
    torch.set_num_threads(1)
    mw.init_distributed(backend="gloo")
    model, parts = build(layers), dict[str, float]()
    dist.barrier()
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    collectives = Collectives()
    if counts:
        collectives.__enter__()
    raw(model) if system == "raw" else ours(model, STRATEGIES[system], parts)
    if counts:
        collectives.__exit__(None, None, None)
    took = torch.tensor([time.perf_counter() - begun_s])
    cpu_s = time.process_time() - begun_cpu_s
    dist.all_reduce(took, dist.ReduceOp.MAX)
    figures = {"seconds": took.item(), "cpu": cpu_s, "parts": parts, "collectives": collectives.calls}
    if mw.rank() == 0:
        print(json.dumps(figures), flush=True)
    mw.shutdown_distributed()


def started(system: str, layers: int, *further: str) -> dict[str, Any]:
    """Start once in new processes, which keep the modules that they compile; return the figures."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, __file__, "--start", system, "--layers", str(layers), *further]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(systems: Sequence[str], layers: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Let the systems take turns; return the medians of each, and the collectives of a start that is not timed."""
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    calls = {system: started(system, layers, "--counts")["collectives"] for system in systems}
    for _ in range(rounds):
        for system, every in found.items():
            every.append(started(system, layers))
    return {system: {**summary(every), "collectives": calls[system]} for system, every in found.items()}


def summary(every: list[dict[str, Any]]) -> dict[str, Any]:
    parts = {part: statistics.median(each["parts"][part] for each in every) for part in every[0]["parts"]}
    figures = {key: statistics.median(each[key] for each in every) for key in ("seconds", "cpu")}
    return {**figures, "fastest": min(each["seconds"] for each in every), "parts": parts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each system (default 5)")
    parser.add_argument("--system", choices=SYSTEMS, action="append", help="systems to start (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--start", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--counts", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start is not None:
        if not inside_launcher():
            return launch([__file__, *sys.argv[1:]], 2)
        start(given.start, given.layers, counts=given.counts)
        return 0
    figures = compare(given.system or SYSTEMS, given.layers, given.rounds)
    print(f"{'system':10}{'median':>9}{'fastest':>9}{'cpu':>8}   parts; collectives")
    for system, found in figures.items():
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in found["parts"].items())
        calls = ", ".join(f"{count} {name}" for name, count in found["collectives"].items())
        seconds = "".join(f"{found[key]:{width}.2f}s" for key, width in (("seconds", 8), ("fastest", 8), ("cpu", 7)))
        print(f"{system:10}{seconds}   {parts}; {calls}")
    if given.json is not None:
        given.json.write_text(json.dumps({"torch": torch.__version__, "systems": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
