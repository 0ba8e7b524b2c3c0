"""A module to plan for on any cluster, before there is a job."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.cost import Cluster
from meshwright.errors import ConfigError, ModelError
from meshwright.nn import check_initialized
from meshwright.nn.batches import call_model, first_loss, loss_of_output, resized
from meshwright.optim import check_steps_alone
from meshwright.planner.family_workload import FamilyModel
from meshwright.planner.model_shapes import Shape
from meshwright.planner.plans import Subject, usable_bytes
from meshwright.planner.workload import Workload
from meshwright.runtime import preserved_rng

_FSDP = 3  # the ZeRO stage that a mesh axis ``zero`` implies


@dataclass(frozen=True)
class ModuleModel:
    """A real module, best on ``meta``, and how it is trained.

    Args:
        name: Name for reports.
        module: Plain module; parameters on ``meta`` need no values.
        sample_batch: A batch of any number of samples, as the model takes it.
        loss_func: ``loss_func(model_input, model_output)``; None takes the loss in the output, or the next-token loss.
        model_input_format: See ``accelerate``.
        optim_func: Builds the optimizer from parameters.
        seq: Tokens per sample, if it has any.
        shape: Its dimensions, if it is of a known family: a search then finds candidates by formulas.
    """

    name: str
    module: nn.Module
    sample_batch: Any
    loss_func: Callable[[Any, Any], Any] | None = None
    model_input_format: str | None = None
    optim_func: Callable[[Any], Optimizer] | None = torch.optim.AdamW
    seq: int | None = None
    shape: Shape | None = None

    def describe(self) -> dict[str, Any]:
        """See :class:`~meshwright.planner.plans.PlannedModel`."""
        count = sum(parameter.numel() for parameter in self.module.parameters())
        found = {"name": self.name, "class": type(self.module).__name__, "num_parameters": count}
        return found | ({"seq": self.seq} if self.seq is not None else {})

    def subject(self, cluster: Cluster, samples: int, limit_bytes: int | None, limit_is_free: bool = False) -> Subject:
        """See :class:`~meshwright.planner.plans.PlannedModel`. The module is traced once for CPUs and once for GPUs."""
        is_free = limit_bytes is None or limit_is_free  # otherwise it is for tensors alone
        limit_bytes = limit_bytes if limit_bytes is not None else usable_bytes(cluster.device)
        if cluster.device.is_host not in self._traced:
            self._traced[cluster.device.is_host] = self._workload(cluster, samples, limit_bytes)
        return self._traced[cluster.device.is_host].elsewhere(cluster, samples, limit_bytes, is_free)

    def outline(self, cluster: Cluster, samples: int, limit_bytes: int | None, limit_is_free: bool) -> Subject | None:
        """Return the subject of plans by formulas, whose figures are near those of the module; None: there are none."""
        if self.shape is None:
            return None
        return FamilyModel(self.name, self.shape).subject(cluster, samples, limit_bytes, limit_is_free)

    @functools.cached_property
    def _traced(self) -> dict[bool, Workload]:
        """Return the cache of workloads, by whether they train on CPUs."""
        return {}

    def _workload(self, cluster: Cluster, samples: int, limit_bytes: int) -> Workload:
        check_initialized(self.module)
        self._check_trains()
        return Workload(
            model=self.module,
            device=torch.device("cpu" if cluster.device.is_host else "cuda"),
            optim_func=None if self.optim_func is None else self._optimizer,
            inputs_of=functools.partial(_inputs, self.sample_batch),
            forward=self._forward,
            batch_size=samples,
            num_micro_batches=None,
            world=cluster.num_devices,
            zero_level=_FSDP,
            limit_bytes=limit_bytes,
            cluster=cluster,
            must_fit=False,
        )

    def _check_trains(self) -> None:
        count = sum(1 for _ in self.module.parameters())
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            raise ModelError(
                f"Nothing of the model {self.name} trains",
                expected="at least one parameter that requires a gradient",
                got=f"{count} parameters, all of them frozen" if count else "a model without parameters",
                fix="call requires_grad_(True) on what shall train" if count else "give it parameters",
            )

    def _optimizer(self, params: Any) -> Optimizer:
        assert self.optim_func is not None
        return check_steps_alone(self.optim_func(params))

    def _forward(self, module: nn.Module, inputs: Any) -> torch.Tensor:
        output = call_model(module, inputs, self.model_input_format)
        loss = self.loss_func or _usual_loss
        return first_loss(loss(inputs, output), trains=torch.is_grad_enabled())


def _inputs(sample_batch: Any, samples: int) -> Any:
    with preserved_rng():
        return resized(sample_batch, samples)


def _usual_loss(inputs: Any, output: Any) -> Any:
    """Return the loss in the output, or the next-token loss of its logits."""
    try:
        return loss_of_output(inputs, output)
    except ConfigError:
        from meshwright.loss import next_token_loss

        return next_token_loss(inputs, output)


def token_batch(seq: int) -> torch.Tensor:
    """Return two samples of token ids, ``[2, seq]``: zeros, since a pass without data reads no values."""
    return torch.zeros(2, seq, dtype=torch.long)
