"""How a project trains, and what it prints: the questions that ``conventions`` answers for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.cost import Scaling


@dataclass(frozen=True)
class Convention:
    """How a source trains, and what it prints.

    Args:
        words: Any of them in a source's name means it.
        family: Of a model whose name does not say.
        fused_attention: Whether attention keeps no scores.
        fused_loss: Whether the loss works on the logits in place.
        dropout: Whether masks are kept.
        reentrant: Whether recomputation runs whole blocks again, their last product too.
        split_tokens: Whether tensor parallelism divides tokens between split layers.
        reduce: Precision in which gradients are reduced.
        wide_gradients: Whether gradients accumulate in fp32 beside half weights.
        reduces_beside: Whether gradients are reduced beside backward (without ZeRO 3).
        reduces_each: Whether under ZeRO 1 each parameter is a collective of its own, behind backward.
        offloads: Whether the optimizer's state is in host memory.
        hosts_activations: Whether under ZeRO 3 activations that do not fit move to host memory, block by block.
        memory: What a peak counts.
        first_rank: Whether it is that of the first rank, and not the most of any.
        ddp_buckets: Whether DistributedDataParallel holds gradients in its buckets beside the parameters' own.
        flash1: Whether fused attention is of the first generation.
        vendor_attention: Whether it is cuDNN's, written for each generation of devices.
        scaling: How tensors are scaled for products in 8 bits (``cost.casts``), where a cell does not say.
        casts_weights: Whether each micro-batch casts weights to 8 bits; False: once a step.
        latency_s: From node to node, where it is not that of InfiniBand or RoCE.
        scatters_boundary: Whether tensor-parallel ranks each hand on a part of what all of them have.
        balances_head: Whether a pipeline's last stage has fewer blocks, for the head: stages end with the block that
            comes nearest to their share, or that goes beyond it.
        keeps_stages: Whether pipelines are torch's, whose stages receive every micro-batch in a buffer of its own, keep
            what they hand on until its backward, and the logits of all.
        keeps_gathered: Whether the gathered input of a split layer is kept for backward.
        compiled: Whether chains of elementwise kernels are one, whatever the table says.
        splits_local_batch: Whether a pipeline cuts what is called its micro-batch into as many as it has ranks.
        batch_of_device: Whether a micro-batch is a device's share of what its tensor group takes together.
        gathers_ahead: Whether backward gathers the next block while one computes (FSDP's BACKWARD_PRE).
        stages: Of a rank of a pipeline, where a table does not say: so many at most, and as the blocks can be divided.
        async_tensor: Whether tensor-parallel collectives run beside the products they feed.
        copies_heads: Whether copies of queries, keys and values are kept.
        logit_bytes: Per logit, kept and beside it in backward; None: torch's cross-entropy.
        logit_moves: Bytes that the loss moves per logit, forward and backward; None: torch's cross-entropy.
        gathers_fp8: Whether with one scale for each tensor its gathers carry 8 bits.
        early_on: Families of devices that its libraries did not know well yet.
        plain_norms: Whether norms and rotary positions run kernel by kernel in fp32 where they are not compiled.
        loss_parallel: Whether the loss of vocabularies that a tensor axis divides is torch's ``loss_parallel``.
        bucket_bytes: Buffers of fixed size in which gradients are reduced.
        live_bytes: Of gathered parameters under ZeRO 3, which gathers single layers instead of blocks.
        expandable: Whether the allocator joins segments, and so loses nothing between them.
        flops: What an MFU or a TFLOPS figure counts: all scores, half of them (causal), or recomputation too.
        vocab: Where a table does not say.
        default_zero: Where a table does not say.
        default_ac: Where a table does not say; ``none`` where that fits, and ``never`` also where it does not.
    """

    words: tuple[str, ...] = ()
    family: Literal["gpt", "llama"] = "llama"
    fused_attention: bool = True
    fused_loss: bool = False
    dropout: bool = False
    reentrant: bool = False
    split_tokens: bool = True
    reduce: Literal["half", "fp32"] = "fp32"
    wide_gradients: bool = False
    reduces_beside: bool = True
    reduces_each: bool = False
    offloads: bool = False
    hosts_activations: bool = False
    memory: Literal["allocated", "reserved"] = "reserved"
    first_rank: bool = False
    ddp_buckets: bool = False
    flops: Literal["full", "causal", "hardware"] = "full"
    vocab: int | None = None
    flash1: bool = False
    vendor_attention: bool = False
    scaling: Scaling = "tensorwise"
    casts_weights: bool = True
    latency_s: float = 1.2e-5
    scatters_boundary: bool = False
    balances_head: Literal["", "nearest", "beyond"] = ""
    keeps_stages: bool = False
    keeps_gathered: bool = False
    copies_heads: bool = False
    async_tensor: bool = False
    compiled: bool = False
    splits_local_batch: bool = False
    batch_of_device: bool = False
    stages: int = 1
    gathers_ahead: bool = True
    logit_bytes: tuple[int, int] | None = None
    logit_moves: tuple[int, int] | None = None
    gathers_fp8: bool = False
    early_on: tuple[str, ...] = ()
    plain_norms: bool = False
    loss_parallel: bool = False
    bucket_bytes: int = 0
    live_bytes: int = 0
    expandable: bool = False
    default_zero: int = 0
    default_ac: Literal["none", "never", "full"] = "none"
