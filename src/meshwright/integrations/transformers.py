"""A drop-in ``transformers.Trainer`` whose distribution is a strategy.

::

    from meshwright.integrations.transformers import Trainer, TrainingArguments

    arguments = TrainingArguments("out", per_device_train_batch_size=4)
    trainer = Trainer(model, arguments, train_dataset=data, strategy="fsdp")
    trainer.train()

The loop, its callbacks and its logs are transformers'. :class:`Trainer` replaces what that loop asks of accelerate: the
model and its optimizer come from :func:`meshwright.accelerate`, batches are divided among replicas, and what
``TrainingArguments`` ask of other engines is refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from meshwright.errors import CheckpointError, ConfigError, LaunchError, ModelError
from meshwright.integrations.strategy_accelerator import Repeats, StrategyAccelerator
from meshwright.nn import reshard
from meshwright.nn.batches import leaves_of
from meshwright.runtime import init_distributed, preserved_rng, same_on_every_rank, world_size
from meshwright.store.entries import unwrapped
from meshwright.store.model_file import load, save_folder, whole_state_dict
from meshwright.store.optimizer_file import load_optimizer, save_optimizer
from meshwright.strategy import Strategy
from meshwright.training.accelerate import accelerate
from meshwright.training.accelerated import Accelerated

_OPTIMIZER_FOLDER, _SCHEDULER_FILE = "optimizer", "scheduler.pt"
_OPTIMIZERS_OF_MODELS = ("params", "model", "optimizer_dict")
_STEP_METHODS = ("loss_spike", "gradient_accumulation")


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """transformers' ``TrainingArguments``, with the strategy; they join the world as Meshwright does.

    Args:
        strategy: A strategy's text or file, as ``meshwright train --strategy`` takes it; None lets the planner choose.
    """

    strategy: str | None = field(default=None, metadata={"help": "Meshwright strategy; chosen if left out."})

    def __post_init__(self) -> None:
        _join_world(self)
        super().__post_init__()


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` on Meshwright's engine: every argument of it, and these. Every rank calls it alike.

    ``per_device_train_batch_size`` counts for a replica: ranks that divide layers or tokens among themselves share its
    samples. Samples that fill the last batch of an epoch count nowhere. Checkpoints resume on any number of ranks.

    Args:
        strategy: A Strategy, or anything it can be made from; None takes that of the arguments, or a chosen one.
        accelerate_args: Further arguments of :func:`meshwright.accelerate`, such as ``weights`` and ``memory_limit``.

    Raises:
        ConfigError: On every rank, when the arguments ask for what a strategy decides, or for what cannot be honoured.
    """

    model: Any
    optimizer: Any
    label_smoother: Any

    def __init__(
        self, *args: Any, strategy: Any = None, accelerate_args: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self.job: Accelerated | None = None
        given = options.get("args", args[1] if len(args) > 1 else None) or TrainingArguments("tmp_trainer")
        _join_world(given)
        with same_on_every_rank():
            check_arguments(given)
        self._strategy = strategy if strategy is not None else getattr(given, "strategy", None)
        self._accelerate_args = dict(accelerate_args or {})
        self._recomputes = given.activation_checkpointing  # the method ``checkpoint`` does it, in place of the model
        self._shares: list[float] = []  # of the micro-batches of a step, in its loss
        if len(args) < 2:
            options["args"] = given
        super().__init__(*args, **options)
        with same_on_every_rank():
            _check_placement(self)
        if self.label_smoother is not None:  # transformers asks for the class's name, which sharding changes
            shifts = type(unwrapped(self.model)).__name__ in _causal_models()
            smooth = self.label_smoother
            self.label_smoother = lambda outputs, labels, shift_labels=False, **more: smooth(
                outputs, labels, shift_labels=shifts, **more
            )

    # --- The engine

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator that the loop talks to."""
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise _refused("another engine", "ACCELERATE_USE_FSDP or ACCELERATE_USE_DEEPSPEED in the environment")
        self.accelerator.__class__ = StrategyAccelerator
        self.accelerator.data_seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.accelerator.job = None
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: each rank moves its own part alone."""

    def _distribute(self) -> Accelerated:
        """Apply the strategy to the model, if that has not been done; collective."""
        if self.job is not None and unwrapped(self.job.model) is unwrapped(self.model):
            return self.job
        self.job = self.accelerator.job = None
        self._set_signature_columns_if_needed()
        sample = self._sample()
        strategy, included = self._asked_strategy()
        optim_func, optim_options = self._asked_optimizer()
        options: dict[str, Any] = {"ddp_options": _ddp_options(self.args), "included": included} | optim_options
        if self.args.ddp_find_unused_parameters is not None:
            options["find_unused_parameters"] = self.args.ddp_find_unused_parameters
        if strategy is None:
            options["excluded"] = ("pipeline_parallel", *_STEP_METHODS)
        job = accelerate(
            self.model, optim_func, loss_func=_loss_for_predictions, strategy=strategy, sample_batch=sample,
            model_input_format="unpack_dict", num_micro_batches=self.args.gradient_accumulation_steps,
            **(options | self._accelerate_args),
        )  # fmt: skip
        self.job = self.accelerator.job = job
        self.model, self.model_wrapped, self.optimizer = unwrapped(job.model), job.model, job.optim
        return job

    def _asked_strategy(self) -> tuple[Strategy | None, list[Any]]:
        """Return the strategy with the methods that the arguments ask for; or None, and these as constraints."""
        half = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else None
        asked: list[Any] = [("amp_native", half)] if half else []
        asked += ["checkpoint"] if self._recomputes else []
        asked += ["compile"] if self.args.torch_compile else []
        if self._strategy is None:
            return None, asked
        strategy = Strategy(self._strategy)
        with same_on_every_rank():
            _check_strategy(strategy)
        for method in asked:
            name = method if isinstance(method, str) else method[0]
            if name not in strategy and not (name == "amp_native" and {"half", "fp8"} & set(strategy.names)):
                strategy = strategy.with_method(method)
        return strategy, []

    def _asked_optimizer(self) -> tuple[Any, dict[str, Any]]:
        """Return the optimizer's class, or an optimizer, and further arguments of ``accelerate``."""
        if self.train_dataset is None and self.optimizer is None:
            return None, {}
        own = type(self).create_optimizer is not transformers.Trainer.create_optimizer
        if self.optimizer is None and own:
            self.create_optimizer()
        if self.optimizer is not None:
            return self.optimizer, {}
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        options = dict(options)
        if any(key in options for key in _OPTIMIZERS_OF_MODELS) or not issubclass(kind, Optimizer):
            raise _refused(f"optim={self.args.optim!s}", "an optimizer that is built from the model itself")
        decayed = set(self.get_decay_parameter_names(self.model))
        groups = functools.partial(_groups, decayed=decayed, weight_decay=self.args.weight_decay)
        return kind, {"optim_args": options, "optim_param_func": groups}

    def _sample(self) -> Any:
        """Return a replica's batch of one step, for predictions and for methods that look at the data flow."""
        data = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        data = next(iter(data.values())) if isinstance(data, dict) else data
        if data is None:
            return None
        training = data is self.train_dataset
        size = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        size *= self.args.gradient_accumulation_steps if training else 1
        with preserved_rng():
            # The accelerator divides among nobody yet.
            return next(iter(self._get_dataloader(data, "Training", size, self._get_eval_sampler)))

    # --- Training

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **options: Any) -> Any:
        """Train, as ``transformers.Trainer.train`` does.

        Raises:
            ConfigError: With a ``trial`` of a hyperparameter search.
        """
        if trial is not None:
            raise _refused("trial", "a hyperparameter search inside one process")
        with _set_for_a_while(self.args, activation_checkpointing=False):
            return super().train(resume_from_checkpoint, **options)

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Refuse: each trial would distribute the model again."""
        raise _refused("hyperparameter_search", "a search inside one process")

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        self._distribute()
        return super()._inner_training_loop(*args, **options)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: DataLoader | None = None) -> nn.Module:
        return self._distribute().model

    def get_tp_size(self) -> int:
        """Return the number of ranks that share the samples of a replica."""
        return world_size() // self.accelerator.num_replicas

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, transformers.trainer_pt_utils.LengthGroupedSampler) and sampler.generator is None:
            # Generators differ between replicas, which would divide different orders.
            sampler.generator = torch.Generator().manual_seed(self.accelerator.data_seed)
        return sampler

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the micro-batches of a step without samples that fill an epoch up, and the tokens of all of them."""
        self.optimizer.zero_grad()  # an offloaded optimizer has gradients of its own
        batches, self._shares = [], []
        for batch in itertools.islice(epoch_iterator, num_batches):
            own, share = self.accelerator.own_samples(batch)
            batches.append(own)
            self._shares.append(share)
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if self.args.average_tokens_across_devices:  # otherwise a rank divides by its own number, which cannot be 0
            batch_samples = [_without_labels(each) if isinstance(each, Repeats) else each for each in batch_samples]
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of a micro-batch; see ``transformers.Trainer``."""
        share = self._share(inputs, self._shares.pop(0), num_items_in_batch)
        with self.accelerator.scaling(share):
            return super().training_step(model, inputs, num_items_in_batch) * share

    def _share(self, inputs: Any, by_samples: float, num_items_in_batch: Any) -> float:
        """Return the factor of a loss in the mean over replicas."""
        by_tokens = num_items_in_batch is not None and self.args.average_tokens_across_devices
        return float(not isinstance(inputs, Repeats)) if by_tokens else by_samples

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # clipping is the job's, for every layout

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_tp_size()

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of this rank's part of a replica's step."""
        return super().floating_point_ops(inputs) // self.get_tp_size()

    # --- Evaluation

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate, as ``transformers.Trainer`` does; repeats count nowhere, and all ranks have the same result."""
        output = super().evaluation_loop(*args, **options)
        reshard(self._distribute().model)
        return output

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return this replica's part of the evaluation data."""
        self._distribute()
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return this replica's part of the test data."""
        self._distribute()
        return super().get_test_dataloader(test_dataset)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Return the loss of the global batch, and this replica's logits and labels."""
        own, by_samples = self.accelerator.own_samples(inputs)
        loss, logits, labels = super().prediction_step(model, own, prediction_loss_only, ignore_keys)
        if loss is not None:
            share = self._share(own, by_samples, self._counts_tokens(own))
            loss = self.accelerator.reduce(loss * share, "mean")
        return loss, logits, labels

    def _counts_tokens(self, inputs: Any) -> bool | None:
        counted = "labels" in inputs and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)
        return True if counted else None

    # --- Saving and resuming

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        job = self._distribute()
        if not isinstance(self.model, transformers.PreTrainedModel):  # adapters, or a module of the user's
            super()._save(output_dir, whole_state_dict(job.model))
            return
        save_folder(
            job.model, output_dir, tokenizer=self.processing_class or getattr(self.data_collator, "tokenizer", None)
        )
        if self.args.should_save:
            torch.save(self.args, Path(output_dir, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        job = self._distribute()
        save_optimizer(self.optimizer, job.model, Path(output_dir, _OPTIMIZER_FOLDER), folder=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        job = self._distribute()
        if isinstance(self.model, transformers.PreTrainedModel):
            load(job.model, resume_from_checkpoint)
        else:
            load(job.model, _weights_file(resume_from_checkpoint), strict=not hasattr(self.model, "peft_config"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        job = self._distribute()
        with same_on_every_rank():
            _check_own(Path(checkpoint))
        load_optimizer(self.optimizer, job.model, Path(checkpoint, _OPTIMIZER_FOLDER))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, _SCHEDULER_FILE), weights_only=True))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


# --- Checks


def _check_own(checkpoint: Path) -> None:
    """Refuse to resume from a checkpoint of another Trainer, whose optimizer states lie otherwise."""
    if not Path(checkpoint, _OPTIMIZER_FOLDER).is_dir():
        found = [each.name for each in checkpoint.glob("optimizer*")]
        raise CheckpointError(
            f"{checkpoint} has no optimizer states of meshwright's Trainer",
            expected=f"a folder {_OPTIMIZER_FOLDER}, as this Trainer writes it",
            got=f"{', '.join(found)} of another Trainer" if found else "none",
            fix="train from its weights: build the model with from_pretrained(CHECKPOINT), and leave "
            "resume_from_checkpoint out",
        )


def _join_world(args: transformers.TrainingArguments) -> None:
    """Make this process a rank, unless the program has done so: with what it chose then."""
    backend = "gloo" if args.use_cpu else args.ddp_backend
    try:
        init_distributed(seed=args.seed, backend=backend, timeout_s=float(args.ddp_timeout))
    except LaunchError:
        if not dist.is_initialized():
            raise


def check_arguments(args: transformers.TrainingArguments) -> None:
    """Refuse what a strategy decides in place of the arguments, and what cannot be honoured.

    Raises:
        ConfigError: Naming the argument.
    """
    decided = {
        "fsdp": args.fsdp, "deepspeed": args.deepspeed, "parallelism_config": args.parallelism_config,
        "activation_checkpointing_kwargs": args.activation_checkpointing_kwargs,
        "torch_compile_backend": args.torch_compile and args.torch_compile_backend not in (None, "inductor"),
        "torch_compile_mode": args.torch_compile_mode,
    }  # fmt: skip
    for name, value in decided.items():
        if value:
            raise _refused(name, "what the strategy decides")
    config = args.accelerator_config
    impossible = {
        "auto_find_batch_size": args.auto_find_batch_size,
        "fp16_full_eval": args.fp16_full_eval,
        "bf16_full_eval": args.bf16_full_eval,
        "eval_use_gather_object": args.eval_use_gather_object,
        "debug": args.debug,
        "train_sampling_strategy='batch_rebalance'": args.train_sampling_strategy == "batch_rebalance",
        "place_model_on_device": args.place_model_on_device,
        "accelerator_config.split_batches": config.split_batches,
        "accelerator_config.dispatch_batches": config.dispatch_batches,
        "accelerator_config.even_batches=False": not config.even_batches,
        "several GPUs in one process": args.n_gpu > 1,
    }
    for name, value in impossible.items():
        if value:
            raise _refused(name, "what this Trainer cannot do")
    if args.device.type == "cuda" and dist.get_backend() == "nccl":
        raise ConfigError(
            "transformers' TrainingArguments have made a world without a backend for tensors on the host",
            expected="gloo beside NCCL",
            got="NCCL alone",
            fix="import TrainingArguments from meshwright.integrations.transformers, too",
        )


def _refused(name: str, what: str) -> ConfigError:
    fix = "leave it out"
    if name == "several GPUs in one process":
        fix = "start with torchrun, one process for each GPU"
    elif what.startswith("what the strategy"):
        fix = "leave it out, and name methods in strategy=; the command 'meshwright methods' lists them"
    return ConfigError(
        f"Meshwright's Trainer cannot take {name}",
        expected="arguments that a strategy and transformers' loop honour",
        got=f"{name}: {what}",
        fix=fix,
    )


def _check_placement(trainer: transformers.Trainer) -> None:
    if trainer.is_model_parallel or trainer.is_distributed_loading_by_transformers:
        raise ModelError(
            "The model is divided among devices already",
            expected="a plain model: on the CPU, on one device, or on meta with accelerate_args={'weights': FOLDER}",
            got="one with device_map, tp_plan or distributed_config",
            fix="leave these out of from_pretrained",
        )


def _check_strategy(strategy: Strategy) -> None:
    own = [name for name in ("pipeline_parallel", *_STEP_METHODS) if name in strategy]
    if own:
        raise ConfigError(
            f"{own[0]} works inside Accelerated.step, and transformers' loop calls the model and backward itself",
            expected="a strategy without it",
            got=str(strategy),
            fix="leave it out, or train with meshwright.accelerate or 'meshwright train'",
        )


# --- Small parts


def _causal_models() -> set[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def _groups(model: nn.Module, *, decayed: set[str], weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of parameters that ``transformers.Trainer.create_optimizer`` makes."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return [
        {"params": [each for name, each in named if name in decayed], "weight_decay": weight_decay},
        {"params": [each for name, each in named if name not in decayed], "weight_decay": 0.0},
    ]


def _ddp_options(args: transformers.TrainingArguments) -> dict[str, Any]:
    given = {
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    return {name: value for name, value in given.items() if value is not None}


def _loss_for_predictions(inputs: Any, output: Any) -> torch.Tensor:
    """Return the loss in the output, or what stands in for one that ``compute_loss`` makes; never trained with."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is not None:
        return loss
    return next(leaf for leaf in leaves_of(output) if isinstance(leaf, torch.Tensor)).float().mean()


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    marked = {name: torch.full_like(batch[name], -100) for name in ("labels", "shift_labels") if name in batch}
    return {**batch, **marked}


def _weights_file(folder: str) -> Path:
    names = ("adapter_model.safetensors", "model.safetensors", "pytorch_model.bin")
    return next((Path(folder, name) for name in names if Path(folder, name).is_file()), Path(folder, names[1]))


@contextlib.contextmanager
def _set_for_a_while(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
