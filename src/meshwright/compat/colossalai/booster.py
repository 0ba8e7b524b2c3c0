"""`Booster`: distribute a plain model, its optimizer and its criterion by a plugin's strategy; mixed precision."""

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
from meshwright.compat.colossalai.optimizers import FusedLAMB
from meshwright.compat.colossalai.plugin import Plugin
from meshwright.data.loader import GlobalBatchLoader
from meshwright.errors import ConfigError, MeshwrightError, did_you_mean
from meshwright.methods import StageOutput
from meshwright.nn.batches import batch_size_of, micro_batches, to_device, usual_input_format
from meshwright.nn.fsdp_units import reshard
from meshwright.runtime import (
    GeneratorState,
    any_rank,
    print_rank,
    same_on_every_rank,
    settings,
    world_size,
)
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
        mixed_precision: ``"fp16"``, ``"bf16"`` or a :class:`MixedPrecision`: autocast, unless the plugin controls the
            precision.
        plugin: Decides the strategy; None trains on one rank.

    Raises:
        ConfigError: When these do not fit together.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: str | MixedPrecision | None = None,
        plugin: Plugin | None = None,
    ) -> None:
        precision = mixed_precision.keys if isinstance(mixed_precision, MixedPrecision) else {"dtype": mixed_precision}
        checks.check_plugin(plugin)
        checks.check_precision(precision["dtype"], plugin)
        super().__init__()
        self.plugin = plugin
        self.device = torch.device(device) if device is not None else None
        self.mixed_precision = precision["dtype"] if plugin is None or not plugin.controls_precision else None
        self._precision = precision
        self._boosted: weakref.WeakKeyDictionary[nn.Module, Accelerated] = weakref.WeakKeyDictionary()
        self._notices_printed = False

    def strategy(self) -> Strategy:
        """Return the strategy that ``boost`` applies in this world."""
        strategy = Strategy([]) if self.plugin is None else self.plugin.strategy(world_size())
        return strategy if self.mixed_precision is None else strategy.with_method(("amp_native", self._precision))

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, BoostedOptimizer | None, Callable[..., Any] | None, Any, LRScheduler | None]:
        """Distribute a model, and give its optimizer the new parameters.

        Random generators stay as they are, as in ColossalAI: seed ranks apart for other dropout masks on each. Only
        where ranks share a replica (stages, layers or tokens divided) are they seeded, each replica apart.

        Args:
            model: Plain, initialised, equal on every rank.
            optimizer: Built over ``model.parameters()`` and not stepped; its groups and hyperparameters stay.
            criterion: Computes the loss from any arguments.
            dataloader: ``plugin.prepare_dataloader`` makes one with this rank's share; one rank of a host then reads a
                stream for the others. If layers, tokens or blocks are divided, the model is traced on the first sample
                of its dataset.
            lr_scheduler: Built over ``optimizer``; returned unchanged, and goes on with it.

        Returns:
            model: The result of ``accelerate``, called as before; ``model.unwrap()`` is the model given.
            optimizer: See :class:`BoostedOptimizer`.
            criterion: Wrapped if the precision needs it, to compute the loss in fp32 or in autocast.
            dataloader, lr_scheduler: The same objects.

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
        generators = GeneratorState.now()
        with _default_dtype(torch.float32), self._advice():
            accelerated = accelerate(
                model,
                optimizer,
                loss_func=loss_of(criterion),
                strategy=strategy,
                ddp_options=ddp_options,
                max_grad_norm=self._max_norm(optimizer),
                sample_batch=sample,
                model_input_format=usual_input_format(sample),
            )
        if accelerated.num_replicas == world_size():
            # Scripts that seed once go on drawing alike on all ranks: weights of a second model, or samples. Ranks that
            # share a replica keep accelerate's seeds, since they must draw alike whatever the script has drawn.
            generators.restore()
        if isinstance(optimizer, FusedLAMB):
            optimizer.clips_elsewhere()
        self._print(notices)
        self._finish_model(accelerated, strategy)
        self._boosted[accelerated.model] = accelerated
        if self.plugin is not None:
            self.plugin.note_mesh(accelerated.mesh)
        boosted = self._finish_optimizer(accelerated)
        _read_streams_once(dataloader)
        return accelerated.model, boosted, wrapped_criterion(criterion, accelerated, strategy), dataloader, lr_scheduler

    def _prepare(self, model: nn.Module, device: torch.device) -> list[str]:
        if self.plugin is None:
            return []
        notices = [] if self._notices_printed else self.plugin.notices()
        return notices + (self.plugin.prepare_model(model, device) if isinstance(model, nn.Module) else [])

    @contextlib.contextmanager
    def _advice(self) -> Iterator[None]:
        """Add the plugin's own words to the errors of methods."""
        try:
            yield
        except MeshwrightError as error:
            if self.plugin is not None:
                self.plugin.advise(error)
            raise

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
        if self.plugin is not None and self.plugin.buffer_dtype is not None:
            _cast_buffers(model, self.plugin.buffer_dtype)
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

    def _max_norm(self, optimizer: Any) -> float | None:
        """Return the largest gradient norm that the plugin or the optimizer asks for; None if neither does."""
        asked = [self._clipping[0], optimizer.max_grad_norm if isinstance(optimizer, FusedLAMB) else 0.0]
        return min((each for each in asked if each), default=None)

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


