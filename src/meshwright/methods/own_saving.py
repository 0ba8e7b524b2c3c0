"""``save_pretrained`` of transformers' and peft's models: it writes what this rank has, for the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.errors import ModelError
from meshwright.methods.job import Job
from meshwright.nn import wrap_method
from meshwright.store.entries import unwrapped


def refuse_own_saving(job: Job) -> None:
    """Lets it write nothing but a state dict that it is given, where a rank has a part of the model."""
    is_part = job.shard_axis is not None or job.is_split or job.pipeline is not None
    if is_part and hasattr(type(job.model), "save_pretrained"):
        wrap_method(unwrapped(job.model), "save_pretrained", _saving)


def _saving(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is None:
        raise ModelError(
            "save_pretrained would write this rank's part of the model",
            expected="meshwright.store.save_folder, or of peft's adapters meshwright.booster.lora.save_lora",
            got="save_pretrained without a state_dict",
            fix="call save_folder(job.model, FOLDER) on every rank: it writes what from_pretrained reads",
        )
    return save(*args, **kwargs)
