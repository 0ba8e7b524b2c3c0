"""Trains a Llama of transformers, from random weights, on the Python standard library's sources byte by byte.

python examples/llama/llama.py
torchrun --nproc_per_node 2 examples/llama/llama.py
torchrun --nproc_per_node 8 examples/llama/llama.py --config path/to/config.json --batch-size 64 --seq-len 2048
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from meshwright.data import ByteTokenizer, GlobalOrder, TokenDataset, find_files, token_cache
from meshwright.lr_scheduler import warmup_decay

HERE = Path(__file__).parent


def build_model(config: str | Path = HERE / "config.json") -> nn.Module:
    """A causal language model of transformers with random weights, of any kind that the config says."""
    found = AutoConfig.from_pretrained(config, local_files_only=True)
    found.use_cache = False  # for generation; in training it only holds memory
    return AutoModelForCausalLM.from_config(found)


def text(seq_len: int) -> TokenDataset:
    """Sequences of bytes, int64 of shape (seq_len,), from the sources of the standard library."""
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
    return TokenDataset(token_cache(find_files("stdlib", HERE), ByteTokenizer(), cache_dir), seq_len)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    mw.init_distributed(seed=0)
    model, dataset = build_model(options.config), text(options.seq_len)
    job = mw.accelerate(
        model,
        torch.optim.AdamW,
        dataset,
        mw.loss.next_token_loss,
        strategy=options.strategy,  # None: Meshwright chooses
        prepare_input=lambda ids, device: {"input_ids": ids.to(device, non_blocking=True)},
        model_input_format="unpack_dict",
        optim_args={"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1},
        # An endless order, the same on any number of ranks; the batch is divided between them.
        dataloader_args={"batch_size": options.batch_size, "sampler": GlobalOrder(len(dataset), seed=0)},
        lr_scheduler_cls=warmup_decay,
        lr_scheduler_args={"num_steps": options.steps, "warmup_steps": options.steps // 10, "min_lr_ratio": 0.1},
        max_grad_norm=1.0,
    )
    mw.print_rank(f"{job.strategy}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    for step, batch in zip(range(1, options.steps + 1), job.dataloader, strict=False):
        result = job.step(batch)
        if step % 20 == 0 or step in (1, options.steps):
            mw.print_rank(f"step {step}/{options.steps}  loss {result.loss.item():.4f} nats per byte", flush=True)
    if options.save:
        mw.save(job.model, options.save)
    mw.shutdown_distributed()


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, launching = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=launching, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", default=HERE / "config.json", help="of a causal language model (default: config.json beside this)")
    add("--steps", type=int, default=300, help="optimizer steps (default: 300)")
    add("--batch-size", type=int, default=16, help="sequences per step over all ranks (default: 16)")
    add("--seq-len", type=int, default=128, help="bytes per sequence (default: 128)")
    add("--lr", type=float, default=4e-3, help="highest learning rate (default: 4e-3)")
    add("--strategy", help="such as \"fsdp + checkpoint + amp_native(dtype='bf16')\" (default: chosen)")
    add("--save", metavar="FILE", help="write the weights there in the end: an ordinary state dict")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
