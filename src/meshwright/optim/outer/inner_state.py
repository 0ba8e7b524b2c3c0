"""The inner optimizer's states when replicas synchronise: reset, averaged, or replica 0's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.clip import local_tensor
from meshwright.optim.guarded import GuardedOptimizer
from meshwright.optim.master import MASTER
from meshwright.optim.outer.exchange import average_in_place
from meshwright.optim.outer.replicas import Replicas


class InnerState:
    """What happens to the states of an optimizer whose weights are replaced from outside.

    Args:
        inner: Any torch optimizer.
        replicas: Who synchronises.
        bucket_bytes: See Message.
    """

    def __init__(self, inner: Optimizer, replicas: Replicas, bucket_bytes: int) -> None:
        self._inner = inner.inner if isinstance(inner, GuardedOptimizer) else inner
        self._replicas, self._bucket_bytes = replicas, bucket_bytes

    def check_average(self) -> None:
        """Refuses optimizers whose states mean nothing when averaged.

        Raises:
            ConfigError: For quantised moments, and moments in subspaces of the replicas' own.
        """
        if not getattr(self._inner, "states_can_be_averaged", True):
            raise ConfigError(
                f"The states of {type(self._inner).__name__} cannot be averaged over replicas",
                expected="states that are plain numbers in one basis",
                got="quantised states, or moments in a subspace that every replica chooses for itself",
                fix="use inner_state='keep', as DiLoCo does, or 'reset'",
            )

    def reset(self, parameters: Sequence[torch.Tensor]) -> None:
        """Makes states of some parameters as before their first step; learning rates and fp32 copies stay."""
        for parameter in parameters:
            state = self._inner.state.pop(parameter, None)
            if not state or MASTER not in state:
                continue
            fresh: dict[str, Any] = self._inner.empty_state(parameter)  # type: ignore[attr-defined]
            step = {"step": type(state["step"])(0)} if not isinstance(state["step"], torch.Tensor) else {}
            self._inner.state[parameter] = {**step, **fresh, MASTER: state[MASTER]}

    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Averages all floating-point states but step counts, of parameters that have states in every replica."""
        tensors = []
        for parameter, keys in self._common(parameters):
            for key in keys:
                value = local_tensor(self._inner.state[parameter][key])
                if value.dim() > 0 and not value.is_floating_point():
                    self.check_average()
                    raise _not_averageable(type(self._inner).__name__, key, value)
                if value.is_floating_point() and value.dim() > 0 and key != MASTER:
                    tensors.append(value)
        average_in_place(tensors, self._replicas, self._bucket_bytes)

    @torch.no_grad()
    def copy_from_first(self, parameters: Sequence[torch.Tensor]) -> None:
        """Takes over replica 0's states, of parameters that have states in every replica."""
        with self._replicas.watched():
            for parameter, keys in self._common(parameters):
                for key in keys:
                    value = local_tensor(self._inner.state[parameter][key])
                    sent = value.to(self._replicas.device).contiguous()
                    work = self._replicas.broadcast(sent, 0)
                    if work is not None:
                        work.wait()
                    value.copy_(sent)

    def _common(self, parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, list[str]]]:
        """Parameters whose tensor states have the same names and shapes in every replica, with those names."""
        own = [_forms(self._inner.state.get(parameter) or {}) for parameter in parameters]
        every = self._replicas.gather_objects(own)
        alike = [all(other[place] == forms for other in every) for place, forms in enumerate(own)]
        return [
            (parameter, [name for name, *_ in forms])
            for parameter, forms, same in zip(parameters, own, alike, strict=True)
            if same and forms
        ]


def _forms(state: dict[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    tensors = {key: local_tensor(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    return [(key, tuple(value.shape), str(value.dtype)) for key, value in tensors.items()]


def _not_averageable(name: str, key: str, value: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"The state {key!r} of {name} cannot be averaged over replicas",
        expected="floating-point states",
        got=f"{value.dtype} of shape {tuple(value.shape)}",
        fix="use inner_state='keep' or 'reset'",
    )
