"""Run tests on a GPU: ``pytest --device cuda``, or ``--device stand-in``, which tries the same without one.

A test that asks for no ranks finds the device as torch's default: what it makes is there. Ranks of a pool compute there
by themselves, as ranks of a machine with GPUs do; those of one pool share the first GPU, and exchange by way of the
host. What they answer is moved to the host, so that a test compares it with a plain process on the CPU.

``FILES`` are the files that run so. Others test the host (files, plans, the program), or ranks with a GPU each.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

DEVICES = ("cpu", "cuda", "stand-in")
FILES: tuple[str, ...] = (
    "inspect/test_recording.py",
    "inspect/test_statistics.py",
    "inspect/test_summaries.py",
    "inspect/test_summaries_model.py",
    "inspect/test_summaries_stages.py",
    "loss/test_fused.py",
    "loss/test_fused_next_token.py",
    "loss/test_lazy_logits.py",
    "loss/test_lazy_logits_shards.py",
    "loss/test_linear_head.py",
    "loss/test_vocabulary_parallel.py",
    "lr_scheduler/test_linear_warmup.py",
    "nn/test_batches.py",
    "nn/test_bf16_on_cpu.py",
    "nn/test_bf16_on_cpu_attention.py",
    "nn/test_fp8.py",
    "nn/test_fsdp_units.py",
    "nn/test_host_exchange.py",
    "nn/test_host_exchange_memory.py",
    "nn/test_initial_values.py",
    "nn/test_known_results.py",
    "nn/test_model_layout.py",
    "nn/test_module_structure.py",
    "nn/test_recompute_buffers.py",
    "nn/test_swapped_parameters.py",
    "optim/adam/test_adam_optimizer.py",
    "optim/adam/test_adam_optimizer_offload.py",
    "optim/adam/test_bucket_update.py",
    "optim/galore/test_distributed.py",
    "optim/galore/test_galore.py",
    "optim/galore/test_layouts.py",
    "optim/galore/test_parity.py",
    "optim/galore/test_trained.py",
    "optim/outer/test_outer_optimizer.py",
    "optim/outer/test_presets.py",
    "optim/outer/test_presets_streaming.py",
    "optim/outer/test_replica_group.py",
    "optim/sharded/test_owner_exchange.py",
    "optim/sharded/test_sharded_optimizer.py",
    "optim/sharded/test_sharded_optimizer_checkpoints.py",
    "optim/test_adafactor.py",
    "optim/test_came.py",
    "optim/test_dtensors_clip.py",
    "optim/test_dtensors_closures.py",
    "optim/test_dtensors_layouts.py",
    "optim/test_dtensors_local_step.py",
    "optim/test_eight_bit_adamw.py",
    "optim/test_eight_bit_moments.py",
    "optim/test_factored.py",
    "optim/test_full_state_dict.py",
    "optim/test_guarded_step.py",
    "optim/test_guarded_step_clip.py",
    "optim/test_guarded_step_loads.py",
    "optim/test_guarded_step_resume.py",
    "optim/test_lamb.py",
    "optim/test_mixed_precision.py",
    "optim/test_mixed_precision_scaler.py",
    "optim/test_muon.py",
    "optim/test_offloaded_optimizer.py",
    "optim/test_offloaded_optimizer_weights.py",
    "optim/test_parity_table.py",
    "optim/test_weight_average.py",
)
ON_HOST: dict[str, str] = {}
"""Tests of these files that a GPU cannot run, each with the reason."""


def why_not(device: str) -> str | None:
    """Return why tests cannot run on a device; None if they can."""
    if device != "cuda":
        return None
    import torch

    if torch.cuda.is_available():
        return None
    built = "with" if torch.version.cuda else "without"
    return (
        f"--device cuda: torch sees no GPU (it was built {built} CUDA); --device stand-in tries the same tests on a CPU"
    )


def runs_there(path: Path, name: str) -> bool:
    """Return whether a test runs on a GPU.

    Args:
        path: Of its file.
        name: Of its function.
    """
    file = str(path.relative_to(Path(__file__).parent))
    return file in FILES and f"{file}::{name}" not in ON_HOST


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    """Make the device torch's default inside the block."""
    import torch

    with contextlib.ExitStack() as stack:
        if device == "stand-in":
            stack.enter_context(_stand_in())
        stack.enter_context(_repeatable(device))
        stack.enter_context(torch.device("cuda", 0))
        yield


@contextlib.contextmanager
def rank_of_pool(device: str, size: int) -> Iterator[str]:
    """Let this process compute on the device inside the block; gives the backend that its world needs."""
    if device == "cpu":
        yield "gloo"
        return
    import torch

    from tests.staged_gloo import ANY_DEVICE, carried_by_host

    os.environ["LOCAL_RANK"] = "0"  # they share the first GPU
    by_nccl = device == "cuda" and size == 1 and torch.distributed.is_nccl_available()
    with contextlib.ExitStack() as stack:
        if device == "stand-in":
            stack.enter_context(_stand_in())
        stack.enter_context(_repeatable(device))
        if not by_nccl:
            stack.enter_context(carried_by_host("CUDA" if device == "cuda" else ANY_DEVICE))
        yield "cpu:gloo,cuda:nccl" if by_nccl else "cpu:gloo,cuda:gloo"


def _stand_in() -> contextlib.AbstractContextManager[None]:
    for package in ("bitsandbytes",):  # which look for CUDA's kernels where there is a GPU
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    from tests.stand_in_cuda import stand_in_cuda

    return stand_in_cuda()


@contextlib.contextmanager
def _repeatable(device: str) -> Iterator[None]:
    """Compute fp32 as fp32 and in one order inside the block, for tests compare bits and small differences."""
    import torch

    if device != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
        torch.use_deterministic_algorithms(False)


class _ToHost(ForkingPickler):
    """Pickle tensors of a device as tensors of the host."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and type(value).__name__ != "DTensor" and value.is_cuda:
            from tests.stand_in_cuda import on_host

            kept = on_host(value.detach()).cpu()
            made = torch.nn.Parameter(kept, value.requires_grad) if isinstance(value, torch.nn.Parameter) else kept
            return _itself, (made,)
        return NotImplemented


def _itself(value: Any) -> Any:
    return value


def packed(answer: Any) -> bytes:
    """Return an answer as bytes for a pipe, with all of its tensors on the host."""
    file = io.BytesIO()
    _ToHost(file).dump(answer)
    return file.getvalue()
