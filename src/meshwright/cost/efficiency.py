"""How much of a device's and a link's stated peak real kernels and collectives reach: a few fitted numbers each."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from meshwright.errors import ConfigError

FORMAT = "meshwright.efficiencies"


@dataclass(frozen=True)
class Efficiency:
    """Fractions of stated peaks, fitted to published runs (``benchmarks/fit.py``) or measured on a machine.

    Args:
        matmul: Of the peak of half-precision (and fp32) matrix products, in large ones.
        fp8: Of the peak of fp8 products, in large ones.
        attention: Of the half-precision peak, in fused attention with heads of width 128.
        memory: Of the memory bandwidth, in kernels that are bound by it.
        intra: Of the bandwidth of links inside a node.
        inter: Of the bandwidth of links between nodes.
    """

    matmul: float = 0.75
    fp8: float = 0.55
    attention: float = 0.45
    memory: float = 0.75
    intra: float = 0.75
    inter: float = 0.5


@dataclass(frozen=True)
class Constants:
    """What all devices share.

    Args:
        gap_s: From the end of one kernel to the start of the next.
        interference: By how much computing slows down while a collective runs beside it (Galvatron: 0.1 to 0.3).
        power: Exponent of sustained power in sustained arithmetic.
        step_s: Once per step: the optimizer's launch, reading the loss, loading a batch.
        call_s: What a collective costs beside its bytes and hops.
        hop: By how much a hop between nodes takes longer than the link's latency.
        p2p_s: What handing on to the next stage of a pipeline costs beside its bytes: ranks wait for each other.
        narrow: Exponent by which attention slows down with heads narrower than 128.
        flash1: Speed of the first generation of fused attention beside the second.
        rowwise_bytes: Moved for each element of an fp8 product's inputs that is scaled row by row, beside the cast.
        async_tensor: Share of tensor-parallel collectives that is left when they run beside the products they feed.
    """

    gap_s: float = 3e-6
    interference: float = 0.2
    power: float = 0.4
    step_s: float = 5e-3
    call_s: float = 2e-5
    hop: float = 1.0
    p2p_s: float = 2e-4
    narrow: float = 0.2
    flash1: float = 0.6
    rowwise_bytes: float = 5.0
    async_tensor: float = 0.5


@dataclass(frozen=True)
class Calibration:
    """Efficiencies by device family, and the constants that go with them."""

    devices: Mapping[str, Efficiency]
    constants: Constants = Constants()

    def of(self, family: str) -> Efficiency:
        """Of a device family; where it was never fitted, the default."""
        return self.devices.get(family) or self.devices.get("default") or Efficiency()


def read_calibration(text: str) -> Calibration:
    """Reads the JSON that ``benchmarks/fit.py`` and a calibration write.

    Raises:
        ConfigError: When it is not such a file, or names what is not known.
    """
    try:
        data = json.loads(text)
        if data.get("format") != FORMAT:
            raise ValueError(f"format {data.get('format')!r}")
        devices = {name: Efficiency(**_numbers(entry)) for name, entry in data["devices"].items()}
        return Calibration(devices, Constants(**_numbers(data["constants"])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            "A calibration cannot be read",
            expected=f'JSON with "format": "{FORMAT}", "devices" and "constants"',
            got=str(error),
            fix="write it with benchmarks/fit.py, or leave it out for the fitted presets",
        ) from None


def write_calibration(calibration: Calibration, **notes: Any) -> str:
    """The JSON of a calibration; ``notes`` say where its numbers come from."""
    devices = {name: dataclasses.asdict(entry) for name, entry in calibration.devices.items()}
    whole = {"format": FORMAT, **notes, "devices": devices, "constants": dataclasses.asdict(calibration.constants)}
    return json.dumps(whole, indent=2) + "\n"


@functools.cache
def fitted() -> Calibration:
    """The presets that the package carries, fitted to published runs."""
    return read_calibration((resources.files("meshwright.cost") / "efficiencies.json").read_text())


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in entry.items() if isinstance(value, int | float)}
