"""The cases, the most worth knowing first; their functions are in ``gpu.checks`` and ``gpu.figures``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpu.machine import Machine

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One process (or one per rank) that reports some items.

    Args:
        name: Unique.
        part: ``right`` reports whether things are right, ``fast`` figures.
        run: ``module:function`` below ``gpu``, called with a session and ``args``; or a script of ``benchmarks``.
        about: What it tries.
        args: For the function, or the script's options on a GPU.
        tiny_args: The script's options on a CPU.
        limit_s: Seconds for all of its items.
        ranks: Processes.
        gpus: The fewest GPUs; 1 also where several ranks share it.
        capability: The oldest kind of GPU.
        memory_bytes: The least free memory of a GPU.
        host_bytes: The least free memory of the host.
        package: One that it needs.
    """

    name: str
    part: Literal["right", "fast"]
    run: str
    about: str
    args: tuple[str, ...] = ()
    tiny_args: tuple[str, ...] = ()
    limit_s: float = 60.0
    ranks: int = 1
    gpus: int = 1
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    host_bytes: int = 0
    package: str | None = None

    @property
    def is_script(self) -> bool:
        """Whether it is a benchmark of its own, which writes its figures to the file after ``--json``."""
        return self.run.endswith(".py")

    def why_not(self, machine: Machine) -> str | None:
        """Why it cannot run here; None if it can."""
        if machine.why_not is not None:
            return machine.why_not
        if machine.gpus < self.gpus:
            return f"needs {self.gpus} GPUs, and there is {machine.gpus}"
        if self.gpus > 1 and not machine.has_nccl:
            return "needs NCCL, without which this torch was built"
        if machine.capability < self.capability:
            wanted, found = (".".join(map(str, each)) for each in (self.capability, machine.capability))
            return f"needs compute capability {wanted}, and {machine.name} has {found}"
        for what, needed, free in (
            ("GPU", self.memory_bytes, machine.free_bytes), ("host", self.host_bytes, machine.host_free_bytes)
        ):  # fmt: skip
            if free < needed:
                return f"needs {needed / GIB:.0f} GiB of {what} memory, and {free / GIB:.0f} GiB are free"
        if self.package is not None and self.package not in machine.packages:
            return f"needs {self.package}, which is not installed"
        return None


def _llama(size: str, variant: str, gib: int, limit_s: float = 75.0, **needs: object) -> Case:
    name = f"llama_{size}_{variant}"
    about = f"Llama {size} in bf16, {variant.replace('_', ' ')}: time, memory and MFU beside the plan"
    return Case(
        name, "fast", "figures:llama", about, (size, variant), limit_s=limit_s, memory_bytes=gib * GIB,
        package="transformers", **needs,  # type: ignore[arg-type]
    )  # fmt: skip


_FP8 = {"capability": (8, 9)}
CASES = (
    Case("methods", "right", "checks:methods", "every method on one rank beside one process on the CPU", limit_s=90),
    _llama("1B", "raw", 40),
    _llama("1B", "plain", 40),
    _llama("1B", "compiled", 40, 120),
    _llama("1B", "raw_compiled", 40, 120),
    Case("decisions", "right", "checks:decisions", "overflow, bad losses and spikes that the device decides about"),
    Case("fp8_kernels", "right", "checks:fp8_kernels", "8-bit products beside fp32 ones of the same values", **_FP8),  # type: ignore[arg-type]
    Case("attention", "right", "checks:attention", "the kernels of ring attention beside attention written out"),
    Case("offload", "right", "checks:offload", "offloading with late copies, and freed memory that is poisoned"),
    _llama("1B", "checkpointed", 45),
    _llama("1B", "offload", 30, 120),
    _llama("1B", "fp8", 40, 120, **_FP8),
    _llama("1B", "raw_fsdp2", 40),
    _llama("1B", "fsdp", 40),
    Case("exchange", "right", "checks:exchange", "methods over two ranks of one GPU, by way of the host",
         limit_s=120, ranks=2),
    Case("nccl", "right", "checks:exchange", "methods over two GPUs, by NCCL", ("nccl",), limit_s=120, ranks=2, gpus=2),
    Case("optimizers", "right", "checks:optimizers", "every optimizer beside the CPU's numbers"),
    Case("checkpoint", "right", "checks:checkpoint", "a checkpoint saved while training goes on, and loaded"),
    Case("captured", "fast", "figures:captured", "steps of a small model replayed as one CUDA graph"),
    Case("out_of_memory", "right", "checks:out_of_memory", "errors for want of memory that training survives"),
    Case("commands", "right", "checks:commands", "meshwright train, whole, resumed and killed", limit_s=180),
    _llama("1B", "tuned", 70, 120),
    _llama("3B", "tuned", 110, 150),
    _llama("8B", "bf16", 115, 180),
    _llama("8B", "bf16_fp8", 115, 240, **_FP8),
    _llama("8B", "raw_bf16", 115, 180),
    _llama("1B", "offload_on_host", 30, 120),
    _llama("3B", "compiled", 70, 150),
    _llama("8B", "offload", 60, 240, host_bytes=110 * GIB),
    Case("adam_offload", "fast", "adam_offload.py", "a step of Adam on the device and on the host, beside DeepSpeed's",
         ("--parameters", "300000000", "--rounds", "5"), ("--quick",), limit_s=90, memory_bytes=20 * GIB),
    Case("losses", "fast", "linear_cross_entropy.py", "cross entropies: time and memory", ("--rounds", "3"),
         ("--quick", "--device", "cpu"), limit_s=90, memory_bytes=20 * GIB),
    Case("attention_times", "fast", "figures:attention", "the kernels of ring attention beside torch's own attention"),
    Case("experts", "fast", "figures:experts", "a mixture of experts beside transformers'", limit_s=90,
         memory_bytes=30 * GIB, package="transformers"),
    _llama("3B", "plain", 70, 120),
    _llama("3B", "raw", 70, 120),
    _llama("3B", "fp8", 70, 150, **_FP8),
    Case("overhead", "fast", "overhead.py", "the host's time of a step beside a raw loop's",
         ("--tiny", "--ranks", "1", "--rounds", "5"), ("--tiny", "--ranks", "1", "--rounds", "1")),
    Case("pairs", "right", "checks:pairs", "pairs of methods over two ranks of one GPU, by way of the host",
         limit_s=400, ranks=2),
    Case("calibration", "fast", "figures:calibration", "what meshwright calibrate finds", limit_s=120),
)  # fmt: skip
