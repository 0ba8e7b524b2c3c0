"""Time clipping and the optimizer's step beside the fused kernel alone, with gradients of a real model.

2 processes train the GPT of ``overhead.py``, or one of GPT-2's size, under ``data`` and ``fsdp``. After every
backward pass one of these runs, in turn and over the same parameters: torch's ``_fused_adamw_`` on local tensors
(``kernel``); a norm of every gradient and that kernel with a divisor, which it writes gradients back for (``least``: no
clipping with torch's kernels can take less); the norm, clipping in the kernel and the step as ``Accelerated.step`` runs
them (``ours``); torch's ``clip_grad_norm_`` and ``AdamW.step`` (``torch``). Figures are medians of CPU time of each
rank's main thread, which other programs and the wait for the other rank disturb least.

    python benchmarks/clip.py [--model tiny|gpt2] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from overhead import BATCH, GPT2, MAX_NORM, OPTIM, SIZES, loss_func

import meshwright as mw
from meshwright.methods.job import parameters_in
from meshwright.optim import clipped_step, local_tensor
from meshwright.runtime import settings, synchronize_device
from meshwright.runtime.launch import inside_launcher, launch

MODELS = {  # sizes, and sequences per rank: 4.8 and 124 million parameters
    "tiny": (SIZES, BATCH),
    "gpt2": ({"vocab_size": 50257, "seq_len": 32, "dim": 768, "num_layers": 12, "num_heads": 12}, 1),
}


def kernel_alone(optimizer: torch.optim.Optimizer, clips: bool = False) -> Callable[[], None]:
    """One call of torch's kernel over all local tensors, with states of its own; after their norms if it clips."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    local = [local_tensor(parameter.data) for parameter in parameters]
    means, squares = [torch.zeros_like(each) for each in local], [torch.zeros_like(each) for each in local]
    steps = [torch.zeros((), device=local[0].device) for _ in local]
    divisor = torch.full((), 1.5, device=local[0].device)

    @torch.no_grad()
    def step() -> None:
        gradients = [local_tensor(parameter.grad) for parameter in parameters]
        if clips:
            torch._foreach_norm(gradients)
        torch._fused_adamw_(local, gradients, means, squares, [], steps, lr=1e-3, beta1=0.9, beta2=0.999,
                            weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
                            grad_scale=divisor if clips else None)  # fmt: skip

    return step


def contestants(job: mw.Accelerated) -> dict[str, Callable[[], None]]:
    plain = torch.optim.AdamW(job.model.parameters(), **OPTIM)

    def ours() -> None:
        _, step = clipped_step(parameters_in(job.model), job.optim, MAX_NORM)
        step()

    def theirs() -> None:
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), MAX_NORM)
        plain.step()

    return {
        "kernel": kernel_alone(job.optim),
        "least": kernel_alone(job.optim, clips=True),
        "ours": ours,
        "torch": theirs,
    }


def measure(kind: str, model: str, rounds: int, device: torch.device) -> dict[str, float | str]:
    sizes, batch = MODELS[model]
    ids = torch.randint(0, sizes["vocab_size"], (batch, sizes["seq_len"]), device=device)
    torch.manual_seed(0)
    job = mw.accelerate(
        GPT2(**sizes).to(device),
        torch.optim.AdamW,
        None,
        loss_func,
        strategy=[] if kind == "data" else [kind],
        optim_args=OPTIM,
        sample_batch=ids,
        max_grad_norm=MAX_NORM,
    )
    calls = contestants(job)
    average = job._mean_loss  # compares the ranks' layers, which else a step by hand does by an exchange of its own
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 2):
        for name, call in calls.items():
            job.optim.zero_grad()
            loss = loss_func(ids, job.model(ids))
            loss.backward()
            average(loss)
            synchronize_device(device)
            start = time.thread_time() if device.type == "cpu" else time.perf_counter()
            call()
            synchronize_device(device)
            elapsed = (time.thread_time() if device.type == "cpu" else time.perf_counter()) - start
            if index >= 2:  # the first rounds make states
                times[name].append(elapsed)
    medians = {f"{name}_s": statistics.median(found) for name, found in times.items()}
    others = {"ratio": "ours_s", "least_ratio": "least_s", "torch_ratio": "torch_s"}
    ratios = {name: medians[other] / medians["kernel_s"] for name, other in others.items()}
    return {"case": kind, **medians, **ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each (default 20)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if not inside_launcher():
        return launch([__file__, *sys.argv[1:]], 2)
    mw.init_distributed()
    results = []
    mw.print_rank(
        f"{'strategy':10} {'kernel':>9} {'least':>9} {'ours':>9} {'torch':>9} "
        f"{'least / kernel':>15} {'ours / kernel':>14} {'torch / kernel':>15}"
    )
    for kind in ("data", "fsdp"):
        found = measure(kind, arguments.model, arguments.rounds, settings().device)
        results.append(found)
        cells = " ".join(f"{1e3 * float(found[name]):7.2f}ms" for name in ("kernel_s", "least_s", "ours_s", "torch_s"))
        ratios = f"{found['least_ratio']:15.2f} {found['ratio']:14.2f} {found['torch_ratio']:15.2f}"
        mw.print_rank(f"{kind:10} {cells} {ratios}", flush=True)
    if arguments.json and mw.rank() == 0:
        arguments.json.write_text(
            json.dumps({"torch": torch.__version__, "model": arguments.model, "cases": results}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
