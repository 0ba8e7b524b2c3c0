"""Switch the attention of transformers models to a faster implementation, through their own interface.

It works for every model that looks its attention up by ``config._attn_implementation`` (BERT, GPT-2, CLIP, Llama and
some hundred more). Softmax attention written out in a plain model is left alone, and torch's ``nn.MultiheadAttention``
calls scaled_dot_product_attention itself.

Attention with sinks (GPT-OSS) is in no kernel of torch's, so that transformers computes all scores. Here it is torch's
fused attention, whose output sinks then shrink by their share of the softmax.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError, StrategyError
from meshwright.methods.replace.model_changes import Replacement, SetAttribute
from meshwright.methods.tokens.attention_calls import attend_with_sinks
from meshwright.runtime import preserved_rng
from meshwright.runtime.torch_internals.modules import PARAMETERS, parameters_of

Choice = Literal["auto", "sdpa", "flex", "flash"]

_NAMES = {"sdpa": ("sdpa",), "flex": ("flex_attention",), "flash": ("flash_attention_3", "flash_attention_2")}
_SUPPORT = {
    "sdpa": ("_supports_sdpa",), "flex": ("_supports_flex_attn",),
    "flash": ("_supports_flash_attn", "_supports_flash_attn_2"),
}  # fmt: skip


_SINKS = "meshwright_sinks"
"""transformers' name for :func:`fused_with_sinks`."""
_TOLERANCE = 1e-4  # of fp32, relative to the largest value


def replace_attention(
    model: nn.Module, choice: Choice, dtype: str, device: torch.device, into: Replacement, *, only_sdpa: bool = False
) -> None:
    """Add the change of implementation for every transformers model in ``model``.

    Args:
        model: A transformers model, or one that contains some.
        choice: ``auto`` replaces eager attention by flash where that is installed, on CUDA and in half precision, by
            sdpa otherwise, and where it has sinks by the fused one here; any other implementation that the model's
            author chose stays.
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
            if name == _SINKS:
                _register_sinks()
            change = SetAttribute(config, "_attn_implementation", name)
            into.add(f"attention: {_count(model, config)} modules {current} -> {name}", [change])
    if len(into.done) + len(into.left) == before:
        into.left.append(_nothing_to_do(model, [config for _, config in found]))


def fuse_sinks(model: nn.Module) -> None:
    """Replace eager attention with sinks where compiled blocks divide tokens, for good.

    Other blocks take the place of transformers' functions while they run, which torch does not see as it compiles.
    """
    for part, config in _configs(model):
        if config._attn_implementation == "eager" and _with_sinks(part) and not _reason_against(part, config, _SINKS):
            _register_sinks()
            config._attn_implementation = _SINKS


def gains_by_attention(model: nn.Module) -> bool:
    """Return whether the attention of a model computes all scores, and need not."""
    return any(
        config._attn_implementation == "eager"
        and not _reason_against(part, config, _SINKS if _with_sinks(part) else "sdpa")
        for part, config in _configs(model)
    )


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
    if _with_sinks(model):  # which neither sdpa nor flash-attn's usual kernels have
        return _SINKS
    flash = _installed_flash() if device.type == "cuda" and dtype != "fp32" and not only_sdpa else None
    return flash if flash is not None and _supports(model, "flash") else "sdpa"


def _supports(model: nn.Module, choice: str) -> bool:
    return any(getattr(model, name, False) for name in _SUPPORT[choice])


def _reason_against(model: nn.Module, config: Any, name: str) -> str:
    """Return why a model cannot compute an implementation; empty if it can."""
    choice = next((choice for choice, names in _NAMES.items() if name in names), None)
    if choice is not None and not _supports(model, choice):
        return f"{type(model).__name__} does not support {choice}"
    if choice is None and not all(map(_proven, {type(each): each for each in _with_sinks(model)}.values())):
        return "its own attention is another than softmax with sinks"
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


# --- Attention with sinks


def fused_with_sinks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute the attention of a transformers module as its own eager function does, by torch's fused kernels.

    Args:
        module: The module, which says whether its attention ``is_causal``.
        query: (batch, heads, queries, features).
        key: (batch, groups, keys, features).
        value: Like ``key``.
        attention_mask: True where a query sees a key, or what is added to scores; None: as ``is_causal`` says.
        options: transformers': ``scaling``, ``dropout`` and the sinks, ``s_aux`` (heads). Others change no score.

    Raises:
        ModelError: With options that change scores, which kernels do not know.
    """
    unknown = [name for name in ("softcap", "position_bias") if options.get(name) is not None]
    if unknown:
        raise ModelError(
            f"module_replace: {type(module).__name__} gives its attention {', '.join(unknown)}",
            expected="softmax with sinks",
            got=", ".join(f"{name}={options[name]}" for name in unknown),
            fix='leave attention out of module_replace: ("module_replace", {"exclude": ["attention"]})',
        )
    asked = options.get("is_causal")
    causal = (getattr(module, "is_causal", True) if asked is None else asked) and query.shape[2] > 1
    causal = causal and attention_mask is None
    if causal and query.shape[2] != key.shape[2]:  # kernels differ in what is causal then
        shape = query.shape[2], key.shape[2]
        attention_mask, causal = torch.ones(shape, dtype=torch.bool, device=query.device).tril(), False
    return attend_with_sinks(query, key, value, attention_mask, options, is_causal=causal), None


def _register_sinks() -> None:
    """Make attention with sinks known to transformers, with masks that are left out where it is causal."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_SINKS, fused_with_sinks)
    AttentionMaskInterface.register(_SINKS, sdpa_mask)


def _with_sinks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have a sink for each head."""
    found = ((module, parameters_of(module).get("sinks")) for module in model.modules())
    return [module for module, sinks in found if sinks is not None and sinks.dim() == 1]


def _proven(module: nn.Module) -> bool:
    """Return whether fused attention agrees with a module's own, eager one on random heads, of a few narrow tokens."""
    # The class may be that of a split layer, made elsewhere.
    modules = (sys.modules.get(each.__module__) for each in type(module).__mro__)
    own = next((found for each in modules if (found := getattr(each, "eager_attention_forward", None))), None)
    groups = getattr(module, "num_key_value_groups", None)
    sinks = parameters_of(module)["sinks"]
    if own is None or sinks is None or type(groups) is not int:
        return False
    generator = torch.Generator().manual_seed(0)
    probe: Any = copy.copy(module)  # called by functions alone, with sinks that are values
    drawn = torch.randn(sinks.numel(), generator=generator)
    probe.__dict__ = {**module.__dict__, PARAMETERS: {"sinks": nn.Parameter(drawn)}}
    heads, tokens, width = sinks.numel(), 5, 8
    query, key, value = (
        torch.randn(2, count, tokens, width, generator=generator) for count in (heads, *[heads // groups] * 2)
    )
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    mask = torch.zeros(1, 1, tokens, tokens).masked_fill(hidden, torch.finfo(torch.float32).min)
    options = {"dropout": 0.0, "scaling": 0.3, "s_aux": probe.sinks}
    try:
        with torch.no_grad(), preserved_rng():
            expected, _ = own(probe, query, key, value, mask, **options)
            got, _ = fused_with_sinks(probe, query, key, value, mask, **options)
    except Exception:  # its function needs more than these
        return False
    return got.shape == expected.shape and bool((got - expected).abs().max() <= _TOLERANCE * expected.abs().max())
