"""Ask for what a machine offers in a process of its own: whoever starts the cases holds nothing of a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
PATHS = (str(BENCHMARKS), str(BENCHMARKS.parent / "src"), str(BENCHMARKS.parent))
PACKAGES = ("transformers", "deepspeed", "torchao", "liger_kernel", "flash_attn")
MINIMUM = (2, 11)
_SHARED = 2**30  # bytes that others hold of a GPU, from which its figures are no good


@dataclass(frozen=True)
class Machine:
    """What there is; without a GPU, ``why_not`` says so."""

    torch: str = ""
    python: str = platform.python_version()
    cuda: str | None = None
    gpus: int = 0
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    free_bytes: int = 0
    host_free_bytes: int = 0
    has_nccl: bool = False
    packages: tuple[str, ...] = ()
    cores: int = 0
    why_not: str | None = None

    @property
    def shared(self) -> str | None:
        """What others hold of the first GPU; None if they hold next to nothing."""
        held = self.memory_bytes - self.free_bytes
        return f"{held / 2**30:.1f} GiB of the GPU are held by others: times say little" if held > _SHARED else None


def environment(**more: str) -> dict[str, str]:
    """That of a process which finds the package, the benchmarks and the tests."""
    paths = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **more}


def machine_here(*, tiny: bool) -> Machine:
    """Ask another process for what is here; with ``tiny``, make up what the stand-in plays."""
    command = [sys.executable, "-m", "gpu.machine"]
    asked = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)
    try:
        found = json.loads(asked.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
        return Machine(why_not=f"torch cannot be asked for GPUs: {last}")
    machine = Machine(**{**found, "capability": tuple(found["capability"]), "packages": tuple(found["packages"])})
    if not tiny:
        return machine
    made_up = {"gpus": 1, "name": "stand-in", "capability": (9, 0), "memory_bytes": 2**40, "free_bytes": 2**40,
               "host_free_bytes": 2**40}  # fmt: skip
    return Machine(**{**asdict(machine), **made_up, "why_not": None})


def _ask() -> Machine:
    import torch

    from meshwright.runtime import host_share_bytes

    known = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "cores": len(os.sched_getaffinity(0)),
        "packages": tuple(name for name in PACKAGES if importlib.util.find_spec(name) is not None),
    }  # fmt: skip
    if tuple(int(each) for each in torch.__version__.split(".")[:2]) < MINIMUM:
        return Machine(**known, why_not=f"torch {torch.__version__} is older than {'.'.join(map(str, MINIMUM))}")
    if not torch.cuda.is_available():
        built = "with" if torch.version.cuda else "without"
        return Machine(**known, why_not=f"torch sees no GPU (it was built {built} CUDA)")
    free, total = torch.cuda.mem_get_info(0)
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    return Machine(
        **known, gpus=torch.cuda.device_count(), name=name, capability=capability, memory_bytes=total, free_bytes=free,
        host_free_bytes=host_share_bytes(1), has_nccl=torch.distributed.is_nccl_available(),
    )  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(asdict(_ask())))
