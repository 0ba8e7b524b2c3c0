"""Caches of keys and values, for generation: in training they are filled and never read."""

from __future__ import annotations

from typing import Any

from torch import nn


def without_caches(model: nn.Module) -> bool:
    """Switches off what ``config.use_cache`` of a transformers model asks for; returns whether it asked for it.

    Parts of a model (T5's decoder, the language model of LLaVA) have configurations of their own.
    """
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    return bool(caching)


def is_cache(value: Any) -> bool:
    """Whether a block that is called with this writes its keys and values into it, as into transformers' caches."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
