"""Held-out loss of every method that computes or communicates below fp32, against plain fsdp, on real text.

The task of ``comm.py``: a small GPT on the Python standard library's sources, byte by byte, on two ranks; the same
batches, AdamW, schedule and clipping for every variant. 8-bit products are emulated: they give the values of the
hardware, slowly.

    python benchmarks/convergence.py [--steps N] [--only NAME …] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.optim import AdamW8bit
from meshwright.runtime.launch import inside_launcher, launch

sys.path.insert(0, str(Path(__file__).parent))

from optimizer_curves import corpus

from comm import RANKS, few, train


def fp8(recipe: str, **keys: Any) -> tuple[str, dict[str, Any]]:
    return ("fp8", {"recipe": recipe, "emulate": True, "exclude": ("head",), **keys})


BF16 = ("amp_native", "bf16")
VARIANTS: dict[str, list[Any]] = {
    "fsdp": ["fsdp"],
    "amp_native bf16": ["fsdp", BF16],
    "half bf16": ["fsdp", ("half", "bf16")],
    "half fp16": ["fsdp", ("half", "fp16")],
    "amp_native bf16, fp8 delayed": ["fsdp", BF16, fp8("delayed", amax_history_len=16)],
    "amp_native bf16, fp8 tensorwise, gathered in fp8": ["fsdp", BF16, fp8("tensorwise", all_gather=True)],
    "comm int8 weights, int8 gradients": ["fsdp", few(all_gather="int8", reduce="int8")],
    "comm int8 weights, int4 gradients": ["fsdp", few(all_gather="int8", reduce="int4")],
    "amp_native bf16, comm int8 weights, int4 gradients": ["fsdp", BF16, few(all_gather="int8", reduce="int4")],
    "AdamW8bit": ["fsdp"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not inside_launcher():
        return launch([__file__, *sys.argv[1:]], RANKS)
    mw.init_distributed(backend="gloo")
    text, found = corpus(), dict[str, float]()
    for name in options.only:
        optimizer = AdamW8bit if name == "AdamW8bit" else torch.optim.AdamW
        found[name] = train(VARIANTS[name], options.steps, text, optimizer)["loss"]
        off = f" ({100 * (found[name] / found['fsdp'] - 1):+.2f} %)" if "fsdp" in found else ""
        mw.print_rank(f"{name:52} {found[name]:.4f}{off}", flush=True)
    if mw.rank() == 0 and options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
