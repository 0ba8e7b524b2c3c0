"""A run that trains adapters of peft: what its directory says of them, for ``meshwright checkpoint export``."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn

from meshwright.booster.lora import adapter_names
from meshwright.runtime import gather_objects, same_on_every_rank
from meshwright.store.entries import model_entries

_ADAPTER = "default"  # what peft calls it where nobody does


def adapters_of(model: nn.Module) -> str | None:
    """A document of a model's adapters, or None where it has none; collective, for ranks may hold different parts.

    Returns:
        JSON: ``config``, peft's own, and ``names``: those in peft's files to those in checkpoints.
    """
    peft = sys.modules.get("peft")  # a model of a library that nobody has imported is not there
    with same_on_every_rank():
        entries = model_entries(model)
        is_adapted = peft is not None and isinstance(entries.module, peft.PeftModel)
        own = adapter_names(entries.module, dict(entries.tensors)) if is_adapted else {}
    if not is_adapted:
        return None
    names: dict[str, str] = {}
    for part in gather_objects(own):
        names |= part
    adapted: Any = entries.module
    config = adapted.peft_config[_ADAPTER].to_dict()
    return json.dumps({"config": config, "names": names}, indent=2, sort_keys=True, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
