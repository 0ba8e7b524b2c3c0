"""Every pair of methods: the smallest strategy with both, refused by the law or trained against one plain process.

A new method is one row of ``ROWS``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import meshwright as mw
from meshwright import Strategy, StrategyError
from meshwright.methods import resolve
from tests import tiny

STEPS, BATCH, DIM, VOCAB = 5, 8, 32, 64
FP32_LIMIT, OF_ONE_PROCESS = 1e-5, 2.0
"""The largest difference allowed in fp32; and below fp32, in units of what one process with the same precision differs
by: rounding is another in another order of sums, and gathered weights are rounded where others are not."""


@dataclass(frozen=True)
class Row:
    """The smallest use of a method."""

    config: Any = None
    axes: dict[str, int] = field(default_factory=dict)
    model: str = "dense"
    rounds: bool = False  # computes below fp32
    drift: float = 0.0  # by which what it sends in few bits may move the weights beside that


BF16 = {"dtype": "bf16"}
MAX_NORM = 0.5
"""Below the norms of all steps, so that every one is clipped."""
ROWS = {
    "parallel_mode": Row(axes={"data": 2}),
    "module_replace": Row(["rms_norm"]),
    "pipeline_parallel": Row(axes={"pipeline": 2}),
    "fp8": Row({"emulate": True, "exclude": ("head",), "amax_history_len": 4}, rounds=True),
    "tensor_parallel": Row(axes={"tensor": 2}),
    "expert_parallel": Row(axes={"expert": 2}, model="experts"),
    "sequence_parallel": Row(axes={"sequence": 2}),
    "context_parallel": Row(axes={"context": 2}),
    "checkpoint": Row(),
    "offload": Row(),
    # Docs: ten steps in int8 end within 1 %, in half precision within 1.5 %, of the way.
    "comm": Row({"reduce": "int8", "min_numel": 64}, axes={"zero": 2}, drift=2e-2),
    "compile": Row({"backend": "aot_eager"}),
    "amp_native": Row(BF16, rounds=True),
    "half": Row(BF16, rounds=True),
    "zero1": Row(axes={"zero": 2}),
    "zero2": Row(axes={"zero": 2}),
    "fsdp": Row(axes={"zero": 2}),
    # Averaging weights after every step of SGD is averaging gradients.
    "outer": Row({"rule": "local_sgd", "sync_every": 1}, axes={"replica": 2}),
    "grad_clip": Row(MAX_NORM),
    "gradient_accumulation": Row(2),
    "skip_nonfinite": Row(),
    "ema": Row(),
    "loss_spike": Row({"window": 8, "threshold": 50.0}),
    "weight_vote": Row({"every": 1, "action": "stop", "at_rest": True}),
}
PAIRS = [*((name, name) for name in ROWS), *itertools.combinations(ROWS, 2)]


@dataclass(frozen=True)
class Case:
    """A strategy with two methods, or with one."""

    methods: tuple[str, ...]
    ranks: int = 2  # where no method has an axis
    fixed_model: str = ""

    @property
    def axes(self) -> dict[str, int]:
        """The axes of both; data, where neither has one."""
        axes = {name: size for method in self.methods for name, size in ROWS[method].axes.items()}
        return axes or {"data": self.ranks}

    @property
    def world(self) -> int:
        """2, or 4 for two axes."""
        return math.prod(self.axes.values())

    @property
    def strategy(self) -> list[Any]:
        """As a user writes it."""
        others = [(name, self._config(name)) for name in self.methods if name != "parallel_mode"]
        return [("parallel_mode", self.axes), *others]

    def _config(self, name: str) -> Any:
        # Every replica clips by its own norm: no bound is the only one that is the same in one process.
        return 1e9 if name == "grad_clip" and "outer" in self.methods else ROWS[name].config

    @property
    def max_norm(self) -> float:
        """That of the reference."""
        clips = "grad_clip" in self.methods and "outer" not in self.methods
        return MAX_NORM if clips else float("inf")

    @property
    def model(self) -> str:
        """The model that both can work on."""
        if self.fixed_model or all(ROWS[name].model == "dense" for name in self.methods):
            return self.fixed_model or "dense"
        # Between experts that nearly tie, rounding would choose others than one process in fp32 does.
        return "all experts" if self.rounding else "experts"

    @property
    def rounding(self) -> tuple[str, ...]:
        """The methods that compute below fp32."""
        return tuple(name for name in self.methods if ROWS[name].rounds)

    @property
    def on_one_rank(self) -> Case:
        """The same precision on the same model, and nothing else."""
        clips = tuple(name for name in self.methods if name == "grad_clip")
        return Case((*self.rounding, *clips), 1, self.model)

    def limit(self, one_rank: Callable[[Case], Any]) -> float:
        """The largest difference allowed.

        Args:
            one_rank: Trains a case on one rank; returns its outcomes.
        """
        drift = sum(ROWS[name].drift for name in self.methods)
        if not self.rounding:
            return FP32_LIMIT + drift
        return OF_ONE_PROCESS * worst_difference(self.on_one_rank, one_rank(self.on_one_rank)) + drift


def case_of(first: str, second: str) -> Case:
    return Case((first,) if first == second else (first, second))


def refusal(case: Case) -> str | None:
    """The sentence with which the law refuses it; None where it does not."""
    try:
        resolve(Strategy(case.strategy), case.world)
    except StrategyError as error:
        return error.what
    return None


class RmsNorm(nn.Module):
    """As models write it by hand."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Experts(nn.Module):
    """A router, and a list of experts that it loops over."""

    def __init__(self, dim: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            if len(token):
                out = out.index_add(0, token, (expert(tokens[token]) * weights[token, slot, None]).to(out.dtype))
        return out.view_as(x)


def build(kind: str) -> nn.Module:
    """A GPT of two blocks with a norm by hand; its weights depend on nothing but its kind."""
    torch.manual_seed(3)
    model = tiny.gpt2.GPT2(vocab_size=VOCAB, seq_len=tiny.SEQ_LEN, dim=DIM, num_layers=2, num_heads=4)
    model.norm = RmsNorm(DIM)
    for block in model.blocks if kind != "dense" else ():
        block.mlp = Experts(DIM, top_k=2 if kind == "experts" else 4)
    with torch.no_grad():
        for parameter in model.parameters():  # biases of zero and norms of one would hide what is lost
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


SGD = {"lr": 0.1, "momentum": 0.9}


@functools.cache
def reference(kind: str, max_norm: float) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, initial and final weights of a plain loop in one process, in fp32."""
    model = build(kind)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optim, data, losses = torch.optim.SGD(model.parameters(), **SGD), tiny.Tokens(), []
    order = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    for _, ids in zip(range(STEPS), DataLoader(data, BATCH, sampler=order), strict=False):
        loss = tiny.loss_func(ids, model(ids))
        optim.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        assert norm > max_norm or max_norm == float("inf"), "nothing is clipped"
        optim.step()
        losses.append(loss.item())
    return losses, before, {name: value.detach() for name, value in model.named_parameters()}


def train(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Five steps on this world: losses, and this rank's weights, each whole."""
    torch._dynamo.reset()
    result = mw.accelerate(
        build(case.model), torch.optim.SGD, tiny.Tokens(), tiny.loss_func, strategy=case.strategy, optim_args=SGD,
        dataloader_args={"batch_size": BATCH},
    )  # fmt: skip
    losses = [result.step(batch).loss.item() for _, batch in zip(range(STEPS), result.dataloader, strict=False)]
    inner = getattr(result.model, "module", result.model)
    names = {name.removeprefix("module.") for name, _ in result.model.named_parameters()}
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in inner.state_dict().items()
        if name in names
    }
    return losses, {name: value.detach().float().clone() for name, value in whole.items()}


def worst_difference(case: Case, outcomes: list[tuple[list[float], dict[str, torch.Tensor]]]) -> float:
    """The largest of: weights' distance as a part of how far they moved, and losses' relative differences.

    Args:
        case: What was trained.
        outcomes: Of every rank; stages of a pipeline have parts of the weights.
    """
    losses, before, after = reference(case.model, case.max_norm)
    mean = torch.tensor([own for own, _ in outcomes], dtype=torch.float64).mean(0)  # over replicas of outer
    apart = (mean / torch.tensor(losses, dtype=torch.float64) - 1).abs().max().item()
    weights: dict[str, torch.Tensor] = {}
    for _, own in outcomes:
        for name, value in own.items():
            assert torch.equal(weights.setdefault(name, value), value), f"ranks differ in {name}"
    assert weights.keys() == after.keys(), weights.keys() ^ after.keys()
    off = torch.stack([(weights[name] - value).norm() for name, value in after.items()]).norm()
    moved = torch.stack([(before[name] - value).norm() for name, value in after.items()]).norm()
    return max(apart, (off / moved).item())
