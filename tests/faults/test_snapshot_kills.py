"""Ranks are killed under many strategies, optimizers, data and launchers: losses and weights are as without."""

from pathlib import Path

import pytest

from tests.cli.helpers import losses, meshwright
from tests.faults.command_runs import OPTIONS, events, prepare, train
from tests.store.reshape_runs import Contents, check_equal

ROOT = Path(__file__).parents[2]
STEPS = 12
KILLS = (("kill", 4, 1), ("kill", 9, 0))
NET = f"""
import importlib.util, sys
import torch
from torch.utils.data import IterableDataset

spec = importlib.util.spec_from_file_location("nets", {str(ROOT / "examples/gpt2/gpt2.py")!r})
nets = sys.modules["nets"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nets)


class Net(nets.GPT2):
    def __init__(self, vocab_size=257, seq_len=16):
        super().__init__(vocab_size=vocab_size, seq_len=seq_len, dim=16, num_layers=4, num_heads=2, dropout=0.1)


class Streamed(Net):
    def forward(self, ids):
        logits = super().forward(ids)
        return {{"loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())}}


class Numbers(IterableDataset):
    def __iter__(self):
        return ({{"ids": torch.randint(0, 257, (16,), generator=torch.Generator().manual_seed(n))}} for n in range(50))


def numbers():
    return Numbers()
"""
MIXTURE = ("data.source=stdlib", "data.mixture=[{source='corpus.txt', weight=3}, {source='more.txt', weight=1}]")
STREAM = ("model.source=net:Streamed", "data.source=net:numbers")
GALORE = ("optimizer.name=galore", "optimizer.args={rank=4}")
EXPERTS = (f"model.source=hf:{ROOT / 'examples/moe/config.json'}",)
CASES = {
    "outer, 8-bit": (
        2, "parallel_mode(replica=2) + outer(rule='diloco', sync_every=4)",
        ("optimizer.name=meshwright.optim:AdamW8bit", "optimizer.args={min_8bit_size=256}"),
    ),
    "muon, ema": (2, "fsdp + ema", ("optimizer.name=muon",)),
    "galore, offload optimizer": (2, "fsdp + offload('optimizer')", GALORE),
    "offload all": (2, "fsdp + offload('all')", ()),
    "pipeline": (2, "parallel_mode(pipeline=2) + pipeline_parallel", ("run.num_micro_batches=2",)),
    "interleaved": (
        2, "parallel_mode(pipeline=2) + pipeline_parallel(schedule='interleaved')", ("run.num_micro_batches=2",),
    ),
    "tensor x data": (4, "parallel_mode(data=2, tensor=2) + tensor_parallel", ()),
    "experts": (2, "parallel_mode(expert=2) + expert_parallel", EXPERTS),
    "fp16, mixture": (2, "fsdp + half(dtype='fp16')", MIXTURE),
    "stream": (2, "parallel_mode(data=2)", STREAM),
}  # fmt: skip


def _options(strategy, changes):
    every = ("model.source=net:Net", "run.batch_size=8", f"run.steps={STEPS}", "run.checkpoint_every=100", *changes)
    return ("--strategy", strategy, *(word for change in every for word in ("--set", change)))


def _prepared(folder, faults=()):
    prepare(folder, faults)
    (folder / "net.py").write_text(NET)
    (folder / "more.txt").write_text("".join(f"{n} green bottles\n" for n in range(60)))


def _same(whole, folder, nproc, most=1):
    """More than two numbers are added up in any order by gloo, which moves the last bit."""
    told = [each for each in events(folder) if each["what"] == "went on"]
    assert [each["source"] for each in told] == ["a snapshot"] * len(KILLS)
    # Under outer steps a replica goes on until it synchronizes: it does not hear of another one's end before.
    assert all(each["lost_steps"] <= most for each in told), told
    if nproc == 2:
        assert losses(folder / "out") == losses(whole / "out")
        check_equal(*(Contents.of(each / "out/checkpoints") for each in (whole, folder)), with_states=True)
    else:
        assert losses(folder / "out") == pytest.approx(losses(whole / "out"), rel=2**-20)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_killed_ranks_change_nothing(tmp_path, name):
    nproc, strategy, changes = CASES[name]
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    for folder, faults in ((whole, ()), (struck, KILLS)):
        _prepared(folder, faults)
        done = train(folder, nproc, *_options(strategy, changes))
        assert done.returncode == 0, done.stderr[-3000:]
    _same(whole, struck, nproc, most=4 if "outer" in strategy else 1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_ranks_change_nothing_under_torchrun(tmp_path):
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
    for folder, faults in ((whole, ()), (struck, KILLS)):
        _prepared(folder, faults)
        options = (*OPTIONS, *_options("fsdp + ema", MIXTURE))
        done = meshwright("train", "tiny.toml", "--out", "out", *options, folder=folder, launcher=launcher)
        assert done.returncode == 0, done.stderr[-3000:]
    _same(whole, struck, 2)
