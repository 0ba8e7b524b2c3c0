"""Check the arguments of ``accelerate``, and turn them into a workload to plan and a job that methods change."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from meshwright.cost import Cluster
from meshwright.errors import ConfigError, did_you_mean
from meshwright.methods import Job
from meshwright.methods.birth import Birth
from meshwright.methods.job import MeshAxes, OptimizerRequests
from meshwright.nn import check_model
from meshwright.nn.batches import (
    batch_size_of,
    call_model,
    check_input_format,
    first_loss,
    is_loss_func,
    leaves_of,
    loss_of_output,
    resized,
    tensors_of,
    to_device,
)
from meshwright.optim import check_steps_alone, fused_where_possible
from meshwright.planner import Plan, Workload, choose, cluster_at_hand, described_cluster, fitting, only_configs
from meshwright.runtime import Settings, coordinate_of, preserved_rng, rank, settings as settings_in_use, world_size
from meshwright.runtime.agreement import value_text
from meshwright.runtime.torch_internals.tensors import storage_identity
from meshwright.strategy import Strategy
from meshwright.training.accelerated import LossWeight

if TYPE_CHECKING:
    from meshwright.data import GlobalBatchLoader
    from meshwright.training.built_optimizer import BuiltOptimizer


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of :func:`meshwright.accelerate`, which documents them."""

    model: nn.Module
    birth: Birth | None
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
    included: Sequence[Any]
    max_grad_norm: float | None
    num_micro_batches: int | None
    loss_weight: LossWeight | None
    find_unused_parameters: bool
    ddp_options: Mapping[str, Any] | None
    sample_batch: Any
    batch_size: int | None
    sampler_seed: int
    time_limit: float | None
    cluster: str | os.PathLike[str] | Cluster | None
    finetune_strategy: bool
    dry_run: bool

    def check(self, device: torch.device) -> None:
        """Refuse arguments that cannot work together.

        Raises:
            ConfigError, ModelError: Saying which.
        """
        check_input_format(self.model_input_format)
        check_kinds(vars(self))
        check_kinds({"batch_size": (self.dataloader_args or {}).get("batch_size")})
        self.strategy_digest()  # reads the strategy
        check_model(self.model, device)
        if self.dry_run and self.dataset is None and self.sample_batch is None:
            raise ConfigError(
                "A dry run needs data", expected="dataset or sample_batch", got="neither", fix="pass one of them"
            )
        self._check_time_limit()
        if self.lr_scheduler_cls is not None and self.optim_func is None:
            raise ConfigError(
                "A learning-rate scheduler needs an optimizer",
                got="optim_func=None",
                fix="pass optim_func",
                expected="optim_func beside lr_scheduler_cls",
            )
        check_lr_scheduler(self.lr_scheduler_cls, self.lr_scheduler_args)
        check_keywords("ddp_options", DistributedDataParallel, self.ddp_options)
        if isinstance(self.optim_func, Optimizer):
            self._check_built()
        elif self.optim_func is not None:
            check_keywords("optim_args", self.optim_func, self.optim_args)

    @property
    def chooses(self) -> bool:
        """Return whether the planner chooses the strategy, or the configs of its methods."""
        return self.strategy is None or self.finetune_strategy

    def _check_time_limit(self) -> None:
        if self.time_limit is None:
            return
        from meshwright.planner.measure import check_time_limit  # imported here: only dry runs need that package

        check_time_limit(self.time_limit)
        if self.chooses and (self.optim_func is None or (self.dataset is None and self.sample_batch is None)):
            raise ConfigError(
                "time_limit asks to run candidates, and there is nothing to train them with",
                expected="optim_func, and dataset or sample_batch",
                got="no optim_func" if self.optim_func is None else "neither dataset nor sample_batch",
                fix="pass them, or leave time_limit out to choose by prediction",
            )

    def _check_built(self) -> None:
        for option, value in (("optim_args", self.optim_args), ("optim_param_func", self.optim_param_func)):
            if value is not None:
                raise ConfigError(
                    f"{option} is given beside an optimizer that is built already",
                    expected="an optimizer, or what builds one",
                    got=f"optim_func={type(self.optim_func).__name__}(…) and {option}",
                    fix=f"leave {option} out, or pass the optimizer's class",
                )
        assert self._built is not None, "making it checks the optimizer"
        check_steps_alone(self._built.optimizer)

    @functools.cached_property
    def _built(self) -> BuiltOptimizer | None:
        """The optimizer given, with the names of its parameters; made before methods replace them."""
        if not isinstance(self.optim_func, Optimizer):
            return None
        from meshwright.training.built_optimizer import BuiltOptimizer

        return BuiltOptimizer(self.optim_func, self.model)

    @property
    def loss(self) -> Callable[[Any, Any], Any]:
        """The caller's loss, or the one that the model's output carries."""
        return self.loss_func or loss_of_output

    @property
    def prepare(self) -> Callable[[Any, torch.device], Any]:
        """The caller's ``prepare_input``, or a function that moves tensors to the device."""
        return self.prepare_input or to_device

    @property
    def build_optimizer(self) -> Callable[[Any], Optimizer] | None:
        """A function that builds the optimizer from parameters; None without one."""
        args = dict(self.optim_args or {})
        if self._built is not None or self.optim_func is None:
            return self._built.take if self._built is not None else None
        assert not isinstance(self.optim_func, Optimizer)
        build = fused_where_possible(self.optim_func, settings_in_use().device)
        return lambda params: check_steps_alone(build(params, **args))

    @property
    def _choose_parameters(self) -> Callable[[nn.Module], Any] | None:
        return self.optim_param_func if self._built is None else self._built.groups

    def plan(self, settings: Settings, limit_bytes: int) -> tuple[Plan, str | None]:
        """Predict the given strategy, or choose one; the second item then says why."""
        cluster, notices = self._cluster(settings)
        workload = self._workload(settings, limit_bytes, cluster)
        if self.chooses:
            plan, reason = choose(workload, **self._constraints(workload))
        else:
            strategy = Strategy(self.strategy)
            if workload.batch_size is None and self._samples_of_replica is not None:
                workload = workload.of_batch(self._samples_of_replica * workload.num_replicas(strategy))
            plan, reason = workload.plan(strategy), None
        gaps = plan.gaps
        if self._built is not None and workload.optim_func is None:
            kind = type(self._built.optimizer).__name__
            gaps = (*gaps, f"optimizer state is not predicted: only {kind}'s constructor makes it")
        return replace(plan, notices=(*plan.notices, *notices), gaps=gaps), reason

    def ranked(self, settings: Settings, limit_bytes: int) -> list[Plan]:
        """Return the plans to choose from by dry runs, best first by prediction."""
        cluster, notices = self._cluster(settings)
        workload = self._workload(settings, limit_bytes, cluster)
        plans = fitting(workload, **self._constraints(workload))
        return [replace(plan, notices=(*plan.notices, *notices)) for plan in plans]

    def _cluster(self, settings: Settings) -> tuple[Cluster | None, tuple[str, ...]]:
        """Return the cluster to predict for, where it is known, and notices of what may differ here."""
        device, local_world = settings.device, settings.local_world_size
        if self.cluster is None:
            return cluster_at_hand(device, world_size(), local_world), ()
        return described_cluster(self.cluster, device, world_size(), local_world)

    def _constraints(self, workload: Workload) -> dict[str, Sequence[Any]]:
        """Return the search constraints; ``finetune_strategy`` fixes the methods and searches their configs."""
        if self.strategy is None or not self.finetune_strategy:
            return {"excluded": self.excluded, "included": self.included}
        return only_configs(workload, Strategy(self.strategy))

    def _workload(self, settings: Settings, limit_bytes: int, cluster: Cluster | None) -> Workload:
        return Workload(
            model=self.model,
            device=settings.device,
            optim_func=self.build_optimizer if self._built is None else self._built.probe,
            optim_param_func=self._choose_parameters,
            inputs_of=lambda samples: self._sample_inputs(settings.device, samples),
            forward=self._forward,
            batch_size=self._global_batch_size,
            num_micro_batches=self.num_micro_batches,
            world=world_size(),
            zero_level=settings.zero_level,
            limit_bytes=limit_bytes,
            cluster=cluster,
            one_host=settings.local_world_size >= world_size(),
            copies_input=settings.device.type == "cpu" and self._copies_input(),
            limit_is_free=True,
            finds_unused=bool((self.ddp_options or {}).get("find_unused_parameters", self.find_unused_parameters)),
            static_graph=bool((self.ddp_options or {}).get("static_graph")),
        )

    def _forward(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        output = call_model(model, inputs, self.model_input_format)  # held while the loss runs, as in a step
        return first_loss(self.loss(inputs, output))

    def _copies_input(self) -> bool:
        """Return whether ``prepare_input`` makes new tensors of a batch that is on the device already."""
        if self.prepare_input is None:
            return False
        try:
            with preserved_rng():
                batch = self.sample_of(1)
                given = set() if batch is None else _storages(self.prepare(batch, torch.device("cpu")))
        except Exception:  # a user's data may raise anything; training will show the error
            return False
        return bool(given) and given.isdisjoint(_storages(batch))

    @property
    def _global_batch_size(self) -> int | None:
        """Return the samples per step over all ranks; None where they follow from the number of replicas.

        A search compares strategies by steps of equally many samples: as many as data parallelism would take.
        """
        if self.batch_size is not None:
            return self.batch_size
        given = (self.dataloader_args or {}).get("batch_size") if self.dataset is not None else None
        if given is None and self.chooses and self._samples_of_replica is not None:
            return self._samples_of_replica * world_size()
        return given

    @functools.cached_property
    def _samples_of_replica(self) -> int | None:
        """The samples per step of one replica, where nobody has said how many all of them take."""
        if self.dataset is not None:
            return 1  # as global_batch_loader does
        return batch_size_of(self.sample_batch) if self.sample_batch is not None else None

    def _sample_inputs(self, device: torch.device, samples: int) -> Any:
        """Return a model input of a number of samples; None if reading a sample would consume data."""
        with preserved_rng():
            batch = self.sample_of(samples)
            return None if batch is None else self.prepare(batch, device)

    def sample_of(self, samples: int) -> Any:
        """Return a batch of a number of samples, as the dataloader yields it; None if reading would consume data."""
        if self.sample_batch is not None:
            return resized(self.sample_batch, samples)
        if self.dataset is None or isinstance(self.dataset, IterableDataset):
            return None
        collate = (self.dataloader_args or {}).get("collate_fn") or default_collate
        length = len(self.dataset)  # type: ignore[arg-type]
        return collate([self.dataset[index % length] for index in range(samples)])

    def job(self, plan: Plan, device: torch.device) -> Job:
        """Make the job that the plan's methods will change."""
        from meshwright.methods import SampleRun  # late: predictions and checks of a request need none

        mode = plan.strategy.get("parallel_mode")
        return Job(
            model=self.model,
            birth=self.birth,
            strategy=plan.strategy,
            device=device,
            loss_func=self.loss,
            prepare_input=self.prepare,
            mesh_axes=MeshAxes(
                plan.step.axes,
                coordinate_of(rank(), plan.step.axes, mode.rank_order),  # type: ignore[union-attr]
                plan.step.shard_axis,
            ),
            num_micro_batches=plan.step.num_micro_batches,
            cut=plan.cut,
            find_unused_parameters=self.find_unused_parameters,
            ddp_options=self.ddp_options or {},
            optim_func=self.build_optimizer,
            optim_param_func=self._choose_parameters,
            optimizer=OptimizerRequests(max_grad_norm=self.max_grad_norm),
            sample=SampleRun(lambda samples: self._sample_inputs(device, samples), self._forward),
        )

    def dataloader(self, job: Job) -> GlobalBatchLoader | None:
        """Make the loader of this rank's part of every global batch; None without a dataset."""
        if self.dataset is None:
            return None
        from meshwright.data import global_batch_loader

        return global_batch_loader(
            self.dataset,
            loader_args={"pin_memory": self._pins(job.device), **(self.dataloader_args or {})},
            replica=job.mesh_axes.replica,
            num_replicas=job.mesh_axes.num_replicas,
            sampler_cls=self.distributed_sampler_cls,
            sampler_seed=self.sampler_seed,
        )

    def _pins(self, device: torch.device) -> bool:
        """Return whether batches are page-locked by default, so that their copies to the device need not wait."""
        if device.type != "cuda":
            return False
        try:
            with preserved_rng():
                batch = self.sample_of(1)
        except Exception:  # a user's data may raise anything; training will show the error
            return False
        # Only dense tensors on the host can be. Of a stream nothing is known before it is read.
        tensors = [leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)]
        return batch is not None and all(each.device.type == "cpu" and each.layout == torch.strided for each in tensors)

    def strategy_digest(self) -> str:
        """Return the strategy asked for as text, equal for equal requests."""
        if self.strategy is None:
            return f"chosen automatically (excluded={list(self.excluded)}, included={list(self.included)})"
        if self.finetune_strategy:
            return f"the methods of {Strategy(self.strategy)} with configs chosen automatically"
        return str(Strategy(self.strategy))

    def parameter_lines(self) -> list[str]:
        """Return a line for every parameter, then for every buffer: name, shape and type."""
        lines = [
            f"{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
            for name, p in self.model.named_parameters()
        ]
        return lines + [f"{name} {tuple(b.shape)} {b.dtype}, a buffer" for name, b in self.model.named_buffers()]

    def training_claims(self) -> list[tuple[str, str, str]]:
        """Return what ranks must train with alike: the name of it, its value as text, and what to do if it differs."""
        given, sampler = self.dataloader_args or {}, (self.dataloader_args or {}).get("sampler")
        order = ("batch_size", "drop_last", "shuffle")
        data = {key: given.get(key) for key in order} | {"sampler": type(sampler), "seed": self.sampler_seed}
        if isinstance(self.optim_func, Optimizer):
            optimizer = optimizer_text(self.optim_func)
        else:
            optimizer = f"{value_text(self.optim_func)} with {value_text(self.optim_args)}"
        names = (
            "max_grad_norm", "num_micro_batches", "find_unused_parameters", "ddp_options", "batch_size", "dry_run",
            "model_input_format",
        )  # fmt: skip
        rest = {name: getattr(self, name) for name in names}
        rest |= {name: getattr(self, name) is not None for name in ("loss_weight", "time_limit")}
        weights = self.birth.weights if self.birth is not None else None
        return [
            (
                "How the model gets its values",
                "it has them" if self.birth is None else "on meta" if weights is None else f"from {weights}",
                "build it on meta, or with values, on every rank alike, and name the same weights",
            ),
            ("The optimizer", optimizer, "pass equal optim_func and optim_args on every rank"),
            (
                "The learning-rate schedule",
                f"{value_text(self.lr_scheduler_cls)} with {value_text(self.lr_scheduler_args)}",
                "pass equal lr_scheduler_cls and lr_scheduler_args on every rank",
            ),
            (
                "The length of the data",
                f"{_length_text(self.dataset)}, {_length_text(sampler)}",
                "give every rank the whole dataset: each of them takes its own part of every batch; ranks with fewer "
                "samples would end their epoch while the others wait for them",
            ),
            ("The order of the data", value_text(data), "pass equal dataloader_args and sampler_seed on every rank"),
            ("An argument of accelerate", value_text(rest), "pass it alike on every rank"),
        ]

    def model_digest(self) -> str:
        """Return a short text that models share whose parameters and buffers have equal names, shapes and dtypes."""
        lines = self.parameter_lines()
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        return f"{type(self.model).__name__} with {len(lines)} parameters and buffers, digest {digest}"


