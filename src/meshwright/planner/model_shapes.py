"""Dimensions and parameters of known model families, by name or written out, without building a model."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshwright.cost import Parameter, StateTensor
from meshwright.errors import ModelError, did_you_mean, join_names

Family = Literal["gpt", "llama", "mixtral"]

BLOCK = "TransformerBlock"
_ADAM = 2  # fp32 tensors as large as the parameter
_FP32_BYTES = 4
_LARGEST = 2**31  # any larger dimension is a mistake
_NO_COUNTS = ("family", "tied", "normed", "adapters")  # fields of a shape
_MOST_LAYERS = 10_000  # ten times the deepest model ever trained; each layer costs an entry


@dataclass(frozen=True)
class Adapters:
    """Matrices of low rank beside the layers of a block, which are frozen (LoRA, Hu et al. 2022).

    Args:
        rank: Of each product.
        layers: Layers of a block that have them.
        inputs: Elements of a token that these layers take, all together.
        outputs: Elements that they return.
        itemsize: Bytes per element of the matrices.
        of_product: Whether the last layer of a block is among them, so that its input is saved.
    """

    rank: int
    layers: int
    inputs: int
    outputs: int
    itemsize: int = _FP32_BYTES
    of_product: bool = True


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
        head_dim: Width of a head; None: ``hidden / heads``.
        itemsize: Bytes per element of its parameters, and of their states: 4, and 2 of a module in half precision.
        normed: Elements of each token that a block's norms take beside its usual two: of queries and keys, or of what
            attention and feed-forward layers return.
        adapters: What alone is trained; None: everything.
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
    head_dim: int | None = None
    itemsize: int = _FP32_BYTES
    normed: int = 0
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name not in _NO_COUNTS}
        most = {"layers": _MOST_LAYERS}
        wrong = [f"{k}={v}" for k, v in numbers.items() if v is not None and not 1 <= v <= most.get(k, _LARGEST)]
        uneven = self.head_dim is None and self.hidden % self.heads
        if wrong or uneven or self.heads % (self.kv_heads or self.heads):
            raise ModelError(
                "The dimensions of a model do not fit together",
                expected=f"numbers from 1 to {_LARGEST:,}, at most {_MOST_LAYERS:,} layers, a width that heads divide "
                "(or their own, head_dim), and heads that kv_heads divide",
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
    def head_width(self) -> int:
        """Return the width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Return the width of the queries, which attention's output has, too."""
        return self.head_width * self.heads

    @property
    def kv_width(self) -> int:
        """Return the width of the keys, which the values have, too."""
        return self.head_width * (self.kv_heads or self.heads)

    @property
    def ffn_width(self) -> int:
        """Return the width of the feed-forward layers.

        It is 4 x hidden, or for gated layers 8/3 x hidden in multiples of 256 (Touvron et al. 2023).
        """
        if self.ffn is not None:
            return self.ffn
        return 4 * self.hidden if self.family == "gpt" else math.ceil(8 * self.hidden / 3 / 256) * 256

    @property
    def gated(self) -> bool:
        """Return whether the feed-forward layers are three: gate, up and down."""
        return self.family != "gpt"

    @property
    def is_tied(self) -> bool:
        """Return whether embedding and head share their weights."""
        return self.family == "gpt" if self.tied is None else self.tied

    @property
    def saves_product(self) -> bool:
        """Return whether the last layer of a block saves its input, for gradients of its weights or adapters."""
        return self.adapters is None or self.adapters.of_product

    @property
    def layers_behind_norms(self) -> int:
        """Return how many layers save what the norms return, for gradients of their weights or adapters."""
        every = 3 + (2 if self.gated else 1)  # queries, keys and values; gate and up
        if self.adapters is None:
            return every
        return min((self.adapters.inputs - (self.ffn_width if self.saves_product else 0)) // self.hidden, every)

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(p.numel for p in outside_parameters(self)) + self.layers * sum(
            p.numel for p in inside_parameters(self)
        )

    def model_flops_per_token(self, *, causal: bool = False) -> float:
        """Return the FLOPs of one token's forward and backward, without recomputation and embedding look-ups.

        Without ``causal`` these are the 6 N + 12 L h s of Chowdhery et al. 2022 (App. B); ``causal`` counts half of the
        scores. Frozen parameters have no gradients: 4 N.
        """
        inside = [
            (p.numel, 6 if p.trainable else 4, is_stacked(p)) for p in inside_parameters(self) if len(p.shape) > 1
        ]
        share = self.experts_per_token / self.experts
        active = sum(numel * flops * (share if stacked else 1) for numel, flops, stacked in inside)
        attention = 12 * self.query_width * self.seq * (0.5 if causal else 1.0)
        head = (6 if self.adapters is None else 4) * self.hidden * self.vocab
        return self.layers * (active + attention) + head


def _adam(*dims: int) -> tuple[StateTensor, ...]:
    return (StateTensor(tuple(range(len(dims))), _FP32_BYTES),) * _ADAM + (StateTensor((), _FP32_BYTES),)


def _parameter(name: str, *shape: int, tensor_dim: int | None = None, **places: tuple[int, ...] | None) -> Parameter:
    states = _adam(*shape)
    return Parameter(name, shape, _FP32_BYTES, owners=(BLOCK,), states=states, tensor_dim=tensor_dim, **places)  # type: ignore[arg-type]


def is_stacked(parameter: Parameter) -> bool:
    """Return whether a family's parameter has the matrices of all experts of a block."""
    return len(parameter.shape) == 3


@functools.lru_cache(maxsize=64)
def inside_parameters(shape: Shape) -> tuple[Parameter, ...]:
    """Return the parameters of one block, with the dims that a tensor axis divides (Shoeybi et al. 2019).

    Experts are stacked in two parameters, as in transformers: gates above what they multiply, and down.
    """
    h, q, kv, f = shape.hidden, shape.query_width, shape.kv_width, shape.ffn_width
    found = [
        _parameter("norm1", h),
        _parameter("query", q, h, tensor_dim=0),
        _parameter("key", kv, h, tensor_dim=0),
        _parameter("value", kv, h, tensor_dim=0),
        _parameter("output", h, q, tensor_dim=1),
        _parameter("norm2", h),
    ]
    if shape.experts > 1:
        wide = 2 * f if shape.gated else f
        found.append(_parameter("router", shape.experts, h))
        found.append(_parameter("experts.up", shape.experts, wide, h, tensor_dim=1))
        found.append(_parameter("experts.down", shape.experts, h, f, tensor_dim=2))
    else:
        found += [_parameter("gate", f, h, tensor_dim=0)] if shape.gated else []
        found += [_parameter("up", f, h, tensor_dim=0), _parameter("down", h, f, tensor_dim=1)]
    if shape.family == "gpt":
        found += [_parameter(f"norm{index}.bias", h) for index in (1, 2)]
        found += [_parameter("qkv.bias", q + 2 * kv, tensor_dim=0), _parameter("output.bias", h)]
        found += [_parameter("up.bias", f, tensor_dim=0), _parameter("down.bias", h)]
    return (*_stored(found, shape), *_of_adapters(shape.adapters))


def _of_adapters(adapters: Adapters | None) -> tuple[Parameter, ...]:
    """Return the matrices of a block's adapters; of layers that are divided either way, the upper ones are."""
    if adapters is None:
        return ()
    down = _parameter("adapters.down", adapters.rank, adapters.inputs)
    up = _parameter("adapters.up", adapters.outputs, adapters.rank, tensor_dim=0)
    return tuple(_in_bytes(each, adapters.itemsize) for each in (down, up))


def outside_parameters(shape: Shape, pipeline: int = 1, *, divided: bool = True) -> tuple[Parameter, ...]:
    """Return the embedding, positions, last norm and head, with the pipeline ranks that train them.

    Args:
        shape: The model.
        pipeline: Ranks of that axis.
        divided: Whether a tensor axis divides the embedding and the head.
    """
    dim = 0 if divided else None
    first = (0,) if pipeline > 1 else None
    last = (pipeline - 1,) if pipeline > 1 else None
    both = (0, pipeline - 1) if pipeline > 1 and shape.is_tied else first
    found = [_parameter("embedding", shape.vocab, shape.hidden, tensor_dim=dim, trained_on=both)]
    if shape.family == "gpt":
        found.append(_parameter("positions", shape.positions or shape.seq, shape.hidden, trained_on=first))
    found.append(_parameter("norm", shape.hidden, trained_on=last))
    if shape.family == "gpt":
        found.append(_parameter("norm.bias", shape.hidden, trained_on=last))
    if not shape.is_tied:
        found.append(_parameter("head", shape.vocab, shape.hidden, tensor_dim=dim, trained_on=last))
    return _stored(found, shape)


def _stored(parameters: list[Parameter], shape: Shape) -> tuple[Parameter, ...]:
    """Return parameters of fp32 with the bytes per element that the shape's have; without states where frozen."""
    stored = tuple(_in_bytes(each, shape.itemsize) for each in parameters)
    if shape.adapters is None:
        return stored
    return tuple(dataclasses.replace(each, trainable=False, states=()) for each in stored)


def _in_bytes(parameter: Parameter, itemsize: int) -> Parameter:
    """Return a parameter of fp32 with other bytes per element, which AdamW's states have, too."""
    if itemsize == _FP32_BYTES:
        return parameter
    states = tuple(dataclasses.replace(s, itemsize=itemsize) if s.dims else s for s in parameter.states)
    return dataclasses.replace(parameter, itemsize=itemsize, states=states)


# --- Models by name, or as a family with its dimensions

# (layers, hidden, heads, kv_heads, ffn, vocab, seq), from the models' papers and configurations.
Dims = tuple[int, int, int, int, int, int, int]
LLAMA: dict[tuple[str, float], Dims] = {
    ("3", 1): (16, 2048, 32, 8, 8192, 128256, 8192),
    ("3", 3): (28, 3072, 24, 8, 8192, 128256, 8192),
    ("3", 8): (32, 4096, 32, 8, 14336, 128256, 8192),
    ("3", 70): (80, 8192, 64, 8, 28672, 128256, 8192),
    ("3", 405): (126, 16384, 128, 8, 53248, 128256, 8192),
    ("2", 7): (32, 4096, 32, 32, 11008, 32000, 4096),
    ("2", 13): (40, 5120, 40, 40, 13824, 32000, 4096),
    ("2", 34): (48, 8192, 64, 8, 22016, 32000, 4096),
    ("2", 70): (80, 8192, 64, 8, 28672, 32000, 4096),
    ("1", 30): (60, 6656, 52, 52, 17920, 32000, 2048),
    ("1", 65): (80, 8192, 64, 64, 22016, 32000, 2048),
}
_TIED_LLAMA = (("3", 1), ("3", 3))  # the only Llamas whose embedding and head share weights
# Brown et al. 2020, Table 2.1, and those of Megatron-LM beyond.
GPT: dict[float, tuple[int, int, int]] = {
    0.125: (12, 768, 12), 0.35: (24, 1024, 16), 0.76: (24, 1536, 16), 1.3: (24, 2048, 16), 1.5: (48, 1600, 25),
    2.7: (32, 2560, 32), 6.7: (32, 4096, 32), 13: (40, 5120, 40), 20: (44, 6144, 64), 22: (48, 6144, 64),
    30: (48, 7168, 56), 66: (64, 9216, 72), 175: (96, 12288, 96), 530: (105, 20480, 128), 1000: (128, 25600, 160),
}  # fmt: skip
MIXTRAL: dict[str, tuple[Dims, int, int]] = {
    "8x7b": ((32, 4096, 32, 8, 14336, 32000, 4096), 8, 2),
    "8x22b": ((56, 6144, 48, 8, 16384, 32768, 4096), 8, 2),
}
_GPT2 = {"gpt2": 0.125, "gpt2-medium": 0.35, "gpt2-xl": 1.5}  # Radford et al. 2019
_GPT2_LARGE = (36, 1280, 20)
_GPT_VOCAB = 50257
_LIKE_LLAMA_3 = ("3", "3.1", "3.2", "3.3")  # the dimensions of a size are the same in all of them
_REQUIRED = ("layers", "hidden", "heads", "vocab")
_USUAL_SEQ = {"gpt": 1024, "llama": 4096, "mixtral": 4096}
_LONGEST = 15  # digits
_OWN = ("family", "itemsize", "normed", "adapters")  # fields that no text says
_KEYS = tuple(field.name for field in dataclasses.fields(Shape) if field.name not in _OWN)


def known_models() -> dict[str, Shape]:
    """Return every known model by name: ``gpt2``, ``gpt-3-175b``, ``llama-2-7b``, ``llama-3.1-405b``."""
    gpt2 = {name: GPT[size] for name, size in _GPT2.items()} | {"gpt2-large": _GPT2_LARGE}
    found = {name: _learned_positions(dims, 1024) for name, dims in gpt2.items()}
    found |= {f"gpt-3-{_size(size)}": _learned_positions(dims, 2048) for size, dims in GPT.items()}
    for (version, size), dims in LLAMA.items():
        for each in _LIKE_LLAMA_3 if version == "3" else (version,):
            found[f"llama-{each}-{_size(size)}"] = _gated("llama", dims, tied=(version, size) in _TIED_LLAMA)
    for name, (dims, experts, per_token) in MIXTRAL.items():
        shape = _gated("mixtral", dims)
        found[f"mixtral-{name}"] = dataclasses.replace(shape, experts=experts, experts_per_token=per_token)
    return found


def parse_family(text: str) -> Shape:
    """Read the text of a known model, or of a family with its dimensions.

    Args:
        text: A family with its dimensions, ``"gpt:layers=24,hidden=1024,heads=16,vocab=50304"`` (the other keys are
            those of ``Shape``), or a known model, whose dimensions may be changed: ``"llama-3-8b:seq=4096"``.

    Raises:
        ModelError: Naming what is unknown, missing or no number.
    """
    name, _, rest = text.strip().partition(":")
    name, known = _plain(name), known_models()
    given = _dimensions(rest)
    if name in known:
        return dataclasses.replace(known[name], **given)
    if name not in get_args(Family):
        nearest = difflib.get_close_matches(name, known, n=len(known), cutoff=0.0)
        raise ModelError(
            f"{text!r} is neither a family nor a known model{did_you_mean(name, (*get_args(Family), *known))}",
            expected=f"a family ({join_names(get_args(Family))}) with dimensions, one of {join_names(nearest, 8)}, or "
            "hf:FOLDER with the config.json of a model",
            got=repr(text),
            fix=f"write hf:{text.strip()}"
            if os.path.exists(text.strip())
            else "correct the name; download the "
            "config.json of another model and write hf:FOLDER; or write family:layers=…,hidden=…,heads=…,vocab=…",
        )
    absent = [key for key in _REQUIRED if key not in given]
    if absent:
        raise ModelError(
            f"The model {text!r} has too few dimensions",
            expected=f"{join_names(_REQUIRED)}, and optionally {join_names(k for k in _KEYS if k not in _REQUIRED)}",
            got=f"no {join_names(absent)}",
            fix=f"add {join_names(f'{key}=…' for key in absent)}",
        )
    return Shape(**{"seq": _USUAL_SEQ[name], **given, "family": name})


def _plain(name: str) -> str:
    """Normalize a name: ``Meta-Llama-3-8B`` and ``llama3-8b`` become ``llama-3-8b``."""
    name = re.sub(r"[\s_]+", "-", name.strip().lower())
    name = re.sub(r"^([\w.-]+/)?(meta-)?", "", name)
    name = re.sub(r"^llama(\d)", r"llama-\1", name)
    return re.sub(r"^gpt3", "gpt-3", name)


def _dimensions(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (each.strip() for each in part.partition("="))
        if key not in _KEYS:
            raise ModelError(
                f"A model has no dimension {key!r}{did_you_mean(key, _KEYS)}",
                expected=f"keys from {join_names(_KEYS, 20)}",
                got=repr(part),
                fix="correct the key or leave it out",
            )
        if key in found:
            raise ModelError(
                f"The dimension {key!r} is given twice",
                expected="every dimension once",
                got=repr(text),
                fix="keep one of them",
            )
        found[key] = _flag(value) if key == "tied" else _number(key, value)
    return found


def _number(key: str, value: str) -> int:
    if not re.fullmatch(r"\d+(?:_\d+)*", value, re.ASCII) or len(value) > _LONGEST:
        raise ModelError(
            f"The dimension {key!r} is no number",
            expected=f"a positive whole number, such as {key}=1024",
            got=repr(value),
            fix="correct the number",
        )
    return int(value)


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise ModelError("tied is true or false", expected="true or false", got=repr(value), fix="correct the value")
    return value.lower() in ("true", "1")


def _learned_positions(dims: tuple[int, int, int], positions: int) -> Shape:
    """Return a GPT whose table of positions has its published size, whatever the samples' length."""
    return Shape("gpt", *dims, vocab=_GPT_VOCAB, seq=positions, positions=positions)


def _gated(family: Family, dims: Dims, *, tied: bool = False) -> Shape:
    layers, hidden, heads, kv_heads, ffn, vocab, seq = dims
    return Shape(family, layers, hidden, heads, vocab, seq, kv_heads=kv_heads, ffn=ffn, tied=tied)


def _size(billions: float) -> str:
    """Format a size as models are called: 125m, 6.7b, 1t."""
    if billions < 1:
        return f"{billions * 1000:.0f}m"
    return f"{billions / 1000:g}t" if billions >= 1000 else f"{billions:g}b"
