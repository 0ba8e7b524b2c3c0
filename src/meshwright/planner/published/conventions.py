"""What sources mean by their words: which kernels, what is kept in fp32, what they count as FLOPs and as memory.

A source is known by words in its name. Every entry is what the project documents or its code did when the figures were
published; none is fitted.
"""

from __future__ import annotations

import dataclasses

from meshwright.planner.published.convention import Convention

# Megatron-LM's loss of divided vocabularies (nanotron's is a copy): cast to fp32, then a maximum, a difference,
# exponentials, a sum and a quotient, each in a kernel; backward multiplies and casts.
_STEPWISE_LOSS = (38, 14)
_MEGATRON_2022 = Convention(  # masked-softmax kernels, dropout, no tokens divided but where it is said
    words=("korthikanti", "2205.05198", "vtrain"),
    family="gpt",
    fused_attention=False,
    fused_loss=True,
    dropout=True,
    reentrant=True,
    split_tokens=False,
    reduce="half",
    wide_gradients=True,
    reduces_beside=False,
    scatters_boundary=True,  # Narayanan et al. 2021, §4.1
    logit_moves=_STEPWISE_LOSS,
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
    fused_loss=True,
    reentrant=True,
    wide_gradients=True,
    async_tensor=True,
    compiled=True,  # Transformer Engine's fused norms, rotary positions and activations
    vendor_attention=True,  # so is its attention
    scaling="delayed",
    casts_weights=False,
    stages=8,
    vocab=128256,
    default_zero=1,
)
_KNOWN = (
    _MEGATRON_2022,
    _MEGATRON_2021,
    _MEGATRON_DEEPSPEED,
    Convention(words=("automodel",), vendor_attention=True, default_zero=3),  # FSDP2 with Transformer Engine
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
        scaling="current",  # its recipes are named ``fp8cs``
        expandable=True,  # ``PYTORCH_CUDA_ALLOC_CONF`` of its recipes
        hosts_activations=True,  # ``cpu_offloading_num_layers`` of those with FSDP
    ),
    _MEGATRON,
    Convention(  # XLA fuses what is elementwise; attention is cuDNN's (``cudnn_flash_te``)
        words=("maxtext",),
        fused_loss=True,
        compiled=True,
        vendor_attention=True,
        scaling="delayed",
        default_zero=3,
    ),
    Convention(  # its recipes switch cuDNN's attention off (``xla_gpu_enable_cudnn_fmha=false``)
        words=("paxml", " pax "),
        family="gpt",
        fused_attention=False,
        fused_loss=True,
        compiled=True,
        scaling="delayed",
        vocab=51200,
        default_zero=3,
    ),
    Convention(words=("kempnerforge",), vendor_attention=True, default_zero=3),  # its profile names cuDNN's kernels
    Convention(
        words=("llm-foundry", "llmfoundry", "mosaic", "composer"),
        family="gpt",
        fused_loss=True,
        # FlashAttention's loss, and two metrics of each training batch (LanguageCrossEntropy, LanguagePerplexity) that
        # take torch's cross-entropy under autocast.
        logit_moves=(2 + 2 * 14, 4),
        reduce="half",
        flash1=True,  # Triton's kernel of 2023
        scaling="delayed",  # Transformer Engine's
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
        reduces_each=True,
        async_tensor=True,
        latency_s=3e-5,  # AWS's network (EFA)
        balances_head="nearest",
        # Inferred from this table's peaks: no public run says so.
        keeps_gathered=True,
        copies_heads=True,
        logit_bytes=(6, 4),
        logit_moves=_STEPWISE_LOSS,
        vocab=131072,
    ),
    Convention(
        words=("bmtrain",),
        family="gpt",
        fused_attention=False,
        fused_loss=True,
        dropout=True,
        reentrant=True,
        split_tokens=False,
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
        fused_attention=False,
        dropout=True,
        reentrant=True,
        split_tokens=False,
        reduce="half",
        flops="hardware",
        logit_bytes=(8, 4),
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
        logit_bytes=(2, 2),
        vocab=128256,
        default_zero=3,
    ),
    Convention(
        words=("torchtitan", "torchao"),
        early_on=("B200",),  # torch and cuBLAS of 2025
        expandable=True,
        plain_norms=True,
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
        fused_loss=True,
        wide_gradients=True,
        compiled=True,
        stages=8,  # §3.3.2: interleaved, a stage is one layer
        default_ac="never",  # §3.3.2: without recomputation at 8K tokens
        default_zero=1,
    ),
    Convention(words=("nanochat", "picotron"), default_zero=1),
    Convention(  # FlashAttention's loss; gradients are reduced in bf16
        words=("internevo", "internlm"),
        fused_loss=True,
        reentrant=True,
        reduce="half",
        default_zero=1,
    ),
)
OTHER = Convention()
"""Of a source that is not known: PyTorch of 2024 with fused attention."""


def convention_of(source: str) -> Convention:
    """The convention of the first known project that a source's name contains."""
    name = source.lower()
    return next((each for each in _KNOWN if any(word in name for word in each.words)), OTHER)
