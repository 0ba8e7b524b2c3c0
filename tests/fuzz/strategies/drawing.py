"""Random cases: a model, a world, a strategy in the words that users write, and how it is trained."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.fuzz.strategies import models

WORLDS = (2, 2, 2, 4, 4, 4, 4, 6, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
SPLITS = {"tensor": "tensor_parallel", "sequence": "sequence_parallel", "context": "context_parallel",
          "expert": "expert_parallel"}  # fmt: skip
BATCH, MOST_DRAWS = 24, 40


@dataclass(frozen=True)
class Case:
    """Everything that a run depends on; a case read from JSON equals the one that was written."""

    model: str
    layers: int
    world: int
    strategy: list[Any]
    optimizer: str = "sgd"
    micro_batches: int = 1
    max_grad_norm: float | None = None
    seed: str = field(default="", compare=False)

    @classmethod
    def read(cls, record: dict[str, Any]) -> Case:
        """Build a case from JSON, in which tuples are lists."""
        strategy = [tuple(method) if isinstance(method, list) else method for method in record["strategy"]]
        return cls(**{**record, "strategy": strategy})

    def record(self) -> dict[str, Any]:
        """Return what JSON holds of it."""
        return asdict(self)


def draw(seed: str) -> Case:
    """Draw the case of ``seed``: the same on every machine and in every version of Python."""
    rng = random.Random(seed)
    name = rng.choice(list(models.MODELS))
    world = rng.choice(WORLDS)
    axes = _axes(rng, name, world)
    strategy: list[Any] = [("parallel_mode", axes)] if axes != {"data": world} or rng.random() < 0.3 else []
    stages = axes.get("pipeline", 1)
    micro_batches = rng.choice((1, 1, 2, 3))
    layers = 4
    if stages > 1:
        schedule = rng.choice(SCHEDULES)
        strategy.append(("pipeline_parallel", {"schedule": schedule}))
        micro_batches = rng.choice((1, 2)) * stages * (2 if schedule == "dualpipev" else 1)
        layers = max(4, stages * (1 if schedule in ("gpipe", "1f1b") else 2))
    for axis, method in SPLITS.items():
        if axes.get(axis, 1) > 1:
            sequence = axis == "tensor" and rng.random() < 0.3
            strategy.append((method, {"sequence": True}) if sequence else method)
    strategy += _rest(rng, axes)
    norm = rng.choice((None, None, 0.5, 2.0))
    return Case(name, layers, world, strategy, rng.choice(("sgd", "sgd", "adamw")), micro_batches, norm, seed)


def _axes(rng: random.Random, name: str, world: int) -> dict[str, int]:
    """Split the world over a few axes, more often over those that this model has a use for."""
    likely = {"data": 4, "zero": 4, "tensor": 3, "pipeline": 3, "sequence": 2, "context": 2}
    if name in models.EXPERTS:
        likely["expert"] = 5
    if name in ("gru", "resnet"):
        likely = {"data": 4, "zero": 6, "pipeline": 1, "tensor": 1}
    axes: dict[str, int] = {}
    for prime in (2, 2, 2) if world == 8 else (2, 3) if world == 6 else (2,) * (world // 2):
        axis = rng.choices(list(likely), list(likely.values()))[0]
        axes[axis] = axes.get(axis, 1) * prime
    return axes


def _rest(rng: random.Random, axes: dict[str, int]) -> list[Any]:
    """Draw what lies beside the axes: sharding, recomputation, offload and what changes no number."""
    methods: list[Any] = []
    if "zero" in axes or rng.random() < 0.35:
        methods.append(rng.choice(("zero1", "zero2", "fsdp", ("fsdp", {"reshard_after_forward": False}))))
    if rng.random() < 0.35:
        keys = ({}, {"every": 2}, {"layers": 0.5}, {"policy": "selective"}, {"no_reentrant": False})
        methods.append(("checkpoint", rng.choice(keys)))
    if rng.random() < 0.25:
        parts = ("optimizer", "activation", "all", {"optimizer": 0.5}, {"activations": 0.5},
                 {"optimizer": 1.0, "gradients": 0.0}, {"parameters": 0.5})  # fmt: skip
        methods.append(("offload", rng.choice(parts)))
    for name, chance in (("ema", 0.15), ("module_replace", 0.15), ("skip_nonfinite", 0.1), ("loss_spike", 0.05)):
        if rng.random() < chance:
            methods.append(name)
    return methods
