"""What a caller of ``accelerate`` asks for: checked, planned and turned into a job before anything is changed."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset, default_collate

from meshwright.batches import (
    batch_size_of,
    call_model,
    check_input_format,
    first_loss,
    loss_of_output,
    resized,
    to_device,
)
from meshwright.built_optimizer import BuiltOptimizer
from meshwright.data import GlobalBatchLoader, global_batch_loader
from meshwright.errors import ConfigError, ModelError, did_you_mean
from meshwright.methods import Job, SampleRun
from meshwright.planner import Plan, Workload, choose, cluster_at_hand
from meshwright.runtime import Settings, coordinate_of, preserved_rng, rank, world_size
from meshwright.strategy import Strategy


@dataclass(frozen=True)
class Request:
    """The arguments of ``accelerate``; see there."""

    model: nn.Module
    optim_func: Callable[..., Optimizer] | Optimizer | None
    dataset: Dataset | None
    loss_func: Callable[[Any, Any], Any] | None
    strategy: Any
    prepare_input: Callable[[Any, torch.device], Any] | None
    model_input_format: str | None
    optim_args: Mapping[str, Any] | None
    optim_param_func: Callable[[nn.Module], Any] | None
    dataloader_args: Mapping[str, Any] | None
    distributed_sampler_cls: type | None
    lr_scheduler_cls: Callable[..., Any] | None
    lr_scheduler_args: Mapping[str, Any] | None
    excluded: Sequence[str]
    included: Sequence[str]
    max_grad_norm: float | None
    num_micro_batches: int | None
    find_unused_parameters: bool
    ddp_options: Mapping[str, Any] | None
    sample_batch: Any
    batch_size: int | None
    sampler_seed: int
    dry_run: bool

    def check(self, device: torch.device) -> None:
        """Refuses arguments that cannot work together.

        Raises:
            ConfigError, ModelError: Saying which.
        """
        check_input_format(self.model_input_format)
        self.strategy_digest()
        check_model(self.model, device)
        if self.num_micro_batches is not None and self.num_micro_batches < 1:
            raise ConfigError(
                "num_micro_batches is not a count",
                expected="1 or more",
                got=repr(self.num_micro_batches),
                fix="use 1 to train on whole batches",
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                "max_grad_norm is not a norm",
                expected="a number above 0, or None",
                got=repr(self.max_grad_norm),
                fix="use None to measure the norm without clipping",
            )
        if self.dry_run and self.dataset is None and self.sample_batch is None:
            raise ConfigError(
                "A dry run needs data", expected="dataset or sample_batch", got="neither", fix="pass one of them"
            )
        if self.lr_scheduler_cls is not None and self.optim_func is None:
            raise ConfigError(
                "A learning-rate scheduler needs an optimizer",
                got="optim_func=None",
                fix="pass optim_func",
                expected="optim_func beside lr_scheduler_cls",
            )
        _check_keywords("ddp_options", DistributedDataParallel, self.ddp_options)
        if isinstance(self.optim_func, Optimizer):
            self._check_built()
        elif self.optim_func is not None:
            _check_keywords("optim_args", self.optim_func, self.optim_args)

    def _check_built(self) -> None:
        for option, value in (("optim_args", self.optim_args), ("optim_param_func", self.optim_param_func)):
            if value is not None:
                raise ConfigError(
                    f"{option} is given beside an optimizer that is built already",
                    expected="an optimizer, or what builds one",
                    got=f"optim_func={type(self.optim_func).__name__}(…) and {option}",
                    fix=f"leave {option} out, or pass the optimizer's class",
                )
        assert self._built is not None  # made here, with its own checks

    @functools.cached_property
    def _built(self) -> BuiltOptimizer | None:
        """The optimizer given, with the names of its parameters; made before methods replace them."""
        return BuiltOptimizer(self.optim_func, self.model) if isinstance(self.optim_func, Optimizer) else None

    @property
    def loss(self) -> Callable[[Any, Any], Any]:
        """The caller's loss, or the one that the model's output carries."""
        return self.loss_func or loss_of_output

    @property
    def prepare(self) -> Callable[[Any, torch.device], Any]:
        """The caller's ``prepare_input``, or moving tensors to the device."""
        return self.prepare_input or to_device

    @property
    def build_optimizer(self) -> Callable[[Any], Optimizer] | None:
        """Builds the optimizer from parameters alone."""
        build, args = self.optim_func, dict(self.optim_args or {})
        if self._built is not None:
            return self._built.take
        assert not isinstance(build, Optimizer)
        return None if build is None else lambda params: build(params, **args)

    def plan(self, settings: Settings, limit_bytes: int) -> tuple[Plan, str | None]:
        """Predicts the strategy asked for, or chooses one; the second item then says why."""
        workload = Workload(
            model=self.model,
            device=settings.device,
            optim_func=self.build_optimizer if self._built is None else self._built.probe,
            optim_param_func=self.optim_param_func,
            inputs_of=lambda samples: self._sample_inputs(settings.device, samples),
            forward=self._forward,
            batch_size=self._global_batch_size(),
            num_micro_batches=self.num_micro_batches,
            world=world_size(),
            zero_level=settings.zero_level,
            limit_bytes=limit_bytes,
            cluster=cluster_at_hand(settings.device, world_size(), settings.local_world_size),
        )
        if self.strategy is None:
            plan, reason = choose(workload, excluded=self.excluded, included=self.included)
        else:
            plan, reason = workload.plan(Strategy(self.strategy)), None
        if self._built is not None and workload.optim_func is None:
            gap = (
                f"optimizer state is not predicted: only {type(self._built.optimizer).__name__}'s constructor makes it"
            )
            plan = replace(plan, gaps=(*plan.gaps, gap))
        return plan, reason

    def _forward(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        return first_loss(self.loss(inputs, call_model(model, inputs, self.model_input_format)))

    def _global_batch_size(self) -> int | None:
        if self.batch_size is not None:
            return self.batch_size
        if self.dataset is not None:
            return (self.dataloader_args or {}).get("batch_size", world_size())
        return batch_size_of(self.sample_batch) * world_size() if self.sample_batch is not None else None

    def _sample_inputs(self, device: torch.device, samples: int) -> Any:
        """The model input of ``samples`` samples; None where no sample can be had without consuming data."""
        with preserved_rng():
            if self.sample_batch is not None:
                return self.prepare(resized(self.sample_batch, samples), device)
            if self.dataset is None or isinstance(self.dataset, IterableDataset):
                return None
            collate = (self.dataloader_args or {}).get("collate_fn") or default_collate
            length = len(self.dataset)  # type: ignore[arg-type]
            return self.prepare(collate([self.dataset[index % length] for index in range(samples)]), device)

    def job(self, plan: Plan, device: torch.device) -> Job:
        """The job that the plan's methods will change."""
        mode = plan.strategy.get("parallel_mode")
        return Job(
            model=self.model,
            strategy=plan.strategy,
            device=device,
            loss_func=self.loss,
            prepare_input=self.prepare,
            axes=plan.step.axes,
            coordinate=coordinate_of(rank(), plan.step.axes, mode.rank_order),  # type: ignore[union-attr]
            shard_axis=plan.step.shard_axis,
            num_micro_batches=plan.step.num_micro_batches,
            cut=plan.cut,
            find_unused_parameters=self.find_unused_parameters,
            ddp_options=self.ddp_options or {},
            optim_func=self.build_optimizer,
            optim_param_func=self.optim_param_func if self._built is None else self._built.groups,
            max_grad_norm=self.max_grad_norm,
            sample=SampleRun(lambda samples: self._sample_inputs(device, samples), self._forward),
        )

    def dataloader(self, job: Job) -> GlobalBatchLoader | None:
        """This rank's part of the dataset's global batches."""
        if self.dataset is None:
            return None
        return global_batch_loader(
            self.dataset,
            loader_args=self.dataloader_args,
            replica=job.replica,
            num_replicas=job.num_replicas,
            sampler_cls=self.distributed_sampler_cls,
            sampler_seed=self.sampler_seed,
        )

    def strategy_digest(self) -> str:
        """The strategy asked for, as text."""
        if self.strategy is None:
            return f"chosen automatically (excluded={list(self.excluded)}, included={list(self.included)})"
        return str(Strategy(self.strategy))

    def model_digest(self) -> str:
        """A short text that two models of equal parameter names, shapes and dtypes share."""
        lines = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in self.model.named_parameters()]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        return f"{type(self.model).__name__} with {len(lines)} parameters, digest {digest}"


