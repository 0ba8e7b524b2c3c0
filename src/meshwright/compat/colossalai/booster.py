"""`Booster`: distribute a plain model, its optimizer and its criterion by a plugin's strategy; and `launch`."""

from __future__ import annotations

import contextlib
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwright.compat.colossalai import boost_checks as checks
from meshwright.compat.colossalai.boosted_optimizer import (
    BoostedOptimizer,
    check_parts,
    execute_one_stage,
    execute_stages,
    joined,
    needs_sample,
    sample_of,
)
from meshwright.compat.colossalai.checkpoint_io import CheckpointVerbs, with_lora
from meshwright.compat.colossalai.plugin import Plugin
from meshwright.methods import StageOutput
from meshwright.nn.batches import batch_size_of, micro_batches, to_device, usual_input_format
from meshwright.nn.fsdp_units import reshard
from meshwright.runtime import init_distributed, print_rank, same_on_every_rank, settings, world_size
from meshwright.runtime.torch_internals.pytree import tree_leaves, tree_map
from meshwright.store.entries import unwrapped
from meshwright.strategy import Strategy
from meshwright.training.accelerate import accelerate
from meshwright.training.accelerated import Accelerated


class Booster(CheckpointVerbs):
    """ColossalAI's Booster on Meshwright's engine. Every rank calls every method alike.

    ::

        booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16"))
        model, optimizer, criterion, dataloader, _ = booster.boost(model, optimizer, criterion, dataloader)
        for inputs, labels in dataloader:
            booster.backward(criterion(model(inputs), labels), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        device: The kind of device to train on, which must be the one launched on; None takes that one.
        mixed_precision: ``"fp16"`` or ``"bf16"``: autocast, unless the plugin controls the precision.
        plugin: Decides the strategy; None trains on one rank.

    Raises:
        ConfigError: When these do not fit together.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: str | None = None,
        plugin: Plugin | None = None,
    ) -> None:
        checks.check_plugin(plugin)
        checks.check_precision(mixed_precision, plugin)
        super().__init__()
        self.plugin = plugin
        self.device = torch.device(device) if device is not None else None
        self.mixed_precision = mixed_precision if plugin is None or not plugin.controls_precision else None
        self._boosted: weakref.WeakKeyDictionary[nn.Module, Accelerated] = weakref.WeakKeyDictionary()
        self._notices_printed = False

    def strategy(self) -> Strategy:
        """Return the strategy that ``boost`` applies in this world."""
        strategy = Strategy([]) if self.plugin is None else self.plugin.strategy(world_size())
        return strategy if self.mixed_precision is None else strategy.with_method(("amp_native", self.mixed_precision))

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, BoostedOptimizer | None, Callable[..., Any] | None, Any, LRScheduler | None]:
        """Distribute a model, and give its optimizer the new parameters.

        Args:
            model: Plain, initialised, equal on every rank.
            optimizer: Built over ``model.parameters()`` and not stepped; its groups and hyperparameters stay.
            criterion: Computes the loss from any arguments.
            dataloader: Returned unchanged; ``plugin.prepare_dataloader`` makes one with this rank's share. If layers,
                tokens or blocks are divided, the model is traced on the first sample of its dataset.
            lr_scheduler: Built over ``optimizer``; returned unchanged, and goes on with it.

        Returns:
            model: The result of ``accelerate``, called as before; ``model.unwrap()`` is the model given.
            optimizer: See :class:`BoostedOptimizer`.
            criterion: Wrapped if the precision needs it, to compute the loss in fp32 or in autocast.
            dataloader, lr_scheduler: Unchanged.

        Raises:
            MeshwrightError: On every rank, when the arguments do not fit together; nothing is changed then.
        """
        device = settings().device
        with same_on_every_rank():
            checks.check_world(self.plugin, self.device, device)
            strategy = self.strategy()
            checks.check_own_loop(strategy)
            checks.check_scheduler(lr_scheduler, optimizer, strategy)
        ddp_options = self.plugin.ddp_options if self.plugin is not None else {}
        notices = self._prepare(model, device)
        sample = None
        if needs_sample(strategy, model):
            sample = sample_of(dataloader, model, strategy, has_criterion=criterion is not None)
        accelerated = accelerate(
            model,
            optimizer,
            loss_func=loss_of(criterion),
            strategy=strategy,
            ddp_options=ddp_options,
            max_grad_norm=self._clipping[0] or None,
            sample_batch=sample,
            model_input_format=usual_input_format(sample),
        )
        self._print(notices)
        self._finish_model(accelerated, strategy)
        self._boosted[accelerated.model] = accelerated
        boosted = self._finish_optimizer(accelerated)
        return accelerated.model, boosted, wrapped_criterion(criterion, accelerated, strategy), dataloader, lr_scheduler

    def _prepare(self, model: nn.Module, device: torch.device) -> list[str]:
        if self.plugin is None:
            return []
        notices = [] if self._notices_printed else self.plugin.notices()
        return notices + (self.plugin.prepare_model(model, device) if isinstance(model, nn.Module) else [])

    def _print(self, notices: list[str]) -> None:
        for notice in notices:
            print_rank(f"meshwright: {notice}", file=sys.stderr, flush=True)
        self._notices_printed = True

    def _finish_model(self, accelerated: Accelerated, strategy: Strategy) -> None:
        """Cast inputs to the model's precision, as ``Accelerated.step`` does for its own, and add ``unwrap``."""
        model = accelerated.model

        def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return accelerated.prepare_input((args, kwargs), accelerated.device)

        if "half" in strategy:
            model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
        if self.plugin is not None and self.plugin.outputs_in_fp32:
            model.register_forward_hook(_outputs_in_fp32)
        model.unwrap = types.MethodType(unwrapped, model)  # type: ignore[assignment]

    def _finish_optimizer(self, accelerated: Accelerated) -> BoostedOptimizer | None:
        if accelerated.optim is None:
            return None
        max_norm, norm_type = self._clipping
        return BoostedOptimizer(
            accelerated.optim,
            accelerated.model,
            max_norm=accelerated.max_grad_norm or 0.0,
            norm_type=norm_type if max_norm else accelerated.grad_norm_type,
            stages=accelerated.stages,
        )

    @property
    def _clipping(self) -> tuple[float, float]:
        return self.plugin.clipping if self.plugin is not None else (0.0, 2.0)

    def backward(self, loss: torch.Tensor, optimizer: BoostedOptimizer) -> None:
        """Run backward of the loss, scaled where the precision needs it."""
        optimizer.backward(loss)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None, optimizer: BoostedOptimizer | None = None) -> Iterator[None]:
        """Accumulate gradients inside the context, for the next backward outside to reduce; works with any strategy.

        Raises:
            ConfigError: When neither model nor optimizer is of this booster.
        """
        with self._accelerated(model if model is not None else getattr(optimizer, "model", None)).no_sync():
            yield

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: BoostedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run forward and backward of one batch, in the plugin's number of micro-batches and by its schedule.

        Args:
            data_iter: Yields the batch: a tensor, a list or tuple of arguments, or keyword arguments; the same on all
                ranks of a pipeline.
            model: The boosted model.
            criterion: ``criterion(outputs, micro_batch)`` returns the mean loss; called on the last stage.
            optimizer: None runs forward only.
            return_loss: Return the mean loss of this rank's samples, detached. Every rank of a pipeline gets it; with
                ColossalAI only the last stage does.
            return_outputs: Return the outputs, detached and concatenated along dim 0, on the last stage.

        Returns:
            ``{"loss": …, "outputs": …}``. None if not requested, and for outputs on other stages.

        Raises:
            ConfigError, DataError: When the model is not of this booster, or the batch does not divide.
            StrategyError: When the schedule cannot run with this number of micro-batches.
        """
        accelerated = self._accelerated(model)
        batch = to_device(next(data_iter), accelerated.device)
        parts = micro_batches(batch, self.plugin.num_micro_batches(batch_size_of(batch)) if self.plugin else 1)
        if accelerated.pipeline is None:
            loss, outputs = execute_one_stage(parts, model, criterion, optimizer, accelerated, return_outputs)
        else:
            check_parts(accelerated, len(parts))
            loss, outputs = execute_stages(parts, model, criterion, optimizer, accelerated.pipeline, return_outputs)
        if optimizer is None:
            reshard(model)
        return {"loss": loss if return_loss else None, "outputs": joined(outputs)}

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | os.PathLike[str] | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Put LoRA adapters around a plain model, with the peft library; before ``boost``.

        Args:
            model: Plain.
            pretrained_dir: Folder of :meth:`save_lora_as_pretrained` with adapters; None makes new ones.
            lora_config: ``peft.LoraConfig``, for new adapters.
            bnb_quantization_config: Must be None: quantised weights cannot be sharded here.
            quantize: Must be False.

        Returns:
            A ``peft.PeftModel``. Build the optimizer over all its parameters, or over those that train.

        Raises:
            ConfigError, ModelError: When the model is boosted already, or arguments are missing.
        """
        checks.check_lora(model in self._boosted, quantize or bnb_quantization_config is not None)
        return with_lora(model, pretrained_dir, lora_config)

    def _accelerated(self, model: Any) -> Accelerated:
        found = self._boosted.get(model) if isinstance(model, nn.Module) else None
        return found if found is not None else checks.refuse_unboosted(model)


