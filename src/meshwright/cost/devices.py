"""Peak arithmetic of accelerators by name: dense, half precision, as the vendors state it."""

from __future__ import annotations

# FLOP/s of fp16 and bf16 matrix products with fp32 accumulation, without sparsity. A name matches when it occurs in
# what the driver calls the device; the first match counts, so narrower names stand first.
_HALF_PEAKS = (
    ("B200", 2.25e15),  # NVIDIA DGX B200 datasheet: 36 PFLOPS with sparsity over 8 GPUs
    ("H200", 989.4e12),  # NVIDIA H200 datasheet (1979 with sparsity)
    ("H100 NVL", 835.5e12),  # NVIDIA H100 datasheet, NVL (1671 with sparsity)
    ("H100 PCIe", 756e12),  # NVIDIA H100 datasheet, PCIe (1513 with sparsity)
    ("H100", 989.4e12),  # NVIDIA H100 datasheet, SXM5 (1979 with sparsity)
    ("A100", 312e12),  # NVIDIA A100 datasheet, 40 and 80 GB alike
    ("A10G", 70e12),  # NVIDIA A10G datasheet (140 with sparsity)
    ("A10", 125e12),  # NVIDIA A10 datasheet (250 with sparsity)
    ("L40S", 362e12),  # NVIDIA L40S datasheet (733 with sparsity)
    ("L40", 181e12),  # NVIDIA L40 datasheet (362 with sparsity)
    ("L4", 121e12),  # NVIDIA L4 datasheet (242 with sparsity)
    ("V100", 125e12),  # NVIDIA V100 datasheet, SXM2; fp16 only (PCIe: 112)
)


# The same in 8 bits, where the device has such products: twice the above, as these datasheets state too.
_FP8_TIMES_HALF = 2
_WITH_FP8 = ("B200", "H200", "H100", "L40", "L4")


def half_peak_flops_per_s(device_name: str) -> float | None:
    """Peak of dense half-precision matrix products in FLOP/s; None for a device that is not in the table."""
    return next((peak for name, peak in _HALF_PEAKS if name in device_name), None)


def fp8_peak_flops_per_s(device_name: str) -> float | None:
    """Peak of dense 8-bit matrix products in FLOP/s; None for a device without, or that is not in the table."""
    half = half_peak_flops_per_s(device_name)
    return half * _FP8_TIMES_HALF if half is not None and any(name in device_name for name in _WITH_FP8) else None
