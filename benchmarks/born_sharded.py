"""Time how long a model takes to be there, sharded and with stored weights: ours, and the ways that others take.

    python benchmarks/born_sharded.py [--ranks 2 4] [--layers 22] [--turns 3] [--folder DIR] [--json FILE]

A Llama in fp32 (1.17 GB with 22 layers of width 1024) lies in a folder of safetensors as ``save_pretrained`` writes it.
Ranks on gloo take turns; a way's time is that of its slowest rank, and ratios are medians over turns.

read            each rank reads its share of the files' bytes once, and keeps them
ours            ``accelerate(function, weights=FOLDER, strategy="fsdp")``, planning included
ours, filling   the part of it that reads and fills the shards
whole           ``from_pretrained`` on every rank, then ``fully_shard`` on every block and on the model
dcp             ``fully_shard`` on meta, ``to_empty``, then ``torch.distributed.checkpoint`` with its reader of
                safetensors, as torchtitan does
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import meshwright as mw
from meshwright.methods.birth import Birth

WAYS = ("read", "ours", "whole", "dcp")


def build(layers: int) -> nn.Module:
    """The Llama; on meta, inside ``torch.device("meta")``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=16_000, use_cache=False))


# --- The ways: each returns what it has made, so that nothing is freed while it is timed


def read(folder: Path, layers: int) -> Any:
    """Read this rank's share of every file into memory of its own."""
    rank, world, kept = dist.get_rank(), dist.get_world_size(), []
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        at, end = size * rank // world, size * (rank + 1) // world
        kept.append(torch.empty(end - at, dtype=torch.uint8))
        left = memoryview(kept[-1].numpy())
        with file.open("rb", buffering=0) as opened:
            opened.seek(at)
            while left:
                left = left[opened.readinto(left) :]
    return kept


def ours(folder: Path, layers: int) -> Any:
    """Let ``accelerate`` build and fill the shards."""
    sample = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    return mw.accelerate(
        lambda: build(layers), torch.optim.AdamW, None, lambda _, output: output.logits.mean(), strategy=["fsdp"],
        sample_batch=sample, model_input_format="unpack_dict", weights=folder,
    )  # fmt: skip


def whole(folder: Path, layers: int) -> Any:
    """Read everything on every rank, and shard it."""
    from transformers import LlamaForCausalLM

    return _sharded(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))


def dcp(folder: Path, layers: int) -> Any:
    """Shard on meta, and let torch's distributed checkpoint read."""
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    with torch.device("meta"):
        model = _sharded(build(layers))
    model.to_empty(device="cpu")
    load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder)))
    return model


def _sharded(model: Any) -> nn.Module:
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return model


# --- Turns


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slowest rank, and what the function returns."""
    dist.barrier()
    started_s = time.perf_counter()
    made = function()
    taken = torch.tensor(time.perf_counter() - started_s)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item(), made


def measure(folder: Path, layers: int, turns: int) -> dict[str, Any]:
    """Medians over turns, of seconds and of ratios to reading alone."""
    filling, fill = [], Birth.fill

    def timed_fill(birth: Birth, model: nn.Module) -> None:
        filling.append(seconds(lambda: fill(birth, model))[0])

    Birth.fill = timed_fill  # type: ignore[method-assign]
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns + 1):  # the first, which imports and fills the page cache, is left out
        for way in WAYS:
            elapsed, made = seconds(lambda way=way: globals()[way](folder, layers))
            del made
            gc.collect()
            if turn:
                taken[way].append(elapsed)
    taken["ours, filling"] = filling[1:]
    ratios = {way: statistics.median(a / b for a, b in zip(taken[way], taken["read"], strict=True)) for way in taken}
    return {"seconds": {way: statistics.median(each) for way, each in taken.items()}, "of_reading": ratios}


def worker(arguments: argparse.Namespace) -> None:
    """Measure on one rank of a launched world; rank 0 prints JSON."""
    mw.init_distributed()
    found = measure(Path(arguments.folder), arguments.layers, arguments.turns)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)


def launch(num_ranks: int, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Start the ranks, and return what rank 0 has found."""
    options = ["--worker", "--folder", folder, "--layers", str(arguments.layers), "--turns", str(arguments.turns)]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", __file__, *options]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(done.stderr[-4000:])
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def main() -> None:
    """Write the folder, measure with every number of ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", help="with the model's weights, or to be written; a temporary one if left out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or temporary
        if not list(Path(folder).glob("*.safetensors")):
            build(arguments.layers).save_pretrained(folder, max_shard_size="300MB")  # type: ignore[operator]
        results = {ranks: launch(ranks, arguments, folder) for ranks in arguments.ranks}
    print("| ranks | way | seconds | / reading |\n|---|---|---|---|")
    for ranks, found in results.items():
        for way, taken in found["seconds"].items():
            print(f"| {ranks} | {way} | {taken:.2f} | {found['of_reading'][way]:.2f} |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
