"""The config keys that zero1, zero2 and fsdp share: ATorch's own, and a clear word for each of FSDP1's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from meshwright.errors import StrategyError
from meshwright.methods.base import Method
from meshwright.methods.dtypes import DType
from meshwright.methods.law import Conflict
from meshwright.methods.references import ClassReferences

_RENAMED = {"fsdp_wrap_params_outmost": "wrap_trainable_outmost"}

# Arguments of FSDP1, DeepSpeed and ATorch that would change the result, or what a rank holds, if they were passed over.
_REFUSED = {
    "sharding_strategy": "name the method instead: zero2 is SHARD_GRAD_OP, fsdp is FULL_SHARD, and a 'data' beside a "
    "'zero' axis in parallel_mode is HYBRID_SHARD",
    "auto_wrap_policy": "name the classes with atorch_wrap_cls, or set atorch_size_based_min_num_params",
    "ignored_modules": "name their classes with atorch_ignored_cls",
    "ignored_states": "name the classes of their modules with atorch_ignored_cls",
    "param_init_fn": "give the model with its parameters initialised on the CPU; they are sharded from there",
    "cpu_offload": "leave it out and add the method offload: ('offload', {'parameters': 1.0})",
    "device_id": "leave it out; the device follows from the local rank",
    "device_mesh": "leave it out; the mesh follows from parallel_mode",
    "process_group": "leave it out; the groups follow from parallel_mode",
    "static_loss_scale": "leave it out; amp_native and half find the loss scale of fp16, and bf16 needs none",
    "dynamic_loss_args": "leave it out; amp_native and half find the loss scale of fp16, and bf16 needs none",
    "clip_grad": "leave it out and add the method grad_clip: ('grad_clip', 1.0)",
    "allgather_bucket_size": "leave it out; what is gathered at once are the modules of atorch_wrap_cls",
    "reduce_bucket_size": "leave it out; what is reduced at once are the modules of atorch_wrap_cls",
    "use_local_sgd": "leave it out and add the method outer: ('outer', {'rule': 'local_sgd'})",
}

# Arguments that say how an engine should do what FSDP2 always does: accepted, kept, and said to change nothing.
_INERT = {
    "limit_all_gathers": "FSDP2 always limits the all-gathers in flight",
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "backward_prefetch": "FSDP2 always prefetches the next block in backward",
    "use_ds_zero": "Meshwright has one implementation of ZeRO, on FSDP2",
    "not_use_fsdp": "Meshwright has one implementation of ZeRO, on FSDP2",
}


class MixedPrecision(BaseModel):
    """Precision of gathered parameters and of gradient reduction under sharding; None keeps the parameter's own.

    Gradients are reduced in ``param_dtype`` where no ``reduce_dtype`` is given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    param_dtype: DType | None = None
    reduce_dtype: DType | None = None
    buffer_dtype: DType | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_torch(cls, value: Any) -> Any:
        """Takes FSDP1's ``MixedPrecision`` and FSDP2's ``MixedPrecisionPolicy``, too."""
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        changed = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        changed = {name: own for name, own in changed.items() if own != getattr(type(value)(), name)}
        beside = sorted(changed.keys() - cls.model_fields.keys())
        if beside:
            raise ValueError(f"precisions alone; without {', '.join(beside)}")
        return changed


def not_beside(*names: str) -> tuple[Conflict, ...]:
    """The conflicts with other methods that shard."""
    reason = "each decides how parameters are sharded"
    fix = "keep one of them: zero1 communicates least, fsdp holds least"
    return tuple(Conflict(other=name, reason=reason, fix=fix) for name in names)


class ZeroMethod(Method):
    """Keys of every method that shards. Short forms: None, or ATorch's ``{"use_ds_zero", True}``."""

    shards: ClassVar[bool] = True

    atorch_wrap_cls: ClassReferences | None = None
    """Classes whose modules are gathered one at a time; None: the model's repeated blocks."""
    atorch_size_based_min_num_params: int | None = None
    """Instead of classes: gather modules of at least this many parameters one at a time."""
    atorch_ignored_cls: ClassReferences = ()
    """Classes whose parameters stay whole on every rank; their gradients are averaged."""
    wrap_trainable_outmost: bool = False
    """Gather all trainable modules as one group, once per step (LoRA: many small trainable modules)."""
    forward_prefetch: bool = True
    """Start gathering the next block while one computes."""
    sync_module_states: bool = True
    """Take parameters and buffers over from rank 0 before sharding."""
    mixed_precision: MixedPrecision | None = None
    """Overrides the precision that amp_native or half asks for."""
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    backward_prefetch: str | None = None
    use_ds_zero: bool | None = None
    not_use_fsdp: bool | None = None

    @classmethod
    def from_short(cls, raw: Any) -> Mapping[str, Any]:
        """Reads ATorch's set literal, in which a key stands beside True."""
        if isinstance(raw, set | frozenset) and raw <= {True, "use_ds_zero", "not_use_fsdp"}:
            return {key: True for key in raw if isinstance(key, str)}
        return super().from_short(raw)

    @classmethod
    def normalised(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Renames ATorch's other spelling and refuses what FSDP2 cannot do."""
        keys = {_RENAMED.get(key, key): value for key, value in keys.items()}
        for key in keys.keys() & _REFUSED.keys():
            raise StrategyError(
                f"{cls.method_name}: {key!r} is an argument of another engine that this one, FSDP2, does not have",
                got=f"{key}={keys[key]!r}",
                fix=_REFUSED[key],
                expected="keys that FSDP2 has",
            )
        if keys.get("atorch_wrap_cls") is not None and keys.get("atorch_size_based_min_num_params") is not None:
            raise StrategyError(
                f"{cls.method_name}: modules are to be wrapped by class and by size",
                expected="atorch_wrap_cls or atorch_size_based_min_num_params",
                got="both",
                fix="leave one of them out",
            )
        return keys

    @field_validator("backward_prefetch", mode="before")
    @classmethod
    def _enum_name(cls, value: Any) -> Any:
        return getattr(value, "name", value)  # torch's BackwardPrefetch.BACKWARD_PRE

    def notices(self) -> list[str]:
        """Says which accepted keys change nothing, and why."""
        return [
            f"{self.method_name}: {key}={getattr(self, key)!r} changes nothing; {why}"
            for key, why in _INERT.items()
            if getattr(self, key) is not None
        ] + self._buffers_notice()

    def _buffers_notice(self) -> list[str]:
        asked = self.mixed_precision
        if asked is None or asked.buffer_dtype in (None, asked.param_dtype):
            return []
        return [f"{self.method_name}: mixed_precision.buffer_dtype changes nothing; FSDP2 leaves buffers as they are"]
