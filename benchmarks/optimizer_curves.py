"""Loss curves and state bytes per parameter of every optimizer, on a BERT-like and a GPT model of real text.

Both models learn the Python standard library's sources byte by byte: the GPT the next byte, the BERT those of 15 % that
are masked. Every optimizer gets the same model, batches and schedule (linear warm-up, cosine decay); its learning rate
is the best of the few that ``RATES`` lists, tried for a fifth of the steps. State bytes are those of all tensors in
``optimizer.state`` after the last step, on one rank, at their peak in that a step makes no others that stay.

    python benchmarks/optimizer_curves.py [--quick] [--steps N] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.data import find_files
from meshwright.optim import (
    CAME,
    Adafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    Lamb,
    Muon,
    get_galore_param_groups,
    muon_param_groups,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt2"))

from gpt2 import GPT2

VOCABULARY, MASK, MASKED = 257, 256, 0.15
SEQ_LEN, BATCH, DIM, LAYERS = 64, 8, 96, 3
GALORE = {"weight_decay": 0.01, "rank": 24, "update_proj_gap": 50, "scale": 1.0}
Build = Callable[[nn.Module, float], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[Build, tuple[float, ...]]] = {
    "AdamW": (lambda m, lr: torch.optim.AdamW(m.parameters(), lr=lr, fused=True), (1e-3, 3e-3)),
    "Lamb": (lambda m, lr: Lamb(m.parameters(), lr=lr, weight_decay=0.01), (1e-2, 3e-2)),
    "Adafactor": (
        lambda m, lr: Adafactor(m.parameters(), lr=lr, relative_step=False, scale_parameter=False, beta1=0.9),
        (1e-3, 3e-3),
    ),
    "CAME": (lambda m, lr: CAME(m.parameters(), lr=lr), (1e-3, 3e-3)),
    "GaLoreAdamW": (lambda m, lr: GaLoreAdamW(get_galore_param_groups(m, **GALORE), lr=lr), (1e-3, 3e-3)),
    "GaLoreAdamW8bit": (lambda m, lr: GaLoreAdamW8bit(get_galore_param_groups(m, **GALORE), lr=lr), (1e-3, 3e-3)),
    "Muon + AdamW": (
        lambda m, lr: Muon(muon_param_groups(m), lr=lr, adjust_lr_fn="match_rms_adamw"),
        (1e-3, 3e-3),
    ),
}


def corpus(limit: int = 8_000_000) -> Tensor:
    """The first bytes of the standard library's sources, shape (limit,)."""
    data = bytearray()
    for path in find_files("stdlib", Path()):
        data += path.read_bytes()
        if len(data) >= limit:
            break
    return torch.frombuffer(data[:limit], dtype=torch.uint8).long()


def gpt() -> nn.Module:
    return GPT2(vocab_size=VOCABULARY, seq_len=SEQ_LEN, dim=DIM, num_layers=LAYERS, num_heads=4)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=4,
            intermediate_size=4 * DIM, max_position_embeddings=SEQ_LEN, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def gpt_loss(model: nn.Module, ids: Tensor, generator: torch.Generator) -> Tensor:
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def bert_loss(model: nn.Module, ids: Tensor, generator: torch.Generator) -> Tensor:
    masked = torch.rand(ids.shape, generator=generator) < MASKED
    logits = model(input_ids=torch.where(masked, MASK, ids)).logits
    return F.cross_entropy(logits[masked], ids[masked])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "GPT": (gpt, gpt_loss),
    "BERT": (bert, bert_loss),
}


def rate(step: int, steps: int) -> float:
    warmup = max(steps // 20, 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def train(model_name: str, build: Build, lr: float, steps: int, total: int, text: Tensor) -> dict[str, Any]:
    """Trains ``steps`` of a run of ``total``."""
    make, loss_of = MODELS[model_name]
    torch.manual_seed(0)
    model = make()
    optimizer = build(model, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, total))
    generator = torch.Generator().manual_seed(1)
    losses, update_s = [], 0.0
    for _ in range(steps):
        starts = torch.randint(0, len(text) - SEQ_LEN, (BATCH,), generator=generator)
        ids = torch.stack([text[start : start + SEQ_LEN] for start in starts.tolist()])
        optimizer.zero_grad()
        loss = loss_of(model, ids, generator)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        begin = time.perf_counter()
        optimizer.step()
        update_s += time.perf_counter() - begin
        schedule.step()
        losses.append(loss.item())
    return {"losses": losses, "bytes_per_parameter": state_bytes(optimizer, model), "update_s": update_s / steps}


def state_bytes(optimizer: torch.optim.Optimizer, model: nn.Module) -> float:
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors) / sum(p.numel() for p in model.parameters())


def last_mean(losses: list[float]) -> float:
    tail = losses[-max(len(losses) // 20, 1) :]
    return sum(tail) / len(tail)


def best(model: str, name: str, steps: int, text: Tensor) -> dict[str, Any]:
    build, rates = OPTIMIZERS[name]
    tried = {lr: last_mean(train(model, build, lr, max(steps // 5, 1), steps, text)["losses"]) for lr in rates}
    lr = min(tried, key=lambda each: tried[each])
    result = train(model, build, lr, steps, steps, text)
    return {"model": model, "optimizer": name, "lr": lr, "loss": last_mean(result["losses"]), **result}


def plot(results: Iterable[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(MODELS) + 1, figsize=(15, 4.2), width_ratios=[3] * len(MODELS) + [2])
    results = list(results)
    colors = {name: f"C{index}" for index, name in enumerate(OPTIMIZERS)}
    for axis, model in zip(axes, MODELS, strict=False):
        for result in (each for each in results if each["model"] == model):
            window = max(len(result["losses"]) // 40, 1)
            smooth = torch.tensor(result["losses"]).unfold(0, window, 1).mean(-1)
            axis.plot(range(window, window + len(smooth)), smooth, color=colors[result["optimizer"]], lw=1.4,
                      label=result["optimizer"])  # fmt: skip
        axis.set(title=f"{model}, Python standard library, bytes", xlabel="step", ylabel="loss (nats)", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    bars = {each["optimizer"]: each["bytes_per_parameter"] for each in results if each["model"] == "GPT"}
    axes[-1].barh(list(bars)[::-1], list(bars.values())[::-1], color=[colors[name] for name in list(bars)[::-1]])
    axes[-1].set(title="optimizer state, GPT", xlabel="bytes per parameter")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps: that it runs, not how well")
    parser.add_argument("--steps", type=int, help="steps of each run (default 300, quick 5)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG file")
    arguments = parser.parse_args()
    steps, text, results = arguments.steps or (5 if arguments.quick else 300), corpus(), []
    for model in MODELS:
        for name in OPTIMIZERS:
            result = best(model, name, steps, text)
            results.append(result)
            print(
                f"{model:5} {name:16} lr {result['lr']:<7} loss {result['loss']:.3f}  "
                f"{result['bytes_per_parameter']:5.2f} B/parameter  update {1e3 * result['update_s']:.1f} ms",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "runs": results}, indent=2) + "\n")
    if arguments.plot:
        plot(results, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
