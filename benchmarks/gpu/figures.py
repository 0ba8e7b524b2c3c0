"""Time steps of Llamas beside raw torch and the plan, kernels, and what a calibration finds."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peers.case import LLAMA_SIZES, loss_func
from tests import tiny
from torch import nn
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from gpu.checks import world
from gpu.worker import Session, Wrong
from meshwright.cost.cluster import half_peak_flops_per_s
from meshwright.methods.tokens.ring_attention import Block
from meshwright.planner.measure.calibration import calibrate
from meshwright.runtime import synchronize_device

_TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
_BATCH = {"1B": 4, "3B": 2, "8B": 2}
_LARGER = {"1B": 16, "3B": 8, "8B": 6}  # where logits are not kept and blocks are compiled
_WARM_STEPS, _STEPS, _MOST_S = 3, 6, 12.0
_STEPS_AT_A_TIME = 4  # the host may run ahead in them, as in a loop that reads no number
_OPTIM = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}
_AMP: list[Any] = [("amp_native", "bf16")]
_FUSED_LOSS = ("module_replace", ["fused_loss"])
_STRATEGIES: dict[str, list[Any]] = {
    "plain": _AMP,
    "compiled": [*_AMP, "compile"],
    "fp8": [*_AMP, "compile", "fp8"],
    "fsdp": [*_AMP, "fsdp"],
    "tuned": [("half", "bf16"), "compile", _FUSED_LOSS],
    "bf16": ["compile", _FUSED_LOSS],  # weights and states are of bf16
    "bf16_fp8": ["compile", _FUSED_LOSS, ("fp8", {"exclude": ["lm_head"]})],
    "checkpointed": [("half", "bf16"), "checkpoint"],
    "offload": [("half", "bf16"), "checkpoint", ("offload", "optimizer")],  # states visit the GPU
    "offload_on_host": [("half", "bf16"), "checkpoint", ("offload", {"optimizer": 1.0, "update_on": "host"})],
}


def llama(session: Session, size: str, variant: str) -> None:
    """Steps of one Llama: seconds, tokens, MFU and memory, beside the plan's where there is one."""

    def run(_: str) -> dict[str, Any]:
        with world(session):
            return _measured(session, size, variant)

    session.each(["figures"], run)


def _measured(session: Session, size: str, variant: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    in_bf16 = variant.startswith(("bf16", "raw_bf16"))
    batches = _LARGER if in_bf16 or variant == "tuned" else _BATCH
    batch, seq_len = (4, 16) if session.tiny else (batches[size], 2048)
    num_micro_batches = 4 if size == "8B" and in_bf16 else None  # weights are updated as seldom as in long runs
    batch *= num_micro_batches or 1
    config = LlamaConfig(**(_TINY if session.tiny else LLAMA_SIZES[size]), use_cache=False)
    torch.manual_seed(0)
    with session.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if in_bf16 else torch.float32)
    flops = _flops(model, batch, seq_len)
    ids = torch.randint(0, config.vocab_size, (batch, seq_len)).to(session.device)
    if variant.startswith("raw"):
        step, plan = _raw(model, ids.chunk(num_micro_batches or 1), variant, session), None
    else:
        job = mw.accelerate(
            model, torch.optim.AdamW, loss_func=loss_func, strategy=_strategy(variant, session), optim_args=_OPTIM,
            max_grad_norm=1.0, sample_batch=torch.zeros(batch, seq_len, dtype=torch.long),
            num_micro_batches=num_micro_batches,
        )  # fmt: skip
        step, plan = lambda: job.step(ids).loss, job.plan
    times, loss = _times(step, session)
    step_time_s = statistics.median(times)
    peak_bytes = torch.cuda.max_memory_allocated(session.device)
    peak = half_peak_flops_per_s(torch.cuda.get_device_name(session.device))
    figures = {
        "step_time_s": step_time_s, "tokens_per_s": batch * seq_len / step_time_s, "peak_bytes": peak_bytes,
        "mfu": flops / step_time_s / peak if peak else None, "loss": loss, "slowest_s": max(times),
    }  # fmt: skip
    if plan is not None:
        figures |= _beside(plan, step_time_s, peak_bytes)
    return figures | _where_it_goes(step, session)


def _strategy(variant: str, session: Session) -> list[Any]:
    """As on a GPU; on the stand-in without what it cannot do, compile and multiply in 8 bits."""
    emulated = {"compile": ("compile", {"backend": "aot_eager"}), "fp8": ("fp8", {"emulate": True})}
    named = [each if isinstance(each, str) else each[0] for each in _STRATEGIES[variant]]
    return [
        emulated.get(name, each) if session.tiny else each
        for name, each in zip(named, _STRATEGIES[variant], strict=True)
    ]


