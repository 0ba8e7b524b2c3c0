"""Describe a decoder of any kind by the dimensions of a known family, for the formulas that find candidates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.nn import find_blocks, setting_of
from meshwright.planner.model_shapes import Adapters, Shape

# [Note: outlines] Searching with traces alone, a second or more each, a model is planned for in ten ways or so. But
# which layouts are good is decided by few numbers: parameters and multiplications of a block, experts and how many of
# them a token takes, width, tokens and vocabulary. So a search finds its candidates with the formulas of a Llama or a
# Mixtral of about these numbers, among thousands, and traces the model itself to rank them. No figure of an outline is
# shown, unless there is no time for a single trace, and then with a word; what-ifs take from it what a change is worth.

_EXPERTS_OF = ("num_local_experts", "num_experts", "n_routed_experts")
_USUAL_WIDTHS = 256  # multiples: kernels are slow with odd numbers


def outline_of(module: nn.Module, seq: int) -> Shape | None:
    """Return a decoder of about as many parameters and multiplications; None for what is no decoder of a config.

    See [Note: outlines]. What blocks have beside attention and experts (experts for all tokens, latent projections,
    state spaces) counts as experts that each token takes more, or as wider feed-forward layers.

    Args:
        module: A model, best on ``meta``.
        seq: Tokens of a sample.
    """
    config = _text_config(module)
    numbers = [setting_of(config, name) for name in ("hidden_size", "num_attention_heads", "vocab_size")]
    blocks = _largest_list(module)
    if setting_of(config, "is_encoder_decoder") or not blocks or not all(type(each) is int for each in numbers):
        return None
    hidden, most, vocab = numbers
    if not _has_head(module):
        vocab = _USUAL_WIDTHS  # scores of some classes take no time beside the rest, and a table only its memory
    width = own_width(config) if _is_plain(config) else None
    heads = most if width else _largest_divisor(hidden, most)
    kv_heads = _largest_divisor(heads, setting_of(config, "num_key_value_heads") or most)
    experts = next((count for name in _EXPERTS_OF if (count := setting_of(config, name))), 1)
    trained = _trained(module, blocks)
    if trained is None:
        return None
    stacked, plain = _matrices(blocks, experts, trained)
    attended = (width or hidden / heads) * (heads + kv_heads)
    rest = plain - 2 * hidden * attended - (experts * hidden if stacked else 0)
    outside = (vocab, seq, kv_heads)
    tied = bool(setting_of(config, "tie_word_embeddings"))
    head = width or hidden // heads
    normed = _normed(blocks, {"q": head * heads, "k": head * kv_heads})
    own: dict[str, Any] = {
        "head_dim": width,
        "itemsize": _itemsize(blocks),
        "normed": max(round(normed) - 2 * hidden, 0),
        "adapters": _adapters(trained, len(blocks), {hidden, head * heads}),
    }
    with suppress(ModelError):
        if not stacked:
            wide = _usual(rest / (3 * hidden))
            return Shape("llama", len(blocks), hidden, heads, *outside, wide, tied, **own)
        wide = _usual(stacked / (3 * hidden * experts))
        taken = setting_of(config, "num_experts_per_tok") or 1
        taken = min(experts, taken + round(max(rest, 0) / (3 * hidden * wide)))
        return Shape("mixtral", len(blocks), hidden, heads, *outside, wide, tied, experts, taken, **own)
    return None


def _has_head(module: nn.Module) -> bool:
    """Return whether a model computes logits over its vocabulary, as far as it says so."""
    head = getattr(module, "get_output_embeddings", None)
    return head is None or head() is not None


def _num_elements(blocks: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _is_plain(config: Any) -> bool:
    """Return whether queries and keys are made from the hidden states, and not from latents."""
    return not any(setting_of(config, name) for name in ("q_lora_rank", "kv_lora_rank"))


def is_eager(module: nn.Module) -> bool:
    """Return whether a model of transformers runs attention by its own code, with all scores."""
    return setting_of(_text_config(module), "_attn_implementation") == "eager"


def _text_config(module: nn.Module) -> Any:
    """Return a model's config, of a model that sees images, too, that of its decoder."""
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _largest_list(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of the list with the most parameters: a decoder's, and not those of what sees images."""
    lists = defaultdict[str, list[nn.Module]](list)
    for path, block in find_blocks(module):
        lists[path.rpartition(".")[0]].append(block)
    return max(lists.values(), key=_num_elements, default=[])


def _normed(blocks: Sequence[nn.Module], widths: Mapping[str, int]) -> float:
    """Return the elements of a token that a block's norms take, given the widths of queries and keys over all heads."""
    total = 0
    for path, module in (each for block in blocks for each in block.named_modules()):
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, torch.Tensor):
            name = path.rpartition(".")[2]
            total += widths[name[0]] if name.startswith(("q_norm", "k_norm")) else weight.numel()
    return total / len(blocks)


