"""What ``meshwright plan`` and ``compare`` are told: a model, a cluster and a batch, turned into a request."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.batches import usual_input_format
from meshwright.cli.references import find_modules_beside, resolve_reference, takes, where_raised
from meshwright.cost import Cluster, find_cluster
from meshwright.errors import ConfigError, MeshwrightError, ModelError
from meshwright.planner import known_models
from meshwright.planning import ModuleModel, PlannedModel, PlanRequest
from meshwright.planning.door import named_model
from meshwright.planning.models import token_batch
from meshwright.strategy import read_size

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FAMILIES = ("gpt", "llama", "mixtral")


@dataclass(frozen=True)
class Subjects:
    """The options that say what is planned for."""

    model: str
    cluster: str
    global_batch: int
    seq: int | None = None
    sample: str | None = None
    loss: str | None = None
    memory_limit: str | None = None

    def request(self, **wanted: Any) -> PlanRequest:
        """The request, with what is wanted of its plans.

        Raises:
            ConfigError, ModelError: Naming the option.
        """
        cluster, limit = find_cluster(self.cluster), read_size(self.memory_limit, "--memory-limit")
        return PlanRequest(self._model(cluster), cluster, self.global_batch, memory_limit=limit, **wanted)

    def _model(self, cluster: Cluster) -> PlannedModel:
        if is_reference(self.model):
            return self._module(cluster)
        given = [f"--{name}" for name in ("sample", "loss") if getattr(self, name) is not None]
        if given:
            raise ConfigError(
                "A model by its name has its own samples and loss",
                expected="--sample and --loss beside --model MODULE:FUNCTION alone",
                got=f"--model {self.model} with {' and '.join(given)}",
                fix=f"leave out {' and '.join(given)}",
            )
        return named_model(self.model, self.seq, cluster)

    def _module(self, cluster: Cluster) -> ModuleModel:
        """The module that a function builds, on ``meta`` unless it is planned for the CPU."""
        find_modules_beside(Path.cwd())
        if (self.seq is None) == (self.sample is None):
            raise ConfigError(
                "A module needs a sample",
                expected="--seq for a model that takes token ids, or --sample MODULE:FUNCTION that returns a batch",
                got="neither" if self.seq is None else "both",
                fix="give one of them",
            )
        function = resolve_reference(self.model, "--model")
        on_meta = not cluster.device.is_host
        with torch.device("meta" if on_meta else "cpu"):
            arguments = {"seq_len": self.seq} if self.seq is not None and takes(function, "seq_len") else {}
            module = _called(self.model, "--model", functools.partial(function, **arguments))
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"--model {self.model} returned no model",
                expected="a torch.nn.Module",
                got=type(module).__name__,
                fix="return the model",
            )
        batch = token_batch(self.seq) if self.seq is not None else self._sample()
        loss = resolve_reference(self.loss, "--loss") if self.loss is not None else None
        return ModuleModel(self.model, module, batch, loss, usual_input_format(batch), seq=self.seq)

    def _sample(self) -> Any:
        assert self.sample is not None
        return _called(self.sample, "--sample", resolve_reference(self.sample, "--sample"))


def is_reference(model: str) -> bool:
    """Whether a model is ``MODULE:FUNCTION``, and not a family with its dimensions."""
    name = model.partition(":")[0]
    return bool(_REFERENCE.fullmatch(model)) and name not in (*_FAMILIES, "hf", *known_models())


def _called(reference: str, option: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{option}: the function {reference} failed",
            expected="a function that works without arguments (a model's may take seq_len)",
            got=f"{type(error).__name__}: {error} ({where_raised(error)})",
            fix="correct the function; --traceback shows where",
        ) from error