def check_model(model: nn.Module, device: torch.device) -> None:
    """Refuses what is not a plain model with values, on the job's device or the CPU.

    Raises:
        ModelError: Saying what it is instead.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "The model is not a module",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            fix="pass the model itself, built",
        )
    wrapped = next(
        (m for m in model.modules() if isinstance(m, DistributedDataParallel | DataParallel | FSDPModule)), None
    )
    sharded = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), None)
    if wrapped is not None or sharded is not None:
        raise ModelError(
            "The model is already distributed",
            expected="a plain nn.Module",
            got=f"{type(wrapped).__name__ if wrapped is not None else sharded} inside {type(model).__name__}",
            fix="pass the model as it was before wrapping; the strategy wraps it",
        )
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if not devices <= {device, torch.device("cpu")} or len(devices) > 1:
        meta = "parameters on meta have no values: build the model on the CPU"
        raise ModelError(
            "The model is on a wrong device",
            expected=f"all parameters and buffers on {device}"
            + ("" if device.type == "cpu" else ", or all on the CPU"),
            got=", ".join(sorted(map(str, devices))),
            fix=meta if torch.device("meta") in devices else f"call model.to({str(device)!r}) before",
        )


def _check_keywords(option: str, function: Callable[..., Any], given: Mapping[str, Any] | None) -> None:
    """Refuses keyword arguments that the function cannot take, before the model is changed."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature: its own error will do
        return
    names = [name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return
    for key in given or {}:
        if key not in names:
            raise ConfigError(
                f"{option} has an unknown key {key!r}{did_you_mean(key, names)}",
                expected=f"keyword arguments of {getattr(function, '__name__', function)}",
                got=repr(key),
                fix="correct the key or leave it out",
            )
