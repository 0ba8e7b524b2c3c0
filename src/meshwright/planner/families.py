"""Well-known families by shape: GPT, Llama and Mixtral as a simulated step, without a model."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.cost import Activations, Block, Boundary, Parameter, Placed, RecomputePart, Stages, StateTensor, Step
from meshwright.errors import ModelError
from meshwright.planner.family_ops import BLOCK, FamilyRun, block_ops, block_saved, outside_ops, outside_saved, parts

Family = Literal["gpt", "llama", "mixtral"]

_ADAM = 2  # fp32 tensors as large as the parameter
_FP32_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """A decoder by its dimensions.

    Args:
        family: ``gpt`` (LayerNorm, biases, GELU, learned positions), ``llama`` (RMSNorm, gated SiLU, rotary positions)
            or ``mixtral`` (Llama with experts).
        layers: Blocks.
        hidden: Width.
        heads: Attention heads.
        vocab: Entries of the vocabulary.
        seq: Tokens of a sample.
        kv_heads: Heads of keys and values; None: as many as ``heads``.
        ffn: Width of the feed-forward layers; None: what the family usually has.
        tied: Whether embedding and head share their weights; None: as the family usually does.
        experts: Feed-forward layers to choose from, and how many of them each token takes.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    ffn: int | None = None
    tied: bool | None = None
    experts: int = 1
    experts_per_token: int = 1

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in dataclasses.asdict(self).items() if name not in ("family", "tied")}
        wrong = [f"{name}={value}" for name, value in numbers.items() if value is not None and value < 1]
        if wrong or self.hidden % self.heads or self.heads % (self.kv_heads or self.heads):
            raise ModelError(
                "The dimensions of a model do not fit together",
                expected="positive numbers, a width that heads divide, and heads that kv_heads divide",
                got=", ".join(wrong) or f"hidden={self.hidden}, heads={self.heads}, kv_heads={self.kv_heads}",
                fix="correct the dimensions",
            )

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layers: 4 x hidden; gated ones 8/3 of it in multiples of 256 (Touvron 2023)."""
        if self.ffn is not None:
            return self.ffn
        return 4 * self.hidden if self.family == "gpt" else math.ceil(8 * self.hidden / 3 / 256) * 256

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layers are three: gate, up and down."""
        return self.family != "gpt"

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are one."""
        return self.family == "gpt" if self.tied is None else self.tied

    @property
    def num_parameters(self) -> int:
        """All elements."""
        return sum(p.numel for p in _outside(self)) + self.layers * sum(p.numel for p in _inside(self))

    def model_flops_per_token(self, *, causal: bool = False) -> float:
        """Forward and backward of one token without recomputation, embeddings' look-up not counted.

        ``causal`` counts half of the scores. 6 N + 12 L h s of Chowdhery et al. 2022 (App. B) where it does not.
        """
        matrices = sum(p.numel for p in _inside(self) if len(p.shape) == 2 and "expert" not in p.name)
        experts = sum(p.numel for p in _inside(self) if "expert" in p.name)
        active = matrices + experts * self.experts_per_token / self.experts
        attention = 12 * self.hidden * self.seq * (0.5 if causal else 1.0)
        return self.layers * (6 * active + attention) + 6 * self.hidden * self.vocab


def _adam(*dims: int) -> tuple[StateTensor, ...]:
    return (StateTensor(tuple(range(len(dims))), _FP32_BYTES),) * _ADAM + (StateTensor((), _FP32_BYTES),)


def _parameter(name: str, *shape: int, tensor_dim: int | None = None, **places: tuple[int, ...] | None) -> Parameter:
    states = _adam(*shape)
    return Parameter(name, shape, _FP32_BYTES, owners=(BLOCK,), states=states, tensor_dim=tensor_dim, **places)  # type: ignore[arg-type]


def _inside(shape: Shape) -> tuple[Parameter, ...]:
    """Parameters of one block; the dims that a tensor axis divides as in Shoeybi et al. 2019."""
    h, kv, f = shape.hidden, shape.kv_width, shape.ffn_width
    experts = [f"expert{index}." for index in range(shape.experts)] if shape.experts > 1 else [""]
    found = [
        _parameter("norm1", h),
        _parameter("query", h, h, tensor_dim=0),
        _parameter("key", kv, h, tensor_dim=0),
        _parameter("value", kv, h, tensor_dim=0),
        _parameter("output", h, h, tensor_dim=1),
        _parameter("norm2", h),
    ]
    if shape.experts > 1:
        found.append(_parameter("router", shape.experts, h))
    for expert in experts:
        found += [_parameter(expert + "gate", f, h, tensor_dim=0)] if shape.gated else []
        found += [_parameter(expert + "up", f, h, tensor_dim=0), _parameter(expert + "down", h, f, tensor_dim=1)]
    if shape.family == "gpt":
        found += [_parameter(f"norm{index}.bias", h) for index in (1, 2)]
        found += [_parameter("qkv.bias", h + 2 * kv, tensor_dim=0), _parameter("output.bias", h)]
        found += [_parameter("up.bias", f, tensor_dim=0), _parameter("down.bias", h)]
    return tuple(found)


def _outside(shape: Shape, pipeline: int = 1) -> tuple[Parameter, ...]:
    first = (0,) if pipeline > 1 else None
    last = (pipeline - 1,) if pipeline > 1 else None
    both = (0, pipeline - 1) if pipeline > 1 and shape.is_tied else first
    found = [_parameter("embedding", shape.vocab, shape.hidden, tensor_dim=0, trained_on=both)]
    if shape.family == "gpt":
        found.append(_parameter("positions", shape.seq, shape.hidden, trained_on=first))
    found.append(_parameter("norm", shape.hidden, trained_on=last))
    if shape.family == "gpt":
        found.append(_parameter("norm.bias", shape.hidden, trained_on=last))
    if not shape.is_tied:
        found.append(_parameter("head", shape.vocab, shape.hidden, tensor_dim=0, trained_on=last))
    return tuple(found)


def family_step(
    shape: Shape,
    run: FamilyRun,
    axes: Sequence[tuple[str, int]] = (),
    *,
    shard_axis: str | None = None,
    stages_per_rank: int = 1,
) -> list[Step]:
    """The simulated step of a family before any method: one, or one for each rank of a pipeline axis.

    Args:
        shape: The model.
        run: Samples, precision and kernels.
        axes: The mesh, innermost first.
        shard_axis: What a ZeRO method will shard over.
        stages_per_rank: Of a pipeline.

    Raises:
        ModelError: When an axis divides what cannot be divided.
    """
    sizes = dict(axes)
    tensor, pipeline, stages = sizes.get("tensor", 1), sizes.get("pipeline", 1), stages_per_rank
    _check(shape, tensor, pipeline * stages, run)
    run = dataclasses.replace(run, tensor=tensor, sequence=sizes.get("sequence", run.sequence))
    counts = _stage_sizes(shape, pipeline * stages, balanced=run.balances_head)
    on_ranks = tuple(sum(counts[rank::pipeline]) for rank in range(pipeline)) if pipeline > 1 else ()
    inside = Block(BLOCK, shape.layers, _inside(shape), on_ranks, block_ops(shape, run))
    outside = Block("outside", 1, _outside(shape, pipeline), (), outside_ops(shape, run, pipeline))
    saved, behind = block_saved(shape, run), outside_saved(shape, run)
    step = Step(
        blocks=(inside, outside),
        axes=tuple(axes),
        shard_axis=shard_axis,
        num_micro_batches=run.num_micro_batches,
        activations=Activations(
            saved_bytes=shape.layers * saved + behind.saved_bytes,
            parts=tuple(_in_blocks(part, shape) for part in parts(shape, run)),
            block_classes=(BLOCK,),
            loss_bytes=behind.loss_bytes,
            outside_bytes=behind.saved_bytes,
            saved_at=_placed(shape, saved, behind.saved_bytes),
            flops_at=_placed(shape, 3 * sum(op.flops for op in inside.ops), 3 * sum(op.flops for op in outside.ops)),
        ),
        flops=3 * (shape.layers * sum(op.flops for op in inside.ops) + sum(op.flops for op in outside.ops)),
        boundaries=_boundaries(shape, run, pipeline),
    )
    if pipeline == 1:
        return [step]
    ranks, bounds = tuple(range(pipeline)) * stages, (0, *itertools.accumulate(counts))
    ranges, hidden = tuple(itertools.pairwise(bounds)), run.token_bytes(shape.hidden)
    return [step.replace(stages=Stages(ranks, ranges, shape.layers, rank, hidden)) for rank in range(pipeline)]


def _placed(shape: Shape, in_block: int, behind: int) -> Placed:
    """An amount of every block, and one of what is behind them: the head and the loss are nearly all of it."""
    return (*(((index,), in_block) for index in range(shape.layers)), ((shape.layers,), behind))


def _in_blocks(part: RecomputePart, shape: Shape) -> RecomputePart:
    """The same with what each block has of it."""
    return dataclasses.replace(part, freed_at=_placed(shape, part.freed_bytes // shape.layers, 0))


def _stage_sizes(shape: Shape, stages: int, *, balanced: bool) -> tuple[int, ...]:
    """Blocks of every stage, as equal as can be; the middle ones take what is left over.

    ``balanced`` counts the head as the blocks that it costs as much as, and spares the last stage as many.
    """
    if balanced and stages > 1:
        head = shape.vocab * shape.hidden / sum(p.numel for p in _inside(shape) if len(p.shape) == 2)
        spared = min(round(head * (stages - 1) / stages), shape.layers // stages - 1)
        if spared > 0:
            fewer = shape.layers // stages - spared
            return (*_equal(shape.layers - fewer, stages - 1), fewer)
    return _equal(shape.layers, stages)


def _equal(layers: int, stages: int) -> tuple[int, ...]:
    base, rest = divmod(layers, stages)
    first = (stages - rest) // 2
    return tuple(base + (first <= stage < first + rest) for stage in range(stages))


def _boundaries(shape: Shape, run: FamilyRun, pipeline: int) -> tuple[Boundary, ...]:
    """Two pairs of collectives a block over the tensor axis (Korthikanti et al. 2022); exchanges for long sequences."""
    whole = run.tokens * shape.hidden * run.itemsize
    found: list[Boundary] = []
    if run.tensor > 1:
        kinds = ("all_gather", "reduce_scatter") if run.split_tokens else ("all_reduce",)
        for moment in ("forward", "backward"):
            for kind in kinds:
                calls = 2 * shape.layers // pipeline
                found.append(Boundary(kind, moment, whole * calls, (BLOCK,), (BLOCK,), count=calls))  # type: ignore[arg-type]
    if run.sequence > 1:
        # Keys and values of every other rank pass by (Liu et al. 2023); their gradients do in backward.
        passed = 2 * run.tokens * run.sequence * shape.kv_width // run.tensor * run.itemsize
        for moment, times in (("forward", 1), ("backward", 2)):
            calls = shape.layers // pipeline
            size = times * passed * calls
            found.append(Boundary("all_gather", moment, size, (BLOCK,), (BLOCK,), axis="sequence", count=calls))  # type: ignore[arg-type]
    return tuple(found)


def _check(shape: Shape, tensor: int, stages: int, run: FamilyRun) -> None:
    if shape.heads % tensor or shape.layers < stages:
        raise ModelError(
            "The mesh cannot divide the model",
            expected="a tensor axis that divides the heads, and no more stages than layers",
            got=f"{shape.heads} heads over {tensor}, {shape.layers} layers in {stages} stages",
            fix="choose smaller axes",
        )
