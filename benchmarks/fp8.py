"""fp8 against bf16: time, memory and loss of one model that trains in turns on the same text.

    python benchmarks/fp8.py                    a Llama of 1.2 B parameters on one GPU of sm 8.9 or above
    python benchmarks/fp8.py --layers 32 --dim 2560     about 3 B
    python benchmarks/fp8.py --tiny             on a CPU, 8 bits emulated: only the losses mean anything there

Each recipe trains beside bf16: two models, in turns of a few steps, so that a machine whose speed drifts slows both
alike. Two of the default size with their optimizer states take 36 GiB. Text: the Python standard library, byte by
byte. ``--compile`` compiles the blocks, without which the casts of ``delayed`` cost more than its products save on most
sizes. ``--json`` writes the figures of a recipe as soon as they are known.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw

BF16 = ("amp_native", "bf16")
TINY = {"dim": 64, "layers": 2, "heads": 4, "seq_len": 64, "batch": 8, "turns": 30, "steps": 10}
LAST = 5  # turns whose losses are averaged


@dataclass
class Variant:
    """One way to train, and what it has shown so far."""

    name: str
    job: mw.Accelerated
    losses: list[float] = field(default_factory=list)  # mean of every turn
    step_times_s: list[float] = field(default_factory=list)


def model_of(args: argparse.Namespace) -> nn.Module:
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.dim, intermediate_size=-(-args.dim * 8 // 3 // 64) * 64,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.heads,
        max_position_embeddings=args.seq_len, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def text_batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """(batch, seq_len) byte tokens, without end; the same for every variant."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(0, len(text) - args.seq_len, (args.batch,), generator=generator)
        yield torch.stack([text[start : start + args.seq_len] for start in starts.tolist()]).long()


def variant_of(name: str, args: argparse.Namespace) -> Variant:
    options = {"recipe": name, "exclude": "lm_head", "emulate": args.tiny}
    model = model_of(args)
    if args.compile:
        for block in model.model.layers:
            block.compile()
    return Variant(name, accelerated(model, [BF16] if name == "bf16" else [BF16, ("fp8", options)]))


def accelerated(model: nn.Module, strategy: list[Any]) -> mw.Accelerated:
    return mw.accelerate(
        model, torch.optim.AdamW, strategy=strategy, optim_args={"lr": 1e-3, "fused": True}, max_grad_norm=1.0,
        prepare_input=lambda ids, device: {"input_ids": ids.to(device), "labels": ids.to(device)},
        model_input_format="unpack_dict",
    )  # fmt: skip


def turn(variant: Variant, batches: list[torch.Tensor]) -> None:
    losses = []
    wait(variant.job.device)
    start = time.perf_counter()
    for batch in batches:
        losses.append(variant.job.step(batch).loss)
    wait(variant.job.device)
    variant.step_times_s.append((time.perf_counter() - start) / len(batches))
    variant.losses.append(torch.stack(losses).mean().item())


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(recipe: str, args: argparse.Namespace) -> dict[str, float]:
    """Figures of one recipe, which trains in turns with bf16."""
    pair = [variant_of(name, args) for name in ("bf16", recipe)]
    text = text_batches(args)
    for _ in range(args.turns):
        batches = [next(text) for _ in range(args.steps)]
        for variant in pair:
            turn(variant, batches)
    reference, own = (each.step_times_s[1:] for each in pair)  # the first turn warms up, and compiles
    loss_of_reference, loss = (statistics.mean(each.losses[-LAST:]) for each in pair)
    tokens = args.batch * args.seq_len
    return {
        "tokens_per_s": tokens / statistics.median(own),
        "tokens_per_s_bf16": tokens / statistics.median(reference),
        "speedup": statistics.median(theirs / ours for theirs, ours in zip(reference, own, strict=True)),
        "loss": loss,
        "loss_bf16": loss_of_reference,
        "loss_change": loss / loss_of_reference - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, 8 bits emulated")
    parser.add_argument("--recipes", default="delayed,tensorwise,rowwise")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    defaults = {"dim": 2048, "layers": 24, "heads": 16, "seq_len": 2048, "batch": 4, "turns": 12, "steps": 5}
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{value}, or {TINY[name]} with --tiny")
    args = parser.parse_args()
    for name, value in (TINY if args.tiny else defaults).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    mw.init_distributed()
    figures = {}
    for recipe in args.recipes.split(","):
        figures[recipe] = compare(recipe, args)
        text = "  ".join(f"{key} {value:.4g}" for key, value in figures[recipe].items())
        print(f"{recipe:<11}{text}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(figures, indent=2) + "\n")
        # The next two models take the place of these, which are reference cycles.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
