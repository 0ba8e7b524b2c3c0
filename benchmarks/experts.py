"""A training step of a mixture of Qwen3's shape, scaled down: transformers' implementations beside ours.

In one process: eager, transformers' best (``grouped_mm``), and ours (``module_replace`` with ``experts``), with the
layer of experts alone beside the whole step, and beside its matrix products, which nobody can leave out. On two ranks:
``fsdp`` beside ``expert 2``, with either implementation, and the bytes of a token's rows in all-to-alls. Variants
take turns, so that a machine whose speed drifts slows all alike; ratios are medians over the turns. Times are those of
the processor, which other programs disturb less, but waiting for another rank is no part of them.

    python benchmarks/experts.py [--turns N] [--quick] [--only one|two] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.methods.replace.grouped_experts import experts_forward
from meshwright.runtime.launch import inside_launcher, launch

RANKS, LAYERS, VOCAB = 2, 2, 512
SIZES = {"hidden_size": 256, "moe_intermediate_size": 96, "num_experts": 128, "num_experts_per_tok": 8}
SAMPLES, SEQ_LEN = 8, 256
QUICK = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}


def build(sizes: Mapping[str, int], implementation: str) -> nn.Module:
    """A model with random weights, the same for the same sizes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **sizes, vocab_size=VOCAB, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        decoder_sparse_step=1, max_position_embeddings=SEQ_LEN, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation(implementation)
    return model


def loss_of(inputs: dict[str, torch.Tensor], output: Any) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())


def job(sizes: Mapping[str, int], implementation: str, *methods: Any) -> mw.Accelerated:
    return mw.accelerate(
        build(sizes, implementation), torch.optim.AdamW, None, loss_of, strategy=list(methods),
        optim_args={"lr": 1e-4, "fused": True}, model_input_format="unpack_dict",
        prepare_input=lambda ids, device: {"input_ids": ids}, sample_batch=batch(1),
    )  # fmt: skip


def batch(samples: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (samples, SEQ_LEN))


def turns(runs: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Processor seconds of every run in every turn, without the first, in which torch allocates."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(count + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                times[name].append(time.process_time() - start)
    return times


def ratio(times: Mapping[str, list[float]], slow: str, fast: str) -> float:
    return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))


# --- One process