_NO_HYPERPARAMETERS = ("params", "param_names", "differentiable")  # torch adds the last when an optimizer is copied


def optimizer_text(optimizer: Optimizer | None, groups: bool = True) -> str:
    """Return the hyperparameters of an optimizer as :func:`value_text` writes them.

    Args:
        optimizer: Any torch optimizer, or None.
        groups: Whether to write those of each of its groups; else its defaults.
    """
    if optimizer is None:
        return "none"
    every: Sequence[Mapping[str, Any]] = optimizer.param_groups if groups else (optimizer.defaults,)
    own = [{key: value for key, value in group.items() if key not in _NO_HYPERPARAMETERS} for group in every]
    return f"{type(optimizer).__name__} with {value_text(own)}"


def _length_text(samples: Any) -> str:
    if samples is None:
        return "none"
    try:
        return f"{type(samples).__name__} of {len(samples)} samples"
    except TypeError:  # a stream, or an order without an end
        return f"{type(samples).__name__} without a length"


# --- Checks of single arguments


def check_keywords(option: str, function: Callable[..., Any], given: Mapping[str, Any] | None) -> None:
    """Refuse keyword arguments that the function cannot take beside its first, before the model is changed."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature, which raises its own error
        return
    names = [name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in given or {}:
        if key not in names and not takes_any:
            raise ConfigError(
                f"{option} has an unknown key {key!r}{did_you_mean(key, names)}",
                expected=f"keyword arguments of {getattr(function, '__name__', function)}",
                got=repr(key),
                fix="correct the key or leave it out",
            )
    try:
        signature.bind(None, **(given or {}))
    except TypeError as error:
        raise ConfigError(
            f"{option} does not fit {getattr(function, '__name__', function)}: {error}",
            expected=f"{option} for {signature}",
            got=repr(dict(given or {})),
            fix="add what is missing",
        ) from error
    if isinstance(function, type) and issubclass(function, Optimizer) and function.__module__.startswith("torch."):
        _check_values(option, function, given or {})


def _check_values(option: str, optim_func: type[Optimizer], given: Mapping[str, Any]) -> None:
    """Refuse values of a wrong kind for torch's optimizers, which fail in the middle of a comparison.

    Raises:
        ConfigError: Naming an argument without which the optimizer can be built.
    """
    wrong = _type_error(optim_func, given)
    for key in given if wrong is not None else ():
        if _type_error(optim_func, {name: value for name, value in given.items() if name != key}) is None:
            raise ConfigError(
                f"{option} has a value for {key!r} that {optim_func.__name__} cannot use",
                expected="a value of the kind that its documentation names, such as a number",
                got=f"{type(given[key]).__name__} {given[key]!r:.80} ({wrong})",
                fix="correct the value",
            ) from wrong


def _type_error(optim_func: Callable[..., Any], given: Mapping[str, Any]) -> TypeError | None:
    try:
        optim_func([nn.Parameter(torch.zeros(1))], **given)
    except TypeError as error:
        return error
    except Exception:  # its text is clear without ours
        return None
    return None


def check_lr_scheduler(scheduler: Any, given: Mapping[str, Any] | None = None) -> None:
    """Refuse a scheduler, or what builds one from ``given``, whose ``step`` needs an argument.

    Raises:
        ConfigError: When it does, as ReduceLROnPlateau's, or when the scheduler cannot take what is given.
    """
    if callable(scheduler):
        check_keywords("lr_scheduler_args", scheduler, given)
    kind = scheduler if isinstance(scheduler, type) else type(scheduler)
    step = getattr(kind, "step", None)
    if not callable(step):  # a function that builds one: its result is checked later
        return
    try:
        inspect.signature(step).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{kind.__name__} cannot be stepped after every optimizer step",
            expected="an lr_scheduler_cls whose step() needs nothing but the number of steps",
            got=f"step{inspect.signature(step)}: {error}",
            fix="build it over result.optim, and call its step with a validation loss that is equal on every rank "
            "(result.evaluate returns one)",
        ) from error


def check_rates(optimizer: Any) -> None:
    """Refuse an optimizer without learning rates beside a scheduler.

    Raises:
        ConfigError: For one that chooses its steps itself, as ``Adafactor`` with ``relative_step`` does.
    """
    if any(group.get("lr", 0.0) is None for group in getattr(optimizer, "param_groups", ())):
        raise ConfigError(
            f"{type(optimizer).__name__} has no learning rate that an lr_scheduler_cls could change",
            expected="an optimizer with an lr",
            got="lr=None",
            fix="leave the scheduler out, or give an lr (to Adafactor with relative_step=False)",
        )


def check_kinds(given: Mapping[str, Any]) -> None:
    """Refuse values that cannot be used before anything is predicted or changed.

    Args:
        given: Arguments of ``accelerate`` by name; those that ``_KINDS`` lacks are checked elsewhere.

    Raises:
        ConfigError: Naming the argument.
    """
    for name, (is_right, expected, fix) in _KINDS.items():
        value = given.get(name)
        if value is not None and not is_right(value):
            raise ConfigError(
                f"{name} is of a wrong kind", expected=expected, got=f"{type(value).__name__} {value!r:.80}", fix=fix
            )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 1


def _is_norm(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_list(value: Any) -> bool:
    return not isinstance(value, str)


# By argument: whether a value can be used, what is expected, and what to do.
_KINDS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "optim_func": (
        lambda value: callable(value) or isinstance(value, Optimizer),
        "an optimizer's class, a function that builds one, or an optimizer",
        "pass torch.optim.AdamW, and its arguments as optim_args",
    ),
    "loss_func": (
        is_loss_func,
        "a function of the model's input and its output",
        'pass lambda inputs, output: F.cross_entropy(output, inputs["labels"]), or what of the input is the target',
    ),
    "loss_weight": (
        callable,
        "a function of a model input",
        'pass lambda inputs: (inputs["labels"] != -100).sum(), or another count',
    ),
    "prepare_input": (callable, "a function of a batch and a device", "leave it out to move tensors to the device"),
    "optim_param_func": (callable, "a function of the model", "return parameter groups from it"),
    "lr_scheduler_cls": (callable, "a scheduler's class", "pass torch.optim.lr_scheduler.StepLR, or another"),
    "dataset": (
        lambda value: not isinstance(value, DataLoader),
        "a dataset: every rank gets a loader of its own part",
        "pass loader.dataset, and the loader's arguments as dataloader_args",
    ),
    "max_grad_norm": (_is_norm, "a number above 0, or None", "use None to measure the norm without clipping"),
    "num_micro_batches": (_is_count, "a whole number, 1 or more", "use 1 to train on whole batches"),
    "excluded": (_is_list, "a list of names of methods", "put the name into a list"),
    "included": (_is_list, "a list of names of methods", "put the name into a list"),
    "cluster": (
        lambda value: isinstance(value, str | os.PathLike | Cluster),
        "a cluster file, the name of a preset, or a Cluster",
        "name the file that meshwright calibrate has written, or leave it out",
    ),
    "batch_size": (_is_integer, "a whole number of samples over all ranks", "correct it"),
}


def _storages(tree: Any) -> set[int]:
    """Return the storages of all tensors in nested containers."""
    return {storage_identity(leaf.untyped_storage()) for leaf in tensors_of(tree)}
