"""Expand `mixed_parallel`, `ds_3d_parallel` and `deepspeed_3d_parallel` into a mesh and the methods of its axes.

These names from ATorch are not methods: a strategy with one is read as the strategy with what it expands to.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """Short form of tensor and pipeline parallelism: the methods of the axes that the mesh has.

    Config: None, where the strategy has a ``parallel_mode``; or keys.
    """

    method_name: ClassVar[str] = "mixed_parallel"
    foreign_keys: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("prop_mode", "use_fake_mode", "tracer_backend"), "leave it out; a model is run, not traced into a graph"
    )

    parallel_mode: Annotated[ParallelMode | None, BeforeValidator(_mode)] = None
    """The mesh; None: the strategy's own."""
    pipe_config: Annotated[PipelineParallel | None, BeforeValidator(_pipe)] = None
    """Keys of ``pipeline_parallel``."""
    tensor_config: Annotated[TensorParallel | None, BeforeValidator(_tensor)] = None
    """Keys of ``tensor_parallel``."""

    def methods(self, mode: ParallelMode) -> list[MethodConfig]:
        """Return the methods that it expands to on a mesh."""
        axes = dict(mode.axes)
        wanted: list[MethodConfig] = [mode]
        if axes.get("pipeline", 1) > 1:
            wanted.append(self.pipe_config or PipelineParallel())
        if axes.get("tensor", 1) > 1:
            wanted.append(self.tensor_config or TensorParallel())
        return wanted


class Ds3dParallel(MixedParallel):
    """``mixed_parallel`` by the name of ATorch's DeepSpeed engine; here there is one engine."""

    method_name: ClassVar[str] = "ds_3d_parallel"
    foreign_keys: ClassVar[Mapping[str, str]] = {
        **MixedParallel.foreign_keys,
        "tpinfo": "leave it out; layers to split are found, or named: "
        "tensor_config={'plan': {'layers.*.up': 'colwise'}}",
        "custom_patcher": "leave it out; the model is trained as it is, without a patch",
        "logit_helper": "leave it out; losses take logits whose words lie on several ranks",
        "ds_config": "leave it out; micro-batches and precision are num_micro_batches, amp_native and half",
        "batch_fn": "pass it as prepare_input",
    }

    base_seed: int | None = None
    """A key of ATorch's config class; changes nothing."""
    tie_first: bool | None = None
    """A key of ATorch's config class; changes nothing."""

    def notices(self) -> list[str]:
        """Return a notice on each accepted key that changes nothing."""
        inert = {"base_seed": "init_distributed seeds every rank", "tie_first": "tied weights are found"}
        given = [key for key in inert if getattr(self, key) is not None]
        return [f"{self.method_name}: {key} changes nothing; {inert[key]}" for key in given]


class DeepSpeed3dParallel(Ds3dParallel):
    """``ds_3d_parallel`` by the name that ATorch's code uses."""

    method_name: ClassVar[str] = "deepspeed_3d_parallel"


_NAMES = (MixedParallel.method_name, Ds3dParallel.method_name, DeepSpeed3dParallel.method_name)


def without_mixed(strategy: Strategy) -> Strategy:
    """Replace ``mixed_parallel`` and its aliases in a strategy by what they expand to.

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
