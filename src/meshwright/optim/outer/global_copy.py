"""The weights all replicas agree on, and the outer optimizer that moves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.optim.clip import local_tensor, multiply_, total_norm
from meshwright.optim.layouts import step_by_layouts, wrapped_like
from meshwright.optim.outer.exchange import AllReduce, Flight
from meshwright.optim.outer.message import Message, wide_type
from meshwright.optim.outer.policy import OuterPolicy
from meshwright.optim.outer.quantised import QuantisedMean
from meshwright.optim.outer.replicas import Replicas
from meshwright.optim.outer.weights import InnerWeights

OuterFactory = Callable[[list[nn.Parameter]], Optimizer]


class GlobalCopy:
    """Global weights in fp32 (fp64 beside fp64), sharded like the parameters, equal in every replica.

    Args:
        weights: The inner optimizer's.
        replicas: Whom to synchronise with.
        make_outer: Builds the outer optimizer over the global weights.
        policy: How.
    """

    def __init__(
        self, weights: InnerWeights, replicas: Replicas, make_outer: OuterFactory, policy: OuterPolicy
    ) -> None:
        self._weights, self._replicas, self._policy = weights, replicas, policy
        self.of: dict[torch.Tensor, nn.Parameter] = {p: self._copy(p) for p in self.held(weights.parameters)}
        """The global weight of each parameter that this rank keeps one of."""
        self.outer = _built(make_outer, list(self.of.values()))

    def held(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some parameters whose global weights this rank keeps."""
        return list(parameters)

    def ordered(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Some parameters in the order in which they travel best."""
        return list(parameters)

    def _copy(self, parameter: torch.Tensor) -> nn.Parameter:
        value = self._weights.read(parameter)
        device = torch.device("cpu") if self._policy.offload else value.device
        on_host = device.type == "cpu" and value.device.type == "cuda"
        copy = torch.empty(value.shape, dtype=wide_type(value.dtype), device=device, pin_memory=on_host).copy_(value)
        return nn.Parameter(wrapped_like(parameter, copy))

    @torch.no_grad()
    def fill(self) -> None:
        """Takes the replicas' weights, which are equal now, for the global ones."""
        for parameter, copy in self.of.items():
            local_tensor(copy).copy_(self._weights.read(parameter))

    def message(self, parameters: Sequence[torch.Tensor]) -> Message:
        """Room for the pseudo-gradients of some parameters."""
        return Message([self._weights.read(parameter) for parameter in parameters], self._policy.bucket_bytes)

    @torch.no_grad()
    def write(self, parameters: Sequence[torch.Tensor], message: Message) -> None:
        """Fills a message with what this replica has to say of its weights: global - local.

        Where weights are kept in half precision only, the global ones are rounded first, as they were when the block
        began: what rounding took away is no progress of the replica.
        """
        for parameter, view in zip(parameters, message.views, strict=True):
            local, copy = self._weights.read(parameter), local_tensor(self.of[parameter])
            view.copy_(copy.to(local.dtype).to(view.device, view.dtype)).sub_(local)

    def send(self, parameters: Sequence[torch.Tensor], message: Message, *, takes_part: bool) -> Flight:
        """Starts averaging what was written."""
        if self._policy.quantise is not None:
            return QuantisedMean(message, self._replicas, self._policy.quantise, takes_part=takes_part)
        return AllReduce(message, self._replicas, takes_part=takes_part)

    @torch.no_grad()
    def step(self, parameters: Sequence[torch.Tensor], flight: Flight) -> int:
        """Waits for the averaged pseudo-gradients and takes an outer step, or none when no replica took part.

        Returns:
            How many replicas took part.
        """
        count = flight.finish()
        if count:
            means = zip(parameters, flight.views, strict=True)
            self._step({parameter: mean for parameter, mean in means if parameter not in self._weights.resting})
        return count

    def _step(self, pseudo_gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        copies = [self.of[parameter] for parameter in pseudo_gradients]
        for copy, mean in zip(copies, pseudo_gradients.values(), strict=True):
            copy.grad = wrapped_like(copy, mean.to(local_tensor(copy).device))
        if self._policy.clip_pseudo_grad is not None:
            self._clip([copy.grad for copy in copies if copy.grad is not None], self._policy.clip_pseudo_grad)
        self.outer.step()
        for copy in copies:
            copy.grad = None

    def _clip(self, gradients: list[torch.Tensor], max_norm: float) -> None:
        factor = torch.clamp(max_norm / (self._norm(gradients) + 1e-6), max=1.0)
        multiply_([local_tensor(gradient) for gradient in gradients], factor)

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return total_norm(gradients)

    def values(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's parts of the global weights, equal in every replica."""
        return [local_tensor(self.of[parameter]).detach() for parameter in parameters]


def _built(make_outer: OuterFactory, copies: list[nn.Parameter]) -> Optimizer:
    # A rank that owns nothing has an optimizer all the same: torch's refuse an empty list.
    outer = make_outer(copies or [nn.Parameter(torch.zeros(()))])
    if not isinstance(outer, Optimizer):
        raise ConfigError(
            "The outer optimizer is none",
            expected="a function that builds a torch.optim.Optimizer from a list of parameters",
            got=type(outer).__name__,
            fix="pass, for example, lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)",
        )
    if not copies:
        outer.param_groups[0]["params"].clear()
    step_by_layouts(outer)
    return outer
