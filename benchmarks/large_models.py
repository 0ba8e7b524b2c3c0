"""Start-up of models of 70B and 405B parameters on 64 to 4096 pretended ranks, in one process that holds no weights.

torch's fake process group stands for the other ranks: it moves nothing. ``accelerate`` records the build, traces and
plans, checks, applies every method as rank 0 does it, and finds the elements that rank 0 would fill; parameters stay on
``meta``. Every case has a process of its own, whose highest resident size is told beside that before the model was
built. Collectives take no time here: what is measured is the work that one rank does by itself.

    python benchmarks/large_models.py [--case NAME …] [--json FILE]
    python benchmarks/large_models.py --model 70b --layers 8 --ranks 64 --strategy '["fsdp"]'
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
SIZES = {
    "70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "405b": {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
"""Llama 3's dimensions, as keys of transformers' LlamaConfig."""
TOKENS = 4096
PARTS = {
    "_conceive": "build", "_decide": "plan", "check_strategy": "check", "apply_strategy": "apply",
    "_build_optimizer": "optimizer",
}  # fmt: skip
"""The functions of ``training/accelerate.py`` that are timed."""


@dataclass(frozen=True)
class Case:
    """A model, a number of ranks, and a strategy as JSON; ``"null"`` lets the planner choose."""

    model: str
    ranks: int
    strategy: str
    layers: int | None = None


def mesh(**sizes: int) -> list[Any]:
    return ["parallel_mode", {"axes": [[name, size] for name, size in sizes.items()]}]


def case(model: str, ranks: int, *methods: Any, layers: int | None = None) -> Case:
    return Case(model, ranks, json.dumps(methods), layers)


SPLIT = ("tensor_parallel", "fsdp")
CASES = {
    "70b-fsdp": case("70b", 64, "fsdp"),
    "70b-tensor": case("70b", 64, mesh(tensor=8, zero=8), *SPLIT),
    "70b-pipeline": case("70b", 64, mesh(pipeline=8, zero=8), "pipeline_parallel", "zero1"),
    "405b-fsdp": case("405b", 512, "fsdp"),
    "405b-tensor": case("405b", 512, mesh(tensor=8, zero=64), *SPLIT),
    "405b-all": case(
        "405b", 512, mesh(tensor=8, pipeline=8, zero=8), "tensor_parallel", "pipeline_parallel", "zero1"
    ),
    "405b-chosen": Case("405b", 512, "null"),
    **{f"16-layers-fsdp-{ranks}": case("70b", ranks, "fsdp", layers=16) for ranks in (64, 512, 4096)},
    **{
        f"16-layers-hsdp-{ranks}": case("70b", ranks, mesh(zero=64, data=ranks // 64), "fsdp", layers=16)
        for ranks in (512, 4096)
    },
    **{
        f"16-layers-tensor-{ranks}": case("70b", ranks, mesh(tensor=8, zero=ranks // 8), *SPLIT, layers=16)
        for ranks in (64, 512, 4096)
    },
    **{
        f"16-layers-pipeline-{ranks}": case(
            "70b", ranks, mesh(tensor=8, pipeline=8, zero=ranks // 64), "tensor_parallel", "pipeline_parallel",
            "zero1", layers=16,
        )
        for ranks in (512, 4096)
    },
}  # fmt: skip


def resident_bytes(kind: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (the highest so far) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {kind} in /proc/self/status")


def timed(module: Any, seconds: dict[str, float]) -> None:
    """Let the parts of ``accelerate`` note how long they take."""

    def noting(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] = time.perf_counter() - start_s

        return run

    for name, part in PARTS.items():
        setattr(module, name, noting(getattr(module, name), part))


def measure(chosen: Case) -> dict[str, Any]:
    """Start one case in this process."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    import meshwright as mw
    from meshwright.training import accelerate as start

    sizes = SIZES[chosen.model] | ({} if chosen.layers is None else {"num_hidden_layers": chosen.layers})
    config = LlamaConfig(**sizes, max_position_embeddings=8192, use_cache=False)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=chosen.ranks)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    seconds: dict[str, float] = {}
    timed(start, seconds)
    before, start_s, start_cpu_s = resident_bytes("VmRSS"), time.perf_counter(), time.process_time()
    result = mw.accelerate(
        lambda: LlamaForCausalLM(config),
        torch.optim.AdamW,
        sample_batch={"input_ids": ids, "labels": ids},
        model_input_format="unpack_dict",
        strategy=json.loads(chosen.strategy),
        memory_limit="1000TB",
    )
    total_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    parameters = [each.to_local() if isinstance(each, DTensor) else each for each in result.model.parameters()]
    return {
        "case": asdict(chosen),
        "plan": result.plan.summary(),
        "gaps": result.plan.gaps,
        "whole_bytes": 4 * whole_numel(sizes),
        "local_numel": sum(each.numel() for each in parameters),
        "materialised_bytes": sum(each.nbytes for each in parameters if not each.is_meta),
        "seconds": {**seconds, "total": total_s, "cpu": cpu_s},
        "before_bytes": before,
        "peak_bytes": resident_bytes("VmHWM"),
    }


def whole_numel(sizes: dict[str, int]) -> int:
    """Return the number of a Llama's parameters."""
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer = 2 * width * width + 2 * width * keys + 3 * width * inner + 2 * width
    return sizes["num_hidden_layers"] * layer + 2 * sizes["vocab_size"] * width + width


def measured_apart(chosen: Case) -> dict[str, Any]:
    options = ["--model", chosen.model, "--ranks", str(chosen.ranks), "--strategy", chosen.strategy]
    options += [] if chosen.layers is None else ["--layers", str(chosen.layers)]
    done = subprocess.run([sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(found: dict[str, Any]) -> str:
    chosen, spent = found["case"], found["seconds"]
    layers = f", {chosen['layers']} layers" if chosen["layers"] else ""
    parts = " | ".join(f"{spent.get(part, 0.0):.1f}" for part in (*PARTS.values(), "total", "cpu"))
    layout = found["plan"].split(";")[0]
    held = f"{found['before_bytes'] / MIB:.0f} | {found['peak_bytes'] / MIB:.0f}"
    return f"| {chosen['model']}{layers} | {chosen['ranks']} | {layout} | {parts} | {held} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--model", choices=SIZES)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--strategy", default='["fsdp"]')
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.model is not None:
        print(json.dumps(measure(Case(options.model, options.ranks, options.strategy, options.layers))))
        return
    print(f"| model | ranks | layout | {' | '.join(f'{each} s' for each in (*PARTS.values(), 'total', 'CPU'))} "
          "| MiB before | MiB at most |")  # fmt: skip
    print("|" + "---|" * (len(PARTS) + 7), flush=True)
    results = []
    for name in options.case or CASES:
        results.append(measured_apart(CASES[name]))
        print(row(results[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
