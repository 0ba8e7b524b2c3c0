"""Predicts published fine-tuning runs on one or two devices from the models themselves, as ``mw.plan`` does for users.

    python benchmarks/finetune.py [FILE.csv] [--json FILE] [--rows 0,5,10-20]

Unlike ``published.py``, which knows families by their dimensions, this builds each model of transformers on ``meta``
(with peft's adapters around it where a row has them) and traces it. What the columns of the table
(``benchmarks/data/finetune_runs.csv``) mean stands in ``docs/predictions.md``. It needs transformers and peft.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    ViTConfig,
    ViTForImageClassification,
)

import meshwright as mw
from meshwright.planner.plans import CONTEXT_BYTES

DEFAULT = Path(__file__).parent / "data" / "finetune_runs.csv"
_GIB = 2**30


def _llama(vocab: int, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **others: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab, num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=ffn, max_position_embeddings=8192, **others,
    )  # fmt: skip


# As their config.json say. Qwen's first generation is a Llama whose keys, queries and values have biases; those of its
# output, which it has not, are 0.1 % of the parameters.
MODELS: dict[str, Any] = {
    "Qwen-1.8B": _llama(151936, 24, 2048, 16, 16, 5504),
    "Qwen-7B": _llama(151936, 32, 4096, 32, 32, 11008),
    "Qwen-14B": _llama(152064, 40, 5120, 40, 40, 13696),
    "Yi-6B": _llama(64000, 32, 4096, 32, 4, 11008),
    "Llama-2-7B": _llama(32000, 32, 4096, 32, 32, 11008),
    "Llama-3-8B": _llama(128256, 32, 4096, 32, 8, 14336),
    "Llama-3.2-3B": _llama(128256, 28, 3072, 24, 8, 8192, tie_word_embeddings=True),
    "TinyLlama": _llama(32000, 22, 2048, 32, 4, 5632),
    "Mistral-7B": MistralConfig(sliding_window=None),
    "Phi-3-mini": Phi3Config(sliding_window=None),
    "Phi-2": PhiConfig(hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, num_attention_heads=32,
                       hidden_act="gelu_pytorch_tanh"),  # one kernel, as litgpt has it
    "BERT-large classifier": BertConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "ViT-H": ViTConfig(hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120,
                       patch_size=14, hidden_dropout_prob=0.0, num_labels=45),
}  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=DEFAULT, help="a table of published runs")
    parser.add_argument("--rows", help="such as 0,5,10-20; all are predicted without it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a line per row there, as soon as it is known")
    options = parser.parse_args(arguments)
    rows = read_rows(options.file)
    errors: dict[tuple[str, str], list[float]] = {}
    for index in _indices(options.rows, len(rows)):
        found = {"row": index, **predicted(rows[index])}
        print(json.dumps(found), flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        for what, key in (("memory", "error"), ("step time", "time_error")):
            if key in found:
                errors.setdefault((rows[index]["source"].split(",")[0], what), []).append(found[key])
    for (source, what), own in errors.items():
        off = statistics.fmean(map(abs, own))
        print(f"{source}: {len(own)} rows, {what} off by {off:.1%}, on average {statistics.fmean(own):+.1%}")
    return 0


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table, by column."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def predicted(row: dict[str, str]) -> dict[str, Any]:
    """One run beside its prediction, in GiB as its source counts them, and samples a second."""
    model, batch = build_model(row), sample_batch(row)
    samples = int(row["micro_batch"]) * int(row["micro_batches"]) * int(row["n_gpus"])
    strategy: list[Any] = [row["strategy"]] if row["strategy"] else []
    strategy += [("amp_native", row["autocast"])] if row["autocast"] else []
    (plan,) = mw.plan(
        model, f"{NO_PRESET.get(row['gpu'], row['gpu'])}x{row['n_gpus']}", global_batch=samples, strategy=strategy,
        num_micro_batches=int(row["micro_batches"]), sample_batch=batch, model_input_format="unpack_dict",
        loss_func=half_loss if row["loss"] == "half" else None, optim_func=OPTIMIZERS[row["optimizer"]],
    )  # fmt: skip
    assert plan.forecast is not None
    assert plan.taken_bytes is not None
    taken = {
        "allocated": max(peak.allocated_bytes for peak in plan.forecast.peaks),
        "reserved": plan.taken_bytes,
        "device": plan.taken_bytes + CONTEXT_BYTES,
    }[row["counts"]]
    found = {"gib": round(taken / _GIB, 2), "moment": plan.forecast.peaks[0].moment}
    found["samples_per_s"] = round(samples / plan.forecast.time.step_time_s, 3)
    if row["samples_per_s"]:
        found["time_error"] = round(float(row["samples_per_s"]) * plan.forecast.time.step_time_s / samples - 1, 4)
    published = float(row["peak_gib"])
    return {**found, "published": published, "error": round(taken / _GIB / published - 1, 4)}


def build_model(row: dict[str, str]) -> nn.Module:
    """The model of a row on ``meta``, adapters around it."""
    config = MODELS[row["model"]]
    config.use_cache = False
    config._attn_implementation = "eager" if row["attention"] == "eager" else "sdpa"
    dtype = torch.bfloat16 if row["weights"] == "bf16" else torch.float32
    with torch.device("meta"):
        if row["model"].startswith("BERT"):
            model = BertForSequenceClassification(config).to(dtype)
        elif row["model"].startswith("ViT"):
            model = ViTForImageClassification(config).to(dtype)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if row["method"].startswith("lora"):
            _, rank, targets, *more = row["method"].split()
            lora = LoraConfig(
                r=int(rank.removeprefix("r=")), target_modules=targets.split(","), lora_dropout=0.05,
                task_type="CAUSAL_LM", modules_to_save=["embed_tokens", "lm_head"] if more else None,
            )  # fmt: skip
            model = get_peft_model(model, lora)
            if row["adapters"] == "bf16":
                model.to(torch.bfloat16)  # on ``meta`` peft makes them in fp32 whatever it is told
    model.train()
    if row["recompute"] == "model":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        if row["method"].startswith("lora"):
            model.enable_input_require_grads()
    return model


def sample_batch(row: dict[str, str]) -> dict[str, torch.Tensor]:
    """A batch of one micro-batch, as the model takes it."""
    count = int(row["micro_batch"])
    if row["model"].startswith("ViT"):
        return {"pixel_values": torch.zeros(count, 3, 224, 224), "labels": torch.zeros(count, dtype=torch.long)}
    ids = torch.zeros(count, int(row["seq"]), dtype=torch.long)
    if row["model"].startswith("BERT"):
        return {"input_ids": ids, "labels": torch.zeros(count, dtype=torch.long)}
    return {"input_ids": ids} if row["loss"] == "half" else {"input_ids": ids, "labels": ids}


def half_loss(batch: Any, output: Any) -> torch.Tensor:
    """The next token's loss of logits in half precision as they are."""
    logits, ids = output.logits[:, :-1], batch["input_ids"][:, 1:]
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1))


NO_PRESET = {"RTX4070": "A10G"}  # its memory is not asked for, and no time is published
OPTIMIZERS: dict[str, Any] = {
    "": torch.optim.AdamW,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, foreach=False),
}


def _indices(text: str | None, count: int) -> Iterator[int]:
    for part in (text or f"0-{count - 1}").split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
