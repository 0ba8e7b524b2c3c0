"""Switch the attention of transformers models to a faster implementation, through their own interface.

It works for every model that looks its attention up by ``config._attn_implementation`` (BERT, GPT-2, CLIP, Llama and
some hundred more). Softmax attention written out in a plain model is left alone, and torch's ``nn.MultiheadAttention``
calls scaled_dot_product_attention itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from meshwright.errors import ModelError, StrategyError
from meshwright.methods.replace.model_changes import Replacement, SetAttribute

Choice = Literal["auto", "sdpa", "flex", "flash"]

_NAMES = {"sdpa": ("sdpa",), "flex": ("flex_attention",), "flash": ("flash_attention_3", "flash_attention_2")}
_SUPPORT = {
    "sdpa": ("_supports_sdpa",), "flex": ("_supports_flex_attn",),
    "flash": ("_supports_flash_attn", "_supports_flash_attn_2"),
}  # fmt: skip


def replace_attention(
    model: nn.Module, choice: Choice, dtype: str, device: torch.device, into: Replacement, *, only_sdpa: bool = False
) -> None:
    """Add the change of implementation for every transformers model in ``model``.

    Args:
        model: A transformers model, or one that contains some.
        choice: ``auto`` replaces eager attention by flash where that is installed, on CUDA and in half precision, and
            by sdpa otherwise; any other implementation that the model's author chose stays.
        dtype: Name of the precision that the job computes in.
        device: Device of the job.
        into: The replacement to add to.
        only_sdpa: Whether another method works inside scaled_dot_product_attention.

    Raises:
        StrategyError: When the job cannot compute the implementation that ``choice`` names.
        ModelError: When a model does not support it.
    """
    wanted = None if choice == "auto" else _implementation(choice, dtype, device, only_sdpa)
    before, found = len(into.done) + len(into.left), list(_configs(model))
    for part, config in found:
        current = config._attn_implementation
        if wanted is None and current != "eager":
            continue
        name = wanted or _best(part, dtype, device, only_sdpa)
        reason = _reason_against(part, config, name) if name != current else ""
        if reason and wanted is not None:
            raise ModelError(
                f"module_replace: the attention of {type(part).__name__} cannot be {name}",
                expected="a model with transformers' attention interface that supports it",
                got=reason,
                fix='use "attention": "auto", which leaves it as it is',
            )
        if reason:
            into.left.append(f"attention: {type(part).__name__} stays {current}: {reason}")
        elif name != current:
            change = SetAttribute(config, "_attn_implementation", name)
            into.add(f"attention: {_count(model, config)} modules {current} -> {name}", [change])
    if len(into.done) + len(into.left) == before:
        into.left.append(_nothing_to_do(model, [config for _, config in found]))


def _configs(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield transformers models with their configs, outer before inner, each config once."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            yield module, module.config


def _implementation(choice: str, dtype: str, device: torch.device, only_sdpa: bool) -> str:
    """Return transformers' name for a choice.

    Raises:
        StrategyError: When the job cannot compute it.
    """
    if only_sdpa and choice != "sdpa":
        raise _refused(choice, "sequence_parallel, which works inside scaled_dot_product_attention")
    if choice == "flex" and device.type == "cpu":
        raise _refused(choice, "a CPU, on which torch compiles no backward of flex_attention")
    if choice != "flash":
        return _NAMES[choice][0]
    name = _installed_flash()
    if device.type != "cuda" or dtype == "fp32" or name is None:
        installed = "flash-attn" if name else "no flash-attn"
        raise _refused(choice, f"{dtype} on {device.type} with {installed} installed")
    return name


def _refused(choice: str, got: str) -> StrategyError:
    needs = {"flash": "fp16 or bf16 on CUDA, with flash-attn installed", "flex": "CUDA"}
    return StrategyError(
        f"module_replace: this job cannot compute attention as {choice!r}",
        expected=needs[choice],
        got=got,
        fix='use "attention": "auto", which takes the best at hand',
    )


def _installed_flash() -> str | None:
    from transformers import utils

    for name in _NAMES["flash"]:
        available = getattr(utils, f"is_flash_attn_{name[-1]}_available", None)
        if available is not None and available():
            return name
    return None


def _best(model: nn.Module, dtype: str, device: torch.device, only_sdpa: bool) -> str:
    flash = _installed_flash() if device.type == "cuda" and dtype != "fp32" and not only_sdpa else None
    return flash if flash is not None and _supports(model, "flash") else "sdpa"


def _supports(model: nn.Module, choice: str) -> bool:
    return any(getattr(model, name, False) for name in _SUPPORT[choice])


def _reason_against(model: nn.Module, config: Any, name: str) -> str:
    """Return why a model cannot compute an implementation; empty if it can."""
    choice = next(choice for choice, names in _NAMES.items() if name in names)
    if not _supports(model, choice):
        return f"{type(model).__name__} does not support {choice}"
    can_set = getattr(model, "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        return f"{type(model).__name__} does not look its attention up"
    if getattr(config, "output_attentions", False):
        return "config.output_attentions asks for the weights, which only eager attention has"
    return ""


def _count(model: nn.Module, config: Any) -> int:
    """Count the attention modules that read this config."""
    return sum(
        "Attention" in type(module).__name__ and getattr(module, "config", None) is config for module in model.modules()
    )


def _nothing_to_do(model: nn.Module, configs: list[Any]) -> str:
    if configs:
        return f"attention: is {', '.join(sorted({config._attn_implementation for config in configs}))} already"
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        return "attention: nn.MultiheadAttention calls scaled_dot_product_attention already"
    return "attention: no module has transformers' interface, and attention written out is not guessed at"