def _itemsize(blocks: Sequence[nn.Module]) -> int:
    """Return the bytes per element of most of the blocks' floating parameters."""
    sizes = Counter[int]()
    for parameter in (parameter for block in blocks for parameter in block.parameters()):
        if parameter.is_floating_point():
            sizes[parameter.element_size()] += parameter.numel()
    return max(sizes, key=sizes.__getitem__, default=4)


_LOW = 4  # a matrix of low rank has so many times as many elements along its other dim
_FEW = 0.1  # the share of a model's elements that may be frozen, and it counts as trained


def _trained(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter] | None:
    """Return the matrices of adapters, where these alone are trained: none where about everything is.

    None for what is neither, such as a model of which some blocks are trained, and for weights in 4 bits.
    """
    every = list(module.parameters())
    frozen = sum(each.numel() for each in every if not each.requires_grad)
    if frozen < _FEW * sum(each.numel() for each in every):
        return []
    in_blocks = [[each for each in block.parameters() if each.requires_grad] for block in blocks]
    found = [each for of_block in in_blocks for each in of_block]
    are_all = len(found) == sum(each.requires_grad for each in every)
    are_low = all(each.dim() == 2 and _LOW * min(each.shape) <= max(each.shape) for each in found)
    is_wide = all(each.is_floating_point() for each in every)
    return found if all(in_blocks) and are_all and are_low and is_wide else None


def _adapters(trained: Sequence[nn.Parameter], num_blocks: int, widths: set[int]) -> Adapters | None:
    """Return the adapters of a block, those of all its layers together; ``widths`` are of its input and of queries."""
    if not trained:
        return None
    lower, upper = ([max(each.shape) for each in trained if (each.shape[0] > each.shape[1]) == up] for up in (0, 1))
    rank = sum(each.numel() for each in trained) // sum(lower + upper)
    layers = max(len(upper) // num_blocks, 1)
    return Adapters(
        rank,
        layers,
        sum(lower) // num_blocks,
        sum(upper) // num_blocks,
        itemsize=trained[0].element_size(),
        of_product=not widths.issuperset(lower),
    )


def _matrices(blocks: Sequence[nn.Module], experts: int, adapters: Sequence[nn.Parameter]) -> tuple[float, float]:
    """Return the elements of a block's matrices without adapters: of stacked experts, and of all others."""
    found, apart = [0, 0], {id(each) for each in adapters}
    for parameter in (each for block in blocks for each in block.parameters() if id(each) not in apart):
        is_stacked = experts > 1 and parameter.dim() == 3 and parameter.shape[0] == experts
        found[0 if is_stacked else 1] += parameter.numel() if parameter.dim() > 1 else 0
    return found[0] / len(blocks), found[1] / len(blocks)


def _usual(width: float) -> int:
    return max(round(width / _USUAL_WIDTHS), 1) * _USUAL_WIDTHS


def _largest_divisor(number: int, most: int) -> int:
    return next(each for each in range(max(min(number, most), 1), 0, -1) if number % each == 0)


def own_width(config: Any) -> int | None:
    """Return the width of a head; None where it is the model's over all heads."""
    width = setting_of(config, "head_dim")
    return width if type(width) is int and width * config.num_attention_heads != config.hidden_size else None
