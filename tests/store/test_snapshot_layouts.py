"""A snapshot of every strategy: a run that is built anew goes on as the one that took it, to the bit."""

import contextlib
import io
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from meshwright.runtime.agreement import bit_sum
from meshwright.store import HostSnapshots
from meshwright.store.snapshot_files import LateCopies
from tests.store.reshape_runs import BATCH, BF16, FP16, MORE, ROWS, STOP, Row, Run, mesh, outer, scheduled

OFFLOAD_OPTIMIZER = ("offload", "optimizer")
MORE_ROWS = {
    "offload optimizer": Row(1, ["fsdp", OFFLOAD_OPTIMIZER]),
    "fsdp 2, offload optimizer, half bf16": Row(2, ["fsdp", OFFLOAD_OPTIMIZER, ("half", BF16)]),
    "fsdp 2, half fp16, ema": Row(2, ["fsdp", ("half", FP16), "ema"]),
    "data 2, amp fp16": Row(2, [mesh(data=2), ("amp_native", FP16)]),
    "muon, data 2 x tensor 2": Row(4, [mesh(data=2, tensor=2), "tensor_parallel"], "muon"),
    "galore, pipeline 2": Row(2, [mesh(pipeline=2), scheduled("1f1b")], "galore", 2),
    "data 2 x tensor 2": Row(4, [mesh(data=2, tensor=2), "tensor_parallel"]),
    "pipeline 2 x data 2, ema": Row(4, [mesh(pipeline=2, data=2), scheduled("1f1b"), "ema"], micro_batches=2),
    "8-bit, diloco": Row(2, [mesh(replica=2), outer("diloco", sync_every=2)], "8-bit"),
    "diloco, half fp16": Row(2, [mesh(replica=2), outer("diloco", sync_every=2), ("half", FP16)]),
    "diloco x zero 2": Row(4, ["fsdp", mesh(replica=2, zero=2), outer("diloco", sync_every=3)]),
    "streaming diloco, under way": Row(
        2, [mesh(replica=2), outer("streaming_diloco", sync_every=6, fragments=2, delay=1)]
    ),
    "8-bit, offload optimizer, fsdp 2": Row(2, ["fsdp", OFFLOAD_OPTIMIZER], "8-bit"),
}
ALL = ROWS | MORE_ROWS
IN_SHORT = (
    "fsdp 2, half fp16, ema", "8-bit, diloco", "pipeline 2, interleaved", "fsdp 2, offload optimizer, half bf16",
)  # fmt: skip


def _snapshots(folder):
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    return HostSnapshots(folder / "run", folder=memory, beside=True)


def _late(make):
    """Copies beside training that begin when forward and backward are over."""

    def delayed(self):
        time.sleep(0.05)
        return make(self)

    return delayed


def _whole(folder, row):
    run, snapshots = Run(row, seed=3), _snapshots(folder)
    with mock.patch.object(LateCopies, "make", _late(LateCopies.make)):
        for _ in range(STOP):
            run.train(1)
            snapshots.take(run.state)
        losses = run.train(MORE)
        snapshots.close(remove=False)
    return losses, _state(run)


def _again(folder, row):
    run, snapshots, said = Run(row, seed=9), _snapshots(folder), io.StringIO()
    with contextlib.redirect_stderr(said):
        info = snapshots.load(run.state)
    assert info is not None, said.getvalue()
    assert (info.step, run.state.step, run.state.samples_seen, info.copies_of) == (STOP, STOP, STOP * BATCH, ())
    snapshots.close()
    losses = run.train(MORE)
    return losses, _state(run)


def _state(run):
    """What a snapshot would hold of this rank now: sums over the bits of tensors, and the record of all else."""
    _, tensors, about = HostSnapshots(Path("unused"))._captured(run.state)
    sums = {name: int(bit_sum(each.detach().reshape(-1).view(torch.uint8))) for name, each in tensors.items()}
    return sums, about["record"].to_json()


def _check(ranks, folder, row):
    whole = ranks(row.world).run(_whole, folder, row)
    back = ranks(row.world).run(_again, folder, row)
    assert back == whole


@pytest.mark.parametrize("name", IN_SHORT)
def test_some_go_on_from_a_snapshot_to_the_bit(ranks, tmp_path, name):
    _check(ranks, tmp_path, ALL[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ALL if name not in IN_SHORT])
def test_every_strategy_goes_on_from_a_snapshot_to_the_bit(ranks, tmp_path, name):
    _check(ranks, tmp_path, ALL[name])
