"""Move an optimizer that was built over a plain model to the parameters that methods have put into the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from meshwright.errors import ConfigError, join_names
from meshwright.optim import ShardedOptimizer
from meshwright.runtime import preserved_rng
from meshwright.store.entries import stored_name, unwrapped


class BuiltOptimizer:
    """An optimizer over a plain model, with the names of its parameters.

    Methods such as fsdp put new parameters into the model under the same names, by which the optimizer finds them. It
    stays the same object with the same group objects, so that learning-rate schedulers go on with it.

    Args:
        optimizer: Any torch optimizer that has not stepped.
        model: The plain model, before any method is applied.

    Raises:
        ConfigError: When it updates parameters of another model, has stepped, or has other references to parameters.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        names = {id(parameter): name for name, parameter in _named(model).items()}
        _check_known(optimizer, names)
        _check_fresh(optimizer, names)
        _check_no_references(optimizer, names)
        self._names = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the model's present parameters in the optimizer's groups, with their hyperparameters.

        Parameters that only other pipeline ranks hold are dropped from the optimizer.
        """
        named, result = _named(model), []
        for group, names in zip(self.optimizer.param_groups, self._names, strict=True):
            here = [index for index, name in enumerate(names) if name in named]
            for index in set(range(len(names))).difference(here):
                self.optimizer.state.pop(group["params"][index], None)
            group["params"] = [group["params"][index] for index in here]
            names[:] = [names[index] for index in here]
            result.append({**_values(group), "params": [named[name] for name in names]})
        return result

    def take(self, groups: Iterable[Mapping[str, Any]]) -> Optimizer:
        """Give the optimizer new parameters, group by group; return it. Hyperparameters stay, states are laid out."""
        for group, new in zip(self.optimizer.param_groups, groups, strict=True):
            parameters = list(new["params"])
            for old, parameter in zip(group["params"], parameters, strict=True):
                state = self.optimizer.state.pop(old, None)
                if state:  # made by the constructor, as Adagrad's are
                    on_device = bool(group.get("fused") or group.get("capturable"))
                    laid_out = {key: _laid_out(value, parameter, on_device) for key, value in state.items()}
                    self.optimizer.state[parameter] = laid_out
            group["params"] = parameters
        return self.optimizer

    @property
    def probe(self) -> Callable[[Any], Optimizer] | None:
        """A function that builds a throw-away optimizer of the same kind, for its states; None if none can be built.

        It returns one of our own optimizers itself, which knows its states without a step.
        """
        if isinstance(self.optimizer, ShardedOptimizer):
            return lambda _: self.optimizer
        try:
            with preserved_rng(), torch.enable_grad():
                tiny = nn.Parameter(torch.ones(2, 3))
                tiny.grad = torch.ones_like(tiny)
                self._twin([tiny]).step()
        except Exception:  # a prediction is not worth failing for
            return None
        return self._twin

    def _twin(self, params: Iterable[Any]) -> Optimizer:
        """Clone the optimizer onto ``params``, parameters or groups of them, without states."""
        kind, values = type(self.optimizer), _values(self.optimizer.param_groups[0])
        twin: Optimizer = kind.__new__(kind)  # by torch's protocol for copies: constructors have other arguments
        given = list(params)
        groups = given if isinstance(given[0], Mapping) else [{"params": given}]
        groups = [{**values, **group, "params": list(group["params"])} for group in groups]
        twin.__setstate__({**self.optimizer.__getstate__(), "state": defaultdict(dict), "param_groups": groups})
        return twin


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names of the plain model; tied ones under each of their names."""
    return {stored_name(name): p for name, p in unwrapped(model).named_parameters(remove_duplicate=False)}


def _laid_out(value: Any, parameter: torch.Tensor, on_device: bool) -> Any:
    """Lay a state that the constructor has made, equal on every rank, out like its new parameter.

    Step counters stay on the host, unless the kernel reads them on the device.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape or not value.shape:
        return value.to(parameter.device) if on_device else value
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _check_known(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strange:
        raise ConfigError(
            "The optimizer updates parameters that are not the model's",
            expected="an optimizer over model.parameters(), or some of them",
            got=f"{len(strange)} others, of shapes {join_names(str(tuple(p.shape)) for p in strange)}",
            fix="build the optimizer over this model, after the last change of it",
        )


def _check_fresh(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    # Constructors may make states, with a step of 0.
    lacking = [p for p, state in optimizer.state.items() if any(_is_on_meta(each) for each in state.values())]
    if lacking:
        raise ConfigError(
            f"{type(optimizer).__name__} has made its states on meta, without values",
            expected="an optimizer without states",
            got=f"states of {join_names(names.get(id(p), '?') for p in lacking)}",
            fix=f"pass what builds it (optim_func={type(optimizer).__name__}) to accelerate instead of the optimizer",
        )
    steps = [(p, state.get("step")) for p, state in optimizer.state.items() if state]
    stepped = [names.get(id(p), "?") for p, step in steps if step is None or float(step) > 0]
    if stepped:
        raise ConfigError(
            "The optimizer has stepped: its states belong to the plain parameters",
            expected="an optimizer without states",
            got=f"states of {join_names(stepped)}",
            fix="build it anew; load its states after the model was distributed",
        )


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _check_no_references(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Refuse an optimizer with lists of its own (LBFGS): it would update parameters that the model no longer has."""
    for attribute, value in vars(optimizer).items():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if attribute not in ("param_groups", "state") and any(id(item) in names for item in items):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps references of its own to the parameters",
                expected="an optimizer that finds its parameters in param_groups",
                got=f"parameters in its attribute {attribute!r}",
                fix="pass what builds it (optim_func) to accelerate instead of the optimizer",
            )
