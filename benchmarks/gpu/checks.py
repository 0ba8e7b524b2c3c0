"""Check what is right: the tests' own cases on a GPU, and what only a GPU can show."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests import tiny
from tests.cli import helpers as cli
from tests.faults.command_runs import events, prepare
from tests.methods import pair_runs
from tests.methods.pair_runs import FP32_LIMIT, OF_ONE_PROCESS, ROWS, Case
from tests.staged_gloo import ANY_DEVICE, carried_by_host
from tests.stand_in_cuda import on_host
from tests.training.test_host_reads import OPTIMIZERS, losses_of, unsound_steps

import meshwright as mw
from gpu.worker import Session, Wrong
from meshwright.methods.tokens.ring_attention import Block
from meshwright.nn.fp8 import DelayedScaling, Fp8Options, to_fp8
from meshwright.optim.offload_storage import CudaCopies
from meshwright.runtime import init_distributed, shutdown_distributed
from meshwright.store import CheckpointStore, TrainingState

LOSS_LIMIT = 1e-4  # of losses under AdamW, relative
FP8_LIMIT = 5e-3  # of products that tensor cores sum in fewer bits, relative
FAR_BEHIND = 2_000_000  # cycles that a copy is held up: a millisecond


@contextlib.contextmanager
def world(session: Session, *, on_cpu: bool = False, nccl: bool = False) -> Iterator[None]:
    """A world of these ranks on the CPU, or on the GPU: by NCCL, or where ranks share one, by gloo and the host."""
    by_nccl = nccl or _has_nccl(session)
    with contextlib.ExitStack() as stack:
        if not on_cpu:
            stack.enter_context(session.gpu())
            if not by_nccl:
                stack.enter_context(carried_by_host(ANY_DEVICE if session.tiny else "CUDA"))
        on_gpu = "cpu:gloo,cuda:nccl" if by_nccl else "cpu:gloo,cuda:gloo"
        init_distributed(backend="gloo" if on_cpu else on_gpu, timeout_s=60.0)
        try:
            yield
        finally:
            shutdown_distributed()


def _has_nccl(session: Session) -> bool:
    return not session.tiny and dist.is_nccl_available() and os.environ.get("WORLD_SIZE", "1") == "1"


def _within(what: str, off: float, limit: float) -> dict[str, Any]:
    if not off <= limit:
        raise Wrong(f"{what} differ by {off:.2g}, and {limit:.2g} is allowed")
    return {"off": off, "limit": limit}


def _losses_within(own: list[float], expected: list[float], limit: float = LOSS_LIMIT) -> dict[str, Any]:
    off = max(abs(one / other - 1) for one, other in zip(own, expected, strict=True))
    return _within("losses", off, limit)


def _outcome(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses, weights = pair_runs.train(case)
    return losses, {name: on_host(value).cpu() for name, value in weights.items()}


# --- Methods and optimizers, as the tests try them on CPUs


def methods(session: Session) -> None:
    """Every method that one rank can use, beside a plain process on the CPU."""

    def run(method: str) -> dict[str, Any]:
        case = Case((method,), 1)
        limit = FP32_LIMIT + ROWS[method].drift
        if case.rounding:  # the same precision on the CPU says how far rounding takes it
            with world(session, on_cpu=True):
                limit = OF_ONE_PROCESS * pair_runs.worst_difference(case, [_outcome(case)])
        with world(session):
            outcome = _outcome(case)
        return _within("losses or weights", pair_runs.worst_difference(case, [outcome]), limit)

    chosen = [name for name, row in ROWS.items() if not row.axes]
    session.each(_some(chosen, session, ("skip_nonfinite", "checkpoint")), run)


def _as_one_process(case: Case, on_hosts: dist.ProcessGroup | None) -> dict[str, Any]:
    """Train a case on all ranks, and compare what they hold with one process on the CPU."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _outcome(case), group=on_hosts)
    limit = FP32_LIMIT + sum(ROWS[method].drift for method in case.methods)
    return _within("losses or weights", pair_runs.worst_difference(case, outcomes), limit)


def exchange(session: Session, backend: str = "gloo") -> None:
    """Every method that divides a model over two ranks, beside a plain process on the CPU."""

    def run(method: str) -> dict[str, Any]:
        return _as_one_process(Case((method,)), on_hosts)

    with world(session, nccl=backend == "nccl"):
        on_hosts = dist.new_group(backend="gloo")
        chosen = [name for name, row in ROWS.items() if row.axes]
        session.each(_some(chosen, session, ("fsdp", "context_parallel", "pipeline_parallel")), run)


