"""A strategy of Lightning's Trainer that is a strategy of Meshwright.

::

    import lightning as L
    from meshwright.integrations.lightning import TrainerStrategy

    trainer = L.Trainer(accelerator="auto", devices=8, strategy=TrainerStrategy(["fsdp", "checkpoint"]))
    trainer.fit(module, loader)

The loop, its callbacks, loggers and schedules are Lightning's, and the LightningModule stays as it is: its
``training_step`` runs inside the distributed model's forward. ``trainer.strategy.job`` is what
:func:`meshwright.accelerate` returned.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from meshwright.errors import ConfigError, DataError
from meshwright.integrations.lightning.common import (
    OTHER_STATE,
    Distribution,
    join_world,
    process_options,
    read_other_state,
    refuse_code,
)
from meshwright.nn import reshard
from meshwright.nn.batches import batch_size_of, first_samples
from meshwright.optim.guarded_step import guard_of
from meshwright.runtime import same_on_every_rank
from meshwright.store.model_file import load, save_folder
from meshwright.store.optimizer_file import load_optimizer, save_optimizer
from meshwright.training.accelerated import Accelerated

_WEIGHTS, _OPTIMIZER = "model", "optimizer"


class TrainerStrategy(DDPStrategy):
    """Distribute the LightningModule of ``Trainer.fit`` by a strategy of Meshwright.

    ``batch_size`` of the loaders counts for a replica: ranks that divide layers among themselves share its samples.
    Samples that fill the last batch of an epoch are not trained with. A checkpoint is a folder that resumes under any
    strategy, on any number of ranks.

    Args:
        strategy: A Strategy, or anything it can be made from; None lets the planner choose.
        sample_batch: What the module's ``forward`` takes, of a replica's size: for predictions, and for methods that
            look at the model's data flow.
        accelerate_args: Further arguments of :func:`meshwright.accelerate`.
        options: Arguments of Lightning's ``DDPStrategy`` about processes, such as ``cluster_environment``.
    """

    optimizers: list[Optimizer]
    precision_plugin: Precision

    def __init__(
        self,
        strategy: Any = None,
        *,
        sample_batch: Any = None,
        accelerate_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**process_options(options))
        self._distribution = Distribution(strategy, sample_batch, dict(accelerate_args or {}))
        self._job: Accelerated | None = None
        self._distributed: pl.LightningModule | None = None
        self._share = 1.0  # of this replica's batch in the mean loss

    @property
    def job(self) -> Accelerated:
        """The distributed job, as ``accelerate`` returned it.

        Raises:
            ConfigError: Before the Trainer has set up the model.
        """
        if self._job is None:
            raise ConfigError(
                "There is no distributed model yet",
                expected="trainer.fit, validate, test or predict first",
                got="a strategy that was not set up",
                fix="read it in a callback, or afterwards",
            )
        return self._job

    def setup_environment(self) -> None:
        """Make or join the world."""
        super().setup_environment()
        join_world(self.local_rank, self.root_device)

    # --- The model

    def setup(self, trainer: pl.Trainer) -> None:
        """Distribute the module, and for ``fit`` its optimizer; collective.

        Raises:
            ConfigError: On every rank, when the Trainer asks for what cannot be honoured.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        fits = trainer.state.fn == TrainerFn.FITTING
        with same_on_every_rank():
            self._check(trainer, module, fits)
        if self._distributed is not module:
            self._distribute(trainer, module, fits)
        self.model = self.job.model
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False  # weights that were gathered in inference mode cannot be trained with

    def _distribute(self, trainer: pl.Trainer, module: pl.LightningModule, fits: bool) -> None:
        optimizer = None
        if fits:
            self.setup_optimizers(trainer)
            optimizer = self.optimizers[0]
        route_forward(module)
        precision = self.precision_plugin.precision
        self._job = self._distribution.apply(module, optimizer, str(precision), "The Trainer")
        self._distributed = module
        with same_on_every_rank():
            _check_tokens(self._job)
        _update_properties(module, device=self.root_device)
        self.precision_plugin = JobPrecision(self._job)
        if fits:
            assert self._job.optim is not None
            self.optimizers = [self._job.optim]

    def _check(self, trainer: pl.Trainer, module: pl.LightningModule, fits: bool) -> None:
        averaging = (StochasticWeightAveraging, WeightAveraging)
        wrong = {
            "manual optimization (automatic_optimization=False)": fits and not module.automatic_optimization,
            "sync_batchnorm=True": self._layer_sync is not None,
            "callbacks that average weights": any(isinstance(each, averaging) for each in trainer.callbacks),
            "fit for a module that this strategy has distributed before": fits and self._distributed is module,
        }
        found = next((name for name, is_asked in wrong.items() if is_asked), None)
        if found is not None:
            raise ConfigError(
                f"TrainerStrategy cannot serve {found}",
                expected="automatic optimization of a plain module, with Lightning's own callbacks",
                got=found,
                fix=_FIXES.get(found, "leave it out, or train with meshwright.accelerate and a loop of your own"),
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return this replica's number, for Lightning's ``DistributedSampler``."""
        return {"num_replicas": self.job.num_replicas, "rank": self.job.replica}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of Lightning's as it is.

        Raises:
            DataError: When ``predict`` would give some ranks fewer batches than others, which gather weights together.
        """
        trainer: Any = self.lightning_module.trainer if self.lightning_module is not None else None
        predicts = trainer is not None and trainer.state.fn == TrainerFn.PREDICTING
        data: Any = getattr(dataloader, "dataset", None)
        if predicts and hasattr(data, "__len__") and len(data) % self.job.num_replicas:
            raise DataError(
                "predict divides the samples among replicas without repeating any, and not all get equally many",
                expected=f"a multiple of {self.job.num_replicas} samples",
                got=str(len(data)),
                fix="leave some out, or add some and drop their predictions",
            )
        return dataloader

    def model_to_device(self) -> None:
        """Leave the model where it is: each rank moves its own part alone."""

    def teardown(self) -> None:
        """Leave model and optimizer where they are, distributed."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- Steps

    def training_step(self, *args: Any, **options: Any) -> Any:
        """Run the module's ``training_step`` inside the distributed model's forward."""
        return self._call("training_step", _train_loader, args, options)

    def validation_step(self, *args: Any, **options: Any) -> Any:
        """Run the module's ``validation_step`` inside the distributed model's forward."""
        return self._call("validation_step", _validation_loader, args, options)

    def test_step(self, *args: Any, **options: Any) -> Any:
        """Run the module's ``test_step`` inside the distributed model's forward."""
        return self._call("test_step", _test_loader, args, options)

    def predict_step(self, *args: Any, **options: Any) -> Any:
        """Run the module's ``predict_step`` inside the distributed model's forward."""
        return self._call("predict_step", None, args, options)

    def _call(self, name: str, loader_of: Callable | None, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._share = 1.0
        if args and loader_of is not None:
            place = options.get("dataloader_idx", args[2] if len(args) > 2 else 0)
            args = (self._own_samples(trainer, loader_of(trainer, place), *args[:2]), *args[1:])
        with routed(self.lightning_module, name):
            return self.job.model(*args, **options)

    def _own_samples(self, trainer: Any, loader: Any, batch: Any, number: int = 0) -> Any:
        """Return the batch without the sample that fills the last one of an epoch, and note its weight."""
        sampler = getattr(loader, "sampler", None)
        if not isinstance(loader, DataLoader) or not isinstance(sampler, DistributedSampler) or sampler.drop_last:
            return batch
        data: Any = sampler.dataset
        repeats = sampler.total_size - len(data)
        try:
            size = batch_size_of(batch)
        except DataError:
            return batch
        if not repeats or number * (loader.batch_size or 0) + size != sampler.num_samples:
            return batch
        replicas = sampler.num_replicas
        own = size - (sampler.rank >= replicas - repeats)
        found = first_samples(batch, own)
        if found is None:  # it cannot be told what belongs to a sample
            return batch
        self._share = own * replicas / (size * replicas - repeats)
        if trainer._results is not None:
            trainer._results.batch_size = own  # the weight of what this step logs, in the mean over an epoch
        return found[0]

    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **options: Any) -> Any:
        """Run backward of the loss, weighted by its samples and with the loss scale of fp16."""
        loss = closure_loss * self._share if self._share != 1 else closure_loss
        guard = guard_of(self.job.optim)
        super().backward(loss if guard is None else guard.scaled(loss), optimizer, *args, **options)
        return closure_loss.detach()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients inside, which the next backward outside averages."""
        with self.job.no_sync():
            yield

    # --- Exchange: ranks of one replica hold the same numbers

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over replicas; see ``DDPStrategy.reduce``."""
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in _MEANS:
            tensor = tensor.double()  # the mean of how many samples were logged, which Lightning rounds down
        found = super().reduce(tensor, group, reduce_op)
        sums = isinstance(found, torch.Tensor) and reduce_op in ("sum", dist.ReduceOp.SUM)
        if not sums or group is not None or self._job is None:
            return found
        return found / (dist.get_world_size() // self._job.num_replicas)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, decided so; collective."""
        count = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(count)
        return int(count) == dist.get_world_size() if all else bool(count)

    def on_validation_end(self) -> None:
        """Free gathered weights."""
        reshard(self.job.model)

    on_test_end = on_predict_end = on_validation_end

    # --- Checkpoints: a folder that loads on any number of ranks

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Load into the distributed model."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: :meth:`save_checkpoint` writes the weights, shard by shard."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing: :meth:`save_checkpoint` writes the states, shard by shard."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write weights, optimizer states and all else into a folder; collective.

        Raises:
            ConfigError: With ``storage_options``.
        """
        if storage_options is not None:
            raise ConfigError(
                "A checkpoint is a folder, written in Meshwright's own way",
                expected="no storage_options",
                got=f"{storage_options!r:.80}",
                fix="leave them out",
            )
        folder, job = Path(self.broadcast(filepath)), self.job
        save_folder(job.model, folder / _WEIGHTS)
        if "optimizer_states" in checkpoint and job.optim is not None:
            save_optimizer(job.optim, job.model, folder / _OPTIMIZER, folder=True)
        with same_on_every_rank():
            if self.is_global_zero:
                torch.save(checkpoint, folder / OTHER_STATE)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read all but weights and optimizer states of a folder; collective.

        Raises:
            CheckpointError: On every rank, when it is none of :meth:`save_checkpoint`.
            ConfigError: With ``weights_only=False``, which would run code from the file.
        """
        refuse_code(weights_only)
        folder = Path(self.broadcast(checkpoint_path))
        with same_on_every_rank():
            found = read_other_state(folder, "fit")
        return {**found, "folder": str(folder)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights that lie beside; collective."""
        load(self.job.model, Path(checkpoint["folder"], _WEIGHTS), strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states that lie beside; collective."""
        assert self.job.optim is not None
        load_optimizer(self.job.optim, self.job.model, Path(checkpoint["folder"], _OPTIMIZER))


class JobPrecision(Precision):
    """Lightning's plain precision, with the clipping and the optimizer step of a distributed job."""

    def __init__(self, job: Accelerated) -> None:
        super().__init__()
        self._job = job

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp every element of the gradients, sharded or not."""
        self._job.clip_grad_value(float(clip_val))

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the gradients of the whole model."""
        self._job.clip_grad_norm(float(clip_val))

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any) -> Any:
        """Run forward and backward, clip, and update: optimizers of many kinds take no closure."""
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**options)
        return result