def _beside(plan: Any, step_time_s: float, peak_bytes: int) -> dict[str, Any]:
    """What the plan said, and how far off it is: above 0 it promised too much memory or time."""
    planned_bytes = plan.needed_bytes if plan.forecast is None else plan.forecast.peak.allocated_bytes
    found: dict[str, Any] = {"planned_peak_bytes": planned_bytes}
    if peak_bytes:
        found["peak_off"] = planned_bytes / peak_bytes - 1
    if plan.forecast is not None:
        planned_s = plan.forecast.time.step_time_s
        found |= {"planned_step_time_s": planned_s, "time_off": planned_s / step_time_s - 1}
    return found


_KERNELS = {
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "attention": ("flash", "fmha", "sdpa", "cudnn"),
    "optimizer": ("multi_tensor", "fused_adam", "adam"),
    "compiled": ("triton",),
    "copies": ("memcpy", "memset"),
}


def _where_it_goes(step: Callable[[], torch.Tensor], session: Session) -> dict[str, Any]:
    """Time of one step's kernels by kind, of the longest ones, and in which no kernel runs."""
    if session.tiny:
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        step()
        synchronize_device(session.device)
    ran = [each for each in traced.events() if each.device_type.name == "CUDA" and not each.is_user_annotation]
    spans = sorted((each.time_range.start, each.time_range.end, each.name) for each in ran)
    of_kind: dict[str, float] = defaultdict(float)
    of_name: dict[str, float] = defaultdict(float)
    busy_until = spans[0][0] if spans else 0.0
    for start, end, name in spans:
        kind = next((kind for kind, words in _KERNELS.items() if any(word in name.lower() for word in words)), "other")
        of_kind[f"{kind}_s"] += (end - start) * 1e-6
        of_name[name[:80]] += (end - start) * 1e-6
        of_kind["idle_s"] += max(start - busy_until, 0.0) * 1e-6
        busy_until = max(busy_until, end)
    longest = sorted(of_name.items(), key=lambda each: -each[1])[:16]
    return {"kernels": dict(of_kind), "longest": [{"name": name, "time_s": time_s} for name, time_s in longest]}


def _flops(model: nn.Module, batch: int, seq_len: int) -> float:
    """FLOPs of forward and backward as PaLM counts them, but of attention's the half that a causal mask needs."""
    config: Any = model.config
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    in_products = sum(each.numel() for each in model.parameters()) - looked_up
    heads = config.num_attention_heads * config.head_dim
    return batch * seq_len * (6.0 * in_products + 6.0 * config.num_hidden_layers * heads * seq_len)


