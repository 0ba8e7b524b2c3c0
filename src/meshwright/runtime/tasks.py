"""Processes that a scheduler has started side by side without telling them of each other."""

from __future__ import annotations

from collections.abc import Mapping

# What srun and the launchers of MPI tell a process: its number, and how many there are. A shell within a job's
# allocation, or a batch script, has none of the second.
_TASKS = {
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
}


def told_separate_tasks(environment: Mapping[str, str]) -> str | None:
    """What to say where several processes were started together and each is about to train alone; None: nothing.

    One of them says it. It is no error: somebody may want so many runs of one process.

    Args:
        environment: Of a process that no launcher has made a rank.
    """
    for launcher, (number, count) in _TASKS.items():
        tasks = environment.get(count, "")
        if tasks.isdecimal() and int(tasks) > 1 and environment.get(number) == "0":
            return (
                f"{launcher} has started {tasks} processes, and each of them trains alone: RANK and WORLD_SIZE are not "
                "set. To train together, let it start torchrun once per machine, or set torchrun's variables: see "
                "docs/clusters.md"
            )
    return None
