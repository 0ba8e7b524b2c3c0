"""Arguments that several of ColossalAI's plugins share, and what they mean for a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from meshwright.booster.plugin.base import Plugin, inert, near
from meshwright.errors import ConfigError, did_you_mean
from meshwright.strategy import Strategy

PRECISIONS = ("fp32", "fp16", "bf16")
_FUSED = "PyTorch's scaled_dot_product_attention and torch.compile fuse what can be fused"


def compressed() -> Any:
    """The argument ``fp8_communication``."""
    return near(False, " is the method comm: gradients travel in int8, gathered weights in fp8, with a scale per block")


def fused() -> Any:
    """A switch of hand-written kernels: it changes speed and never results."""
    return inert(False, _FUSED)


def sequence_overlap() -> Any:
    """The argument ``enable_sequence_overlap``, which ColossalAI has dropped since: by its name only."""
    return field(default=False, kw_only=True, metadata={"inert": "what overlaps is torch's to decide"})


class LossScaleArguments(Plugin):
    """The dynamic loss scale, used when the precision is fp16.

    Names only: each plugin declares them where ColossalAI has them, so that they have its places and defaults.
    """

    initial_scale: float
    min_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    max_scale: float

    def check_precision(self, precision: str) -> None:
        """Refuses a precision that is none, and numbers that make no loss scale.

        Raises:
            ConfigError, StrategyError: Saying which.
        """
        Strategy(self.precision_methods(precision))

    def precision_methods(self, precision: str, *, master_weights: bool = True) -> list[Any]:
        """The method that a precision means: half for fp16 and bf16, none for fp32.

        Raises:
            ConfigError: When the precision is not one of the three.
        """
        check_choice(self, "precision", precision, PRECISIONS)
        if precision == "fp32":
            return []
        keys: dict[str, Any] = {"dtype": precision, "master_weights": master_weights}
        if precision == "fp16":
            keys["loss_scale"] = {name: getattr(self, name) for name in LossScaleArguments.__annotations__}
        return [("half", keys)]


def check_choice(plugin: Plugin, name: str, value: object, choices: tuple[Any, ...]) -> None:
    """Refuses a value that is none of the choices.

    Raises:
        ConfigError: Naming them.
    """
    if value not in choices:
        known = [each for each in choices if isinstance(each, str)]
        raise ConfigError(
            f"{type(plugin).__name__}: {name} is none of its values{did_you_mean(str(value), known)}",
            expected=" or ".join(map(repr, choices)),
            got=repr(value),
            fix=f"choose another {name}",
        )


def in_fp8(products: bool, communication: bool, *, gathers: bool) -> list[Any]:
    """The methods that ``use_fp8`` and ``fp8_communication`` mean.

    Args:
        products: ``use_fp8``: as in ColossalAI, each tensor is scaled by its own largest value.
        communication: ``fp8_communication``.
        gathers: Whether weights are sharded, and travel too.
    """
    wire = ("comm", {"all_gather": "fp8" if gathers else None, "reduce": "int8"})
    return [*([("fp8", "tensorwise")] if products else []), *([wire] if communication else [])]


def offloaded(cpu_offload: bool) -> list[Any]:
    """The method that ``cpu_offload`` means: master weights and states on the host, where they are updated."""
    return [("offload", "optimizer")] if cpu_offload else []


def mesh_of(plugin: Plugin, world: int, sizes: Mapping[str, int], rest: str) -> dict[str, Any]:
    """The ``parallel_mode`` config of a mesh whose ``rest`` axis takes what the other sizes leave of the world.

    Args:
        plugin: For the error.
        world: Number of ranks.
        sizes: Argument sizes by mesh axis, innermost first.
        rest: The axis that takes the rest.

    Raises:
        ConfigError: When they do not divide the world.
    """
    product = 1
    for axis, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{type(plugin).__name__}: the size of the {axis} axis is not a number of ranks",
                expected="1 or more",
                got=repr(size),
                fix="use 1 for an axis that is not split",
            )
        product *= size
    if world % product:
        raise ConfigError(
            f"{type(plugin).__name__}: the sizes do not divide the world",
            expected=f"a divisor of {world} ranks",
            got=" x ".join(f"{axis} {size}" for axis, size in sizes.items()) + f" = {product}",
            fix=f"start a multiple of {product} processes, or change the sizes",
        )
    axes = {axis: size for axis, size in sizes.items() if size > 1 and axis != "data"}
    axes[rest] = world // product
    if sizes.get("data", 1) > 1 and rest != "data":
        axes["data"] = sizes["data"]
    return {"axes": list(axes.items())}
