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


def itemsize(name: str) -> int:
    """Bytes per element of a precision."""
    return _TORCH[name].itemsize
