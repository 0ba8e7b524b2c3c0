"""Trains LoRA adapters of peft around a frozen Llama of transformers on the Python standard library's sources.

    python examples/lora/lora.py
    torchrun --nproc_per_node 2 examples/lora/lora.py --save adapters
    torchrun --nproc_per_node 8 examples/lora/lora.py --base path/to/model --rank 16 --strategy fsdp --save adapters

Without --base the frozen weights are random ones: enough to see how it works, and all that there is without a download.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from meshwright.booster.lora import save_lora
from meshwright.data import ByteTokenizer, GlobalOrder, TokenDataset, find_files, token_cache
from meshwright.lr_scheduler import warmup_decay

HERE = Path(__file__).parent
CONFIG = HERE.parent / "llama" / "config.json"


def build_model(base: str | Path | None = None, config: str | Path = CONFIG, rank: int = 8) -> nn.Module:
    """A causal language model of transformers, frozen, with adapters of a rank around all of its linear layers.

    The head is one of them where it has weights of its own.

    Args:
        base: Folder of a trained model, such as ``meshwright checkpoint export`` writes; None: random weights.
        config: Of the model with random weights.
        rank: Inner dim of the adapters: each adds ``rank * (in_features + out_features)`` parameters.
    """
    if base is not None:
        model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True)
    else:
        # A head of its own: between frozen random weights nothing is learned without adapters around it.
        untied = AutoConfig.from_pretrained(config, local_files_only=True, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(untied)
    model.config.use_cache = False  # for generation; in training it only holds memory
    # peft freezes the base; only the adapters will have gradients and optimizer state.
    tied = model.config.tie_word_embeddings  # adapters around such a head would part it from the embedding
    targets = "all-linear" if tied else r".*(_proj|lm_head)"
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def text(seq_len: int) -> TokenDataset:
    """Sequences of bytes, int64 of shape (seq_len,), from the sources of the standard library."""
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
    return TokenDataset(token_cache(find_files("stdlib", HERE), ByteTokenizer(), cache_dir), seq_len)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    mw.init_distributed(seed=0)
    model, dataset = build_model(options.base, options.config, options.rank), text(options.seq_len)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    job = mw.accelerate(
        model,
        torch.optim.AdamW,
        dataset,
        mw.loss.next_token_loss,
        strategy=options.strategy,  # None: Meshwright chooses
        prepare_input=lambda ids, device: {"input_ids": ids.to(device, non_blocking=True)},
        model_input_format="unpack_dict",
        optim_args={"lr": options.lr, "weight_decay": 0.0},
        # An endless order, the same on any number of ranks; the batch is divided between them.
        dataloader_args={"batch_size": options.batch_size, "sampler": GlobalOrder(len(dataset), seed=0)},
        lr_scheduler_cls=warmup_decay,
        lr_scheduler_args={"num_steps": options.steps, "warmup_steps": options.steps // 10},
        max_grad_norm=1.0,
    )
    mw.print_rank(f"{job.strategy}: trains {trained:,} of {total:,} parameters", flush=True)
    for step, batch in zip(range(1, options.steps + 1), job.dataloader, strict=False):
        result = job.step(batch)
        if step % 20 == 0 or step in (1, options.steps):
            mw.print_rank(f"step {step}/{options.steps}  loss {result.loss.item():.4f} nats per byte", flush=True)
    if options.save:
        save_lora(job.model, options.save, use_safetensors=True)  # for peft.PeftModel.from_pretrained
    mw.shutdown_distributed()


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, launching = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=launching, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base", metavar="FOLDER", help="a trained model in transformers' format (default: random weights)")
    add("--config", default=CONFIG, help="of the model with random weights (default: the one of examples/llama)")
    add("--rank", type=int, default=8, help="inner dim of the adapters (default: 8)")
    add("--steps", type=int, default=300, help="optimizer steps (default: 300)")
    add("--batch-size", type=int, default=16, help="sequences per step over all ranks (default: 16)")
    add("--seq-len", type=int, default=128, help="bytes per sequence (default: 128)")
    add("--lr", type=float, default=3e-3, help="highest learning rate (default: 3e-3)")
    add("--strategy", help="such as \"fsdp + amp_native(dtype='bf16')\" (default: chosen)")
    add("--save", metavar="FOLDER", help="write the adapters there in the end, as peft reads them")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
