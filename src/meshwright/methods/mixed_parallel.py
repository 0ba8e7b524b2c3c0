"""``mixed_parallel`` and ``ds_3d_parallel``: one name for a mesh and the methods of its axes. Seed: ATorch.

They are no methods of their own: a strategy with one is read as the strategy with what it stands for.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from meshwright.errors import StrategyError
from meshwright.methods.parallel_mode import ParallelMode
from meshwright.methods.pipeline_parallel import PipelineParallel
from meshwright.methods.tensor_parallel import TensorParallel
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
        """What it stands for on a mesh."""
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


def without_mixed(strategy: Strategy) -> Strategy:
    """The strategy with what ``mixed_parallel`` and ``ds_3d_parallel`` stand for in their place.

    Raises:
        StrategyError: When no mesh is named, or two are.
    """
    for name in ("mixed_parallel", "ds_3d_parallel"):
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
