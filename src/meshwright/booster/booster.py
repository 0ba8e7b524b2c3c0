"""``Booster``: a plain model, its optimizer and its criterion in; the same, distributed by a plugin, out."""

from __future__ import annotations

import contextlib
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from meshwright.accelerated import Accelerated
from meshwright.auto import accelerate
from meshwright.batches import batch_size_of, micro_batches, to_device
from meshwright.booster import checks
from meshwright.booster.checkpoint import CheckpointVerbs
from meshwright.booster.criterion import loss_of, wrapped_criterion
from meshwright.booster.lora import with_lora
from meshwright.booster.optimizer import BoostedOptimizer
from meshwright.booster.pipeline import (
    check_parts,
    execute_one_stage,
    execute_stages,
    input_format,
    joined,
    needs_sample,
    reshard,
    sample_of,
)
from meshwright.booster.plugin import Plugin
from meshwright.runtime import print_rank, same_on_every_rank, settings, world_size
from meshwright.store.entries import unwrapped
from meshwright.strategy import Strategy


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
        """The strategy that ``boost`` applies in this world."""
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
        """Distributes a model and hands its optimizer the new parameters.

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
        """Casts inputs to the model's precision, as ``Accelerated.step`` does for its own, and adds ``unwrap``."""
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
        """Puts LoRA adapters around a plain model, with the peft library; before ``boost``.

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