def pairs(session: Session) -> None:
    """Every pair of methods on two ranks that computes in fp32, beside a plain process on the CPU."""
    in_fp32 = [name for name, row in ROWS.items() if not row.rounds]
    cases = {f"{one} {other}": Case((one, other)) for one, other in itertools.combinations(in_fp32, 2)}
    possible = {name: case for name, case in cases.items() if case.world == 2}
    allowed = [name for name, case in possible.items() if pair_runs.refusal(case) is None]

    with world(session):
        on_hosts = dist.new_group(backend="gloo")
        session.each(_some(allowed, session, ("outer ema",)), lambda name: _as_one_process(cases[name], on_hosts))


def optimizers(session: Session) -> None:
    """Losses under every optimizer, beside the CPU's."""

    def run(name: str) -> dict[str, Any]:
        with world(session, on_cpu=True):
            expected = losses_of(*OPTIMIZERS[name], [])
        with world(session):
            every = [losses_of(*OPTIMIZERS[name], strategy) for strategy in ([], ["fsdp"])]
        return _losses_within([each for own in every for each in own], 2 * expected)

    session.each(_some(list(OPTIMIZERS), session, ("AdamW", "AdamOffloadOptimizer")), run)


def _some(names: list[str], session: Session, few: tuple[str, ...]) -> list[str]:
    """On a GPU all; with tiny sizes a few, for tests try the others on the stand-in."""
    return [name for name in names if name in few] if session.tiny else names


_UNSOUND: dict[str, list[Any]] = {
    "skip_nonfinite": ["skip_nonfinite"],
    "loss_spike": [("loss_spike", {"window": 4, "threshold": 20.0})],
    "fp16": [("half", {"dtype": "fp16"}), "fsdp"],
}


def decisions(session: Session) -> None:
    """What the device decides about bad losses is what the host would have decided."""

    def run(name: str) -> dict[str, Any]:
        with world(session, on_cpu=True):
            expected = unsound_steps(_UNSOUND[name])
        with world(session):
            found = unsound_steps(_UNSOUND[name])
        told = [[step[2:5] for step in each[0]] for each in (found, expected)]
        if found[1:] != expected[1:] or told[0] != told[1]:
            raise Wrong(f"steps skipped, spikes and rates are {told[0]}, and {told[1]} on the CPU")
        pairs = [(one[0], other[0]) for one, other in zip(found[0], expected[0], strict=True)]
        finite = [pair for pair in pairs if abs(pair[1]) < float("inf")]
        limit = 2e-2 if name == "fp16" else LOSS_LIMIT
        return _losses_within(*map(list, zip(*finite, strict=True)), limit)  # type: ignore[arg-type]

    session.each(_UNSOUND, run)


# --- Kernels


def fp8_kernels(session: Session) -> None:
    """8-bit products beside fp32 products of the same 8-bit values, forward and backward."""
    size = 64 if session.tiny else 2048

    def run(fp8_format: str) -> dict[str, Any]:
        recipe = DelayedScaling(fp8_format=fp8_format)  # type: ignore[arg-type]
        found = []
        for emulate in (session.tiny, True):
            torch.manual_seed(0)
            layer = to_fp8(torch.nn.Linear(size, 2 * size), Fp8Options(recipe, emulate, keep_weight=False))
            layer = layer.to(session.device, torch.bfloat16)
            given = torch.randn(3, size, size).to(session.device, torch.bfloat16).requires_grad_()
            out = layer(given)
            # Not a gradient of the output: what rounding moves there would be another number in 8 bits.
            out.backward(torch.randn(3, size, 2 * size).to(session.device, torch.bfloat16))
            assert given.grad is not None
            assert layer.weight.grad is not None
            found.append([out.detach(), given.grad, layer.weight.grad])
        off = max(_apart(one, other) for one, other in zip(*found, strict=True))
        return _within("products or gradients", off, FP8_LIMIT)

    with session.gpu():
        session.each(("E4M3", "HYBRID"), run)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = (on_host(each).float().cpu() for each in (one, other))
    return ((one - other).norm() / other.norm()).item()


# Type, heads of keys for 8 of queries, whether causal, whether masked.
_ATTENTION = {
    "bf16 causal": (torch.bfloat16, 8, True, False),
    "bf16 grouped": (torch.bfloat16, 2, False, False),
    "fp32 causal": (torch.float32, 8, True, False),
    "fp32 masked": (torch.float32, 2, False, True),
    "bf16 masked": (torch.bfloat16, 8, False, True),
}