def _read_streams_once(dataloader: Any) -> None:
    """Let one rank of each host read a stream for the others, where every rank has given a loader of ours."""
    if not any_rank(not isinstance(dataloader, GlobalBatchLoader)):
        dataloader.read_once_per_host()


def _outputs_in_fp32(_: nn.Module, __: Any, output: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, output)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default type, which scripts lower around ``boost``, where ColossalAI makes its weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


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


# --- Precisions and devices as objects.


class MixedPrecision:
    """A precision for ``Booster(mixed_precision=…)``.

    Args:
        dtype: ``"fp16"`` or ``"bf16"``.
        loss_scale: Keys of the method amp_native's ``loss_scale``.
    """

    def __init__(self, dtype: str, **loss_scale: Any) -> None:
        self.keys: dict[str, Any] = {"dtype": dtype, **({"loss_scale": loss_scale} if loss_scale else {})}

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
    ) -> tuple[nn.Module, BoostedOptimizer | None, Callable[..., Any] | None]:
        """Return what a Booster without a plugin makes of them, in a world of one rank.

        Raises:
            LaunchError: In a world of several ranks, where a plugin must say how gradients are averaged.
        """
        boosted = Booster(mixed_precision=self).boost(model, optimizer, criterion)
        return boosted[0], boosted[1], boosted[2]


class FP16TorchMixedPrecision(MixedPrecision):
    """Autocast in fp16 with a dynamic loss scale, whose defaults are those of torch's ``GradScaler``."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        super().__init__(
            "fp16",
            initial_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=1,
        )


class BF16MixedPrecision(MixedPrecision):
    """Autocast in bf16."""

    def __init__(self) -> None:
        super().__init__("bf16")


_PRECISIONS: dict[str, Callable[[], MixedPrecision]] = {"fp16": FP16TorchMixedPrecision, "bf16": BF16MixedPrecision}


def mixed_precision_factory(mixed_precision_type: str) -> MixedPrecision:
    """Return the precision of a name.

    Raises:
        ConfigError: When it is neither ``"fp16"`` nor ``"bf16"``.
    """
    if mixed_precision_type not in _PRECISIONS:
        raise ConfigError(
            f"There is no such mixed precision{did_you_mean(str(mixed_precision_type), _PRECISIONS)}",
            expected="'fp16' or 'bf16'",
            got=repr(mixed_precision_type),
            fix="use 'fp16' for fp16_apex and fp16_naive, and a plugin with use_fp8=True for fp8",
        )
    return _PRECISIONS[mixed_precision_type]()


class Accelerator:
    """A kind of device, to which models are moved.

    Args:
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: For another one.
    """

    def __init__(self, device: str) -> None:
        if device not in ("cpu", "cuda"):
            raise ConfigError(
                "There is no such device", expected="'cpu' or 'cuda'", got=repr(device), fix="name one of them"
            )
        self.device = device

    def bind(self) -> None:
        """Make this rank's device the current one, which launching has done."""

    def configure_model(self, model: nn.Module) -> nn.Module:
        """Return the model, moved to the device."""
        return model.to(self.device)
