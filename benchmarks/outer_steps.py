"""Rare synchronisation against synchronous training: loss at equal tokens, bytes sent per token, time on slow links.

Four replicas on this machine train a small GPT on the Python standard library's sources, byte by byte. Every variant
sees the same batches with the same inner AdamW, schedule and clipping; the held-out loss is that of the global weights.
Bytes are those a rank sends, as ring algorithms send them.

The second part puts every replica into a network namespace of its own, behind a link that ``tc`` shapes to ``--mbit``
(it needs root, ``ip`` and ``tc``; without them, or with ``--delay``, every exchange waits as long as its bytes would
take on such a link). Variants take turns, so that a machine whose speed drifts slows all alike.

    python benchmarks/outer_steps.py [--steps N] [--json FILE] [--plot FILE] [--only loss|time] [--mbit M] [--delay]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.lr_scheduler import warmup_decay
from meshwright.optim import OuterOptimizer
from meshwright.runtime.launch import inside_launcher, launch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt2"))

from gpt2 import GPT2
from optimizer_curves import corpus

REPLICAS, VOCABULARY, SEQ_LEN, BATCH, DIM, LAYERS = 4, 257, 64, 32, 96, 3
HELD_OUT, EVALUATE_EVERY, ROUNDS = 64, 50, 5
Methods = list[Any]


def replicas(**config: Any) -> Methods:
    return [("parallel_mode", {"replica": REPLICAS}), ("outer", config)]


VARIANTS: dict[str, Methods] = {
    "synchronous": [("parallel_mode", {"data": REPLICAS})],
    "local SGD, H = 10": replicas(rule="local_sgd", sync_every=10),
    "BMUF (NBM), H = 10": replicas(rule="bmuf", sync_every=10, momentum=0.75, nesterov=True, warmup_steps=0),
    "DiLoCo, H = 10": replicas(rule="diloco", sync_every=10),
    "DiLoCo, H = 50": replicas(rule="diloco", sync_every=50),
    "streaming DiLoCo, H = 50, int4": replicas(rule="streaming_diloco", sync_every=50, fragments=5, delay=2),
}
TIMED = ("synchronous", "DiLoCo, H = 10", "DiLoCo, H = 50", "streaming DiLoCo, H = 50, int4")


def loss_func(ids: Tensor, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def build(
    methods: Methods, steps: int, lr: float = 3e-3, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> mw.Accelerated:
    torch.manual_seed(0)
    kernel = {"fused": True} if optimizer is torch.optim.AdamW else {}
    model = GPT2(vocab_size=VOCABULARY, seq_len=SEQ_LEN, dim=DIM, num_layers=LAYERS, num_heads=4)
    return mw.accelerate(
        model,
        optimizer,
        loss_func=loss_func,
        strategy=methods,
        optim_args={"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1, **kernel},
        lr_scheduler_cls=warmup_decay,
        lr_scheduler_args={"num_steps": steps, "warmup_steps": steps // 20, "decay": "cosine", "min_lr_ratio": 0.05},
        max_grad_norm=1.0,
    )


def sequences(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(text) - SEQ_LEN, (count,), generator=generator)
    return torch.stack([text[start : start + SEQ_LEN] for start in starts.tolist()])


def held_out_loss(job: mw.Accelerated, ids: Tensor) -> float:
    weights = job.optim.global_weights() if isinstance(job.optim, OuterOptimizer) else contextlib.nullcontext()
    with weights:
        return float(job.evaluate(ids))


def bytes_sent(job: mw.Accelerated, steps: int) -> float:
    if isinstance(job.optim, OuterOptimizer):
        return job.optim.replicas.bytes_sent
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in job.model.parameters())
    return steps * 2 * (REPLICAS - 1) / REPLICAS * gradients


def train(name: str, steps: int, text: Tensor) -> dict[str, Any]:
    """A whole run; what rank 0 returns counts."""
    job, generator = build(VARIANTS[name], steps), torch.Generator().manual_seed(1)
    held_out = sequences(text[-500_000:], HELD_OUT, torch.Generator().manual_seed(2))
    curve: list[tuple[int, float]] = []
    for step in range(1, steps + 1):
        batch = sequences(text[:-500_000], BATCH, generator)[mw.rank() :: REPLICAS]
        job.step(batch)
        if step % EVALUATE_EVERY == 0 or step == steps:
            curve.append((step, held_out_loss(job, held_out)))
    per_token = bytes_sent(job, steps) / (steps * BATCH // REPLICAS * SEQ_LEN)
    return {"curve": curve, "bytes_per_token": per_token}


def losses(steps: int) -> dict[str, Any]:
    text, found = corpus(), {}
    for name in VARIANTS:
        found[name] = train(name, steps, text)
        last = found[name]["curve"][-1][1]
        mw.print_rank(
            f"{name:32} held-out loss {last:.4f}, {found[name]['bytes_per_token']:8.1f} B per token", flush=True
        )
    return found


def times(mbit: float, *, delay: bool) -> dict[str, Any]:
    """Tokens per second over 50 steps, the variants in turns; ratios to synchronous training are medians of turns."""
    text, generator = corpus(1_000_000), torch.Generator().manual_seed(1)
    jobs = {name: build(VARIANTS[name], 10_000) for name in TIMED}
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    with waiting_for_bytes(mbit) if delay else contextlib.nullcontext():
        for turn in range(ROUNDS + 1):
            for name, job in jobs.items():
                batches = [sequences(text, BATCH, generator)[mw.rank() :: REPLICAS] for _ in range(50)]
                dist.barrier()
                begin = time.perf_counter()
                for batch in batches:
                    job.step(batch)
                dist.barrier()
                if turn:  # the first one warms up
                    seconds[name].append(time.perf_counter() - begin)
    tokens = 50 * BATCH * SEQ_LEN
    reference = seconds["synchronous"]
    found = {
        name: {
            "tokens_per_s": tokens / statistics.median(every),
            "speedup": statistics.median(r / s for r, s in zip(reference, every, strict=True)),
        }
        for name, every in seconds.items()
    }
    for name, figures in found.items():
        mw.print_rank(f"{name:32} {figures['tokens_per_s']:8.0f} tokens/s, {figures['speedup']:5.2f} x", flush=True)
    return found


@contextlib.contextmanager
def waiting_for_bytes(mbit: float) -> Iterator[None]:
    """Lets every collective take as long as its bytes do at ``mbit``: waits where the result is waited for."""
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single", "all_gather_into_tensor")}

    class Late:
        def __init__(self, work: dist.Work | None, ready_s: float) -> None:
            self.work, self.ready_s = work, ready_s

        def wait(self, *args: Any) -> bool:
            if self.work is not None:
                self.work.wait()
            time.sleep(max(self.ready_s - time.perf_counter(), 0))
            return True

    def slowed(original: Any, *args: Any, **kwargs: Any) -> Any:
        num_bytes = max(arg.nbytes for arg in args if isinstance(arg, Tensor))
        late = Late(original(*args, **kwargs), time.perf_counter() + num_bytes * 8 / (mbit * 1e6))
        if kwargs.get("async_op"):
            return late
        late.wait()
        return None

    for name, original in originals.items():
        setattr(dist, name, functools.partial(slowed, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def can_shape() -> bool:
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


@contextlib.contextmanager
def shaped_network(mbit: float) -> Iterator[list[str]]:
    """A namespace per replica, joined by a bridge; what leaves a namespace passes a token bucket."""

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True)

    tag = f"mw{os.getpid() % 10000}"
    spaces = [f"{tag}n{replica}" for replica in range(REPLICAS)]
    try:
        run(f"ip link add {tag}b type bridge")
        run(f"ip link set {tag}b up")
        for replica, space in enumerate(spaces):
            run(f"ip netns add {space}")
            run(f"ip link add {tag}o{replica} type veth peer name eth0 netns {space}")
            run(f"ip link set {tag}o{replica} master {tag}b up")
            run(f"ip -n {space} addr add 10.77.0.{replica + 1}/24 dev eth0")
            run(f"ip -n {space} link set eth0 up")
            run(f"ip -n {space} link set lo up")
            run(f"tc -n {space} qdisc add dev eth0 root tbf rate {mbit:.0f}mbit burst 64kb latency 200ms")
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{tag}b"], capture_output=True, check=False)


def timed_behind_links(mbit: float, out: Path) -> int:
    """Starts the second part with a rank in every namespace."""
    with shaped_network(mbit) as spaces:
        command = [sys.executable, __file__, "--only", "time", "--json", str(out), "--mbit", str(mbit), "--shaped"]
        shared = {**os.environ, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "eth0"}
        shared |= {"WORLD_SIZE": str(REPLICAS), "LOCAL_WORLD_SIZE": str(REPLICAS), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", space, *command], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank, space in enumerate(spaces)
        ]
        return max(rank.wait() for rank in ranks)


def plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name, result in found.items():
        left.plot(*zip(*result["curve"], strict=True), label=name)
        right.scatter(result["bytes_per_token"], result["curve"][-1][1], label=name)
    left.set(xlabel="steps", ylabel="held-out loss (nats per byte)", title="At equal tokens", ylim=(None, 3.2))
    right.set(xlabel="bytes a rank sends per token of its own", ylabel="last held-out loss", xscale="log")
    left.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", choices=("loss", "time"))
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--delay", action="store_true", help="wait instead of shaping the network")
    parser.add_argument("--shaped", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    delay = options.delay or not can_shape()
    if not inside_launcher():
        if options.only != "time" and (status := launch([__file__, *sys.argv[1:], "--only", "loss"], REPLICAS)):
            return status
        if options.only != "loss" and delay:
            return launch([__file__, *sys.argv[1:], "--only", "time"], REPLICAS)
        return timed_behind_links(options.mbit, options.json) if options.only != "loss" else 0
    mw.init_distributed(backend="gloo")
    found = losses(options.steps) if options.only == "loss" else times(options.mbit, delay=not options.shaped)
    if mw.rank() == 0 and options.json is not None:
        name = options.json.with_suffix(f".{options.only}.json")
        name.write_text(json.dumps(found, indent=1))
    if mw.rank() == 0 and options.only == "loss" and options.plot is not None:
        plot(found, options.plot)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