def _raw(model: nn.Module, parts: Sequence[torch.Tensor], variant: str, session: Session) -> Callable[[], torch.Tensor]:
    """The loop that a careful user writes: autocast over fp32 weights, or FSDP2 that gathers and reduces in bf16."""
    sharded = variant == "raw_fsdp2"
    if variant in ("raw_compiled", "raw_bf16"):
        for block in model.model.layers:  # type: ignore[union-attr, misc]
            block.compile(backend="aot_eager" if session.tiny else "inductor")
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(session.device.type, (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        for block in (*model.model.layers, model):  # type: ignore[union-attr, misc]
            fully_shard(block, mesh=mesh, mp_policy=policy)
    optim = torch.optim.AdamW(model.parameters(), **_OPTIM)

    def step() -> torch.Tensor:
        optim.zero_grad()
        for ids in parts:
            with torch.autocast(session.device.type, torch.bfloat16, enabled=variant in ("raw", "raw_compiled")):
                loss = loss_func(ids, model(ids)) / len(parts)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        return loss.detach()

    return step


def _times(step: Callable[[], torch.Tensor], session: Session) -> tuple[list[float], float]:
    """Seconds of a step, several times, after the first ones, and the last loss; memory is counted anew from there."""
    for _ in range(_WARM_STEPS):
        step()
    synchronize_device(session.device)
    torch.cuda.reset_peak_memory_stats(session.device)
    times: list[float] = []
    while len(times) < (3 if session.tiny else _STEPS) and _STEPS_AT_A_TIME * sum(times) < _MOST_S:
        start_s = time.perf_counter()
        for _ in range(_STEPS_AT_A_TIME):
            loss = step()
        synchronize_device(session.device)
        times.append((time.perf_counter() - start_s) / _STEPS_AT_A_TIME)
    return times, float(loss)


_EXPERTS = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 8}
_METHODS: dict[str, list[Any]] = {"transformers": _AMP, "ours": [*_AMP, ("module_replace", ["experts"])]}


def experts(session: Session) -> None:
    """Steps of a mixture of Qwen3's shape in bf16: transformers' grouped products beside ours."""
    from experts import QUICK, SEQ_LEN, VOCAB, build, loss_of

    samples = 2 if session.tiny else 32

    def run(name: str) -> dict[str, Any]:
        with world(session):
            with session.device:
                model = build(QUICK if session.tiny else _EXPERTS, "grouped_mm")
            ids = torch.randint(0, VOCAB, (samples, SEQ_LEN))
            job = mw.accelerate(
                model, torch.optim.AdamW, loss_func=loss_of, strategy=_METHODS[name], optim_args=_OPTIM,
                model_input_format="unpack_dict", sample_batch=ids,
                prepare_input=lambda ids, device: {"input_ids": ids.to(device)},
            )  # fmt: skip
            times, loss = _times(lambda: job.step(ids).loss, session)
            peak_bytes = torch.cuda.max_memory_allocated(session.device)
        return {"step_time_s": statistics.median(times), "peak_bytes": peak_bytes, "loss": loss}

    # transformers' grouped products ask for a histogram that torch has on GPUs alone.
    session.each(("ours",) if session.tiny else _METHODS, run)


_BLOCKS, _BATCHES = 24, 12


def captured(session: Session) -> None:
    """Steps of a small GPT that are replayed as one graph, beside ordinary ones: equal losses, and less time."""

    def run(name: str) -> dict[str, Any]:
        strategy: list[Any] = [] if name == "fp32" else [("half", "bf16")]
        ids = torch.randint(0, 257, (_BATCHES, 8, 64))
        losses, times = [], []
        with world(session):
            for is_recorded in (False, True):
                torch.manual_seed(0)
                job = mw.accelerate(
                    tiny.gpt2.GPT2(257, 64, 64, 2 if session.tiny else _BLOCKS, 4), torch.optim.AdamW,
                    loss_func=tiny.loss_func, strategy=strategy, optim_args=_OPTIM, max_grad_norm=1.0,
                    sample_batch=ids[0],
                )  # fmt: skip
                step = mw.CapturedStep(job) if is_recorded else job.step
                losses.append([float(step(each).loss) for each in ids])
                batch = ids[0].to(session.device)
                times.append(statistics.median(_times(lambda step=step, batch=batch: step(batch).loss, session)[0]))
        off = max(abs(one / other - 1) for one, other in zip(*losses, strict=True))
        if not off < 1e-3 or losses[0][-1] == losses[0][0]:
            raise Wrong(f"losses of replayed steps differ by {off:.2g}")
        return {"ordinary_s": times[0], "replayed_s": times[1], "ratio": times[1] / times[0], "losses_off": off}

    session.each(("fp32", "half"), run)


# --- Kernels, and the machine


def attention(session: Session) -> None:
    """Forward and backward of one block of ring attention, beside torch's own attention over the same tensors."""
    tokens, features, dtype = (16, 8, torch.float32) if session.tiny else (4096, 128, torch.bfloat16)

    def run(name: str) -> dict[str, Any]:
        is_causal = name == "causal"
        shape = (2, 16, tokens, features)
        tensors = [torch.randn(shape).to(session.device, dtype) for _ in range(4)]

        def ours() -> torch.Tensor:
            block = Block(*tensors[:3], None, is_causal, None)
            out, lse = block.forward()
            return block.backward(tensors[3], out, lse)[0].sum()

        leaves = [each.detach().clone().requires_grad_() for each in tensors[:3]]

        def torchs() -> torch.Tensor:
            out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
            return torch.autograd.grad(out, leaves, tensors[3])[0].sum()

        own, other = (statistics.median(_times(each, session)[0]) for each in (ours, torchs))
        return {"ring_block_s": own, "torch_s": other, "ratio": own / other}

    with session.gpu():
        session.each(("causal", "whole"), run)


def calibration(session: Session) -> None:
    """What ``meshwright calibrate`` finds of this machine."""

    def run(_: str) -> dict[str, Any]:
        with world(session, on_cpu=session.tiny):
            return dict(calibrate(scale=0.01 if session.tiny else 0.5).figures())

    session.each(["figures"], run)
