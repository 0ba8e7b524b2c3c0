"""Build a narrow copy of a transformers model, on which a split is found and proved in place of large blocks.

A trial of a block takes seconds, and several times the block's memory in fp32: 40 GB where 405B parameters are in 126
blocks. A copy of the same code with as many heads and blocks, and fewer features, is split in the same way: what counts
features there is what counts features here. Sizes are carried over in both directions: parts of a fused layer by the
ratio of the layers' features, attributes by their values in either model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.tensor.block_trials import VIEWS, Adjustment
from meshwright.methods.tensor.split_plan import PlannedLayer, planned
from meshwright.methods.tensor.split_search import Entry, FoundPlan
from meshwright.nn import features, find_blocks, setting_of

_LARGE = 2**24  # parameters of a block
_MOST_TRIED = 2**29  # the most with which a block is tried itself, where its narrow copy fails: 2 GiB
_SMALL_HEAD, _SMALL_WIDTH, _SMALL_EXPERT = 8, 16, 4
_SMALL_ROTATED = 4  # features of a head, where a number of them is rotated
_SHARE_OF_HEAD = 2  # features of the hidden state for each head, where these are not its parts
_HIDDEN = ("hidden_size", "word_embed_proj_dim")
_FEED_FORWARD = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size")  # there are many
_HEADS = ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LATENT = ("q_lora_rank", "kv_lora_rank")


def narrow_copy(model: nn.Module, ranks: int) -> nn.Module | None:
    """Build a transformers model with as many heads and blocks as one with large blocks, on ``meta``.

    Args:
        model: A plain module.
        ranks: Size of the tensor axis, which divides the copy's features.

    Returns:
        The copy; None where no block is large, and where none can be built.
    """
    if _largest_block(model) < _LARGE:
        return None
    config: Any = copy.deepcopy(getattr(model, "config", None))
    heads = setting_of(config, "num_attention_heads")
    if not isinstance(heads, int) or not hasattr(config, "hidden_size"):
        return None
    own_head = setting_of(config, "qk_nope_head_dim") or setting_of(config, "head_dim")
    are_parts = own_head is None or config.hidden_size == heads * own_head
    widths = dict.fromkeys(_HIDDEN, heads * (_SMALL_HEAD if are_parts else _SHARE_OF_HEAD))
    widths |= dict.fromkeys(_FEED_FORWARD, ranks * _SMALL_WIDTH) | dict.fromkeys(_EXPERTS, ranks * _SMALL_EXPERT)
    widths |= dict.fromkeys(_HEADS, _SMALL_HEAD) | dict.fromkeys(_LATENT, 4 * _SMALL_HEAD)
    widths["rotary_dim"] = _SMALL_ROTATED
    try:
        for name, width in widths.items():
            # Others are computed from these; None: a multiple of another.
            own = name in vars(config) or name in type(config).attribute_map
            if own and getattr(config, name) is not None:
                setattr(config, name, width)
        with torch.device("meta"):
            small: nn.Module = type(model)(config)  # type: ignore[arg-type]
    except Exception:  # a model's code may ask anything of its config
        return None
    return small if _outline(small) == _outline(model) else None


def tried_narrow(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let a failure of the narrow copy pass, unless blocks are too large to be tried themselves.

    An error names their own sizes then, and some may fail for being narrow.
    """
    can_be_tried = _largest_block(model) <= _MOST_TRIED
    return contextlib.suppress(ModelError) if can_be_tried else contextlib.nullcontext()


def _largest_block(model: nn.Module) -> int:
    return max((sum(p.numel() for p in block.parameters()) for _, block in find_blocks(model)), default=0)


def _outline(model: nn.Module) -> list[tuple[str, Any, tuple[tuple[str, int], ...]]]:
    """Return the modules of a model with the names and dims of their parameters.

    Outside the blocks, which alone are tried, a module may have another forward (``module_replace``'s of a head): its
    class is another then, of the same name.
    """
    blocks = tuple(f"{path}." for path, _ in find_blocks(model))

    def kind(path: str, module: nn.Module) -> Any:
        own = type(module)
        return own if f"{path}.".startswith(blocks) else (own.__module__, own.__qualname__)

    return [
        (path, kind(path, module), tuple((name, p.dim()) for name, p in module.named_parameters(recurse=False)))
        for path, module in model.named_modules()
    ]


def layers_in(copied: nn.Module, layers: Iterable[PlannedLayer]) -> list[PlannedLayer] | None:
    """Return the layers of a split in a copy of the model; None where sizes cannot be carried over."""
    found = []
    for layer in layers:
        parts = _scaled(layer.parts, layer.module, copied.get_submodule(layer.path))
        if layer.place or parts is None:
            return None
        found.append(dataclasses.replace(planned(copied, layer.path, layer.style.name), parts=parts))
    return found


def plan_in(model: nn.Module, plan: FoundPlan, copied: nn.Module, ranks: int) -> FoundPlan | None:
    """Return the plan of a model that was found in a narrow copy; None where its sizes do not fit the model."""
    entries = {}
    for path, entry in plan.entries.items():
        parts = _scaled(entry.parts, copied.get_submodule(path), model.get_submodule(path))
        if parts is None or any(size % ranks for size in parts):
            return None
        entries[path] = Entry(entry.style, parts)
    adjustments = adjustments_in(model, plan.adjustments, ranks)
    return None if adjustments is None else dataclasses.replace(plan, entries=entries, adjustments=adjustments)


def adjustments_in(model: nn.Module, adjustments: Iterable[Adjustment], ranks: int) -> tuple[Adjustment, ...] | None:
    """Return adjustments with a rank's share of what their attributes count in this model; None if it has none."""
    found = []
    for each in adjustments:
        if each.name == VIEWS:
            found.append(each)
            continue
        value = getattr(model.get_submodule(each.path), each.name)
        if value % ranks:
            return None
        found.append(dataclasses.replace(each, value=value // ranks))
    return tuple(found)


def _scaled(parts: tuple[int, ...], before: nn.Module, after: nn.Module) -> tuple[int, ...] | None:
    if not parts:
        return ()
    (_, old), (_, new) = features(before), features(after)
    return None if any(size * new % old for size in parts) else tuple(size * new // old for size in parts)
