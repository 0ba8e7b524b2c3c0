"""What ColossalAI's pipeline and sequence arguments mean: methods and mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from meshwright.booster.plugin.base import Plugin
from meshwright.booster.plugin.options import check_choice
from meshwright.errors import ConfigError

STYLES = ("1f1b", "interleaved", "zbv")
_IN_TENSOR_GROUPS = ("split_gather", "ring")
_APART = {"all_to_all": "sequence", "ring_attn": "context"}
"""Modes whose ranks are those of an axis of its own."""
_MODES = (*_IN_TENSOR_GROUPS, *_APART)


class AxisArguments(Plugin):
    """The arguments of a plugin that name axes; their defaults are the plugin's."""

    tp_size: int
    pp_size: int
    sp_size: int | None
    enable_sequence_parallelism: bool
    sequence_parallelism_mode: str | None
    num_microbatches: int | None
    microbatch_size: int | None
    pp_style: str
    num_model_chunks: int
    num_layers_per_stage: Sequence[int] | None


def sequence_mode(plugin: AxisArguments) -> str | None:
    """How tokens are divided; None: not at all. ColossalAI's default is ``all_to_all``."""
    return (plugin.sequence_parallelism_mode or "all_to_all") if plugin.enable_sequence_parallelism else None


def check_axes(plugin: AxisArguments) -> None:
    """Refuses pipeline and sequence arguments that do not fit together.

    Raises:
        ConfigError: Saying which.
    """
    check_choice(plugin, "pp_style", plugin.pp_style, STYLES)
    check_choice(plugin, "sequence_parallelism_mode", plugin.sequence_parallelism_mode, (None, *_MODES))
    _check_pipeline(plugin)
    _check_sequence(plugin)


def _check_pipeline(plugin: AxisArguments) -> None:
    chunks = plugin.num_model_chunks
    if plugin.pp_size == 1:
        return
    if plugin.num_microbatches is None and plugin.microbatch_size is None:
        _refuse(
            plugin,
            "a pipeline cuts batches into micro-batches",
            expected="num_microbatches or microbatch_size",
            got="neither",
            fix="give num_microbatches, best several times pp_size",
        )
    if plugin.pp_style == "interleaved" and chunks < 2:
        _refuse(
            plugin,
            "pp_style='interleaved' divides each rank's blocks into several stages",
            expected="num_model_chunks of 2 or more",
            got=repr(chunks),
            fix="give num_model_chunks=2, or use pp_style='1f1b'",
        )
    if plugin.pp_style == "zbv" and chunks not in (1, 2):
        _refuse(
            plugin,
            "pp_style='zbv' has two stages on every rank",
            expected="num_model_chunks=2",
            got=repr(chunks),
            fix="leave num_model_chunks out",
        )


def _check_sequence(plugin: AxisArguments) -> None:
    mode, size = sequence_mode(plugin), plugin.sp_size
    if mode is None and size not in (1, None):
        _refuse(
            plugin,
            "sp_size is given and sequence parallelism is not enabled",
            expected="enable_sequence_parallelism=True beside it",
            got=f"sp_size={size}",
            fix="enable it, or leave sp_size out",
        )
    if mode in _IN_TENSOR_GROUPS and (plugin.tp_size == 1 or size not in (1, None, plugin.tp_size)):
        _refuse(
            plugin,
            f"sequence_parallelism_mode={mode!r} divides tokens over the ranks of a tensor group",
            expected="tp_size of 2 or more, and no other sp_size",
            got=f"tp_size={plugin.tp_size}, sp_size={size}",
            fix="leave sp_size out, and raise tp_size; or use 'all_to_all', which has ranks of its own",
        )
    if mode in _APART and (size is None or size < 2):
        _refuse(
            plugin,
            f"sequence_parallelism_mode={mode!r} divides tokens over ranks of its own",
            expected="sp_size of 2 or more",
            got=f"sp_size={size}",
            fix="give sp_size, or use 'split_gather' with tp_size",
        )


def _refuse(plugin: AxisArguments, what: str, **parts: str) -> NoReturn:
    raise ConfigError(f"{type(plugin).__name__}: {what}", **parts)


def axis_methods(plugin: AxisArguments) -> list[Any]:
    """The methods that work on the axes tensor, sequence, context and pipeline."""
    mode, methods = sequence_mode(plugin), list[Any]()
    if plugin.tp_size > 1:
        methods.append(("tensor_parallel", {"sequence": True} if mode in _IN_TENSOR_GROUPS else {}))
    if mode in _APART:
        methods.append(f"{_APART[mode]}_parallel")
    if plugin.pp_size > 1:
        methods.append(("pipeline_parallel", _pipeline_keys(plugin)))
    return methods


def _pipeline_keys(plugin: AxisArguments) -> dict[str, Any]:
    stages = {"1f1b": 1, "interleaved": plugin.num_model_chunks, "zbv": 2}[plugin.pp_style]
    keys: dict[str, Any] = {"schedule": plugin.pp_style, "num_stages_per_rank": stages}
    # With microbatch_size the number follows from the batch; as many as stages are what every schedule runs with.
    keys["num_micro_batches"] = plugin.num_microbatches or plugin.pp_size * stages
    if plugin.num_layers_per_stage is not None:
        keys["split"] = list(plugin.num_layers_per_stage)
    return keys


def axis_sizes(plugin: AxisArguments) -> dict[str, int]:
    """Sizes of the axes inside ``data``, innermost first."""
    sizes, mode = {"tensor": plugin.tp_size}, sequence_mode(plugin)
    if mode in _APART:
        sizes[_APART[mode]] = plugin.sp_size or 1
    return sizes if plugin.pp_size == 1 else {**sizes, "pipeline": plugin.pp_size}


def axis_notices(plugin: AxisArguments) -> list[str]:
    """What the user should know of arguments that mean something for some strategies only."""
    name, found = type(plugin).__name__, []
    if plugin.pp_size > 1 and plugin.pp_style == "1f1b" and plugin.num_model_chunks > 1:
        found.append(f"{name}: num_model_chunks changes nothing; pp_style='1f1b' has one stage on every rank")
    if plugin.pp_size == 1 and plugin.pp_style != "1f1b":
        found.append(f"{name}: pp_style changes nothing; there is one pipeline stage")
    if sequence_mode(plugin) == "ring":
        found.append(f"{name}: sequence_parallelism_mode='ring' is 'split_gather'; the order of sending is torch's")
    return found
