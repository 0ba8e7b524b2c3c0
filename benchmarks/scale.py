"""Measure what agreement between ranks costs as their number grows; fit it, and draw it.

A model of 48 small blocks starts under ``fsdp`` on gloo, takes ten steps, saves, loads, and hangs once, diagnosed by
:class:`meshwright.runtime.Watch`; then ``meshwright train`` trains it. Processes are forked from one that has imported
torch, so that 64 of them fit on a small machine. What is counted does not depend on its speed: bytes and messages
between a rank and the store (the kernel's counters of its connection), connections to other ranks, objects received,
files opened, collectives of a step. Every quantity is fitted with the slowest growth that describes it, which gives the
figures at 1,024 and 16,384 ranks; those are extrapolated, and marked. ``--pretended`` lets one process start as a rank
of 16,384 through torch's fake process group. Linux only.

    python benchmarks/scale.py [--ranks 2 4 8 …] [--starts-only] [--pretended 16384] [--json FILE] [--plot FILE.svg]
    python benchmarks/scale_launch.py             seconds from torchrun to the first step, beside FSDP2 by hand
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import pickle
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scale_fit import draw, fitted, table
from torch import nn

import meshwright as mw
from meshwright.runtime.torch_internals.fake_tensors import TorchDispatchMode
from meshwright.runtime.watch import Watch
from meshwright.store import CheckpointStore, TrainingState

PRELOADED = (
    "torch.distributed.fsdp",
    "meshwright.training.accelerate",
    "meshwright.store",
    "meshwright.cli.train_loop",
)
BLOCKS, WIDTH = 48, 16
STEPS, MORE_STEPS = 10, 4
HANG_LIMIT_S = 4.0
MODEL_FILE = f"import torch\nfrom torch import nn\n\nBLOCKS, WIDTH = {BLOCKS}, {WIDTH}\n\n\n"
TRAINING_FILE = """
[model]
source = "small:Small"
[data]
source = "{corpus}"
tokenizer = "bytes"
seq_len = {width}
[strategy]
methods = ["fsdp"]
[optimizer]
name = "adamw"
lr = 1e-3
[run]
nproc = {ranks}
steps = {steps}
batch_size = {ranks}
"""


class Small(nn.Module):
    """48 blocks that predict the next byte from a byte: nothing but parameters to count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 257)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def loss_of(ids: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# --- What a rank counts

RECEIVED = {
    "all_gather_object": "object_list", "gather_object": "object_gather_list", "broadcast_object_list": "object_list",
    "scatter_object_list": "scatter_object_output_list",
}  # fmt: skip
"""Collectives of objects, and the argument that holds what a rank receives."""


def sockets() -> dict[str, int]:
    """Connections to other ranks, and the store's traffic, from the kernel's counters of this process's sockets."""
    store_port = int(os.environ["MASTER_PORT"])
    found = {"peers": 0, "store bytes read": 0, "store messages": 0}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                remote, local = connection.getpeername(), connection.getsockname()
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # a listening socket, one of another kind, or one that has just been closed
            continue
        if remote[1] == store_port:
            found["store bytes read"] += struct.unpack_from("Q", info, 128)[0]  # tcpi_bytes_received
            found["store messages"] += struct.unpack_from("I", info, 156)[0]  # tcpi_data_segs_out
        elif local[1] != store_port:
            found["peers"] += 1
    return found


class Counts:
    """Objects that collectives bring to this rank, and files it opens below a folder."""

    def __init__(self, folder: Path) -> None:
        self.objects = self.object_bytes = 0
        self.opened: set[str] = set()
        self._folder = os.fspath(folder)
        sys.addaudithook(self._audit)
        for name, received in RECEIVED.items():
            setattr(dist, name, self._counted(getattr(dist, name), received))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str) or not arguments[0].startswith(self._folder):
            return
        if os.path.isfile(arguments[0]):
            self.opened.add(arguments[0])

    def _counted(self, function: Callable[..., Any], received: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            objects = signature.bind(*args, **kwargs).arguments.get(received)
            if objects is not None:
                self.objects += 1
                self.object_bytes += sum(len(pickle.dumps(each)) for each in objects)
            return result

        return run


ENGINE = ("/fsdp/_fully_shard/", "/meshwright/nn/host_exchange.py")
"""Files whose collectives move weights and gradients."""


class Exchanges(TorchDispatchMode):
    """Collectives that are called for anything but weights and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.number += not _is_called_from(ENGINE)
        return func(*args, **(kwargs or {}))


def _is_called_from(files: Sequence[str]) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if any(file in frame.f_code.co_filename for file in files):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def private_bytes() -> int:
    """Memory that this process does not share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))


