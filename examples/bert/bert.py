"""Trains a BERT of transformers, from random weights, to fill in masked bytes of the Python standard library's sources.

python examples/bert/bert.py
torchrun --nproc_per_node 2 examples/bert/bert.py
torchrun --nproc_per_node 8 examples/bert/bert.py --config path/to/config.json --batch-size 256 --strategy zero2
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForMaskedLM

import meshwright as mw
from meshwright.data import ByteTokenizer, GlobalOrder, TokenDataset, find_files, token_cache
from meshwright.lr_scheduler import warmup_decay

HERE = Path(__file__).parent
MASK = 257  # bytes are 0 to 255, the end of a text is 256
IGNORED = -100  # the label of a place that is not to be predicted


class MaskedText(Dataset):
    """Sequences of which 15 % of the places are to be predicted: ``input_ids`` and ``labels``, int64 of shape (T,).

    Of these places 80 % hold ``MASK``, 10 % a random byte and 10 % what they held, as in "BERT: Pre-training of Deep
    Bidirectional Transformers" (Devlin et al. 2019). A sequence has the same masks whenever and on whatever rank it is
    asked for; all have equally many, so that the mean over ranks is the mean over places.
    """

    def __init__(self, tokens: TokenDataset, seed: int) -> None:
        self.tokens, self.seed = tokens, seed

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * len(self) + index)
        ids = self.tokens[index].clone()
        places = torch.randperm(len(ids), generator=generator)[: max(1, round(0.15 * len(ids)))]
        labels = torch.full_like(ids, IGNORED)
        labels[places] = ids[places]
        draw = torch.rand(len(places), generator=generator)
        ids[places[draw < 0.8]] = MASK
        random = places[draw >= 0.9]
        ids[random] = torch.randint(0, 256, (len(random),), generator=generator)
        return {"input_ids": ids, "labels": labels}


def masked_text(seq_len: int, seed: int = 0) -> MaskedText:
    """The dataset of bert.toml."""
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"
    tokens = token_cache(find_files("stdlib", HERE), ByteTokenizer(), cache_dir)
    return MaskedText(TokenDataset(tokens, seq_len), seed)


def build_model(config: str | Path = HERE / "config.json") -> nn.Module:
    """A masked language model of transformers with random weights, of any kind that the config says."""
    return AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(config, local_files_only=True))


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    mw.init_distributed(seed=0)
    model, dataset = build_model(options.config), masked_text(options.seq_len)
    job = mw.accelerate(
        model,
        torch.optim.AdamW,
        dataset,  # no loss function: the model's output carries the loss, since its input holds labels
        strategy=options.strategy,  # None: Meshwright chooses
        model_input_format="unpack_dict",
        optim_args={"lr": options.lr, "weight_decay": 0.01},
        # An endless order, the same on any number of ranks; the batch is divided between them.
        dataloader_args={"batch_size": options.batch_size, "sampler": GlobalOrder(len(dataset), seed=0)},
        lr_scheduler_cls=warmup_decay,
        lr_scheduler_args={"num_steps": options.steps, "warmup_steps": options.steps // 10},
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
    add("--config", default=HERE / "config.json", help="of a masked language model (default: config.json beside this)")
    add("--steps", type=int, default=400, help="optimizer steps (default: 400)")
    add("--batch-size", type=int, default=16, help="sequences per step over all ranks (default: 16)")
    add("--seq-len", type=int, default=128, help="bytes per sequence (default: 128)")
    add("--lr", type=float, default=2e-3, help="highest learning rate (default: 2e-3)")
    add("--strategy", help="such as \"zero2 + amp_native(dtype='bf16')\" (default: chosen)")
    add("--save", metavar="FILE", help="write the weights there in the end: an ordinary state dict")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
