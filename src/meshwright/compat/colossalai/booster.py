"""`Booster`: distribute a plain model, its optimizer and its criterion as a plugin says; and `launch`."""

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
    input_format,
    joined,
    needs_sample,
    reshard,
    sample_of,
)
from meshwright.compat.colossalai.checkpoint_io import CheckpointVerbs, with_lora
from meshwright.compat.colossalai.plugin import Plugin
from meshwright.methods import StageOutput
from meshwright.nn.batches import batch_size_of, micro_batches, to_device
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
        device: The kind of device to train on; None takes the one that was launched on, which it must be.
        mixed_precision: ``"fp16"`` or ``"bf16"``: autocast, where the plugin does not control the precision.
        plugin: Decides the strategy; None trains in a world of one.

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
        self._notices_told = False

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
        """Distribute a model and hands its optimizer the new parameters.

        Args:
            model: Plain, initialised, equal on every rank.
            optimizer: Built over ``model.parameters()`` and not stepped; goes on with its groups and hyperparameters.
            criterion: Computes the loss from what it is called with.
            dataloader: Returned as it is; ``plugin.prepare_dataloader`` makes one with this rank's share. Where layers,
                tokens or blocks are divided, the first sample of its dataset shows how the model runs.
            lr_scheduler: Over ``optimizer``; returned as it is, and goes on steering it.

        Returns:
            model: What ``accelerate`` makes of it, called as before; ``model.unwrap()`` is the model given.
            optimizer: See :class:`BoostedOptimizer`.
            criterion: Wrapped where the precision needs it: the loss is computed in fp32, or in autocast.
            dataloader, lr_scheduler: As given.

        Raises:
            MeshwrightError: On every rank, when anything does not fit together; nothing is changed then.
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
            model_input_format=input_format(sample),
        )
        self._tell(notices)
        self._finish_model(accelerated, strategy)
        self._boosted[accelerated.model] = accelerated
        boosted = self._finish_optimizer(accelerated)
        return accelerated.model, boosted, wrapped_criterion(criterion, accelerated, strategy), dataloader, lr_scheduler

    def _prepare(self, model: nn.Module, device: torch.device) -> list[str]:
        if self.plugin is None:
            return []
        notices = [] if self._notices_told else self.plugin.notices()
        return notices + (self.plugin.prepare_model(model, device) if isinstance(model, nn.Module) else [])

    def _tell(self, notices: list[str]) -> None:
        for notice in notices:
            print_rank(f"meshwright: {notice}", file=sys.stderr, flush=True)
        self._notices_told = True

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
        """``optimizer.backward(loss)``."""
        optimizer.backward(loss)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None, optimizer: BoostedOptimizer | None = None) -> Iterator[None]:
        """A forward and backward inside accumulate gradients, which the next one outside reduces; for any strategy.

        Raises:
            ConfigError: When neither is of this booster.
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
        """Forward and backward of one batch, in micro-batches (``num_microbatches`` of the plugin) and by its schedule.

        Args:
            data_iter: Its next batch is used: a tensor, a list or tuple of arguments, or keyword arguments; the same on
                all ranks of a pipeline.
            model: The boosted model.
            criterion: ``criterion(outputs, micro_batch)`` returns the mean loss; called where the last stage is.
            optimizer: None runs forward only.
            return_loss: Return the mean loss of this rank's samples, detached. Every rank of a pipeline knows it;
                ColossalAI's has it on the last stage only.
            return_outputs: Return the outputs, detached and joined along dim 0, where the last stage is.

        Returns:
            ``{"loss": …, "outputs": …}``, None where not asked for, and for the outputs on other stages.

        Raises:
            ConfigError, DataError: When the model is not of this booster, or the batch does not divide.
            StrategyError: When the schedule cannot run with so many micro-batches.
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
            pretrained_dir: Folder with adapters of :meth:`save_lora_as_pretrained`; None makes new ones.
            lora_config: ``peft.LoraConfig``, for new adapters.
            bnb_quantization_config: Must be None: quantised weights cannot be sharded here.
            quantize: Must be False.

        Returns:
            A ``peft.PeftModel``. Build the optimizer over it, or over its parameters that train.

        Raises:
            ConfigError, ModelError: When the model is boosted already, or the arguments are not complete.
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


# --- A criterion that users call with whatever they like, as the loss function that methods wrap.

Criterion = Callable[..., Any]


class CalledWith(NamedTuple):
    """The arguments of a criterion, in the place of a model's output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def loss_of(criterion: Criterion | None) -> Callable[[Any, Any], Any] | None:
    """Return the criterion as methods wrap losses.

    A model's own output comes in a pass without data alone, which asks what depends on what: any sum tells that.
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
    """Return the criterion with what precision and stages need around it; itself where they need nothing."""
    wrapped = accelerated.unscaled_loss_func
    if wrapped is None or not {"half", "amp_native", "pipeline_parallel"} & set(strategy.names):
        return criterion

    def call(*args: Any, **kwargs: Any) -> Any:
        elsewhere = [value for value in (*args, *kwargs.values()) if isinstance(value, StageOutput)]
        return wrapped(None, elsewhere[0] if elsewhere else CalledWith(args, kwargs))

    return call


# --- ColossalAI's verbs for joining the world.


def launch_from_torch(
    backend: str | None = None, seed: int = 1024, verbose: bool = True, timeout_s: float = 1800.0
) -> None:
    """Make this process a rank of the world that torchrun started, or a world of one. Seed: ColossalAI.

    Args:
        backend: torch.distributed backend; None means NCCL with CUDA and gloo without.
        seed: Seed of the run, for all generators.
        verbose: Say on rank 0 what was launched.
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
    """:func:`launch_from_torch` for processes that were started by other means than torchrun. Seed: ColossalAI.

    Sets torchrun's environment variables for this process and those it starts.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        host: Address of rank 0.
        port: A free port there.
        backend: See :func:`launch_from_torch`.
        local_rank: Which device of its machine the rank uses; None takes LOCAL_RANK, or ``rank``.
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
