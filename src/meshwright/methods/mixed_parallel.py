"""``mixed_parallel``, ``ds_3d_parallel`` (in ATorch's code ``deepspeed_3d_parallel``): one name for a mesh and the
methods of its axes. Seed: ATorch.

They are no methods of their own: a strategy with one is read as the strategy with what it stands for.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from meshwright.errors import StrategyError
from meshwright.methods.parallel_mode import ParallelMode
from meshwright.methods.pipeline.pipeline_parallel import PipelineParallel
from meshwright.methods.tensor.tensor_parallel import TensorParallel
from meshwright.strategy import MethodConfig, Strategy


def _mode(value: Any) -> Any:
    return value if value is None else ParallelMode.parse(value)


def _pipe(value: Any) -> Any:
    return value if value is None else PipelineParallel.parse(value)


def _tensor(value: Any) -> Any:
    return value if value is None else TensorParallel.parse(value)


class MixedParallel(MethodConfig):
    """Tensor and pipeline parallelism together: the methods of the axes that the mesh has.

    Config: None, where the strategy has a ``parallel_mode``; or keys.
    """

    method_name: ClassVar[str] = "mixed_parallel"

    parallel_mode: Annotated[ParallelMode | None, BeforeValidator(_mode)] = None
    """The mesh; None: the strategy's own."""
    pipe_config: Annotated[PipelineParallel | None, BeforeValidator(_pipe)] = None
    """Keys of ``pipeline_parallel``."""
    tensor_config: Annotated[TensorParallel | None, BeforeValidator(_tensor)] = None
    """Keys of ``tensor_parallel``."""

    def methods(self, mode: ParallelMode) -> list[MethodConfig]:
        """Return what it stands for on a mesh."""
        axes = dict(mode.axes)
        wanted: list[MethodConfig] = [mode]
        if axes.get("pipeline", 1) > 1:
            wanted.append(self.pipe_config or PipelineParallel())
        if axes.get("tensor", 1) > 1:
            wanted.append(self.tensor_config or TensorParallel())
        return wanted


class Ds3dParallel(MixedParallel):
    """The same by the name of ATorch's second engine, DeepSpeed's; there is one engine here."""

    method_name: ClassVar[str] = "ds_3d_parallel"

    base_seed: int | None = None
    """Of ATorch's config class: changes nothing."""
    tie_first: bool | None = None
    """Of ATorch's config class: changes nothing."""

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Refuse what told DeepSpeed's engine of a model, with what to do instead."""
        for key in keys.keys() & _REFUSED.keys():
            if keys[key] is not None:
                raise StrategyError(
                    f"{cls.method_name}: {key!r} configures DeepSpeed's engine, which there is none of here",
                    expected="parallel_mode, pipe_config, tensor_config, base_seed and tie_first",
                    got=f"{key}={keys[key]!r}",
                    fix=_REFUSED[key],
                )
        return {key: value for key, value in keys.items() if key not in _REFUSED}

    def notices(self) -> list[str]:
        """Say which accepted keys change nothing."""
        inert = {"base_seed": "init_distributed seeds every rank", "tie_first": "tied weights are found"}
        given = [key for key in inert if getattr(self, key) is not None]
        return [f"{self.method_name}: {key} changes nothing; {inert[key]}" for key in given]


_REFUSED = {
    "tpinfo": "leave it out; layers to split are found, or named: tensor_config={'plan': {'layers.*.up': 'colwise'}}",
    "custom_patcher": "leave it out; the model is trained as it is, without a patch",
    "logit_helper": "leave it out; losses take logits whose words lie on several ranks",
    "ds_config": "leave it out; micro-batches and precision are num_micro_batches, amp_native and half",
    "batch_fn": "pass it as prepare_input",
}


class DeepSpeed3dParallel(Ds3dParallel):
    """The same by the name that ATorch's code has for it."""

    method_name: ClassVar[str] = "deepspeed_3d_parallel"


_NAMES = (MixedParallel.method_name, Ds3dParallel.method_name, DeepSpeed3dParallel.method_name)


def without_mixed(strategy: Strategy) -> Strategy:
    """Return the strategy with what ``mixed_parallel`` and ``ds_3d_parallel`` stand for in their place.

    Raises:
        StrategyError: When no mesh is named, or two are.
    """
    for name in _NAMES:
        mixed, own = strategy.get(name), strategy.get("parallel_mode")
        if not isinstance(mixed, MixedParallel):
            continue
        mode = mixed.parallel_mode or own
        if not isinstance(mode, ParallelMode) or (mixed.parallel_mode is not None and own is not None):
            raise StrategyError(
                f"{name} needs one mesh",
                expected="parallel_mode in the strategy, or in its config",
                got="both" if own is not None else "neither",
                fix=f"write ('{name}', {{'parallel_mode': ([('tensor', 2), ('pipeline', 2), ('data', 2)], None)}})",
            )
        given = {method.method_name for method in strategy.methods}
        added = [method for method in mixed.methods(mode) if method.method_name not in given]
        strategy = Strategy([*strategy.without(name).methods, *added])
    return strategy
