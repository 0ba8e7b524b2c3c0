"""Trains GPT-2 on the Python standard library's sources, byte by byte, with the loop of BMTrain's README.

One rank, or as many as a launcher starts:

    python examples/gpt2/train.py
    torchrun --nproc_per_node 2 examples/gpt2/train.py
    torchrun --nproc_per_node 8 examples/gpt2/train.py --size 13b --dtype fp16 --optimizer offload
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from models import GPT
from sizes import SIZES, num_parameters
from torch import Tensor
from torch.utils.data import DataLoader

import meshwright as bmt
from meshwright.data import ByteTokenizer, GlobalOrder, ShardedSampler, TokenDataset, find_files, token_cache
from meshwright.runtime import peak_memory_bytes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMIZERS = {
    "adam": bmt.optim.AdamOptimizer,
    "offload": bmt.optim.AdamOffloadOptimizer,
    "torch": torch.optim.AdamW,
}
PADDING = -100


def main() -> None:
    options = parse_options()
    bmt.init_distributed(seed=options.seed, zero_level=options.zero_level)
    size = SIZES[options.size]
    bmt.print_rank(
        f"{options.size}: {num_parameters(**size):,} parameters, {options.dtype}; {bmt.world_size()} ranks, each "
        f"{options.batch_size} sequences of {options.seq_len} bytes per step",
        flush=True,
    )
    model = GPT(**size, bias=True, dtype=DTYPES[options.dtype])
    if options.load:
        bmt.load(model, options.load)
    else:
        bmt.init_parameters(model)
    train(model, options)
    if options.save:
        bmt.save(model, options.save)
        bmt.print_rank(f"saved {options.save}")
    bmt.shutdown_distributed()


def train(model: GPT, options: argparse.Namespace) -> None:
    device = next(model.parameters()).device
    batches = rank_batches(options, device)
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=PADDING)  # torch.nn.CrossEntropyLoss in less memory
    optimizer = OPTIMIZERS[options.optimizer](model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    lr_scheduler = bmt.lr_scheduler.Cosine(
        optimizer, start_lr=options.lr, warmup_iter=options.steps // 5, end_iter=options.steps
    )
    optim_manager = bmt.optim.OptimManager(loss_scale=1024 if options.dtype == "fp16" else None)
    optim_manager.add_optimizer(optimizer, lr_scheduler)

    step_time_s = bmt.utils.AverageRecorder()

    for iteration in range(1, options.steps + 1):
        started_s = time.perf_counter()
        enc_input, enc_length, targets = next(batches)
        pos = torch.arange(enc_input.size(1), device=device).repeat(enc_input.size(0), 1)
        logits = model(enc_input, pos, pos < enc_length[:, None])
        batch, seq_len, vocab_out_size = logits.size()
        loss = loss_func(logits.view(batch * seq_len, vocab_out_size), targets.view(batch * seq_len))
        global_loss = bmt.sum_loss(loss).item()  # the mean over all ranks, for the log

        optim_manager.zero_grad()
        optim_manager.backward(loss)
        grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        if options.inspect_every and iteration % options.inspect_every == 0:
            print_statistics(model)
        lr = lr_scheduler.current_lr
        optim_manager.step()

        step_time_s.record(time.perf_counter() - started_s)
        if iteration % options.log_every == 0 or iteration in (1, options.steps):
            tokens_per_s = bmt.world_size() * batch * seq_len / step_time_s.value
            bmt.print_rank(
                f"step {iteration}/{options.steps}  loss {global_loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.3f}  "
                f"loss scale {optim_manager.loss_scale:g}  {tokens_per_s:,.0f} tokens/s  "
                f"{peak_memory_bytes(device) / 2**20:,.0f} MiB",
                flush=True,
            )


def rank_batches(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless ``(enc_input, enc_length, targets)`` of this rank; other ranks get other sequences.

    Shapes (B, T), (B,) and (B, T). ``targets`` are the next bytes. Text from the middle of a file fills every
    sequence; texts of their own would be padded behind ``enc_length``, with ``PADDING`` as targets.
    """
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
    # The first run writes the bytes of all files into one; ranks that do so at the same time do not disturb each other.
    tokens = token_cache(find_files("stdlib", Path.cwd()), ByteTokenizer(), cache_dir)
    dataset = TokenDataset(tokens, options.seq_len + 1)
    order = ShardedSampler(GlobalOrder(len(dataset), options.seed), bmt.rank(), bmt.world_size())
    for window in DataLoader(dataset, options.batch_size, sampler=order, pin_memory=device.type == "cuda"):
        window = window.to(device, non_blocking=True)
        enc_length = window.new_full((len(window),), options.seq_len)
        yield window[:, :-1], enc_length, window[:, 1:].contiguous()


def print_statistics(model: GPT) -> None:
    """Every weight and gradient over all ranks; gradients are clipped, and still times the loss scale. Collective."""
    bmt.print_rank(bmt.inspect.format_summary(bmt.inspect.inspect_model(model, "*")), flush=True)


def parse_options() -> argparse.Namespace:
    summary, _, launching = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=launching, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="see sizes.py (default: tiny)")
    add("--steps", type=count, default=200, help="optimizer steps (default: 200)")
    add("--batch-size", type=count, default=8, help="sequences of each rank per step (default: 8)")
    add("--seq-len", type=count, help="bytes per sequence (default: as many as the size has positions)")
    add("--dtype", choices=DTYPES, default="fp32", help="type of weights and arithmetic (default: fp32)")
    add("--lr", type=float, default=4e-3, help="highest learning rate (default: 4e-3, for tiny)")
    add("--zero-level", type=int, choices=(1, 2, 3), default=3, help="what is sharded (default: 3, everything)")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="offload: states in host memory (default: adam)")
    add("--save", metavar="FILE", help="write the weights there in the end: an ordinary state dict")
    add("--load", metavar="FILE", help="begin with these weights instead of random ones")
    add("--seed", type=int, default=0, help="of weights and order of the data (default: 0)")
    add("--log-every", type=count, default=20, metavar="N", help="steps between lines of the log (default: 20)")
    add("--inspect-every", type=count, metavar="N", help="print statistics of weights and gradients every N steps")
    add("--local-rank", help=argparse.SUPPRESS)  # torch.distributed.launch passes it; the environment says the same
    options = parser.parse_args()
    max_distance = SIZES[options.size]["max_distance"]
    options.seq_len = options.seq_len or max_distance
    if options.seq_len > max_distance:
        parser.error(f"--seq-len {options.seq_len}: size {options.size} has {max_distance} positions")
    if options.optimizer == "torch" and options.dtype != "fp32":
        parser.error("--optimizer torch updates half weights in half precision, which loses small updates; use adam")
    return options


def count(text: str) -> int:
    """A number of things, 1 or more."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    main()
