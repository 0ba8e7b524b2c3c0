"""The systems by name, and the lines that their user writes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from peers.case import Case, Step

_EVERY = frozenset({"plain", "compile", "fp8", "offload"})


@dataclass(frozen=True)
class System:
    """One way to train: a file of this package, and which of its variants."""

    name: str
    file: str
    variant: str
    package: str = "torch"
    ours: bool = False
    features: frozenset[str] = frozenset({"plain", "compile", "fp8"})

    @property
    def missing(self) -> bool:
        return importlib.util.find_spec(self.package) is None

    @property
    def version(self) -> str:
        try:
            return importlib.metadata.version(self.package.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:  # it lies on the path, not installed
            return "source"

    @property
    def user_lines(self) -> int:
        """Lines of code between ``# user:`` and ``# end`` in its file."""
        counted, inside = 0, False
        for line in (Path(__file__).parent / f"{self.file}.py").read_text().splitlines():
            text = line.strip()
            if text in ("# user:", "# end"):
                inside = text == "# user:"
            elif inside and text and not text.startswith("#") and text != "import torch":
                counted += 1
        return counted

    def setup(self, case: Case) -> Step:
        """Builds model and optimizer in this process and rank; what it returns trains one step."""
        return importlib.import_module(f"peers.{self.file}").setup(case, self.variant)


def _deepspeed(stage: int) -> System:
    features = frozenset({"plain", "offload"})
    return System(f"DeepSpeed ZeRO-{stage}", "with_deepspeed", str(stage), "deepspeed", features=features)


def _meshwright(variant: str, name: str) -> System:
    return System(f"Meshwright {name}", "with_meshwright", variant, "meshwright", ours=True, features=_EVERY)


DDP, FSDP2, ACCELERATE = "DDP", "FSDP2", "Accelerate"
FSDP, AUTO = "Meshwright fsdp", "Meshwright auto"
SYSTEMS = {
    system.name: system
    for system in (
        System(DDP, "raw_ddp", ""),
        System(FSDP2, "raw_fsdp2", "", features=_EVERY),
        _deepspeed(1),
        _deepspeed(2),
        _deepspeed(3),
        System(ACCELERATE, "with_accelerate", "", "accelerate", features=frozenset({"plain", "compile"})),
        System("Fabric DDP", "with_fabric", "ddp", "lightning_fabric", features=frozenset({"plain", "compile"})),
        System("Fabric FSDP2", "with_fabric", "fsdp2", "lightning_fabric", features=frozenset({"plain", "compile"})),
        _meshwright("data", "data"),
        _meshwright("zero1", "zero1"),
        _meshwright("zero2", "zero2"),
        _meshwright("fsdp", "fsdp"),
        _meshwright("auto", "auto"),
    )
}
