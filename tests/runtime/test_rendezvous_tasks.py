"""Processes that were started side by side, and would train apart without a word."""

import os
import subprocess
import sys

from meshwright.runtime.rendezvous import separate_tasks_warning

SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}


def test_one_of_several_tasks_says_that_they_train_apart():
    assert "Slurm has started 8 processes" in separate_tasks_warning(SRUN)
    assert "mpirun has started 2" in separate_tasks_warning({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    assert separate_tasks_warning(SRUN | {"SLURM_PROCID": "3"}) is None


def test_one_task_and_batch_scripts_say_nothing():
    assert separate_tasks_warning({}) is None
    assert separate_tasks_warning(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert separate_tasks_warning({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None
    assert separate_tasks_warning(SRUN | {"SLURM_STEP_NUM_TASKS": "many"}) is None


def test_a_world_of_one_says_it():
    code = "import meshwright as mw; mw.init_distributed(); mw.shutdown_distributed()"
    rest = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=rest | SRUN, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stderr.count("each of them trains alone") == 1
