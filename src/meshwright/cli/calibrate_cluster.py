"""Run ``meshwright calibrate``: measure this machine and write it as a cluster file for predictions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from rich.table import Table

from meshwright.cli.ranks import DEVICES, check_choice, check_launched, num_ranks
from meshwright.cli.run_files import check_writable, write_whole
from meshwright.cost import write_cluster
from meshwright.errors import ConfigError
from meshwright.planner.measure import Calibrated, Clock, calibrate
from meshwright.runtime import init_distributed, rank, same_on_every_rank, shutdown_distributed
from meshwright.runtime.terminal import PlainConsole, progress_bar

_CLOCKS = ("auto", *get_args(Clock))


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of ``meshwright calibrate``."""

    out: Path
    nproc: int | None
    device: str
    clock: str

    @property
    def uses_cuda(self) -> bool:
        """Return whether ranks compute on CUDA devices."""
        return self.device == "auto" and torch.cuda.is_available()

    def check(self) -> None:
        """Refuse what cannot be measured or written, before anything is started.

        Raises:
            ConfigError: Naming the option.
        """
        check_choice("--device", self.device, DEVICES)
        check_choice("--clock", self.clock, _CLOCKS)
        check_launched("--nproc", self.nproc)
        # Rank 0 alone writes the file: other nodes need no such directory.
        if rank() == 0:
            self._check_out()

    def _check_out(self) -> None:
        if self.out.suffix.lower() != ".json":
            raise ConfigError(
                "--out names no file that can be written",
                expected="a .json file in an existing directory",
                got=str(self.out),
                fix="name another file",
            )
        check_writable("--out", self.out.expanduser())

    def num_processes(self) -> int:
        """Return the ranks to start on this machine: as asked, else one per CUDA device, else two.

        Raises:
            ConfigError: When there are fewer CUDA devices than ranks.
        """
        cpu = "measure the CPU with --device cpu"
        return num_ranks(self.nproc, on_cuda=self.uses_cuda, otherwise=2, option="--nproc", use_cpu=cpu)

    def arguments(self) -> list[str]:
        """Return the command line of one rank."""
        return ["calibrate", "--out", str(self.out), "--device", self.device, "--clock", self.clock]


def run_calibration(options: CalibrateOptions) -> None:
    """Measure, as one rank of the world, write the file and show the result on rank 0; collective.

    Raises:
        MeshwrightError: On every rank.
    """
    init_distributed(backend="gloo" if options.device == "cpu" else None)
    with same_on_every_rank():
        options.check()
    with progress_bar(20) as progress:
        task = progress.add_task("", total=1)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        measured = calibrate(clock=None if options.clock == "auto" else options.clock, on_progress=show)  # type: ignore[arg-type]
    with same_on_every_rank():
        if rank() == 0:
            file = options.out.expanduser()
            write_whole(file, write_cluster(measured.cluster, measured.document()), f"{file} cannot be written")
            _show(options.out, measured)
    shutdown_distributed()


def _show(file: Path, measured: Calibrated) -> None:
    console, cluster = PlainConsole(), measured.cluster
    table = Table(
        title=f"{cluster.num_devices} x {cluster.device.name}, {measured.notes['seconds']} s", title_justify="left"
    )
    for column in ("part", "measured", "samples", "off by", "worst"):
        table.add_column(column, justify="left" if column == "part" else "right")
    known = measured.figures()
    for each in measured.residuals:
        off = [f"{value:.0%}" for value in (each.median, each.worst)] if each.num_samples > 1 else ["", ""]
        table.add_row(each.part, known.get(each.part, ""), str(each.num_samples), *off)
    console.print(table)
    console.print(f"In whole steps kernels take {known['in a step']} what they take alone.")
    if cluster.num_devices > 1:
        console.print(f"Gathers and reductions of shards take {known['shards']}; ranks wait {known['waiting']}.")
    if measured.clock == "cpu":
        console.print(
            f"Other programs were busy (work took {measured.disturbed:.1f} times as long by the clock on the wall): "
            "seconds are those in which a process computed."
        )
    console.print(f"Written to {file}: use it as --cluster {file}")