# --- Forward, through which all steps of the module run

_ROUTE = "_meshwright_route"


def route_forward(module: pl.LightningModule) -> None:
    """Let the module's forward run the method that :func:`routed` names, where it names one."""
    own = type(module).forward

    def forward(self: pl.LightningModule, *args: Any, **options: Any) -> Any:
        name = self.__dict__.pop(_ROUTE, None)  # a step that calls the module runs its own forward
        return own(self, *args, **options) if name is None else getattr(self, name)(*args, **options)

    module.forward = types.MethodType(forward, module)


@contextlib.contextmanager
def routed(module: pl.LightningModule, name: str) -> Iterator[None]:
    """Let the next forward run the method of this name."""
    module.__dict__[_ROUTE] = name
    try:
        yield
    finally:
        module.__dict__.pop(_ROUTE, None)


# --- Checks and small parts

_MEANS = ("mean", "avg", None)

_FIXES = {
    "sync_batchnorm=True": "leave it out, and convert the module by torch.nn.SyncBatchNorm",
    "callbacks that average weights": 'add the method ema to the strategy: ("ema", {"decay": 0.999})',
    "fit for a module that this strategy has distributed before": "fit before you validate, and only once: a further "
    "fit takes a new module, a new Trainer and ckpt_path",
}


def _check_tokens(job: Accelerated) -> None:
    if any(size > 1 for axis, size in job.plan.step.axes if axis in ("sequence", "context")):
        raise ConfigError(
            "Ranks that divide the tokens of a batch need a loss of divided tokens, and training_step computes it",
            expected="a strategy without the axes sequence and context",
            got=str(job.strategy),
            fix="leave them out, or train with meshwright.accelerate",
        )


def _train_loader(trainer: pl.Trainer, place: int) -> Any:
    return trainer.train_dataloader  # one, or a collection, whose batches stay as they are


def _validation_loader(trainer: pl.Trainer, place: int) -> Any:
    return _at(trainer.val_dataloaders, place)


def _test_loader(trainer: pl.Trainer, place: int) -> Any:
    return _at(trainer.test_dataloaders, place)


def _at(loaders: Any, place: int) -> Any:
    return loaders[place] if isinstance(loaders, list | tuple) else loaders