def attention(session: Session) -> None:
    """The kernels of ring attention, forward and backward, beside attention that is written out in fp32."""
    tokens, features = (12, 8) if session.tiny else (384, 64)

    def run(name: str) -> dict[str, Any]:
        dtype, groups, is_causal, is_masked = _ATTENTION[name]
        torch.manual_seed(0)
        shapes = [(2, heads, tokens, features) for heads in (8, groups, groups)]
        tensors = [torch.randn(shape).to(dtype) for shape in shapes]
        gradient = torch.randn(shapes[0]).to(dtype)
        mask = torch.zeros(2, 1, tokens, tokens).masked_fill(torch.rand(2, 1, tokens, tokens) < 0.3, -torch.inf)
        mask[..., 0] = 0.0
        expected = _written_out(tensors, gradient, mask if is_masked else None, is_causal)
        query, key, value, gradient = (each.to(session.device) for each in (*tensors, gradient))
        block = Block(query, key, value, mask.to(session.device, dtype) if is_masked else None, is_causal, None)
        out, lse = block.forward()
        found = [out, *block.backward(gradient, out, lse)]
        off = max(_apart(one, other) for one, other in zip(found, expected, strict=True))
        found_right = _within("outputs or gradients", off, 1e-5 if dtype == torch.float32 else 2e-2)
        # Since Hopper cuDNN is to compute what has no mask: FlashAttention is about half as fast there.
        return {**found_right, "by_cudnn": not session.tiny and block._padded()._takes_cudnn()}

    # The stand-in has no flash kernel.
    with session.gpu():
        session.each([name for name in _ATTENTION if not session.tiny or name.startswith("fp32")], run)


def _written_out(
    tensors: list[torch.Tensor], gradient: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> list[torch.Tensor]:
    query, key, value = (each.double().requires_grad_() for each in tensors)
    times = query.shape[1] // key.shape[1]
    wide = [each.repeat_interleave(times, 1) for each in (key, value)]
    scores = query @ wide[0].mT / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + mask.double()
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ wide[1]
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), gradient.double())]


# --- Streams: what is right by luck becomes wrong when copies come late and freed memory is written to


