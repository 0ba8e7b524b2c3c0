"""What AdamOptimizer and AdamOffloadOptimizer share: groups, states, checks, and a step over buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from meshwright.errors import ConfigError, ModelError, did_you_mean
from meshwright.optim.adam.buckets import cut
from meshwright.optim.adam.delta import DeltaMoments
from meshwright.optim.adam.links import DirectLink, Link
from meshwright.optim.adam.rule import WEIGHT_DECAY_RULES, AdamRule, WeightDecayRule
from meshwright.optim.adam.states import AdamStates, check_saved_states
from meshwright.optim.adam.update import BucketUpdate
from meshwright.optim.clip import local_tensor
from meshwright.optim.layouts import HALF_TYPES
from meshwright.optim.state_dicts import ShardedStateDict

_BUCKET_ELEMENTS = 2**24


class AdamBase(ShardedStateDict):
    """Adam over plain parameters and DTensors, fp32 and half; see the two subclasses."""

    state_kind = "AdamW"
    """States have the names and meaning of ``torch.optim.AdamW``'s: checkpoints of one load into the other."""
    step_takes_scale = True
    """``step(scale=…)`` divides the gradients itself."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hold_steps: int = 0,
        record_delta: bool = False,
        *,
        weight_decay_rule: WeightDecayRule = "decoupled",
        maximize: bool = False,
        bucket_elements: int = _BUCKET_ELEMENTS,
    ) -> None:
        if bucket_elements < 1:
            raise _bad_value("bucket_elements", bucket_elements, "1 or more elements")
        self.bucket_elements = bucket_elements
        self.record_delta = record_delta
        self._begin()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "hold_steps": hold_steps,
            "weight_decay_rule": weight_decay_rule,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _begin(self) -> None:
        self._links: dict[torch.device, Link] = {}  # made when the first parameter of a device is updated
        self._states = AdamStates(lambda parameter: self.state[parameter], self.home)
        self._delta = DeltaMoments()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; values it lacks are the constructor's.

        Raises:
            ConfigError: When a hyperparameter is out of range.
            ModelError: When a parameter is not fp32, fp16 or bf16.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], Any] | None = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Gradients are used up: those of fp32 parameters may be left divided by ``scale``, others as they were.

        Args:
            closure: Computes the loss again, with gradients; its result is returned.
            scale: What the loss was multiplied by.

        Raises:
            ModelError: When a gradient is sparse; nothing is updated then.
            ConfigError: When a loaded group asks for ``amsgrad``, or ``scale`` is not above 0.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_step(scale)
        with torch.no_grad(), FreshLinksAfterError(self._links):
            self._delta.restart()
            for update in self._updates(with_gradient=True):
                update.advance_all()
                update.run(scale)
            if self.record_delta:
                self._delta.reduce()
        return loss

    def _updates(self, *, with_gradient: bool) -> list[BucketUpdate]:
        """One update per group, type and device, over its parameters (those with a gradient, or all trainable ones)."""
        updates = []
        for group in self.param_groups:
            kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None if with_gradient else parameter.requires_grad:
                    kinds.setdefault((parameter.dtype, local_tensor(parameter).device), []).append(parameter)
            for (dtype, device), parameters in kinds.items():
                link = self._link(device)
                limit = self.bucket_elements if link.remote or dtype in HALF_TYPES else None
                rule = AdamRule.of(group, dtype)
                delta = self._delta if self.record_delta else None
                updates.append(BucketUpdate(parameters, cut(parameters, limit), rule, link, self._states, delta))
        return updates

    def _link(self, device: torch.device) -> Link:
        if device not in self._links:
            self._links[device] = self._make_link(device)
        return self._links[device]

    def _make_link(self, device: torch.device) -> Link:
        return DirectLink()

    def home(self, parameter: torch.Tensor) -> tuple[torch.device, bool]:
        """Where a parameter's states live, and whether that is another device than its own."""
        local = local_tensor(parameter)
        link = self._link(local.device)
        return link.home(local), link.remote

    @property
    def staging_bytes(self) -> int:
        """Bytes this rank holds for moving and converting gradients and weights, beside the states."""
        return sum(link.staging_bytes for link in self._links.values())

    def _check_step(self, scale: float) -> None:
        if not 0 < scale < float("inf"):
            raise _bad_value("scale", scale, "a finite number above 0")
        for group in self.param_groups:
            if group.get("amsgrad"):
                raise ConfigError(
                    f"{type(self).__name__} has no amsgrad, which a loaded checkpoint asks for",
                    expected="amsgrad=False",
                    got="amsgrad=True",
                    fix="train on with torch.optim.AdamW(amsgrad=True), or set the group's amsgrad to False",
                )
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise ModelError(
                        f"{type(self).__name__} does not take sparse gradients",
                        expected="dense gradients",
                        got=f"{parameter.grad.layout} for a parameter of shape {tuple(parameter.shape)}",
                        fix="build the embedding with sparse=False, or give it to torch.optim.SparseAdam",
                    )

    @torch.no_grad()
    def empty_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """States as before a parameter's first step: ``step``, ``exp_avg``, ``exp_avg_sq`` and perhaps ``master``."""
        return self._states.made_for(parameter)

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Refuses states that are not those of an Adam."""
        check_saved_states(state_dict)

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Takes the parameters over into their fp32 masters; call it after weights were changed by other means.

        A step rounds the masters into the parameters, so a change of the parameters alone would be lost.
        """
        for parameter, state in self.state.items():
            if "master" in state:
                local_tensor(state["master"]).copy_(local_tensor(parameter))

    def get_avg_delta(self) -> float:
        """Mean of the last step's m̂ / (√v̂ + eps) + weight_decay · w over all parameters of all ranks.

        Raises:
            ConfigError: Without ``record_delta=True``.
        """
        self._check_recorded()
        return self._delta.mean

    def get_var_delta(self) -> float:
        """Population variance of what :meth:`get_avg_delta` averages.

        Raises:
            ConfigError: Without ``record_delta=True``.
        """
        self._check_recorded()
        return self._delta.variance

    def _check_recorded(self) -> None:
        if not self.record_delta:
            raise ConfigError(
                "The deltas of the last step were not recorded",
                expected="record_delta=True",
                got="record_delta=False",
                fix="build the optimizer with record_delta=True",
            )

    def forget(self) -> None:
        """Lets go of states that are about to be replaced."""
        self._states.forget()

    def __getstate__(self) -> dict[str, Any]:
        # For copies and pickles; streams, threads' queues and staging buffers are made anew.
        own = {"bucket_elements": self.bucket_elements, "record_delta": self.record_delta}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_links" not in self.__dict__:
            self._begin()
        for group in self.param_groups:  # a group of torch's AdamW lacks what is ours
            for key, value in self.defaults.items():
                group.setdefault(key, value)


