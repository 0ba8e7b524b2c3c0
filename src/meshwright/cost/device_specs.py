"""Accelerators by name: memory, peak arithmetic and memory bandwidth, as their vendors state them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.errors import ConfigError, did_you_mean, join_names

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Args:
        name: What presets and messages call it.
        memory_bytes: What the driver reports as total memory.
        half_flops_per_s: Peak of dense fp16 and bf16 matrix products with fp32 accumulation.
        fp32_flops_per_s: Peak of fp32 matrix products (without TF32).
        fp8_flops_per_s: Peak of dense fp8 products; None where the device has none.
        fp4_flops_per_s: Peak of dense 4-bit products; None where the device has none.
        bandwidth_bytes_per_s: Of its memory.
        efficiency: Whose fitted efficiencies it takes (a key of ``efficiencies.json``).
        power_fraction: Sustained power for each FLOP/s of the peak, over that of the device which its family's
            efficiencies are stated for: boards of one chip that may draw less keep lower clocks.
        cache_bytes: Of its cache, so much of a kernel's bytes as moves at ``Efficiency.cached``; 0: not told apart.
        price_per_hour: In US dollars; None: unknown. Prices differ by vendor and month: set your own.
        bf16: Whether it multiplies in bf16; without, half precision is fp16.
        is_host: Whether its memory is the host's.
    """

    name: str
    memory_bytes: int
    half_flops_per_s: float
    fp32_flops_per_s: float
    bandwidth_bytes_per_s: float
    fp8_flops_per_s: float | None = None
    efficiency: str = "default"
    power_fraction: float = 1.0
    price_per_hour: float | None = None
    bf16: bool = True
    is_host: bool = False
    cache_bytes: int = 0
    aliases: tuple[str, ...] = field(default=(), compare=False)
    fp4_flops_per_s: float | None = None

    @property
    def half_dtype(self) -> str:
        """Half precision of the device: ``bf16`` where it has it, else ``fp16``."""
        return "bf16" if self.bf16 else "fp16"

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the peak of matrix products in ``fp32``, ``half``, ``fp8`` or ``fp4`` (or of the next wider type)."""
        if dtype == "fp32":
            return self.fp32_flops_per_s
        if dtype == "fp4" and self.fp4_flops_per_s:
            return self.fp4_flops_per_s
        return self.fp8_flops_per_s or self.half_flops_per_s if dtype in ("fp8", "fp4") else self.half_flops_per_s


def _pcie(like: Device, name: str, bandwidth_bytes_per_s: float, power_fraction: float, *aliases: str) -> Device:
    """Return a board with the same chip but other memory and power."""
    return dataclasses.replace(
        like,
        name=name,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        power_fraction=power_fraction,
        aliases=aliases,
    )


# Vendors' datasheets, dense figures; memory as the driver reports it (with ECC on: 1.5 GiB less than the nominal 24 on
# A10 and L4). H800 and A800 have fewer links, PCIe boards none; A100's state the peak of 400 W, and have 300 and 250.
# GeForce boards multiply at half speed where sums are in fp32, as in training: that counts. All RTX boards use the
# matrix instructions of Ampere, and take what A100 reaches of its peak (white papers on GA102, Ada, RTX Blackwell).
# ``aliases`` are what drivers call a device; the longest that matches counts.
_A100_80 = Device("A100-80", 81_920 * _MIB, 312e12, 19.5e12, 2.039e12, None, "A100", aliases=("A100-80", "A100"))
_A100_40 = Device("A100-40", 40_536 * _MIB, 312e12, 19.5e12, 1.555e12, None, "A100", aliases=("A100-40",))
_BARE = (
    Device("GB300", 284_208 * _MIB, 2.5e15, 80e12, 8.0e12, 5e15, "B200", aliases=("GB300",), fp4_flops_per_s=15e15),
    Device("GB200", 189_471 * _MIB, 2.5e15, 80e12, 8.0e12, 5e15, "B200", aliases=("GB200",), fp4_flops_per_s=10e15),
    Device("B300", 275_040 * _MIB, 2.25e15, 75e12, 8.0e12, 4.5e15, "B200", aliases=("B300",), fp4_flops_per_s=13.5e15),
    Device("B200", 183_359 * _MIB, 2.25e15, 75e12, 8.0e12, 4.5e15, "B200", aliases=("B200",), fp4_flops_per_s=9e15),
    Device("H200", 143_771 * _MIB, 989.4e12, 67e12, 4.8e12, 1978.9e12, "H100", aliases=("H200", "GH200-144")),
    Device("H100-NVL", 95_830 * _MIB, 835.5e12, 60e12, 3.9e12, 1671e12, "H100", aliases=("H100 NVL", "H100-NVL")),
    Device("H100-PCIe", 81_559 * _MIB, 756e12, 51e12, 2.0e12, 1513e12, "H100", aliases=("H100 PCIe", "H100-PCIe")),
    Device("GH200", 97_871 * _MIB, 989.4e12, 67e12, 4.0e12, 1978.9e12, "H100", aliases=("GH200",)),
    Device("H20", 97_871 * _MIB, 148e12, 44e12, 4.0e12, 296e12, "H100", aliases=("H20",)),
    Device("H100-SXM", 81_559 * _MIB, 989.4e12, 67e12, 3.35e12, 1978.9e12, "H100", aliases=("H100",)),
    Device("H800-PCIe", 81_559 * _MIB, 756e12, 51e12, 2.0e12, 1513e12, "H100", aliases=("H800 PCIe", "H800-PCIe")),
    Device("H800", 81_559 * _MIB, 989.4e12, 67e12, 3.35e12, 1978.9e12, "H100", aliases=("H800",)),
    _pcie(_A100_80, "A100-PCIe-80", 1.935e12, 0.75, "A100-80GB-PCIe", "A100-PCIe-80", "A100-PCIe"),
    _pcie(_A100_40, "A100-PCIe-40", 1.555e12, 0.625, "A100-40GB-PCIe", "A100-PCIe-40"),
    _A100_80,
    _A100_40,
    _pcie(_A100_80, "A800-PCIe", 1.935e12, 0.75, "A800-80GB-PCIe", "A800-PCIe"),
    dataclasses.replace(_A100_80, name="A800", aliases=("A800",)),
    Device("MI325X", 256 * _GIB, 1307.4e12, 163.4e12, 6.0e12, 2614.9e12, "MI300X", aliases=("MI325X", "MI325")),
    Device("MI300X", 192 * _GIB, 1307.4e12, 163.4e12, 5.3e12, 2614.9e12, "MI300X", aliases=("MI300X", "MI300")),
    Device("MI250X", 64 * _GIB, 191.5e12, 47.9e12, 1.6e12, None, "MI300X", aliases=("MI250X", "MI250")),  # one die
    Device("A10G", 23_028 * _MIB, 70e12, 35e12, 600e9, None, "A100", aliases=("A10G",)),
    Device("A10", 23_028 * _MIB, 125e12, 31.2e12, 600e9, None, "A100", aliases=("A10",)),
    Device("L40S", 46_068 * _MIB, 362e12, 91.6e12, 864e9, 733e12, "A100", aliases=("L40S",)),
    Device("L40", 46_068 * _MIB, 181e12, 90.5e12, 864e9, 362e12, "A100", aliases=("L40",)),
    Device("L4", 23_034 * _MIB, 121e12, 30.3e12, 300e9, 242e12, "A100", aliases=("L4",)),
    Device("RTX-PRO-6000", 97_887 * _MIB, 504e12, 126e12, 1.792e12, 1008e12, "A100", aliases=("RTX PRO 6000",)),
    Device("RTX-5090", 32_607 * _MIB, 209.5e12, 104.8e12, 1.792e12, 419e12, "A100", aliases=("RTX 5090", "RTX5090")),
    Device("RTX-4090", 24_564 * _MIB, 165.2e12, 82.6e12, 1.008e12, 330.3e12, "A100", aliases=("RTX 4090", "RTX4090")),
    Device("RTX-3090", 24_576 * _MIB, 71e12, 35.6e12, 936e9, None, "A100", aliases=("RTX 3090", "RTX3090")),
    Device("RTX-6000-Ada", 49_140 * _MIB, 364.2e12, 91.1e12, 960e9, 728.5e12, "A100", aliases=("RTX 6000 Ada",)),
    Device("RTX-A6000", 49_140 * _MIB, 154.8e12, 38.7e12, 768e9, None, "A100", aliases=("RTX A6000", "A6000")),
    Device("V100S-PCIe", 32_510 * _MIB, 130e12, 16.4e12, 1.134e12, None, "V100", bf16=False, aliases=("V100S",)),
    Device("V100-PCIe-32", 32_510 * _MIB, 112e12, 14e12, 900e9, None, "V100", bf16=False, aliases=("V100-PCIe",)),
    Device("V100-PCIe-16", 16_160 * _MIB, 112e12, 14e12, 900e9, None, "V100", bf16=False, aliases=("V100-PCIe-16",)),
    Device("V100-32", 32_510 * _MIB, 125e12, 15.7e12, 900e9, None, "V100", bf16=False, aliases=("V100-32", "V100")),
    Device("V100-16", 16_160 * _MIB, 125e12, 15.7e12, 900e9, None, "V100", bf16=False, aliases=("V100-16",)),
    # One core of a server at 2.8 GHz with AVX-512: a placeholder until ``calibrate`` has measured the machine.
    Device("CPU", 16 * _GIB, 200e9, 100e9, 20e9, None, "CPU", is_host=True, aliases=("CPU", "gloo")),
)
# US dollars per device and hour on demand, as listed early in 2026 by RunPod (secure cloud), else by Lambda (A10,
# A100-40, V100-16) or AWS (A10G: g5.xlarge, V100-32: an eighth of p3dn.24xlarge, CPU: a vCPU of compute-optimised
# instances); GeForce boards: RunPod's community cloud. Large clouds ask for two to four times as much; one who owns
# devices pays less.
_PRICES = {
    "B200": 5.98, "H200": 3.59, "H100-NVL": 2.59, "H100-PCIe": 1.99, "H100-SXM": 2.69, "A100-80": 1.39, "A100-40": 1.29,
    "MI300X": 2.49, "A10G": 1.01, "A10": 0.75, "L40S": 0.79, "L40": 0.69, "L4": 0.44, "V100-32": 3.90, "V100-16": 0.55,
    "RTX-3090": 0.22, "RTX-4090": 0.34, "RTX-5090": 0.69, "CPU": 0.05,
}  # fmt: skip
# What boards of one chip may draw (datasheets), and the board whose power its family's efficiencies are stated for.
_TDP_WATTS = {
    "B200": 1000, "GB200": 1200, "B300": 1100, "GB300": 1400, "H100-SXM": 700, "H200": 700, "GH200": 700, "H800": 700,
    "H100-NVL": 400, "H100-PCIe": 350, "H800-PCIe": 350, "A100-80": 400, "A100-40": 400, "A800": 400,
}  # fmt: skip
_STATED_FOR = {"B200": "B200", "H100": "H100-SXM", "A100": "A100-80"}


def _preset(device: Device) -> Device:
    """Add the price, and the power per FLOP/s of its peak, to a device from a datasheet."""
    peaks = {each.name: each.half_flops_per_s for each in _BARE}
    fraction = device.power_fraction
    if device.name in _TDP_WATTS:
        stated = _STATED_FOR[device.efficiency]
        fraction = _TDP_WATTS[device.name] / device.half_flops_per_s / (_TDP_WATTS[stated] / peaks[stated])
    return dataclasses.replace(device, price_per_hour=_PRICES.get(device.name), power_fraction=fraction)


_TABLE = tuple(_preset(device) for device in _BARE)
DEVICES: Mapping[str, Device] = {device.name: device for device in _TABLE}
"""Presets by name."""

_MEMORY = re.compile(r"(\d+)\s*G(?:i?B)?(?![a-z])", re.IGNORECASE)
_WATTS = re.compile(r"(?<!\d)([1-9]\d{2,3})\s*W(?![a-z])", re.IGNORECASE)
# "MIG 1c.3g.40gb": one of the three compute slices of an instance with 40 GB. A device has 7 of compute, 8 of memory.
_INSTANCE = re.compile(r"\s+MIG\s+(?:(\d)c\.)?(\d)g\.(\d+)gb.*$", re.IGNORECASE)
# A vendor's own words for a board that runs below its power, without saying how far: TorchAO's B200 run at 750 W.
_LIMITED_POWER = 0.75
# HBM2e boards of H100 (PCIe and the 96 GB variant) have 6 stacks at 2.4 TB/s at most; PCIe's datasheet: 5 at 2.0.
_HBM2E_BANDWIDTH = 2.4e12


def find_device(name: str) -> Device:
    """Return the preset that a name from a driver or a table means.

    Memory, power and kind of memory in the name count: ``"NVIDIA A100-SXM4-40GB"`` is an A100-40, ``"H100-SXM-96GB-
    HBM2e-500W"`` an H100 with its memory, power and memory bandwidth changed, and ``"… MIG 3g.40gb"`` part of a device.

    Raises:
        ConfigError: When no preset matches.
    """
    if name in DEVICES:
        return DEVICES[name]
    instance = _INSTANCE.search(name)
    if instance is not None:
        return _part(find_device(name[: instance.start()]), instance)
    known = None if "LAPTOP" in name.upper() else _match(name)  # of the same name, and with another chip
    if known is None:
        raise ConfigError(
            f"Unknown device {name!r}{did_you_mean(name, DEVICES)}",
            expected=f"a name that contains one of {join_names(DEVICES, 20)}",
            got=repr(name),
            fix="correct the name, or describe the device in a cluster file",
        )
    return _as_named(known, name)


def half_peak_flops_per_s(device_name: str) -> float | None:
    """Return the dense half-precision peak in FLOP/s; None for an unknown device."""
    try:
        return find_device(device_name).half_flops_per_s
    except ConfigError:
        return None


def _part(device: Device, instance: re.Match[str]) -> Device:
    own, slices, gigabytes = instance.groups()
    compute, memory_bytes = int(own or slices) / 7, int(gigabytes) * _GIB
    memory = max(round(8 * memory_bytes / device.memory_bytes), 1) / 8
    return dataclasses.replace(
        device,
        memory_bytes=min(memory_bytes, device.memory_bytes),
        half_flops_per_s=device.half_flops_per_s * compute,
        fp32_flops_per_s=device.fp32_flops_per_s * compute,
        fp8_flops_per_s=device.fp8_flops_per_s and device.fp8_flops_per_s * compute,
        fp4_flops_per_s=device.fp4_flops_per_s and device.fp4_flops_per_s * compute,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * memory,
        cache_bytes=int(device.cache_bytes * memory),
        price_per_hour=None,
    )


def _match(name: str) -> Device | None:
    squeezed = re.sub(r"[\s_]+", "-", re.sub(r"^\s*\d+\s*[x×*]\s*", "", name)).upper()  # "8 x H100" is one of them
    matching = (
        (len(alias), device)
        for device in _TABLE
        for alias in device.aliases
        # A10 is not A100, L4 not L40: what follows a number must not go on with it.
        if re.search(rf"(?<![A-Z0-9]){re.escape(alias.replace(' ', '-').upper())}(?![0-9])", squeezed)
    )
    return max(matching, key=lambda each: each[0], default=(0, None))[1]


def _as_named(device: Device, name: str) -> Device:
    size = _MEMORY.search(name)
    gigabytes = int(size.group(1)) if size else None
    family = device.name.rpartition("-")[0]
    if gigabytes is not None and f"{family}-{gigabytes}" in DEVICES:
        return DEVICES[f"{family}-{gigabytes}"]
    changes: dict[str, object] = {}
    # What is printed is the nominal size; only one that differs from the preset's says something.
    if gigabytes is not None and 4 <= gigabytes < 400 and abs(gigabytes * _GIB / device.memory_bytes - 1) > 0.05:
        changes["memory_bytes"] = gigabytes * _GIB
    if "HBM2E" in name.upper() and device.name.startswith("H100"):
        changes["bandwidth_bytes_per_s"] = min(device.bandwidth_bytes_per_s, _HBM2E_BANDWIDTH)
    watts, tdp = _WATTS.search(name), _TDP_WATTS.get(device.name)
    if watts and tdp:
        changes["power_fraction"] = device.power_fraction * min(int(watts.group(1)) / tdp, 1.0)
    elif "LIMITED" in name.upper():
        changes["power_fraction"] = device.power_fraction * _LIMITED_POWER
    return dataclasses.replace(device, **changes) if changes else device  # type: ignore[arg-type]