def _outputs_in_fp32(_: nn.Module, __: Any, output: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, output)


# --- Criteria.
#
# Methods wrap losses of the form ``loss_func(model_input, model_output)``, but users call a criterion with any
# arguments. So the arguments are passed to the wrapped loss in place of the model's output.

Criterion = Callable[..., Any]


class CalledWith(NamedTuple):
    """Arguments of a criterion, in place of a model's output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def loss_of(criterion: Criterion | None) -> Callable[[Any, Any], Any] | None:
    """Return the criterion as a loss function that methods can wrap.

    It receives a model's own output only from a trace over fake tensors, which needs the data flow and no values: there
    the loss is the sum of the output.
    """
    if criterion is None:
        return None

    def loss(_: Any, output: Any) -> Any:
        if isinstance(output, CalledWith):
            return criterion(*output.args, **output.kwargs)
        floating = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        return sum(leaf.sum() for leaf in floating)

    return loss


def wrapped_criterion(criterion: Criterion | None, accelerated: Accelerated, strategy: Strategy) -> Criterion | None:
    """Return the criterion, wrapped as precision and pipeline stages need it; unchanged if they do not."""
    wrapped = accelerated.unscaled_loss_func
    if wrapped is None or not {"half", "amp_native", "pipeline_parallel"} & set(strategy.names):
        return criterion

    def call(*args: Any, **kwargs: Any) -> Any:
        elsewhere = [value for value in (*args, *kwargs.values()) if isinstance(value, StageOutput)]
        return wrapped(None, elsewhere[0] if elsewhere else CalledWith(args, kwargs))

    return call


def launch_from_torch(
    backend: str | None = None, seed: int = 1024, verbose: bool = True, timeout_s: float = 1800.0
) -> None:
    """Join the world that torchrun started, or make a world of one. Seed: ColossalAI.

    Args:
        backend: torch.distributed backend; None means NCCL with CUDA and gloo without.
        seed: Seed of the run, for all generators.
        verbose: Print on rank 0 what was launched.
        timeout_s: Seconds a collective may take before its rank gives up.

    Raises:
        LaunchError: When environment and devices do not fit together.
    """
    init_distributed(seed=seed, backend=backend, timeout_s=timeout_s)
    if verbose:
        device = settings().device.type
        print_rank(f"meshwright: launched {world_size()} ranks on {device}, seed {seed}", file=sys.stderr, flush=True)


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Join a world whose processes were not started by torchrun. Seed: ColossalAI.

    It sets torchrun's environment variables for this process and its children.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        host: Address of rank 0.
        port: A free port there.
        backend: See :func:`launch_from_torch`.
        local_rank: Index of the device on this machine; None takes LOCAL_RANK, or ``rank``.
        seed: See :func:`launch_from_torch`.
        verbose: See :func:`launch_from_torch`.

    Raises:
        LaunchError: When these do not fit together.
    """
    local = local_rank if local_rank is not None else os.environ.get("LOCAL_RANK", rank)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(port), LOCAL_RANK=str(local)
    )
    launch_from_torch(backend, seed, verbose)