class FreshLinksAfterError:
    """Forgets all links when a step fails: a bucket that was under way would block its staging buffers for ever."""

    def __init__(self, links: dict[torch.device, Link]) -> None:
        self._links = links

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._links.clear()


def _bad_value(name: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{name} is out of range", expected=expected, got=repr(value), fix=f"choose another {name}")


def _check_group(group: dict[str, Any]) -> None:
    rule = group["weight_decay_rule"]
    if rule not in WEIGHT_DECAY_RULES:
        raise ConfigError(
            f"Unknown weight_decay_rule {rule!r}{did_you_mean(str(rule), WEIGHT_DECAY_RULES)}",
            expected=f"one of {', '.join(WEIGHT_DECAY_RULES)}",
            got=repr(rule),
            fix="use decoupled for AdamW's rule",
        )
    for name in ("lr", "eps", "weight_decay"):
        if not float(group[name]) >= 0:
            raise _bad_value(name, group[name], "0 or more")
    if len(group["betas"]) != 2 or not all(0 <= float(beta) < 1 for beta in group["betas"]):
        raise _bad_value("betas", group["betas"], "two numbers from 0 to below 1")
    if not isinstance(group["hold_steps"], int) or group["hold_steps"] < 0:
        raise _bad_value("hold_steps", group["hold_steps"], "a number of steps, 0 or more")
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, *HALF_TYPES):
            raise ModelError(
                "A parameter has a type that this Adam does not update",
                expected="torch.float32, torch.float16 or torch.bfloat16",
                got=f"{parameter.dtype}, of shape {tuple(parameter.shape)}",
                fix="convert the model, or use torch.optim.AdamW",
            )