def layer_runs(sizes: Mapping[str, int], tokens: int) -> dict[str, Callable[[], object]]:
    """Forward and backward of one layer of experts by each implementation, and its products alone."""
    layers = {name: build(sizes, name).model.layers[0].mlp.experts for name in ("eager", "grouped_mm")}
    own = build(sizes, "grouped_mm").model.layers[0].mlp.experts
    hidden = torch.randn(tokens, sizes["hidden_size"])
    weights, index = torch.randn(tokens, sizes["num_experts"]).softmax(-1).topk(sizes["num_experts_per_tok"])

    def run(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
        module.zero_grad()
        given = hidden.clone().requires_grad_(), index, weights.clone().requires_grad_()
        forward(*given).square().mean().backward()

    runs: dict[str, Callable[[], object]] = {
        name: lambda module=module: run(module, module)
        for name, module in layers.items()  # type: ignore[misc]
    }
    runs["ours"] = lambda: run(own, lambda *given: experts_forward(own, *given))
    runs["products"] = products(own, hidden, index)
    return runs


def products(module: Any, hidden: torch.Tensor, index: torch.Tensor) -> Callable[[], None]:
    """The six grouped products of forward and backward of a layer, on random rows."""
    ends = index.flatten().bincount(minlength=module.num_experts).cumsum(0).to(torch.int32)
    up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    rows = torch.randn(index.numel(), hidden.shape[1])
    wide, narrow = torch.randn(index.numel(), up.shape[1]), torch.randn(index.numel(), down.shape[2])

    def run() -> None:
        for left, right in (
            (rows, up.mT), (narrow, down.mT), (rows, down), (rows.T, narrow), (wide.T, rows), (wide, up),
        ):  # fmt: skip
            F.grouped_mm(left, right, offs=ends)

    return run


def one_process(sizes: Mapping[str, int], samples: int, count: int) -> dict[str, Any]:
    layer = turns(layer_runs(sizes, samples * SEQ_LEN), count)
    jobs = {
        "eager": job(sizes, "eager"),
        "grouped_mm": job(sizes, "grouped_mm"),
        "ours": job(sizes, "grouped_mm", ("module_replace", ["experts"])),
    }
    ids = batch(samples)
    losses = {name: each.step(ids).loss.item() for name, each in jobs.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    step = turns({name: (lambda each=each: each.step(ids)) for name, each in jobs.items()}, count)  # type: ignore[misc]
    found: dict[str, Any] = {}
    for what, times in (("layer", layer), ("step", step)):
        found[what] = {
            "ms": {name: 1e3 * statistics.median(every) for name, every in times.items()},
            "eager / ours": ratio(times, "eager", "ours"),
            "grouped_mm / ours": ratio(times, "grouped_mm", "ours"),
        }
    found["layer"]["products' part of ours"] = 1 / ratio(layer, "ours", "products")
    return found


# --- Two ranks


@contextmanager
def exchanged() -> Iterator[list[int]]:
    """Collect the bytes of every row that goes into an all-to-all; numbers of rows are none."""
    sizes: list[int] = []
    send = dist.all_to_all_single

    def note(output: torch.Tensor, given: torch.Tensor, *args: Any, **keys: Any) -> Any:
        if given.is_floating_point():
            sizes.append(given.nbytes)
        return send(output, given, *args, **keys)

    with mock.patch.object(dist, "all_to_all_single", note):
        yield sizes


def bytes_per_token(result: mw.Accelerated, ids: torch.Tensor) -> float:
    """Bytes of rows in all-to-alls of a step, by token and layer of experts, in the mean over ranks."""
    with exchanged() as sizes:
        result.step(ids)
    total = torch.tensor([sum(sizes), ids.numel()])
    dist.all_reduce(total)
    return float(total[0] / total[1]) / LAYERS


def least_bytes(sizes: Mapping[str, int]) -> int:
    """Bytes of a token's rows if each of its experts gets and answers it once, in forward and in backward."""
    return 4 * sizes["num_experts_per_tok"] * sizes["hidden_size"] * 4


def two_ranks(sizes: Mapping[str, int], samples: int, count: int) -> dict[str, Any]:
    divided = [("parallel_mode", {"expert": RANKS}), "expert_parallel"]
    jobs = {
        "fsdp": job(sizes, "grouped_mm", "fsdp"),
        "fsdp, ours": job(sizes, "grouped_mm", "fsdp", ("module_replace", ["experts"])),
        "expert 2": job(sizes, "grouped_mm", *divided),
        "expert 2, ours": job(sizes, "grouped_mm", *divided, ("module_replace", ["experts"])),
    }
    torch.manual_seed(mw.rank())
    ids = batch(samples // RANKS)
    losses = {name: each.step(ids).loss.item() for name, each in jobs.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    times = turns({name: (lambda each=each: each.step(ids)) for name, each in jobs.items()}, count)  # type: ignore[misc]
    return {
        "step": {
            "ms": {name: 1e3 * statistics.median(every) for name, every in times.items()},
            "fsdp / expert 2, ours": ratio(times, "fsdp", "expert 2, ours"),
            "fsdp / expert 2": ratio(times, "fsdp", "expert 2"),
        },
        "bytes per token and layer": bytes_per_token(jobs["expert 2, ours"], ids),
        "least": least_bytes(sizes),
        "busiest expert by the mean": jobs["expert 2"].expert_load.imbalance().item(),  # type: ignore[union-attr]
    }


def report(title: str, found: Mapping[str, Any], indent: int = 0) -> None:
    print(f"{'  ' * indent}{title}")
    for name, value in found.items():
        if isinstance(value, dict):
            report(name, value, indent + 1)
        else:
            print(f"{'  ' * indent}  {name}: {value:.5g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("one", "two"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes, samples = (QUICK, 2) if options.quick else (SIZES, SAMPLES)
    logging.disable(logging.WARNING)
    if inside_launcher():
        mw.init_distributed()
        torch.set_num_threads(1)
        found = two_ranks(sizes, samples, options.turns)
        if mw.rank() == 0:
            report("two ranks", found)
            if options.json is not None:
                options.json.with_suffix(".two.json").write_text(json.dumps(found, indent=1) + "\n")
        return
    torch.set_num_threads(1)
    if options.only != "two":
        found = one_process(sizes, samples, options.turns)
        report("one process", found)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.only != "one":
        sys.exit(launch([__file__, *sys.argv[1:]], RANKS))


if __name__ == "__main__":
    main()
