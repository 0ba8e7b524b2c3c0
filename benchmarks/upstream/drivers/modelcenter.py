"""Train one of ModelCenter's models: ``modelcenter.py model_center/model/NAME.py``, with a tiny configuration.

Twelve steps with AdamOffloadOptimizer, NoDecay and a loss scale of 1024 in the model's own half precision, or in fp32
with ``--float``; then it is saved and loaded into a second model, which must go on with the same numbers to the bit.
Ranks have equal parts of one batch, so losses are those of one process.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_center import model as models

import meshwright as bmt

VOCAB, BATCH, LENGTH, CLASSES, IMAGE, STEPS = 61, 8, 12, 7, 16, 12
_SIZES = {"dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 64, "vocab_size": VOCAB}
_ONE = {**_SIZES, "num_layers": 3}
_TWO = {**_SIZES, "num_encoder_layers": 2, "num_decoder_layers": 2}
_IMAGES = {"img_size": IMAGE, "patch_size": 4, "num_classes": CLASSES, "hidden_size": 32, "num_layers": 3}
_LONG = {"attention_window": 4, "emb_init_std": 0.02, "proj_init_std": 0.02}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "BertConfig", {**_ONE, "position_size": 32}),
    "cpm1": ("CPM1", "CPM1Config", _ONE),
    "cpm2": ("CPM2", "CPM2Config", _TWO),
    "cpm3": ("CPM3", "CPM3Config", {**_ONE, "emb_init_std": 0.5, "att_init_std": 0.2, "ffn_init_std": 0.2}),
    "glm": ("GLM", "GLMConfig", {**_ONE, "position_size": 33, "dropout_p": 0.0, "sop_tok_id": 58, "mask_tok_id": 60}),
    "gpt2": ("GPT2", "GPT2Config", {**_ONE, "position_size": 32}),
    "gptj": ("GPTj", "GPTjConfig", {**_ONE, "pos_rotary_dim": 4, "proj_init_std": 0.1}),
    "llama": ("Llama", "LlamaConfig", _ONE),
    "longformer": ("Longformer", "LongformerConfig", {**_ONE, "position_size": 34, "dropout_p": 0.0, **_LONG}),
    "opt": ("OPT", "OPTConfig", {**_ONE, "position_size": 32, "dropout_p": 0.0}),
    "roberta": ("Roberta", "RobertaConfig", {**_ONE, "position_size": 32}),
    "t5": ("T5", "T5Config", _TWO),
    "vit": ("ViT", "VitConfig", {**_IMAGES, "num_heads": 4, "mlp_size": 64}),
}


def main() -> None:
    """Train, save, load and go on."""
    name, in_float = Path(sys.argv[1]).stem, "--float" in sys.argv
    bmt.init_distributed(seed=0)
    kind, config, options = KINDS[name]

    def build() -> torch.nn.Module:
        built: torch.nn.Module = getattr(models, kind)(getattr(models, config)(**options, half=not in_float))
        return built.float() if in_float else built

    model = build()
    bmt.init_parameters(model)
    if name == "vit":  # ModelCenter leaves these to a checkpoint
        for parameter in (model.patch_embed._parameters[each] for each in ("cls_token", "pos_embed")):
            torch.nn.init.zeros_(parameter.to_local())
    data = batches(name)
    optimizer, manager = optimizers(model, in_float)
    train = trainer(name, not in_float)
    for batch in data:
        bmt.print_rank(f"loss: {train(model, optimizer, manager, batch):.6f}", flush=True)
    other = build()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        bmt.save(model, f"{folder[0]}/model.pt")
        whole = model.state_dict()
        assert (len(whole) == len(list(model.named_parameters()))) if bmt.rank() == 0 else not whole, list(whole)
        bmt.load(other, f"{folder[0]}/model.pt")
        torch.save(manager.state_dict(), f"{own}/optimizer.pt")
        second, its_manager = optimizers(other, in_float)
        its_manager.load_state_dict(torch.load(f"{own}/optimizer.pt"))
        bmt.synchronize()
    for batch in data[:2]:
        here, there = train(model, optimizer, manager, batch), train(other, second, its_manager, batch)
        assert here == there, (here, there)
    bmt.print_rank("saved, loaded and gone on")


def batches(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return twelve times one of two batches, of ids or images, with their targets; equal on every rank."""
    generator = torch.Generator().manual_seed(3)

    def drawn() -> tuple[torch.Tensor, torch.Tensor]:
        if name == "vit":
            images = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)
            return images, torch.randint(0, CLASSES, (BATCH,), generator=generator)
        ids, targets = torch.randint(0, VOCAB, (2, BATCH, LENGTH), generator=generator)
        return ids, targets

    return [drawn(), drawn()] * (STEPS // 2)


def optimizers(model: torch.nn.Module, in_float: bool) -> tuple[Any, Any]:
    """Return an optimizer and its manager."""
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), weight_decay=1e-2)
    scheduler = bmt.lr_scheduler.NoDecay(optimizer, start_lr=5e-3, warmup_iter=2, end_iter=-1, num_iter=0)
    manager = bmt.optim.OptimManager(loss_scale=None if in_float else 1024)
    manager.add_optimizer(optimizer, scheduler)
    return optimizer, manager


def trainer(name: str, half: bool) -> Callable[..., float]:
    """Return a function that takes one step on this rank's part of a batch and returns the mean loss."""
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)

    def logits_of(model: torch.nn.Module, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if name == "vit":
            return model(x.half() if half else x)
        ids, length = x.int(), torch.full((len(x),), LENGTH, dtype=torch.int32)
        if name == "longformer":
            return model(x, length, return_logits=True)
        if name == "glm":
            masked = x.clamp(max=57)
            masked[:, 5], masked[:, 6] = 60, 58  # what is to be filled in, and where it begins
            return model(masked, sep=torch.full((len(x),), 6))
        if name in ("t5", "cpm2"):
            return model(ids, length, targets.int(), length).logits
        if name in ("cpm1", "cpm3"):
            context = (torch.arange(LENGTH) < 4).expand(len(x), -1)
            return model(ids, length, context=context, span=torch.zeros_like(ids)).logits
        return model(ids, length).logits

    def train(model: torch.nn.Module, optimizer: Any, manager: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        x, targets = (each.chunk(bmt.world_size())[bmt.rank()] for each in batch)
        logits = logits_of(model, x, targets)
        loss = loss_func(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))
        mean = bmt.sum_loss(loss).item()
        manager.zero_grad()
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        return mean

    return train


if __name__ == "__main__":
    main()
