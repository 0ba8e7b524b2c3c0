"""Run tests on a GPU: ``pytest --device cuda``, or ``--device stand-in``, which tries the same without one.

A test that asks for no ranks finds the device as torch's default: what it makes is there. Ranks of a pool compute there
by themselves, as ranks of a machine with GPUs do; those of one pool share the first GPU, and exchange by way of the
host. What they answer is moved to the host, so that a test compares it with a plain process on the CPU.

``FILES`` are the files that run so: those that were seen to pass on the stand-in. docs/cuda.md tells what a GPU said.
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
    "comm/test_compression.py",
    "inspect/test_summaries_model.py",
    "loss/test_fused_next_token.py",
    "loss/test_linear_head.py",
    "loss/test_vocabulary_parallel.py",
    "lr_scheduler/test_linear_warmup.py",
    "methods/test_birth.py",
    "methods/test_comm.py",
    "methods/test_compile.py",
    "methods/test_composition.py",
    "methods/test_dtypes.py",
    "methods/test_fp8.py",
    "methods/test_job_parameters.py",
    "methods/test_offload.py",
    "methods/test_offload_activations.py",
    "methods/test_optimizer_step.py",
    "methods/test_outer.py",
    "nn/test_fp8.py",
    "nn/test_model_layout.py",
    "nn/test_recompute_buffers.py",
    "optim/adam/test_bucket_update.py",
    "optim/galore/test_galore.py",
    "optim/outer/test_outer_optimizer.py",
    "optim/outer/test_presets_streaming.py",
    "optim/outer/test_replica_group.py",
    "optim/test_adafactor.py",
    "optim/test_dtensors_closures.py",
    "optim/test_dtensors_local_step.py",
    "optim/test_eight_bit_adamw.py",
    "optim/test_guarded_step.py",
    "optim/test_guarded_step_clip.py",
    "optim/test_guarded_step_loads.py",
    "optim/test_lamb.py",
    "optim/test_mixed_precision.py",
    "optim/test_mixed_precision_scaler.py",
    "optim/test_offloaded_optimizer_weights.py",
    "store/test_model_file.py",
    "store/test_optimizer.py",
    "store/test_reshape.py",
    "store/test_shards.py",
    "training/test_accelerate.py",
    "training/test_accelerated.py",
)
RANKS = (
    "optim/test_adafactor.py",
    "optim/test_eight_bit_adamw.py",
    "optim/test_guarded_step_clip.py",
    "optim/test_mixed_precision.py",
    "methods/test_offload_activations.py",
)
"""The files of these whose tests with several ranks run there, too."""
_TOO_EARLY = "what it is given is made when the file is read, before there is a device"
_OF_HOST = "it makes tensors of the host beside those of the device"
_NO_GENERATOR = "it draws numbers from a GPU's generator"
ON_HOST = {
    "loss/test_fused_next_token.py::test_each_position_predicts_the_next_token": _TOO_EARLY,
    "loss/test_fused_next_token.py::test_a_guess_costs_the_logarithm_of_the_vocabulary": _TOO_EARLY,
    "inspect/test_summaries_model.py::test_wrappers_are_left_out_of_names_and_parts_of_a_name_stay": _OF_HOST,
    "inspect/test_summaries_model.py::test_an_empty_parameter_and_a_sparse_gradient": _OF_HOST,
    "inspect/test_summaries_model.py::test_nothing_and_joined_summaries": _OF_HOST,
    "nn/test_fp8.py::test_hardware_products_are_given_the_same_numbers": "tensor cores sum in fewer bits (make gpu)",
    "nn/test_fp8.py::test_operands_lie_as_the_tensor_cores_want_them": _OF_HOST,
    "nn/test_fp8.py::test_types_and_shapes_are_those_of_a_plain_layer": "its autocast is that of a CPU",
    "optim/outer/test_outer_optimizer.py::test_what_is_refused": _OF_HOST,
    "optim/test_guarded_step_clip.py::test_the_step_is_that_of_gradients_clipped_before": "it hides CUDA's kernels",
}
"""Tests of these files that no GPU runs, each with the reason."""
NOT_ON_STAND_IN = {
    "nn/test_fp8.py::test_what_is_kept_changes_only_where_it_must": "it changes a weight by way of .data",
    "optim/galore/test_galore.py::test_a_decomposition_that_fails_leaves_the_old_projector": _NO_GENERATOR,
    "optim/galore/test_galore.py::test_states_are_small": _NO_GENERATOR,
}
"""Tests of these files that the stand-in cannot run, each with the reason."""


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


def holds(path: Path) -> bool:
    """Return whether a file has tests that run on a GPU."""
    return str(path.relative_to(Path(__file__).parent)) in FILES


def runs_there(device: str, path: Path, name: str, *, has_ranks: bool = False) -> bool:
    """Return whether a test runs on a GPU.

    Args:
        device: The GPU or the stand-in.
        path: Of its file.
        name: Of its function.
        has_ranks: Whether it asks for ranks.
    """
    file = str(path.relative_to(Path(__file__).parent))
    left_out = {**ON_HOST, **(NOT_ON_STAND_IN if device == "stand-in" else {})}
    return file in (RANKS if has_ranks else FILES) and f"{file}::{name}" not in left_out


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    """Make the device torch's default inside the block."""
    import torch

    with contextlib.ExitStack() as stack:
        if device == "stand-in":
            stack.enter_context(_stand_in())
        stack.enter_context(_repeatable(device))
        stack.enter_context(torch.device("cuda", 0))
        stack.enter_context(_generators_of_the_host())
        yield


def _generators_of_the_host() -> contextlib.AbstractContextManager[Any]:
    """Let a generator of the host draw there what a test then has on the device: it is the same on both."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Drawn(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            generator = kwargs.get("generator")
            makes = not any(isinstance(each, torch.Tensor) for each in args) and kwargs.get("device") is None
            if generator is None or generator.device.type != "cpu" or not makes:
                return func(*args, **kwargs)
            return func(*args, **kwargs, device="cpu").to("cuda")

    return Drawn()


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
