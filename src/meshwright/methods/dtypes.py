"""Precisions by name: ``fp32``, ``bf16``, ``fp16`` in configs, whatever a user wrote."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator

_NAMES = {
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "fp32": "fp32", "float32": "fp32", "torch.float32": "fp32",
}  # fmt: skip
_TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def dtype_name(value: Any) -> Any:
    """The name of a precision in any of its spellings; what is none of them stays as it is."""
    return _NAMES.get(str(value), value)


DType = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(dtype_name)]
HalfDType = Annotated[Literal["fp16", "bf16"], BeforeValidator(dtype_name)]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a precision's name."""
    return _TORCH[name]


def half_dtype(device: torch.device) -> str:
    """What half precision is on a device: ``bf16``; ``fp16`` on CUDA devices that only emulate it (before Ampere)."""
    # CPUs without bf16 instructions multiply it in fp32; of fp16 they have no fast way.
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "fp16"


def itemsize(name: str) -> int:
    """Bytes per element of a precision."""
    return _TORCH[name].itemsize
