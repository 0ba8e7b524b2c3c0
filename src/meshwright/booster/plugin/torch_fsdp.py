"""``TorchFSDPPlugin``: PyTorch's FSDP, in its second version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.booster.plugin.base import Plugin
from meshwright.booster.plugin.options import check_choice, compressed, in_fp8
from meshwright.errors import ConfigError, join_names
from meshwright.strategy import Strategy

_FSDP1 = ("process_group", "auto_wrap_policy", "backward_prefetch", "ignored_modules", "param_init_fn")
_METHODS = {None: "fsdp", "FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2", "NO_SHARD": None}


@dataclass(frozen=True, eq=False, repr=False)
class TorchFSDPPlugin(Plugin):
    """Fully sharded data parallelism. Arguments are those of FSDP1, as in ColossalAI; the engine is FSDP2.

    Args:
        sharding_strategy: A ``ShardingStrategy`` or its name: FULL_SHARD, SHARD_GRAD_OP or NO_SHARD.
        mixed_precision: With ``param_dtype`` and ``reduce_dtype``; there is no loss scaling, so use bf16.
        cpu_offload: With ``offload_params=True``: parameters, gradients and states live in host memory (offload).
        sync_module_states: Take parameters over from rank 0 before sharding.

    The others are the ones that FSDP2 does not have: the error of each says what to do instead.
    """

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    auto_wrap_policy: Any = None
    backward_prefetch: Any = None
    mixed_precision: Any = None
    ignored_modules: Any = None
    param_init_fn: Any = None
    sync_module_states: bool = False
    fp8_communication: bool = compressed()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "sharding_strategy", self._sharding(), tuple(_METHODS))
        if getattr(self.mixed_precision, "buffer_dtype", None) is not None:
            raise ConfigError(
                f"{type(self).__name__}: mixed_precision has a buffer_dtype, which FSDP2 does not have",
                expected="param_dtype and reduce_dtype",
                got=f"buffer_dtype={self.mixed_precision.buffer_dtype}",
                fix="leave it out, and cast the model's buffers yourself",
            )
        keys = [*self._keys(), *(["cpu_offload"] if self._offloaded() else [])]
        if _METHODS[self._sharding()] is None and keys:
            raise ConfigError(
                f"{type(self).__name__}: NO_SHARD has no arguments",
                expected="nothing beside it",
                got=join_names(keys),
                fix="use TorchDDPPlugin, with Booster(mixed_precision=…) for a precision",
            )
        self.strategy(1)  # the method refuses what FSDP2 does not have

    def _sharding(self) -> str | None:
        return getattr(self.sharding_strategy, "name", self.sharding_strategy)

    def _keys(self) -> dict[str, Any]:
        """The config of the sharding method, of what was given."""
        keys = {name: value for name in _FSDP1 if (value := getattr(self, name)) is not None}
        if self.mixed_precision is not None:
            dtypes = ("param_dtype", "reduce_dtype")
            keys["mixed_precision"] = {name: getattr(self.mixed_precision, name) for name in dtypes}
        return keys

    def strategy(self, world: int) -> Strategy:
        """fsdp, zero2 or data parallelism over all ranks."""
        method = _METHODS[self._sharding()]
        methods = [] if method is None else [(method, {"sync_module_states": self.sync_module_states, **self._keys()})]
        fp8 = in_fp8(False, self.fp8_communication, gathers=method is not None)
        return self.with_methods([("parallel_mode", {"data": world}), *methods, *fp8, *self._offloaded()])

    def _offloaded(self) -> list[Any]:
        asked = getattr(self.cpu_offload, "offload_params", bool(self.cpu_offload))
        return [("offload", {"parameters": 1.0})] if asked else []
