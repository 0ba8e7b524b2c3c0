"""Run ``meshwright bench-comm``: time collectives between ranks by message size."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.cli.ranks import DEVICES, check_choice, check_launched, num_ranks
from meshwright.cli.run_files import check_writable, write_whole
from meshwright.comm import Measurement, benchmark_collectives, benchmark_sizes
from meshwright.comm.bandwidth import benchmark_table, check_benchmark, check_num_ranks, default_max_bytes
from meshwright.comm.transport import members_of
from meshwright.runtime import init_distributed, rank, same_on_every_rank, settings, shutdown_distributed
from meshwright.runtime.terminal import PlainConsole, progress_bar

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_STDOUT = "-"


@dataclass(frozen=True)
class BenchOptions:
    """Options of ``meshwright bench-comm``."""

    ops: tuple[str, ...]
    min_bytes: int
    max_bytes: int | None
    dtype: str
    iterations: int
    warmup: int
    device: str
    json: str | None
    nproc: int | None

    @property
    def uses_cuda(self) -> bool:
        """Return whether ranks compute on CUDA devices."""
        return self.device == "auto" and torch.cuda.is_available()

    @property
    def sizes(self) -> list[int]:
        """Return the sizes to measure, in bytes."""
        default = default_max_bytes(torch.device("cuda" if self.uses_cuda else "cpu"))
        return benchmark_sizes(self.min_bytes, self.max_bytes if self.max_bytes is not None else default)

    def check(self) -> None:
        """Refuse what cannot be measured or written, before anything is started.

        Raises:
            ConfigError: Naming the option.
        """
        check_benchmark(self.ops, self.iterations, self.warmup)
        check_choice("--dtype", self.dtype, tuple(DTYPES))
        check_choice("--device", self.device, DEVICES)
        assert self.sizes
        if self.json not in (None, _STDOUT):
            fix = f"name another file, or write to standard output with --json {_STDOUT}"
            check_writable("--json", Path(str(self.json)).expanduser(), fix)

    def num_processes(self) -> int:
        """Return the ranks to start on this machine: as asked, else one per CUDA device, else two.

        Raises:
            ConfigError: When there are fewer CUDA devices than ranks.
            LaunchError: When it would be one.
        """
        cpu = "measure on the CPU with --device cpu"
        nproc = num_ranks(self.nproc, on_cuda=self.uses_cuda, otherwise=2, option="--nproc", use_cpu=cpu)
        check_num_ranks(nproc)
        return nproc

    def arguments(self) -> list[str]:
        """Return the command line of one rank."""
        return [
            "bench-comm",
            *(word for op in self.ops for word in ("--op", op)),
            *("--min-bytes", str(self.min_bytes)),
            *(("--max-bytes", str(self.max_bytes)) if self.max_bytes is not None else ()),
            *("--dtype", self.dtype, "--device", self.device),
            *("--iterations", str(self.iterations), "--warmup", str(self.warmup)),
            *(("--json", self.json) if self.json is not None else ()),
        ]


def bench_comm(options: BenchOptions) -> None:
    """Measure, as one rank of the world, and show the result on rank 0; collective.

    Raises:
        MeshwrightError: On every rank.
    """
    init_distributed(backend="gloo" if options.device == "cpu" else None)
    with same_on_every_rank():
        options.check()
        check_launched("--nproc", options.nproc)
    with progress_bar(14) as progress:
        task = progress.add_task("", total=len(options.ops) * len(options.sizes))
        measurements = benchmark_collectives(
            options.ops,
            min_bytes=options.min_bytes,
            max_bytes=options.sizes[-1],
            dtype=DTYPES[options.dtype],
            iterations=options.iterations,
            warmup=options.warmup,
            on_measurement=lambda each: progress.update(task, advance=1, description=each.op),
        )
    with same_on_every_rank():
        if rank() == 0:
            _show(options, measurements)
    shutdown_distributed()


def _show(options: BenchOptions, measurements: list[Measurement]) -> None:
    """Print the table, and write JSON where it is wanted; on standard output JSON stands alone."""
    text = json.dumps(_document(measurements), indent=2)
    if options.json == _STDOUT:
        print(text, flush=True)
        return
    PlainConsole().print(benchmark_table(measurements))
    if options.json is not None:
        file = Path(options.json).expanduser()
        write_whole(file, text + "\n", f"{options.json} cannot be written", "name another file for --json")


def _document(measurements: list[Measurement]) -> dict[str, Any]:
    device = settings().device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "torch": torch.__version__,
        "backend": members_of(None).backend(device),
        "device": name,
        "num_ranks": measurements[0].num_ranks,
        "measurements": [asdict(each) for each in measurements],
    }
