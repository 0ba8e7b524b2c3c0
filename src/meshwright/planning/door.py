"""``plan``: ranked strategies for a model on a cluster, in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import Cluster, find_cluster
from meshwright.errors import ConfigError
from meshwright.planner import Plan, parse_family
from meshwright.planning.models import FamilyModel, ModuleModel, PlannedModel, token_batch
from meshwright.planning.request import PlanRequest
from meshwright.planning.transformers import transformers_model

_HF = "hf:"


def plan(
    model: str | nn.Module,
    cluster: str | Cluster,
    *,
    global_batch: int,
    seq: int | None = None,
    strategy: Any = None,
    num_micro_batches: int | None = None,
    objective: str = "tokens_per_s",
    excluded: Sequence[str] = (),
    included: Sequence[Any] = (),
    top: int = 10,
    memory_limit: int | str | None = None,
    sample_batch: Any = None,
    loss_func: Callable[[Any, Any], Any] | None = None,
    model_input_format: str | None = None,
    optim_func: Callable[[Any], Optimizer] | None = torch.optim.AdamW,
) -> list[Plan]:
    """Predicts memory and time of strategies for a model on a cluster that need not be there, best first.

    Args:
        model: A known model (``"llama-3-8b"``), a family with its dimensions
            (``"gpt:layers=24,hidden=1024,heads=16,vocab=50304"``), a transformers config (``"hf:PATH"``), or a module,
            whose parameters may be on ``meta``.
        cluster: A preset (``"h100x64"``), a cluster file, or a :class:`~meshwright.cost.Cluster`.
        global_batch: Samples of a step, over all devices.
        seq: Tokens of a sample; None: what the model is known for. A module gets token ids ``[samples, seq]``.
        strategy: A Strategy, or anything it can be made from: the only plan, whether it fits or not. None searches.
        num_micro_batches: Parts of a batch, of the strategy given.
        objective: ``"tokens_per_s"``, ``"price"`` or ``"memory"``: what plans are ranked by.
        excluded: Methods that must not be used.
        included: Methods that every plan uses: names, or ``(name, config)`` with keys that stay as they are.
        top: Plans at the most.
        memory_limit: What tensors may take of a device, in bytes or as ``"40 GiB"``; None: what it has for them.
        sample_batch: Of a module: a batch of any number of samples, instead of ``seq``.
        loss_func: Of a module: ``loss_func(model_input, model_output)``; None: the loss in its output, or the next
            token's.
        model_input_format: Of a module; as of ``accelerate``.
        optim_func: Of a module: builds the optimizer from parameters.

    Returns:
        Plans with their forecasts. ``str(plan)`` is one line; :mod:`meshwright.planner.explain` says why.

    Raises:
        ConfigError: For an unknown cluster, and arguments that contradict each other.
        ModelError: For an unknown model, and one that cannot be traced.
        StrategyError: When no strategy fits, naming the smallest and what binds.

    Example:
        >>> for each in mw.plan("llama-3-8b", "h100x64", global_batch=512):
        ...     print(each)
    """
    where = find_cluster(cluster) if isinstance(cluster, str) else cluster
    if isinstance(model, str):
        others = sample_batch is not None or loss_func is not None or model_input_format is not None
        if others or optim_func is not torch.optim.AdamW:
            raise ConfigError(
                "A model by its name has its own samples, loss and optimizer",
                expected="sample_batch, loss_func, model_input_format and optim_func beside a module alone",
                got=repr(model),
                fix="leave them out, or pass the module",
            )
        planned = named_model(model, seq, where)
    else:
        batch = _sample(seq, sample_batch)
        name = type(model).__name__
        planned = ModuleModel(name, model, batch, loss_func, model_input_format, optim_func, seq)
    asked = PlanRequest(
        planned, where, global_batch, strategy, num_micro_batches, objective, excluded, included, top, memory_limit
    )
    return list(asked.found().plans)


def named_model(name: str, seq: int | None, cluster: Cluster) -> PlannedModel:
    """A model by its text: ``hf:PATH``, a known model, or a family with its dimensions.

    Raises:
        ConfigError, ModelError: When there is no such model, or ``seq`` is no length.
    """
    if seq is not None and seq < 1:
        raise ConfigError("seq is not a length", expected="1 or more tokens", got=repr(seq), fix="correct the number")
    if name.startswith(_HF):
        path = Path(name.removeprefix(_HF)).expanduser()
        return transformers_model(path, seq, on_meta=not cluster.device.is_host)
    shape = parse_family(name)
    return FamilyModel(name, shape if seq is None else dataclasses.replace(shape, seq=seq))


def _sample(seq: int | None, sample_batch: Any) -> Any:
    if (seq is None) == (sample_batch is None):
        raise ConfigError(
            "A module needs a sample",
            expected="seq for a model that takes token ids, or sample_batch for any other",
            got="neither" if seq is None else "both",
            fix="pass one of them",
        )
    return token_batch(seq) if seq is not None else sample_batch
