"""Precisions by name, and what half precision is on a device."""

import pytest
import torch

from meshwright.methods.base import half_dtype


@pytest.mark.parametrize(
    ("kind", "native", "expected"), [("cpu", False, "bf16"), ("cuda", True, "bf16"), ("cuda", False, "fp16")]
)
def test_half_precision_is_what_the_device_has_and_does_not_emulate(monkeypatch, kind, native, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert half_dtype(torch.device(kind)) == expected
