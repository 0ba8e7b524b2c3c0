"""Predictions against our own runs: every strategy family on this machine's CPU, on 2 and on 4 ranks.

    python benchmarks/own_runs.py [--model gpt|qwen2|vit] [--world 2|4] [--quick] [--peaks] [--clock auto|wall|cpu]
                                  [--json FILE]

The machine is calibrated (``meshwright calibrate``) in the same processes, before the first turn and after every one;
the geometric mean of all predictions counts, for a machine's speed drifts. In a turn a small model trains under every
strategy: bytes of parameters, gradients and optimizer state must be as predicted, to the byte; the most bytes of
tensors at any moment of a step are held against the prediction, and so is the median of the seconds of a step. How well
the medians of even and of odd turns agree on the order (``tau_of_measured``) tells what correlation the measurement
allows at all.

The memory terms of predictions were found on the GPT; nothing was fitted to the other models, which are transformers'.

With ``--peaks`` nothing is timed and the machine is not calibrated: bytes do not depend on how busy it is.

Where other programs keep the machine busy, seconds are CPU time of the slowest rank, which a prediction meets without
the waiting of a pipeline (``bubble_s``).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import meshwright as mw
from meshwright.cost import memory, peak
from meshwright.errors import MeshwrightError
from meshwright.planner import Forecast, forecast, measured_state
from meshwright.planner.measure import Calibrated, calibrate
from meshwright.runtime import gather_objects, rank
from meshwright.runtime.launch import inside_launcher, launch
from meshwright.runtime.lazy import settling
from meshwright.training.accelerated import Accelerated

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt2"))

from gpt2 import GPT2
from tests.live_bytes import LiveBytes

VOCAB, SEQ = 512, 128
IMAGE, PATCH, CLASSES = 64, 8, 10
BATCH = 16  # over all ranks
PEAK_STEPS = 3
WARM_UP_STEPS, STEPS_IN_TURN = 2, 3  # those not timed, in which memory and caches are the strategy's again; and timed
STATE = ("parameters", "gradients", "master", "optimizer", "buffers")


def mesh(**axes: int) -> tuple[str, dict[str, int]]:
    return "parallel_mode", axes


def scheduled(name: str) -> tuple[str, dict[str, str]]:
    return "pipeline_parallel", {"schedule": name}


BF16 = ("amp_native", "bf16")
CASES: dict[int, dict[str, tuple[list[Any], int]]] = {
    2: {
        "data": ([], 1),
        "data, 2 micro-batches": ([], 2),
        "data, 4 micro-batches": ([], 4),
        "data, checkpoint": (["checkpoint"], 1),
        "data, bf16": ([BF16], 1),
        "zero1": (["zero1"], 1),
        "zero1, 4 micro-batches": (["zero1"], 4),
        "zero2": (["zero2"], 1),
        "zero2, 4 micro-batches": (["zero2"], 4),
        "zero2, checkpoint": (["zero2", "checkpoint"], 1),
        "fsdp": (["fsdp"], 1),
        "fsdp, 2 micro-batches": (["fsdp"], 2),
        "fsdp, 4 micro-batches": (["fsdp"], 4),
        "fsdp, checkpoint": (["fsdp", "checkpoint"], 1),
        "fsdp, bf16": (["fsdp", BF16], 1),
        "fsdp, bf16, checkpoint": (["fsdp", BF16, "checkpoint"], 1),
        "fsdp, half": (["fsdp", ("half", "bf16")], 1),
        "fsdp, offload": (["fsdp", "offload"], 1),
        "tensor": (["tensor_parallel", mesh(tensor=2)], 1),
        "tensor, checkpoint": (["tensor_parallel", mesh(tensor=2), "checkpoint"], 1),
        "tensor, sequence": ([("tensor_parallel", {"sequence": True}), mesh(tensor=2)], 1),
        "sequence": (["sequence_parallel", mesh(sequence=2)], 1),
        "sequence, fsdp": (["sequence_parallel", mesh(sequence=2), "fsdp"], 1),
        "context": (["context_parallel", mesh(context=2)], 1),
        "pipeline 1f1b, 4": ([mesh(pipeline=2), scheduled("1f1b")], 4),
        "pipeline 1f1b, 8": ([mesh(pipeline=2), scheduled("1f1b")], 8),
        "pipeline gpipe, 4": ([mesh(pipeline=2), scheduled("gpipe")], 4),
        "pipeline interleaved, 4": ([mesh(pipeline=2), scheduled("interleaved")], 4),
    },
    4: {
        "data": ([], 1),
        "data, checkpoint": (["checkpoint"], 1),
        "data, bf16": ([BF16], 1),
        "zero1": (["zero1"], 1),
        "zero2": (["zero2"], 1),
        "fsdp": (["fsdp"], 1),
        "fsdp, 2 micro-batches": (["fsdp"], 2),
        "fsdp, checkpoint": (["fsdp", "checkpoint"], 1),
        "data x zero": (["zero2", mesh(data=2, zero=2)], 1),
        "tensor 4": (["tensor_parallel", mesh(tensor=4)], 1),
        "data x tensor": (["tensor_parallel", mesh(data=2, tensor=2)], 1),
        "zero x tensor": (["tensor_parallel", "fsdp", mesh(zero=2, tensor=2)], 1),
        "data x sequence": (["sequence_parallel", mesh(data=2, sequence=2)], 1),
        "zero x context": (["context_parallel", "fsdp", mesh(zero=2, context=2)], 1),
        "pipeline 1f1b, 4": ([mesh(pipeline=4), scheduled("1f1b")], 4),
        "pipeline x data": ([mesh(pipeline=2, data=2), scheduled("1f1b")], 4),
        "pipeline x zero2": ([mesh(pipeline=2, zero=2), "zero2", scheduled("1f1b")], 4),
        "pipeline x tensor": (["tensor_parallel", mesh(pipeline=2, tensor=2), scheduled("1f1b")], 4),
    },
}
QUICK = ("data", "fsdp", "fsdp, checkpoint", "tensor", "pipeline 1f1b, 4", "data x zero")


@dataclass(frozen=True)
class Result:
    """One strategy."""

    world: int
    name: str
    predicted_s: float
    measured_s: float
    measured_of_halves: tuple[float, float]  # of even and of odd turns
    parts: dict[str, float]
    predicted_peak_bytes: int
    measured_peak_bytes: int

    @property
    def time_off(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def peak_off(self) -> float:
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1


def loss_func(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def a_gpt() -> nn.Module:
    return GPT2(vocab_size=VOCAB, seq_len=SEQ, dim=256, num_layers=4, num_heads=4)


def a_qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def a_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=IMAGE, patch_size=PATCH, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4, num_labels=CLASSES,
    )  # fmt: skip
    return ViTForImageClassification(config)


def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCAB, (SEQ,), generator=generator)


def labelled_image(generator: torch.Generator) -> dict[str, torch.Tensor]:
    label = torch.randint(0, CLASSES, (), generator=generator)
    return {"pixel_values": torch.randn(3, IMAGE, IMAGE, generator=generator), "labels": label}


@dataclass(frozen=True)
class Subject:
    """A model that trains, its samples, and the strategies that it cannot take.

    Args:
        build: Makes the model.
        sample: Makes a sample from random numbers.
        loss_func: None: the model's output carries the loss.
        options: Of ``accelerate``.
        without: Words in the names of strategies that are left out.
    """

    build: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Any]
    loss_func: Callable[[Any, Any], torch.Tensor] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def cases(self, world: int, *, quick: bool) -> dict[str, tuple[list[Any], int]]:
        return {
            name: case
            for name, case in CASES[world].items()
            if (not quick or name in QUICK) and not any(word in name for word in self.without)
        }


SUBJECTS = {
    "gpt": Subject(a_gpt, tokens, loss_func),
    "qwen2": Subject(
        a_qwen2, tokens, mw.loss.next_token_loss,
        {"prepare_input": lambda ids, device: {"input_ids": ids.to(device)}, "model_input_format": "unpack_dict"},
        without=("tensor 4",),  # two heads of keys and values
    ),
    "vit": Subject(
        a_vit, labelled_image, None, {"model_input_format": "unpack_dict"},
        without=("tensor, sequence",),  # two ranks do not divide 65 tokens; the other methods fill up
    ),
}  # fmt: skip


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, sample: Callable[[torch.Generator], Any]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 64 * BATCH

    def __getitem__(self, index: int) -> Any:
        return self.sample(torch.Generator().manual_seed(index))


def build(subject: Subject, strategy: list[Any], micro_batches: int) -> Accelerated:
    torch.manual_seed(0)
    return mw.accelerate(
        subject.build(), torch.optim.AdamW, Samples(subject.sample), subject.loss_func, strategy=strategy,
        max_grad_norm=1.0, optim_args={"lr": 1e-3, "fused": True}, dataloader_args={"batch_size": BATCH},
        num_micro_batches=micro_batches, **subject.options,
    )  # fmt: skip


def check_state(result: Accelerated) -> None:
    """Bytes of every class of lasting state, on every rank, exactly."""
    plan, job = result.plan, result._job
    predicted = memory(plan.steps[job.index("pipeline")] if plan.steps else plan.step, job.coordinate)
    for kind, measured in measured_state(result.model, result.optim).items():
        if kind in STATE and getattr(predicted, kind) != measured:
            raise AssertionError(f"{result.strategy}: {kind} {getattr(predicted, kind)} predicted, {measured} measured")


def peak_of(subject: Subject, strategy: list[Any], micro_batches: int) -> tuple[int, int]:
    """The most bytes of tensors that this rank holds in a step, and the prediction; state is checked beside.

    The least of some steps: by chance gloo's threads let go of what they have sent later. The host is the device here:
    what is offloaded to it counts as well.
    """
    with LiveBytes() as live:
        result = build(subject, strategy, micro_batches)
        batch = next(iter(result.dataloader))
        result.step(batch)
        check_state(result)
        gc.collect()
        peaks = []
        for _ in range(PEAK_STEPS):
            live.peak = 0
            result.step(batch)
            peaks.append(int(live.peak))
        plan, job = result.plan, result._job
        held = peak(plan.steps[job.index("pipeline")] if plan.steps else plan.step).memory
        return min(peaks), held.total + held.host_total


def turn_of(jobs: dict[str, Accelerated], batches: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Seconds of some steps under each strategy, on the wall and of CPU time, both of the slowest rank.

    A job's first steps only bring its weights back to where the others' have been.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    with settling() as settle:
        settle()  # a run has one job, as here the collector does not look through those of all strategies
        for name, job in jobs.items():
            for _ in range(WARM_UP_STEPS):
                job.step(batches[name])
            for _ in range(STEPS_IN_TURN):
                mw.synchronize()
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                job.step(batches[name])
                found[name].append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    every = gather_objects(found)
    return {name: [_slowest(each) for each in zip(*(of_rank[name] for of_rank in every), strict=True)] for name in jobs}


def _slowest(ranks: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return max(wall for wall, _ in ranks), max(cpu for _, cpu in ranks)


def median_of(turns: Sequence[Sequence[tuple[float, float]]], clock: int) -> float:
    return statistics.median(each[clock] for steps in turns for each in steps)


def predict(result: Accelerated, machine: Calibrated) -> Forecast:
    plan = result.plan
    return forecast(plan.steps or (plan.step,), machine.cluster, samples=BATCH)


def run_world(options: argparse.Namespace, world: int) -> list[Result]:
    mw.init_distributed(backend="gloo")
    if options.peaks:
        return run_peaks(options, world)
    clock = None if options.clock == "auto" else options.clock
    machine = calibrate(scale=0.3 if options.quick else 1.0, clock=clock)
    subject = SUBJECTS[options.model]
    cases = subject.cases(world, quick=options.quick)
    jobs, peaks = {}, {}
    for name, (strategy, micro_batches) in cases.items():
        try:
            peaks[name] = gather_objects(peak_of(subject, strategy, micro_batches))
            gc.collect()
            jobs[name] = build(subject, strategy, micro_batches)
        except MeshwrightError as error:
            mw.print_rank(f"{name}: {error}", file=sys.stderr)
    batches = {name: next(iter(job.dataloader)) for name, job in jobs.items()}
    turn_of(jobs, batches)  # warms up
    machines, measured = [machine], dict[str, list[list[tuple[float, float]]]]()
    for _ in range(2 if options.quick else options.rounds):
        for name, steps in turn_of(jobs, batches).items():
            measured.setdefault(name, []).append(steps)
        machines.append(calibrate(scale=0.3 if options.quick else 0.5, clock=machine.clock))
    on_wall, clock_index = machine.clock != "cpu", int(machine.clock == "cpu")
    results = []
    for name, job in jobs.items():
        told = [predict(job, each).time for each in machines]
        seconds = statistics.geometric_mean(each.step_time_s - (0.0 if on_wall else each.bubble_s) for each in told)
        turns = measured[name]
        halves = median_of(turns[::2], clock_index), median_of(turns[1::2] or turns, clock_index)
        held, known = max(peaks[name], key=lambda each: each[0])
        results.append(
            Result(world, name, seconds, median_of(turns, clock_index), halves, asdict(told[0]), known, held)
        )
    if rank() == 0:
        notes = machine.document()
        Path(options.into).write_text(json.dumps({"machine": notes, "results": [asdict(each) for each in results]}))
    mw.runtime.shutdown_distributed()
    return results


def run_peaks(options: argparse.Namespace, world: int) -> list[Result]:
    """Peaks alone; seconds are left at 1."""
    subject = SUBJECTS[options.model]
    results = []
    for name, (strategy, micro_batches) in subject.cases(world, quick=options.quick).items():
        held, known = max(gather_objects(peak_of(subject, strategy, micro_batches)), key=lambda each: each[0])
        results.append(Result(world, name, 1.0, 1.0, (1.0, 1.0), {}, known, held))
        gc.collect()
    if rank() == 0:
        Path(options.into).write_text(json.dumps({"machine": None, "results": [asdict(each) for each in results]}))
    mw.runtime.shutdown_distributed()
    return results


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Pairs of pairs in the same order less those in the other, over all."""
    signs = [1 if (a - c) * (b - d) > 0 else -1 for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    return sum(signs) / len(signs)


def regret(results: Sequence[Result]) -> float:
    """How much longer a step of the strategy predicted fastest takes than that of the fastest."""
    chosen = min(results, key=lambda each: each.predicted_s)
    return chosen.measured_s / min(each.measured_s for each in results) - 1


def summary(results: Sequence[Result]) -> dict[str, float]:
    off = sorted(abs(each.time_off) for each in results)
    peaks = sorted(abs(each.peak_off) for each in results)
    return {
        "strategies": len(results),
        "time_mape": statistics.mean(off), "time_median": statistics.median(off), "time_worst": off[-1],
        "peak_mape": statistics.mean(peaks), "peak_worst": peaks[-1],
        "kendall_tau": kendall_tau([(each.predicted_s, each.measured_s) for each in results]),
        "tau_of_measured": kendall_tau([each.measured_of_halves for each in results]), "regret": regret(results),
    }  # fmt: skip


def show_peaks(world: int, results: Sequence[Result]) -> None:
    table = Table(title=f"{world} ranks, peak tensor bytes", box=box.MARKDOWN, title_justify="left")
    for column in ("strategy", "predicted", "measured", "off"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for each in results:
        held = (f"{size / 2**20:.1f} MiB" for size in (each.predicted_peak_bytes, each.measured_peak_bytes))
        table.add_row(each.name, *held, f"{each.peak_off:+.1%}")
    console = Console(width=120)
    console.print(table)
    off = [abs(each.peak_off) for each in results]
    console.print(f"peak_mape: {statistics.mean(off):.3g}")
    console.print(f"peak_worst: {max(off):.3g}")


def show(world: int, results: Sequence[Result], machine: dict[str, Any]) -> None:
    clock = "CPU time" if machine["clock"] == "cpu" else "time"
    table = Table(title=f"{world} ranks, {clock} of a step", box=box.MARKDOWN, title_justify="left")
    for column in ("strategy", "predicted", "measured", "off", "peak predicted", "measured ", "off "):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for each in results:
        table.add_row(
            each.name, f"{1e3 * each.predicted_s:.0f} ms", f"{1e3 * each.measured_s:.0f} ms", f"{each.time_off:+.0%}",
            f"{each.predicted_peak_bytes / 2**20:.1f} MiB", f"{each.measured_peak_bytes / 2**20:.1f} MiB",
            f"{each.peak_off:+.1%}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    for name, value in summary(results).items():
        console.print(f"{name}: {value:.3g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SUBJECTS), default="gpt", help="which one trains (default gpt)")
    parser.add_argument("--world", type=int, choices=sorted(CASES), help="only so many ranks")
    parser.add_argument("--quick", action="store_true", help="a few strategies, a few steps: to see that it runs")
    parser.add_argument("--peaks", action="store_true", help="bytes alone: no calibration, no seconds")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each strategy (default 5)")
    parser.add_argument("--clock", choices=("auto", "wall", "cpu"), default="auto", help="which seconds count")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--into", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if inside_launcher():
        run_world(options, options.world)
        return 0
    everything = {}
    for world in [options.world] if options.world else sorted(CASES):
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "results.json"
            arguments = [*sys.argv[1:], "--world", str(world), "--into", str(into)]
            status = launch([__file__, *arguments], world)
            if status:
                return status
            found = json.loads(into.read_text())
        results = [Result(**each) for each in found["results"]]
        if options.peaks:
            show_peaks(world, results)
            everything[str(world)] = found
            continue
        show(world, results, found["machine"])
        everything[str(world)] = {**found, "summary": summary(results)}
    if options.json:
        options.json.write_text(json.dumps(everything, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