@contextlib.contextmanager
def late_copies_and_poison(model: torch.nn.Module) -> Iterator[None]:
    """Hold up every copy between device and host, and write nan into memory as soon as it is free."""
    plain = {name: getattr(CudaCopies, name) for name in ("to_host", "to_device")}

    def late(copies: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(getattr(copies, f"_{name}")):
            torch.cuda._sleep(FAR_BEHIND)
        return plain[name](copies, *args, **kwargs)

    def poison(like: torch.Tensor) -> None:
        # Blocks of a size that activations have just left, and one of each gradient's.
        for _ in range(3):
            torch.empty_like(like).fill_(float("nan"))

    def after_forward(module: torch.nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            poison(out.detach())
            if out.requires_grad:
                out.register_hook(lambda gradient: poison(gradient.detach()))

    handles = [module.register_forward_hook(after_forward) for module in model.modules()]
    with contextlib.ExitStack() as stack:
        for name in plain:
            stack.enter_context(mock.patch.object(CudaCopies, name, functools.partialmethod(late, name)))
        yield
    for handle in handles:
        handle.remove()


_FEW_AT_A_TIME = {"optimizer": 1.0, "bucket_bytes": 2**14}
_OFFLOADED: dict[str, list[Any]] = {
    "optimizer": [("offload", "optimizer")],
    "optimizer in buckets": [("offload", _FEW_AT_A_TIME)],
    "optimizer in buckets, half": [("half", "bf16"), ("offload", _FEW_AT_A_TIME)],
    "optimizer in buckets, fsdp": ["fsdp", ("offload", {**_FEW_AT_A_TIME, "optimizer": 0.6})],
    "optimizer on the host": [("offload", {**_FEW_AT_A_TIME, "update_on": "host"})],
    "activations": [("offload", "activation")],
    "all": [("offload", "all"), "fsdp"],
}


def _job(strategy: list[Any], loss_func: Any = tiny.loss_func, optim: Any = torch.optim.AdamW) -> Any:
    torch.manual_seed(0)
    return mw.accelerate(
        tiny.plain(num_layers=4), optim, tiny.Tokens(), loss_func, strategy=strategy, optim_args={"lr": 1e-3},
        dataloader_args={"batch_size": 8}, max_grad_norm=1.0,
    )  # fmt: skip


def _losses(job: Any, steps: int) -> list[float]:
    return [float(job.step(batch).loss) for batch in itertools.islice(job.dataloader, steps)]


def offload(session: Session) -> None:
    """Losses with offloading, late copies and poison, beside those without."""

    def run(name: str) -> dict[str, Any]:
        with world(session):
            expected = _losses(_job([each for each in _OFFLOADED[name] if each[0] == "half"]), 10)
            job = _job(_OFFLOADED[name])
            with late_copies_and_poison(job.model):
                found = _losses(job, 10)
        return _losses_within(found, expected)

    session.each(_OFFLOADED, run)


def checkpoint(session: Session) -> None:
    """What a save in the background writes is what was there when it began, and training goes on from it."""

    def run(name: str) -> dict[str, Any]:
        strategy = [] if name == "plain" else [name]
        with world(session), tempfile.TemporaryDirectory() as folder:
            job = _job(strategy)
            batches = list(itertools.islice(job.dataloader, 6))
            for batch in batches[:3]:
                job.step(batch)
            store = CheckpointStore(Path(folder))
            store.save(TrainingState(job.model, job.optim, step=3), non_blocking=True)
            expected = [float(job.step(batch).loss) for batch in batches[3:]]
            other = _job(strategy)
            store.load(TrainingState(other.model, other.optim))
            found = [float(other.step(batch).loss) for batch in batches[3:]]
        return _losses_within(found, expected, 1e-6)

    session.each(("plain", "fsdp"), run)


# --- The program


_WRITES = ("--set", "run.log_every=1", "--set", "model.args.dropout=0.0")
_KILL = ("--max-restarts", 2, "--set", "run.callbacks=['faulty:Faults']", "--set", "run.snapshot.every=1")


def commands(session: Session) -> None:
    """``meshwright train`` on the GPU, whole, resumed and killed, beside the same run on the CPU."""
    device = "cpu" if session.tiny else "auto"

    def trained(folder: Path, *options: Any) -> list[float]:
        done = cli.meshwright("train", "tiny.toml", "--out", "out", *_WRITES, *options, folder=folder)
        if done.returncode:
            raise Wrong((done.stderr.strip().splitlines() or ["no output"])[-1])
        return cli.losses(folder / "out")

    def run(name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as temporary:
            own, other = Path(temporary, "own"), Path(temporary, "other")
            for folder in (own, other):
                prepare(folder, [("kill", 4, 0)])
            expected = trained(other, "--set", "run.device='cpu'")
            options: tuple[Any, ...] = ("--set", f"run.device='{device}'", *_OPTIONS[name])
            if name == "resumed":
                trained(own, "--steps", 3, *options)
                options = (*options, "--resume", "auto")
            figures = _losses_within(trained(own, *options), expected)
            if name == "killed":
                figures["went_on"] = next(told for told in events(own) if told["what"] == "went on")
        return figures

    session.each(_some(list(_OPTIONS), session, ("resumed", "killed")), run)


_OPTIONS: dict[str, tuple[Any, ...]] = {
    "whole": ("--set", "run.profile.steps=[3, 4]"),
    "fsdp bf16": ("--strategy", "fsdp + amp_native"),
    "resumed": (),
    "killed": _KILL,
}


# --- Errors that a run survives


def out_of_memory(session: Session) -> None:
    """After a step that wants more memory than there is, training goes on as if the step had not been."""

    def too_much() -> None:
        if session.tiny:
            raise torch.OutOfMemoryError("made up")
        torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device=session.device)

    def run(name: str) -> dict[str, Any]:
        where, _, method = name.partition(" ")

        def loss_func(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if bad and where == "forward":
                too_much()
            if bad:
                logits.register_hook(lambda gradient: too_much())
            return tiny.loss_func(ids, logits)

        bad, found = False, {}
        with world(session):
            for fails in (False, True):
                job = _job([method] if method else [], loss_func)
                batches = list(itertools.islice(job.dataloader, 5))
                losses = [float(job.step(batches[0]).loss)]
                if fails:
                    bad = True
                    try:
                        job.step(batches[1])
                    except torch.OutOfMemoryError:
                        pass
                    else:
                        raise Wrong("no error came")
                    bad = False
                losses += [float(job.step(batch).loss) for batch in batches[2:]]
                found[fails] = losses
        return _losses_within(found[True], found[False], 1e-6)

    session.each(("forward", "backward", "forward fsdp", "backward fsdp"), run)
