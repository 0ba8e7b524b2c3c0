"""The dimensions of well-known families, and their parameters: no model is built."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from meshwright.cost import Parameter, StateTensor
from meshwright.errors import ModelError

Family = Literal["gpt", "llama", "mixtral"]

BLOCK = "TransformerBlock"
_ADAM = 2  # fp32 tensors as large as the parameter
_FP32_BYTES = 4
_LARGEST = 2**31  # of any dimension: what is larger is a mistake
_MOST_LAYERS = 10_000  # ten times the deepest model that was trained; each is an entry of its own


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
        positions: Rows of the table of learned positions, the longest sample that there can be; None: as many as
            ``seq``. Families with rotary positions have no table.
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
    positions: int | None = None

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in dataclasses.asdict(self).items() if name not in ("family", "tied")}
        most = {"layers": _MOST_LAYERS}
        wrong = [f"{k}={v}" for k, v in numbers.items() if v is not None and not 1 <= v <= most.get(k, _LARGEST)]
        if wrong or self.hidden % self.heads or self.heads % (self.kv_heads or self.heads):
            raise ModelError(
                "The dimensions of a model do not fit together",
                expected=f"numbers from 1 to {_LARGEST:,}, at most {_MOST_LAYERS:,} layers, a width that heads divide, "
                "and heads that kv_heads divide",
                got=", ".join(wrong) or f"hidden={self.hidden}, heads={self.heads}, kv_heads={self.kv_heads}",
                fix="correct the dimensions",
            )
        if self.positions is not None and self.seq > self.positions:
            raise ModelError(
                "Samples are longer than the model's table of positions",
                expected=f"at most {self.positions:,} tokens, as the model was published",
                got=f"seq={self.seq}",
                fix=f"take shorter samples, or give the model a longer table: positions={self.seq}",
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
        return sum(p.numel for p in outside_parameters(self)) + self.layers * sum(
            p.numel for p in inside_parameters(self)
        )

    def model_flops_per_token(self, *, causal: bool = False) -> float:
        """Forward and backward of one token without recomputation, embeddings' look-up not counted.

        ``causal`` counts half of the scores. 6 N + 12 L h s of Chowdhery et al. 2022 (App. B) where it does not.
        """
        matrices = sum(p.numel for p in inside_parameters(self) if len(p.shape) == 2 and "expert" not in p.name)
        experts = sum(p.numel for p in inside_parameters(self) if "expert" in p.name)
        active = matrices + experts * self.experts_per_token / self.experts
        attention = 12 * self.hidden * self.seq * (0.5 if causal else 1.0)
        return self.layers * (6 * active + attention) + 6 * self.hidden * self.vocab


def _adam(*dims: int) -> tuple[StateTensor, ...]:
    return (StateTensor(tuple(range(len(dims))), _FP32_BYTES),) * _ADAM + (StateTensor((), _FP32_BYTES),)


def _parameter(name: str, *shape: int, tensor_dim: int | None = None, **places: tuple[int, ...] | None) -> Parameter:
    states = _adam(*shape)
    return Parameter(name, shape, _FP32_BYTES, owners=(BLOCK,), states=states, tensor_dim=tensor_dim, **places)  # type: ignore[arg-type]


def inside_parameters(shape: Shape) -> tuple[Parameter, ...]:
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


def outside_parameters(shape: Shape, pipeline: int = 1) -> tuple[Parameter, ...]:
    """Embedding, positions, last norm and head, with the pipeline ranks that train them."""
    first = (0,) if pipeline > 1 else None
    last = (pipeline - 1,) if pipeline > 1 else None
    both = (0, pipeline - 1) if pipeline > 1 and shape.is_tied else first
    found = [_parameter("embedding", shape.vocab, shape.hidden, tensor_dim=0, trained_on=both)]
    if shape.family == "gpt":
        found.append(_parameter("positions", shape.positions or shape.seq, shape.hidden, trained_on=first))
    found.append(_parameter("norm", shape.hidden, trained_on=last))
    if shape.family == "gpt":
        found.append(_parameter("norm.bias", shape.hidden, trained_on=last))
    if not shape.is_tied:
        found.append(_parameter("head", shape.vocab, shape.hidden, tensor_dim=0, trained_on=last))
    return tuple(found)