# --- What a rank does


def life(folder: Path, *, starts_only: bool) -> dict[str, float]:
    """Start, train, save, load and hang as one rank, or start alone; return what it counted."""
    found, counts = dict[str, float](), Counts(folder)
    begun_s = time.perf_counter()
    mw.init_distributed(backend="gloo")
    job = mw.accelerate(
        build(), torch.optim.AdamW, None, loss_of, strategy=["fsdp"], optim_args={"lr": 1e-3},
        sample_batch=torch.zeros(1, WIDTH, dtype=torch.long),
    )  # fmt: skip
    found["start: seconds"] = time.perf_counter() - begun_s
    ids = torch.randint(0, 257, (1, WIDTH), generator=torch.Generator().manual_seed(mw.rank()))
    job.step(ids)
    begun_s = time.perf_counter()
    for _ in range(0 if starts_only else STEPS):
        job.step(ids)
    found["step: seconds"] = (time.perf_counter() - begun_s) / STEPS
    traffic = sockets()
    found |= {f"start: {name}": traffic[name] for name in traffic}
    found |= {"start: objects": counts.objects, "start: bytes of objects": counts.object_bytes}
    found["start: bytes held"] = private_bytes()
    if starts_only:
        mw.shutdown_distributed()
        return found
    with Exchanges() as exchanges:
        job.step(ids)
    found["step: exchanges outside the engine, job.step"] = exchanges.number
    with counted(found, "save", counts):
        store, state = CheckpointStore(folder / "checkpoints"), TrainingState(job.model, job.optim)
        state.step = 1
        store.save(state)
    with counted(found, "load", counts):
        store.load(state)
    found["save: files"] = sum(path.is_file() for path in (folder / "checkpoints").rglob("*"))
    found |= hang()
    mw.shutdown_distributed()
    return found


@contextmanager
def counted(found: dict[str, float], phase: str, counts: Counts) -> Iterator[None]:
    """Note seconds, files opened and bytes of objects of a phase."""
    counts.opened.clear()
    bytes_before, begun_s = counts.object_bytes, time.perf_counter()
    yield
    found[f"{phase}: seconds"] = time.perf_counter() - begun_s
    found[f"{phase}: files opened"] = len(counts.opened)
    found[f"{phase}: bytes of objects"] = counts.object_bytes - bytes_before


def hang() -> dict[str, float]:
    """Let the middle rank sleep; return when it was named, and what that read from the store."""
    told, flag = list[tuple[float, str]](), torch.zeros(1)
    guilty = mw.world_size() // 2
    before = sockets()
    with Watch(HANG_LIMIT_S, tell=lambda text: told.append((time.perf_counter(), text))) as watch:
        for step in range(4):
            watch.beat()
            begun_s = time.perf_counter()
            if step == 3 and mw.rank() == guilty:
                time.sleep(3 * HANG_LIMIT_S)
            dist.all_reduce(flag)
        after = sockets()
    found = {f"hang: {name}": after[name] - before[name] for name in after if name != "peers"}
    for at_s, text in told:
        if f"rank {guilty}" in text:
            found["hang: limits until named"] = (at_s - begun_s) / HANG_LIMIT_S
    return found


def command_line(folder: Path, steps: int) -> dict[str, float]:
    """Train with ``meshwright train`` as one rank; return its exchanges outside the engine."""
    from meshwright.cli.train_loop import train
    from meshwright.cli.train_options import Options

    options = Options(folder / f"{steps}.toml", None, None, False, folder / f"run-{steps}", (), False, 0)
    with Exchanges() as exchanges, redirect_stdout(StringIO()):
        train(options)
    return {"exchanges": exchanges.number}


