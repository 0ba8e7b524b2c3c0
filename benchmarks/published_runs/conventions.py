"""Conventions of the sources of published runs: implementation, fp32 state, FLOPs and memory, by the table's date."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.planner.family_ops import Implementation
from published_runs.table_rows import Row, devices

FLASH2 = Implementation(attention="flash2")


@dataclass(frozen=True)
class Convention:
    """How a source trains, and what it prints.

    Args:
        words: Words of which any one in a source's name identifies it.
        family: Family of models whose names do not show it.
        impl: Its kernels, and what they save; cells of a row may change ``scaling``, ``compiled`` and ``split_tokens``.
        reentrant: Whether recomputation repeats whole blocks, their last product included.
        reduce: Precision in which gradients are reduced.
        wide_gradients: Whether gradients accumulate in fp32 beside half weights.
        reduces_beside: Whether reducing gradients overlaps with backward (without ZeRO 3).
        reduces_after: Whether under ZeRO 1 gradients are reduced after backward, and not beside it.
        copy_s: Seconds per parameter and rank in which the host copies parts of what ZeRO 1 gathers.
        micro_batch_s: Seconds that devices wait for the host in each micro-batch.
        adds_gradients: Whether kernels of their own add each micro-batch's half gradients to fp32 ones.
        counts_embedding: Whether an MFU counts the embedding as a product, even where it is the head beyond one stage.
        collective_host_s: Seconds of the host per tensor-parallel collective; None: those of all.
        waiting_s: Seconds of each tensor-parallel collective per rank in pipelines over several nodes.
        transfer_s: Seconds of each transfer between stages on 64 nodes, and where tensors are divided over four.
        offloads: Whether the optimizer's state is in host memory.
        offloads_activations: Whether under ZeRO 3 activations that do not fit are offloaded, block by block.
        memory: Whether a peak counts allocated or reserved memory.
        first_rank: Whether a peak is that of the first rank, instead of the highest.
        ddp_buckets: Whether DistributedDataParallel's buckets are a second copy of the gradients.
        latency_s: Latency between nodes; the default is that of InfiniBand and RoCE.
        ring_step_s: Seconds of each step of a ring between nodes.
        keeps_stages: Whether pipelines are torch's, whose stages receive every micro-batch in its own buffer, and keep
            their outputs until backward, and the logits of all micro-batches.
        splits_local_batch: Whether a pipeline divides the printed micro-batch by its number of ranks.
        batch_of_device: Whether the printed micro-batch is one device's share of its tensor group's.
        gathers_ahead: Whether backward gathers the next block while one computes (FSDP's BACKWARD_PRE).
        stages: Maximum number of stages per pipeline rank where a table does not give it.
        async_tensor: Whether tensor-parallel collectives overlap with the products they feed.
        gathers_fp8: Whether gathers carry 8 bits where each tensor has one scale.
        softmax_of: Its fused softmax takes multiples of this number of samples times heads; others take five kernels.
        early_on: Families of devices that its libraries were not optimized for yet.
        loss_parallel: Whether the loss of a vocabulary that a tensor axis divides is torch's ``loss_parallel``.
        bucket_bytes: Size of the fixed buffers in which gradients are reduced.
        kept_gathered: Share of the gathered inputs that a peak has, where ``impl`` keeps them.
        live_bytes: Limit of gathered parameters under ZeRO 3, which gathers single layers instead of blocks.
        expandable: Whether the allocator has expandable segments, and loses no memory between segments.
        flops: FLOPs that an MFU or a TFLOPS figure counts: all scores, half of them (causal), or recomputation, too.
        vocab: Vocabulary where a table does not give it.
        default_zero: ZeRO stage where a table does not give it.
        default_ac: Recomputation where a table does not give it: ``none`` if that fits, ``never`` even if it does not.
    """

    words: tuple[str, ...] = ()
    family: Literal["gpt", "llama"] = "llama"
    impl: Implementation = FLASH2
    reentrant: bool = False
    reduce: Literal["half", "fp32"] = "fp32"
    wide_gradients: bool = False
    reduces_beside: bool = True
    reduces_after: bool = False
    copy_s: float = 0.0
    micro_batch_s: float = 0.0
    adds_gradients: bool = False
    counts_embedding: bool = False
    collective_host_s: float | None = None
    waiting_s: float = 0.0
    transfer_s: float = 0.0
    offloads: bool = False
    offloads_activations: bool = False
    memory: Literal["allocated", "reserved"] = "reserved"
    first_rank: bool = False
    ddp_buckets: bool = False
    flops: Literal["full", "causal", "hardware"] = "full"
    vocab: int | None = None
    latency_s: float = 1.2e-5
    ring_step_s: float = 0.0
    keeps_stages: bool = False
    async_tensor: bool = False
    splits_local_batch: bool = False
    batch_of_device: bool = False
    stages: int = 1
    gathers_ahead: bool = True
    gathers_fp8: bool = False
    softmax_of: int = 1
    early_on: tuple[str, ...] = ()
    loss_parallel: bool = False
    bucket_bytes: int = 0
    kept_gathered: float = 1.0
    live_bytes: int = 0
    expandable: bool = False
    default_zero: int = 0
    default_ac: Literal["none", "never", "full"] = "none"


# --- The sources
#
# Words in a source's name identify it. Every entry is what the project documents, or what its code did when the figures
# were published; none is fitted.

# Megatron-LM's loss of divided vocabularies (nanotron's is a copy): cast to fp32, then a maximum, a difference,
# exponentials, a sum and a quotient, each in a kernel; backward multiplies and casts.
_STEPWISE_LOSS = (38, 14)
# Transformer Engine brings cuDNN's attention, and saves the inputs of products in 8 bits.
_TRANSFORMER_ENGINE = Implementation(attention="torch", saves_narrow=True)
_MEGATRON_2022 = Convention(  # masked-softmax kernels, dropout, no tokens divided but where it is said
    words=("korthikanti", "2205.05198", "vtrain"),
    family="gpt",
    impl=Implementation(
        attention="scores",
        dropout=True,
        split_tokens=False,
        fused_loss=True,
        logit_moves=_STEPWISE_LOSS,
        scatters_boundary=True,
    ),
    reentrant=True,
    reduce="half",
    wide_gradients=True,
    reduces_beside=False,
    micro_batch_s=2.3e-3,
    softmax_of=4,  # ``FusedScaleMaskSoftmax.is_kernel_available``
    vocab=51200,
    default_ac="full",
)
# The figures of 2021 count recomputation (equation 3 of Narayanan et al.); so does what Megatron-DeepSpeed prints.
_MEGATRON_2021 = dataclasses.replace(_MEGATRON_2022, words=("narayanan", "2104.04473"), flops="hardware")
_MEGATRON_DEEPSPEED = dataclasses.replace(  # its pipelines are DeepSpeed's, whose ZeRO 1 keeps gradients in half
    _MEGATRON_2021,
    words=("megatron-deepspeed", "bigscience", "bloom", "mt-nlg", "2201.11990", "gpt-neox", "neox"),
    wide_gradients=False,
    bucket_bytes=2 * 10**9,  # as of ``deepspeed`` below
    default_zero=1,
)
_MEGATRON = Convention(
    words=("megatron-lm", "mcore", "megascale", "megatron"),
    family="gpt",
    # Transformer Engine's attention; its norms, rotary positions and activations are fused.
    impl=dataclasses.replace(
        _TRANSFORMER_ENGINE, compiled=True, scaling="delayed", casts_weights=False, fused_loss=True
    ),
    reentrant=True,
    wide_gradients=True,
    async_tensor=True,
    stages=8,
    vocab=128256,
    default_zero=1,
)
_KNOWN = (
    _MEGATRON_2022,
    _MEGATRON_2021,
    _MEGATRON_DEEPSPEED,
    Convention(words=("automodel",), impl=_TRANSFORMER_ENGINE, default_zero=3),  # FSDP2 with Transformer Engine
    dataclasses.replace(  # ``grad_sync_dtype: bf16`` in NeMo's recipes, ``grad_reduce_in_fp32 = False`` in Bridge's
        _MEGATRON,
        words=("nemo",),
        reduce="half",
        wide_gradients=False,
    ),
    dataclasses.replace(
        _MEGATRON,
        words=("megatron-bridge", "megatron bridge"),
        reduce="half",
        wide_gradients=False,
        impl=dataclasses.replace(_MEGATRON.impl, scaling="current"),  # its recipes are named ``fp8cs``
        expandable=True,  # ``PYTORCH_CUDA_ALLOC_CONF`` of its recipes
        offloads_activations=True,  # ``cpu_offloading_num_layers`` of those with FSDP
    ),
    _MEGATRON,
    Convention(  # XLA fuses what is elementwise; attention is cuDNN's (``cudnn_flash_te``)
        words=("maxtext",),
        impl=dataclasses.replace(_TRANSFORMER_ENGINE, compiled=True, scaling="delayed", fused_loss=True),
        default_zero=3,
    ),
    Convention(  # its recipes switch cuDNN's attention off (``xla_gpu_enable_cudnn_fmha=false``)
        words=("paxml", " pax "),
        family="gpt",
        impl=Implementation(attention="scores", compiled=True, scaling="delayed", fused_loss=True),
        vocab=51200,
        default_zero=3,
    ),
    Convention(words=("kempnerforge",), impl=_TRANSFORMER_ENGINE, default_zero=3),  # its profile names cuDNN's kernels
    Convention(
        words=("llm-foundry", "llmfoundry", "mosaic", "composer"),
        family="gpt",
        impl=Implementation(
            attention="flash1",  # Triton's kernel of 2023
            scaling="delayed",  # Transformer Engine's
            fused_loss=True,
            # FlashAttention's loss, and two metrics of each training batch (LanguageCrossEntropy, LanguagePerplexity)
            # that take torch's cross-entropy under autocast.
            logit_moves=(2 + 2 * 14, 4),
        ),
        reduce="half",
        early_on=("H100",),  # cuBLAS of CUDA 12.1
        gathers_ahead=False,  # Composer's default is BACKWARD_POST
        vocab=50368,
        default_zero=3,
    ),
    Convention(
        words=("nanotron",),
        first_rank=True,  # which writes its table (``log_throughput``)
        memory="allocated",  # the table has both; the figure does not say which
        ddp_buckets=True,  # without ``gradient_as_bucket_view``
        reentrant=True,
        wide_gradients=True,
        reduces_after=True,
        copy_s=5e-6,
        collective_host_s=2.35e-4,
        waiting_s=3.5e-4,
        async_tensor=True,
        latency_s=3e-5,  # AWS's network (EFA)
        ring_step_s=5.5e-5,
        adds_gradients=True,
        counts_embedding=True,
        impl=Implementation(
            attention="flash2",
            # Inferred from this table's peaks: no public run says so.
            copies_heads=True,
            keeps_gathered=True,
            logit_bytes=(6, 4),
            logit_moves=_STEPWISE_LOSS,
            balances_head="reaching",
        ),
        vocab=131072,
    ),
    Convention(
        words=("bmtrain",),
        family="gpt",
        impl=Implementation(attention="scores", dropout=True, split_tokens=False, fused_loss=True),
        reentrant=True,
        reduce="half",
        offloads=True,
        batch_of_device=True,
        vocab=50304,
        default_zero=3,
        default_ac="full",
    ),
    Convention(
        words=("deepspeed",),
        family="gpt",
        impl=Implementation(attention="scores", dropout=True, split_tokens=False, logit_bytes=(8, 4)),
        reentrant=True,
        reduce="half",
        flops="hardware",
        # Documented defaults of ZeRO 2 and 3: two reduction buckets of 5e8, and 1e9 live parameters, in half.
        bucket_bytes=2 * 10**9,
        live_bytes=2 * 10**9,
        vocab=51200,
        default_zero=3,
        default_ac="full",
    ),
    Convention(
        words=("colossal",),
        memory="allocated",  # its benchmark prints ``max_memory_allocated``
        reentrant=True,
        reduce="half",
        wide_gradients=True,
        default_ac="full",
        default_zero=1,
    ),
    Convention(  # of 2025: the loss is compiled, too
        words=("trainy",),
        expandable=True,
        gathers_fp8=True,
        splits_local_batch=True,
        impl=Implementation(attention="flash2", logit_bytes=(2, 2)),
        vocab=128256,
        default_zero=3,
    ),
    Convention(
        words=("torchtitan", "torchao"),
        early_on=("B200",),  # torch and cuBLAS of 2025
        expandable=True,
        impl=Implementation(attention="flash2", plain_norms=True),
        gathers_fp8=True,  # ``enable_fsdp_float8_all_gather``, ``Float8ColwiseParallel``
        loss_parallel=True,
        keeps_stages=True,
        splits_local_batch=True,
        vocab=128256,
        default_zero=3,
    ),
    Convention(words=("fms-fsdp", "fms_fsdp", "ibm"), reduce="half", vocab=32000, default_zero=3),
    Convention(
        words=("llama 3 paper", "2407.21783"),
        impl=Implementation(attention="flash2", compiled=True, fused_loss=True),
        wide_gradients=True,
        stages=8,  # §3.3.2: interleaved, a stage is one layer
        default_ac="never",  # §3.3.2: without recomputation at 8K tokens
        default_zero=1,
    ),
    Convention(words=("nanochat", "picotron"), default_zero=1),
    Convention(  # FlashAttention's loss; gradients are reduced in bf16
        words=("internevo", "internlm"),
        impl=Implementation(attention="flash2", fused_loss=True),
        reentrant=True,
        reduce="half",
        default_zero=1,
    ),
)
OTHER = Convention()
"""Convention of unknown sources: PyTorch of 2024 with fused attention."""


def convention_of(source: str) -> Convention:
    """Return the convention of the first known project in a source's name."""
    name = source.lower()
    return next((each for each in _KNOWN if any(word in name for word in each.words)), OTHER)


# --- Changes by date and row

_FUSED_SINCE = 2301  # as arXiv counts: what was written in 2022 trained before FlashAttention (May 2022) was common
_OF_2025 = re.compile(r"(?<![\d.])v?25\.(?:0[1-9]|1[0-2])(?!\d)")
# "recomputation counted" beside TFLOPS; a source that prints both figures says so otherwise (``HFU=``).
_COUNTED = re.compile(
    r"recomput\w* (?:is |are )?counted|(?:count|includ)\w* (?:full )?recomput|with recomputation\b", re.I
)


def convention_of_row(row: Row) -> Convention:
    """Return the convention of a row's source, for the version that a cell, a note or the table's title shows."""
    source = row.source.lower()
    # BMTrain's table compares with DeepSpeed and Megatron-LM, whose rows have a ZeRO stage.
    if "bmtrain" in source and row.text("zero_stage"):
        return dataclasses.replace(convention_of("deepspeed"), batch_of_device=True)
    convention = _of_its_year(row, _dated(row, convention_of(row.source)))
    if any(word in source for word in ("llm-foundry", "llmfoundry")):
        return _llm_foundry(row, convention)
    if any(word in source for word in ("bench_cluster", "old_bench")):  # nanotron of July 2024 (``build_model``)
        convention = _with(convention, balances_head="beyond")
    if "benchmark_summary" in source or "benchmarks_interactive" in source:
        convention = dataclasses.replace(convention, kept_gathered=_kept_by_nanotron(row))
    if "benchmarks_interactive" in source:  # all runs, and not the fastest of each cell alone
        convention = dataclasses.replace(convention, transfer_s=0.29)
    return dataclasses.replace(convention, flops="hardware") if _COUNTED.search(row.notes) else convention


def _kept_by_nanotron(row: Row) -> float:
    """Return the share of gathered inputs that a run's peak has.

    Read off the peaks of its 772 runs, which seem to be of several versions: without a pipeline all of them, in one of
    two ranks none, in longer ones those of all micro-batches in flight but two; none where tensors are divided over
    four nodes in a pipeline, and hardly any on 64 nodes.
    """
    pipeline, tensor = row.count("pp") or 1, row.count("tp") or 1
    if tensor >= 32:
        return 1.0 if pipeline == 1 else 0.0
    if (devices(row) or 0) >= 512:
        return 0.0
    return 1.0 if pipeline == 1 else 1 - 2 / pipeline


def _with(convention: Convention, **changes: Any) -> Convention:
    """Return the convention with other kernels."""
    return dataclasses.replace(convention, impl=dataclasses.replace(convention.impl, **changes))


def _dated(row: Row, convention: Convention) -> Convention:
    # Megatron-LM has no ZeRO 3: such rows of its tables are of DeepSpeed.
    if (
        convention.words
        and not convention.impl.fused_attention
        and re.match(r"(?:zero)?\W*3", row.text("zero_stage"), re.I)
    ):
        return convention_of("deepspeed")
    found = re.search(r"arxiv\W{0,2}(\d{4})\.\d{4,5}", row.text("source"), re.I)
    early = found is not None and int(found.group(1)) < _FUSED_SINCE
    if not convention.words and (early or "mingpt" in row.text("source").lower()):
        return _with(convention, attention="scores")
    return convention


def _of_its_year(row: Row, convention: Convention) -> Convention:
    # NVIDIA's containers are numbered by year and month; Blackwell's first devices came in February 2025.
    if convention.impl.attention == "torch" and _OF_2025.search(row.source):
        return dataclasses.replace(convention, early_on=(*convention.early_on, "B200"))
    return convention


def _llm_foundry(row: Row, convention: Convention) -> Convention:
    """Return the convention of llm-foundry by its version of torch.

    Its first tables (precision ``bf16``, mode PURE) are of May 2023, with torch 1.13; later ones of torch 2.1.

    Recomputation is not reentrant in any (``submit_benchmarks.py``), but torch stops it at the last saved tensor only
    since 2.1. Mode DEFAULT reduces gradients in fp32. The sweep of January 2024 on 128 H100 and more sets BACKWARD_PRE.
    """
    if "PURE" in row.notes or "amp" not in row.text("precision").lower():
        return dataclasses.replace(convention, reentrant=True)
    large = "large scale" in row.source.lower()
    return dataclasses.replace(convention, reduce="fp32", gathers_ahead=large)
