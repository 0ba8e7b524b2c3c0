"""Present a stage to torch's pipeline schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from meshwright.methods.pipeline.chain import Boundary, Line
from meshwright.methods.pipeline.splice import Handed, Splice
from meshwright.runtime.torch_internals.pipelining import AnyStage


def _nothing_left() -> Callable[..., None]:
    return lambda *_: None


_IS_SPLIT_RIGHTLY = TorchVersion(torch.__version__) >= (2, 13)  # type: ignore[operator]  # compares with tuples, too
WEIGHTS_APART = None if _IS_SPLIT_RIGHTLY else _nothing_left
"""A stage's ``dw_builder``: None has torch compute the gradients of weights apart where a schedule asks for it.

Before 2.13 that counted a weight that is used twice more than once, and mixed up the outputs of operations with several
(pytorch issues 180952 and 170277), without a word. There all gradients are computed with those of inputs, which leaves
nothing for later.
"""


# --- One stage as torch's schedules see it: a module from hidden states to hidden states, or to the loss.

Parameters = Callable[[], Iterator[nn.Parameter]]


class StageModule(nn.Module):
    """Runs one stage for one micro-batch, which it is told by its number.

    A stage that fails goes on with zeros: its peers get what they wait for, and the error is raised when all are
    through. It stands in :attr:`error`.

    Args:
        splice: Of the model.
        stage: Number of the stage.
        boundaries: What goes between the stages, by the number of the one that sends.
        parameters: Those that this stage may use, as they are when asked.
        device: Where it computes.
    """

    def __init__(
        self,
        splice: Splice,
        stage: int,
        boundaries: Mapping[int, Boundary],
        parameters: Parameters,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._splice, self.stage, self._parameters_now, self._device = splice, stage, parameters, device
        self.before, self.after = boundaries.get(stage - 1), boundaries.get(stage)
        self._inputs: list[Any] = []
        self._seeds: Sequence[int] = ()
        self._run: Callable[[Any], Any] | None = None
        self._measure: Callable[[], Any] | None = None
        self.saved_bytes = 0  # by the first micro-batch, when it was measured
        self.error: Exception | None = None

    def begin(
        self,
        inputs: list[Any],
        run: Callable[[Any], Any],
        seeds: Sequence[int],
        measure: Callable[[], Any] | None = None,
    ) -> None:
        """Set the micro-batches of a step, what runs the model on one, their seeds, and what measures the first."""
        self._inputs, self._run, self._seeds, self._measure, self.error = inputs, run, seeds, measure, None

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The stage's parameters; the model itself is no submodule, for all stages of a rank share it."""
        return self._parameters_now()

    def forward(self, *tensors: torch.Tensor, number: torch.Tensor) -> Any:
        """Return the hidden states of the stage before -> those of this one, or the loss as a tensor of one element."""
        if self.error is None:
            try:
                return self._computed(list(tensors), int(number))
            except Exception as error:
                self.error = error
        return self._zeros(tensors)

    def _computed(self, tensors: list[torch.Tensor], number: int) -> Any:
        assert self._run is not None
        run, inputs = self._run, self._inputs[number]
        inbox = Handed(tensors, self.before.form) if self.before is not None else None
        with self._measure() if self._measure is not None and number == 0 else contextlib.nullcontext() as saved:
            result = self._splice.run(self.stage, inbox, lambda: run(inputs), self._seeds[number])
        self.saved_bytes = saved.bytes if saved is not None else self.saved_bytes
        if self.after is None:
            return result.reshape(1)
        self.after.check(result)
        return tuple(tensor.contiguous() for tensor in result.tensors)  # as it travels

    def _zeros(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Zeros that depend on all inputs, so that backward runs as it would."""
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        zero = sum((t.sum().float() * 0 for t in tensors if t.is_floating_point()), anchor * 0)
        if self.after is None:
            return zero.reshape(1)
        return tuple(
            torch.zeros_like(t) + (zero.to(t.dtype) if t.is_floating_point() else 0)
            for t in self.after.empty(self._device)
        )


class Stage(AnyStage):  # type: ignore[misc,valid-type]
    """torch's stage, which neither synchronises gradients nor leaves its peers waiting when it fails."""

    @classmethod
    def build(cls, module: StageModule, line: Line) -> Stage:
        """Return a stage whose shapes are known."""
        device = line.device

        def described(boundary: Boundary | None) -> tuple[torch.Tensor, ...]:
            tensors = boundary.empty(device) if boundary is not None else []
            return tuple(t.requires_grad_(t.is_floating_point()) for t in tensors)

        loss = (torch.zeros(1, device=device, requires_grad=True),)
        stage = cls(
            module,
            module.stage,
            len(line.ranks),
            device,
            input_args=described(module.before),
            output_args=loss if module.after is None else described(module.after),
            group=line.group,
            dw_builder=WEIGHTS_APART,
        )
        stage.stage_index_to_group_rank = dict(enumerate(line.ranks))
        return stage

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """torch's, which goes on with zeros when it fails."""
        module = self.submod
        assert isinstance(module, StageModule)
        try:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        except Exception as error:
            module.error = module.error or error
            inputs = bwd_kwargs.get("input_values", ())
            tensors = [t if isinstance(t, torch.Tensor) and t.requires_grad else None for t in inputs]
            return tuple(torch.zeros_like(t) if t is not None else None for t in tensors), []

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the engine reduces once for all stages of a rank."""
