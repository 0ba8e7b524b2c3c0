"""Ray Train: the manual's own code on two workers of this machine, of which one dies, beside one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.store import CheckpointStore, TrainingState
from tests import tiny
from tests.docs.pages import blocks

ROOT = Path(__file__).parents[2]
EPOCHS = 3
BATCH_SIZE = 16
# What the manual leaves to its reader, on CPUs. A worker dies in its second epoch, once.
SCRIPT = """
import os, sys
from pathlib import Path

import ray
import torch
from tests import tiny

folder, code = Path(sys.argv[1]), Path(sys.argv[2]).read_text()


class Dataset(tiny.Tokens):
    def __getitem__(self, index):
        died = folder / "died"
        if (folder / "run" / "step-00000001").exists() and index == 5 and not died.exists():
            died.touch()
            os._exit(1)
        return super().__getitem__(index)


def build_model():
    torch.manual_seed(3)
    return tiny.plain()


environment = {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment})
try:
    here = {"build_model": build_model, "dataset": Dataset(), "loss_func": tiny.loss_func, "__name__": "__main__"}
    exec(code, here)
    assert here["result"].error is None, here["result"].error
finally:
    ray.shutdown()
"""


def as_here(code: str, folder: Path) -> str:
    """Return the manual's code for two workers on CPUs."""
    for before, after in (
        ("num_workers=32, use_gpu=True", "num_workers=2, use_gpu=False"),
        ('["fsdp", ["amp_native", "bf16"]]', '["fsdp"]'),
        ('"batch_size": 256', f'"batch_size": {BATCH_SIZE}'),
        ('"epochs": 3', f'"epochs": {EPOCHS}'),
        ('"/shared/run-a"', repr(str(folder / "run"))),
        ('"/shared/ray"', repr(str(folder / "ray"))),
        ("trainer.fit()", "result = trainer.fit()"),
    ):
        assert before in code, before
        code = code.replace(before, after)
    return code


def alone(folder: Path) -> None:
    """Train as much on one process, and compare its weights with those of the checkpoint."""
    torch.manual_seed(3)
    job = mw.accelerate(
        tiny.plain(), torch.optim.AdamW, tiny.Tokens(), tiny.loss_func, strategy=[],
        dataloader_args={"batch_size": BATCH_SIZE},
    )  # fmt: skip
    for epoch in range(EPOCHS):
        job.dataloader.set_epoch(epoch)
        for batch in job.dataloader:
            job.step(batch)
    trained = {name: value.detach().clone() for name, value in job.model.named_parameters()}
    state = TrainingState(job.model, job.optim, step=0)
    info = CheckpointStore(folder / "run").load(state)
    assert info is not None
    assert state.step == EPOCHS
    stored = dict(job.model.named_parameters())
    for name, value in trained.items():
        assert torch.allclose(stored[name], value, atol=2e-5), name


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_manuals_code_trains_on_two_workers_and_after_one_has_died(ranks, tmp_path):
    pytest.importorskip("ray.train.torch")
    (block,) = [each for each in blocks("docs/clusters.md", "python") if each.title == "Ray"]
    (tmp_path / "manual.py").write_text(as_here(block.code, tmp_path))
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "RAY_TRAIN_V2_ENABLED": "1"}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(tmp_path / "manual.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "died").exists()
    ranks(1).run(alone, tmp_path)