# --- Worlds


def _serve(local_rank: int, steps: int, num_ranks: int, port: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(local_rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    found = command_line(folder, steps) if steps > 0 else life(folder, starts_only=steps < 0)
    (folder / f"rank-{local_rank}.json").write_text(json.dumps(found))


def world(num_ranks: int, folder: Path, steps: int = 0) -> list[dict[str, float]]:
    """Run forked processes: so many steps of ``meshwright train``, or :func:`life`, below 0 its start alone."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mp.start_processes(_serve, (steps, num_ranks, port, folder), num_ranks, start_method="forkserver")
    return [json.loads((folder / f"rank-{each}.json").read_text()) for each in range(num_ranks)]


def measure(num_ranks: int, *, starts_only: bool) -> dict[str, float]:
    """Return every quantity for a number of ranks: that of the rank with the most of it, and totals where named so."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ranks = world(num_ranks, folder, -1 if starts_only else 0)
        found = {name: max(rank.get(name, 0.0) for rank in ranks) for rank in ranks for name in rank}
        if starts_only:
            return found
        found["hang: store bytes read, all ranks"] = sum(rank["hang: store bytes read"] for rank in ranks)
        (folder / "corpus.txt").write_text("to be or not to be, that is the question\n" * 200)
        totals = []
        for steps in (2, 2 + MORE_STEPS):
            text = TRAINING_FILE.format(corpus=folder / "corpus.txt", width=WIDTH, ranks=num_ranks, steps=steps)
            (folder / f"{steps}.toml").write_text(text)
            (folder / "small.py").write_text(MODEL_FILE + inspect.getsource(Small))
            totals.append(world(num_ranks, folder, steps)[0]["exchanges"])
        found["step: exchanges outside the engine, meshwright train"] = (totals[1] - totals[0]) / MORE_STEPS
    return found


# --- One process as a rank of many


def pretended(num_ranks: int) -> list[dict[str, Any]]:
    """Start a Llama of the width of 70B and 16 layers as rank 0 of many, under three layouts; nothing is exchanged."""
    import large_models as large

    cases = (
        large.case("70b", num_ranks, "fsdp", layers=16),
        large.case("70b", num_ranks, large.mesh(zero=64, data=num_ranks // 64), "fsdp", layers=16),
        large.case(
            "70b", num_ranks, large.mesh(tensor=8, pipeline=8, zero=num_ranks // 64), "tensor_parallel",
            "pipeline_parallel", "zero1", layers=16,
        ),
    )  # fmt: skip
    found = []
    for case in cases:
        found.append(large.measured_apart(case))
        print(large.row(found[-1]), flush=True)
    return found


def main() -> int:
    """Measure what is asked for, and print, write and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--starts-only", action="store_true", help="start, take a step, and no more")
    parser.add_argument("--pretended", type=int, help="start one process as a rank of so many, too")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this SVG file")
    given = parser.parse_args()
    figures: dict[str, Any] = {"torch": torch.__version__}
    if given.ranks:
        figures |= measured_and_fitted(given.ranks, starts_only=given.starts_only)
        print(table(figures["measured"], figures["fits"]))
        if given.plot is not None and not given.starts_only:
            draw(figures["measured"], figures["fits"], given.plot)
    if given.pretended:
        figures["pretended"] = pretended(given.pretended)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def measured_and_fitted(numbers: Sequence[int], *, starts_only: bool) -> dict[str, Any]:
    """Return what each number of ranks counts, and how every quantity grows."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    measured = {}
    for number in numbers:
        print(f"{number} processes …", file=sys.stderr, flush=True)
        measured[number] = measure(number, starts_only=starts_only)
        print(json.dumps(measured[number]), file=sys.stderr, flush=True)  # long runs may be cut off
    names = [name for name in measured[numbers[0]] if "seconds" not in name]  # those say more of the machine
    fits = {
        name: fitted({number: found[name] for number, found in measured.items() if name in found}) for name in names
    }
    return {"measured": measured, "fits": fits}


if __name__ == "__main__":
    sys.exit(main())
