"""One model under many strategies: saved under each, loaded under each other; see test_reshape.py.

A new strategy is one row of ``ROWS``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright import runtime
from meshwright.data import GlobalOrder
from meshwright.errors import MeshwrightError
from meshwright.nn.fp8 import is_scaling_state
from meshwright.optim import CAME, AdamW8bit, GaLoreAdamW, Lamb, Muon, get_galore_param_groups, muon_param_groups
from meshwright.store import CheckpointStore, TrainingState
from meshwright.store.entries import dtype_named
from meshwright.store.manifest import TENSORS, Record, verify
from meshwright.store.stored_shards import load_shards
from tests import tiny
from tests.methods.pair_runs import DIM, VOCAB, Experts, RmsNorm

BATCH, STOP, MORE, SAMPLES = 12, 3, 2, 50  # the run crosses the end of an epoch behind the checkpoint
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}, None),
    "8-bit": (partial(AdamW8bit, min_8bit_size=1024), {"lr": 1e-2}, None),
    "galore": (GaLoreAdamW, {"lr": 1e-2}, lambda model: get_galore_param_groups(model, weight_decay=0.01, rank=4)),
    "came": (CAME, {"lr": 1e-3}, None),
    "lamb": (Lamb, {"lr": 1e-2}, None),
    "muon": (Muon, {"lr": 1e-2}, muon_param_groups),
}


@dataclass(frozen=True)
class Row:
    """A strategy on a world."""

    world: int
    strategy: list[Any] = field(default_factory=list)
    optimizer: str = "adamw"
    micro_batches: int = 1
    model: str = "dense"
    tolerance: float = 1e-5
    """Of the losses that follow, against one process in fp32 from the same checkpoint, relative; None: not like it."""

    @property
    def replicas_apart(self) -> bool:
        """Whether replicas go ways of their own after a step."""
        return any(method[0] == "outer" for method in self.strategy if isinstance(method, tuple))


def mesh(**axes: int) -> tuple[str, dict[str, int]]:
    return "parallel_mode", axes


def scheduled(schedule: str) -> tuple[str, dict[str, str]]:
    return "pipeline_parallel", {"schedule": schedule}


def outer(rule: str, **keys: Any) -> tuple[str, dict[str, Any]]:
    return "outer", {"rule": rule, **keys}


SEQUENCE = ("tensor_parallel", {"sequence": True})
FP8 = ("fp8", {"emulate": True, "exclude": ("head",), "amax_history_len": 4})
COMM = ("comm", {"reduce": "int8", "min_numel": 64})
BF16, FP16 = {"dtype": "bf16"}, {"dtype": "fp16"}
ROWS: dict[str, Row] = {
    "one process": Row(1),
    "checkpoint, accumulation": Row(1, ["checkpoint"], micro_batches=3),
    "offload all": Row(1, ["fsdp", ("offload", "all")]),
    "ema": Row(1, ["ema"]),
    "amp bf16": Row(1, [("amp_native", BF16)], tolerance=2e-4),
    "half fp16": Row(1, [("half", FP16)], tolerance=1e-4),
    "fp8": Row(1, [FP8], tolerance=3e-3),
    "data 2": Row(2, [mesh(data=2)]),
    "zero1": Row(2, ["zero1"]),
    "zero2, checkpoint": Row(2, ["zero2", "checkpoint"]),
    "fsdp 2, half bf16": Row(2, ["fsdp", ("half", BF16)], tolerance=3e-4),
    "fsdp 2, offload all": Row(2, ["fsdp", ("offload", "all")]),
    "comm int8": Row(2, [mesh(zero=2), COMM], tolerance=1e-4),
    "tensor 2, sequence": Row(2, [SEQUENCE, mesh(tensor=2)]),
    "sequence 2": Row(2, ["sequence_parallel", mesh(sequence=2)]),
    "context 2": Row(2, ["context_parallel", mesh(context=2)]),
    "expert 2": Row(2, ["expert_parallel", mesh(expert=2)], model="experts"),
    "pipeline 2, interleaved": Row(2, [mesh(pipeline=2), scheduled("interleaved")], micro_batches=4),
    "pipeline 2, zbv": Row(2, [mesh(pipeline=2), scheduled("zbv")], micro_batches=4),
    "diloco": Row(2, [mesh(replica=2), outer("diloco", sync_every=2)]),
    "streaming diloco": Row(2, [mesh(replica=2), outer("streaming_diloco", sync_every=2, fragments=2, delay=0)]),
    "bmuf": Row(2, [mesh(replica=2), outer("bmuf", sync_every=2, warmup_steps=0)]),
    "slowmo": Row(2, [mesh(replica=2), outer("slowmo", sync_every=2)]),
    "fsdp 3": Row(3, ["fsdp"]),
    "data 2 x zero 2": Row(4, ["fsdp", mesh(data=2, zero=2)]),
    "tensor 2 x zero 2": Row(4, ["tensor_parallel", "fsdp", mesh(tensor=2, zero=2)]),
    "expert 2 x zero 2": Row(4, ["expert_parallel", "fsdp", mesh(expert=2, zero=2)], model="experts"),
    "pipeline 4, 1f1b": Row(4, [mesh(pipeline=4), scheduled("1f1b")], micro_batches=4),
    "pipeline 2 x zero 2": Row(4, ["fsdp", mesh(pipeline=2, zero=2), scheduled("1f1b")], micro_batches=2),
    "tensor 2 x pipeline 2": Row(
        4, [mesh(tensor=2, pipeline=2), "tensor_parallel", scheduled("1f1b")], micro_batches=2
    ),
    "one process, experts": Row(1, model="experts"),
    "fsdp 2, experts": Row(2, ["fsdp"], model="experts"),
    "pipeline 2, experts": Row(2, [mesh(pipeline=2), scheduled("1f1b")], micro_batches=2, model="experts"),
    "expert 2 x sequence 2": Row(
        4, ["expert_parallel", "sequence_parallel", mesh(expert=2, sequence=2)], model="experts"
    ),
    "expert 2 x pipeline 2": Row(
        4, ["expert_parallel", mesh(expert=2, pipeline=2), scheduled("1f1b")], micro_batches=2, model="experts"
    ),
    "tensor 2, sequence x expert 2": Row(4, [SEQUENCE, "expert_parallel", mesh(tensor=2, expert=2)], model="experts"),
    "8-bit": Row(1, optimizer="8-bit"),
    "8-bit, fsdp 2": Row(2, ["fsdp"], "8-bit"),
    "8-bit, tensor 2": Row(2, ["tensor_parallel", mesh(tensor=2)], "8-bit"),
    "8-bit, pipeline 2": Row(2, [mesh(pipeline=2), scheduled("1f1b")], "8-bit", 2),
    "galore": Row(1, optimizer="galore"),
    "galore, fsdp 2": Row(2, ["fsdp"], "galore"),
    "came": Row(1, optimizer="came"),
    "came, fsdp 2": Row(2, ["fsdp"], "came"),
    "lamb": Row(1, optimizer="lamb"),
    "lamb, data 2": Row(2, [mesh(data=2)], "lamb"),
    "lamb, fsdp 4": Row(4, ["fsdp"], "lamb"),
    "muon": Row(1, optimizer="muon"),
    "muon, fsdp 2": Row(2, ["fsdp"], "muon"),
}


def slug(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


def build(kind: str, seed: int) -> torch.nn.Module:
    """A GPT of four blocks; experts are such that each token takes all: rounding cannot choose others."""
    torch.manual_seed(seed)
    model = tiny.gpt2.GPT2(vocab_size=VOCAB, seq_len=tiny.SEQ_LEN, dim=DIM, num_layers=4, num_heads=4)
    model.norm = RmsNorm(DIM)
    for block in model.blocks if kind == "experts" else ():
        block.mlp = Experts(DIM, top_k=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


class Run:
    """One strategy at work."""

    def __init__(self, row: Row, seed: int) -> None:
        make, args, param_func = OPTIMIZERS[row.optimizer]
        self.order = GlobalOrder(SAMPLES, seed=5)
        self.accelerated = mw.accelerate(
            build(row.model, seed), make, tiny.Tokens(SAMPLES), tiny.loss_func, strategy=row.strategy, optim_args=args,
            optim_param_func=param_func, dataloader_args={"batch_size": BATCH, "sampler": self.order},
            num_micro_batches=row.micro_batches, lr_scheduler_cls=torch.optim.lr_scheduler.StepLR,
            lr_scheduler_args={"step_size": 2, "gamma": 0.9},
        )  # fmt: skip
        given = self.accelerated
        self.state = TrainingState(given.model, given.optim, given.lr_scheduler, strategy=given.strategy.to_json())

    def train(self, steps: int) -> list[float]:
        """Losses, over all replicas."""
        losses = []
        self.order.start = self.state.samples_seen
        for _, batch in zip(range(steps), self.accelerated.dataloader, strict=False):
            losses.append(self.accelerated.step(batch).loss)
            self.state.step += 1
            self.state.samples_seen += BATCH
        return [runtime.sum_loss(loss).item() for loss in losses]


def save_all(directory: Path, names: list[str]) -> dict[str, Any]:
    """Trains each, saves it and trains on: the losses that follow, or why it cannot be saved."""
    found: dict[str, Any] = {}
    for name in names:
        run = Run(ROWS[name], seed=3)
        run.train(STOP)
        try:
            CheckpointStore(directory / slug(name)).save(run.state)
            found[name] = run.train(MORE)
        except MeshwrightError as error:
            found[name] = str(error)
    return found


def load_all(directory: Path, name: str, sources: list[str]) -> dict[str, Any]:
    """Loads checkpoints into a run of one strategy, one after the other, saves each at once, and trains on.

    The first goes into a run that has only been built, the others replace weights and states that have moved.

    Returns:
        By source the losses that follow; or why it was refused, and the run's weights are then those of the source.
    """
    found: dict[str, Any] = {}
    run = Run(ROWS[name], seed=9)
    for source in sources:
        store, again = CheckpointStore(directory / slug(source)), CheckpointStore(resaved(directory, source, name))
        try:
            info = store.load(run.state)
        except MeshwrightError as error:
            weights_alone = TrainingState(run.state.model)
            store.load(weights_alone)
            again.save(weights_alone)
            found[source] = str(error)
            continue
        assert (info.step, run.state.step, run.state.samples_seen) == (STOP, STOP, STOP * BATCH)
        again.save(run.state)
        found[source] = run.train(MORE)
    return found


def resaved(directory: Path, source: str, name: str) -> Path:
    """Where a run of a strategy saves what it has loaded from another."""
    return directory / "again" / f"{slug(source)}-into-{slug(name)}"


@dataclass(frozen=True)
class Contents:
    """A checkpoint, read in one process."""

    record: Record
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, directory: Path) -> Contents:
        """The only checkpoint of a directory."""
        (path,) = directory.glob("step-*")
        record = verify(path)
        told = dict(record.tensors)
        for replica in record.outer.replicas if record.outer else ():
            told |= replica.tensors
        tensors = {name: torch.empty(shape, dtype=dtype_named(dtype)) for name, (shape, dtype) in told.items()}
        load_shards(tensors, path / TENSORS)
        return cls(record, tensors)

    @property
    def num_replicas(self) -> int:
        return len(self.record.outer.replicas) if self.record.outer else 1

    def weights(self, replica: int | None = None) -> dict[str, torch.Tensor]:
        """By name; of replicas that are apart those of one, or their mean."""
        found = {name: tensor for name, tensor in self.tensors.items() if name.startswith("model.")}
        for name in found:
            own = [self.tensors.get(f"replica.{number}.{name}") for number in range(self.num_replicas)]
            if own[0] is not None:
                mean = torch.stack(own).double().mean(0).to(own[0].dtype)
                found[name] = mean if replica is None else own[replica]
        return {name: tensor for name, tensor in found.items() if not is_scaling_state(name)}

    def states(self, replica: int) -> dict[str, torch.Tensor]:
        """Of the optimizer (of one replica), by name."""
        prefix = f"replica.{replica % self.num_replicas}." if self.record.outer else ""
        found = {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}
        return {name: tensor for name, tensor in found.items() if name.startswith("optim.state.")}

    def groups(self) -> dict[str, Any]:
        """Hyperparameters by parameter."""
        record = self.record.outer.replicas[0].optimizer if self.record.outer else self.record.optimizer
        return {name: group.values for group in record.groups for name in group.parameters}


def check_equal(source: Contents, again: Contents, *, with_states: bool) -> None:
    """Everything that was saved is what was loaded, to the bit."""
    same = source.num_replicas == again.num_replicas
    for replica in range(again.num_replicas):
        _check_bits(source.weights(replica if same else None), again.weights(replica if same else None))
        if with_states:
            _check_bits(source.states(replica), again.states(replica))
    if with_states:
        assert again.groups() == source.groups()
        assert again.record.lr_scheduler == source.record.lr_scheduler


def _check_bits(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, tensor in found.items():
        wanted = expected[name]
        assert torch.equal(tensor, wanted), (name, tensor.dtype, wanted.dtype, (tensor - wanted).abs().max())


def family(name: str) -> tuple[str, str]:
    """Strategies of one model and one optimizer: their checkpoints load into each other."""
    return ROWS[name].model, ROWS[name].optimizer


def reference(name: str) -> str:
    """One process of the same family: the first of it."""
    return next(other for other, row in ROWS.items() if row.world == 1 and family(other) == family(name))


FAMILIES = list(dict.fromkeys(map(family, ROWS)))
PAIRS = [
    (source, name)
    for source in ROWS
    for name in ROWS
    if family(source) == family(name)
    # Of other optimizers' the weights load: one of each into one of each shows it.
    or (family(source)[0] == family(name)[0] and reference(source) == source and reference(name) == name)
]


def problem(source: str, name: str, losses: dict[str, Any], after: Any, alone: Any) -> str | float:
    """What is wrong with the losses that follow; or by how much they are apart from one process's, relative.

    Args:
        source: What was saved.
        name: Where it was loaded.
        losses: That followed the save, by source.
        after: That followed the load.
        alone: That followed when one process of the family loaded it.
    """
    if source == name and after != losses[source]:
        return f"{after} follow in place of {losses[source]}"
    # Replicas that go apart are like one process in their first step only, and not even there if they were apart.
    steps = MORE - ROWS[name].replicas_apart * (MORE - 1 + ROWS[source].replicas_apart)
    apart = max((abs(own / wanted - 1) for own, wanted in zip(after[:steps], alone[:steps], strict=True)), default=0.0)
    return apart if apart <= ROWS[name].tolerance else f"{apart:.1e} is above {ROWS[name].tolerance:.0e}"
