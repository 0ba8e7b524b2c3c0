"""Present a stage of a spliced model to torch's pipeline schedules.

:class:`Stage` is torch's ``PipelineStage`` with known shapes and with gradients left to the engine;
:class:`StageModule` is its module, which runs one stage for one micro-batch. Errors are postponed: a stage that fails
continues with zeros, so that its peers get the tensors they wait for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from meshwright.methods.pipeline.chain import Boundary, PipelineRank
from meshwright.methods.pipeline.splice import HiddenState, Splice
from meshwright.methods.recompute import recomputes
from meshwright.nn import is_compiled
from meshwright.nn.batches import tensors_of
from meshwright.optim.dtensors import local_tensor
from meshwright.runtime.torch_internals.autograd import Function
from meshwright.runtime.torch_internals.pipelining import ReceivingStage


def _no_weight_backward() -> Callable[..., None]:
    return lambda *_: None


_IS_SPLIT_RIGHTLY = TorchVersion(torch.__version__) >= (2, 13)  # type: ignore[operator]  # compares with tuples, too


def dw_builder(model: nn.Module) -> Callable[[], Callable[..., None]] | None:
    """Return a stage's ``dw_builder``; None lets torch compute gradients of weights apart where a schedule asks for it.

    Before torch 2.13 that silently counted a weight used twice more than once, and mixed up the outputs of operations
    with several (pytorch issues 180952 and 170277). A block that is recomputed would run again for each of its layers'
    weights, and be held as often; the backward of a compiled one is a single operation. There all gradients are
    computed together with those of inputs, and nothing is left for the weights' turn.
    """
    is_whole = recomputes(model) or any(map(is_compiled, model.modules()))
    return None if _IS_SPLIT_RIGHTLY and not is_whole else _no_weight_backward


# --- One stage as a module: from hidden states to hidden states, or to the loss

Parameters = Callable[[], Iterator[nn.Parameter]]


class StageModule(nn.Module):
    """Runs one stage for the micro-batch of a given number.

    A stage that fails continues with zeros, so its peers get what they wait for; ``error`` holds the exception
    until all ranks are done.

    Args:
        splice: Runs single stages of the model.
        stage: Number of the stage.
        boundaries: Descriptions of hidden states, by the number of the sending stage.
        parameters: Yields the parameters that this stage may use at the moment.
        device: Device of the hidden states.
        exchanges: Whether ranks of other pipelines take part in a stage. They would wait for a rank that continues
            with zeros, so that a stage that fails raises its error at once.
    """

    def __init__(
        self,
        splice: Splice,
        stage: int,
        boundaries: Mapping[int, Boundary],
        parameters: Parameters,
        device: torch.device,
        *,
        exchanges: bool = False,
    ) -> None:
        super().__init__()
        self.exchanges = exchanges
        self._splice, self.stage, self._parameters_now, self._device = splice, stage, parameters, device
        self.before, self.after = boundaries.get(stage - 1), boundaries.get(stage)
        self._inputs: list[Any] = []
        self._seeds: Sequence[int] = ()
        self._run: Callable[[Any], Any] | None = None
        self._measure: Callable[[], Any] | None = None
        self.saved_bytes = 0  # by the first micro-batch beside its input, if measured
        self.saved_inputs: set[int] = set()  # which tensors of its input it saved
        self.error: Exception | None = None

    def begin(
        self,
        inputs: list[Any],
        run: Callable[[Any], Any],
        seeds: Sequence[int],
        measure: Callable[[], Any] | None = None,
    ) -> None:
        """Start a step.

        Args:
            inputs: The model's input of every micro-batch.
            run: Runs the model on one of them.
            seeds: A random seed for each.
            measure: Measures what the first one saves for backward; None: nothing is measured.
        """
        self._inputs, self._run, self._seeds, self._measure, self.error = inputs, run, seeds, measure, None

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the stage's parameters; the model is no submodule, since all stages of a rank share it."""
        return self._parameters_now()

    def forward(self, *tensors: torch.Tensor, number: torch.Tensor) -> Any:
        """Compute this stage's hidden states from those of the stage before, or the loss as a tensor (1,)."""
        if self.error is None:
            try:
                return self._computed(list(tensors), int(number))
            except Exception as error:
                if self.exchanges:
                    raise
                self.error = error
        return self._zeros(tensors)

    def _computed(self, tensors: list[torch.Tensor], number: int) -> Any:
        assert self._run is not None
        run, inputs = self._run, self._inputs[number]
        inbox = HiddenState(tensors, self.before.form) if self.before is not None else None
        with self._measure() if self._measure is not None and number == 0 else contextlib.nullcontext() as saved:
            result = self._splice.run(self.stage, inbox, lambda: run(inputs), self._seeds[number])
        if saved is not None:
            given = {place: saved.bytes_of(tensor) for place, tensor in enumerate(tensors_of(inputs))}
            self.saved_inputs = {place for place, size in given.items() if size}
            handed_on = [] if self.after is None else result.tensors  # torch keeps them for backward, too
            self.saved_bytes = saved.bytes - sum(given.values()) + saved.bytes_beside(handed_on, tensors)
        if self.after is None:
            return _own(result.reshape(1))
        self.after.check(result)
        return tuple(_own(tensor.contiguous()) for tensor in result.tensors)  # ready to be sent

    def _zeros(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return zeros that depend on all inputs, so that backward still sends their gradients."""
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        zero = sum((t.sum().float() * 0 for t in tensors if t.is_floating_point()), anchor * 0)
        if self.after is None:
            return zero.reshape(1)
        return tuple(
            torch.zeros_like(t) + (zero.to(t.dtype) if t.is_floating_point() else 0)
            for t in self.after.empty(self._device)
        )


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory for the schedule alone.

    Schedules that split backward detach in place what a stage returns. A view refuses that, so that torch would keep
    the graph behind a loss until the step's end; and a tensor that a block passes on unchanged (T5's position bias)
    would be without a gradient when the block runs again.
    """
    own: torch.Tensor = _Alias.apply(tensor) if tensor.requires_grad else tensor.detach()
    return own


class _Alias(Function):
    """Identity, whose result is another tensor and no view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def _own_memory(parameters: list[nn.Parameter], taken: set[int]) -> None:
    """Copy new gradients whose memory is not theirs alone, so that those of the next micro-batch can be added in place.

    A backward pass of weights alone puts gradients in place as autograd returns them: expanded (of a sum), one tensor
    for two parameters (of ``a + b``), or the gradient of an input (of ``x + a`` with one sample).

    Args:
        parameters: Parameters that had no gradient before.
        taken: Addresses of gradients that are on their way to other stages. Grows.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
            address = _address(local)
            is_expanded = any(stride == 0 < size - 1 for size, stride in zip(local.shape, local.stride(), strict=True))
            if is_expanded or address in taken:
                parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
            taken.add(address)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Stage(ReceivingStage):
    """torch's stage, which leaves gradients to the engine and does not leave its peers waiting when it fails."""

    _returned: set[int]  # addresses of gradients of inputs in this step: they may still be on their way

    @classmethod
    def build(
        cls, module: StageModule, rank: PipelineRank, dw_builder: Callable[[], Callable[..., None]] | None
    ) -> Stage:
        """Build a stage with known shapes, so that torch exchanges no metadata."""
        device = rank.device

        def described(boundary: Boundary | None) -> tuple[torch.Tensor, ...]:
            tensors = boundary.empty(device) if boundary is not None else []
            return tuple(t.requires_grad_(t.is_floating_point()) for t in tensors)

        loss = (torch.zeros(1, device=device, requires_grad=True),)
        stage = cls(
            module,
            module.stage,
            len(rank.stage_ranks),
            device,
            input_args=described(module.before),
            output_args=loss if module.after is None else described(module.after),
            group=rank.group,
            dw_builder=dw_builder,
        )
        stage.stage_index_to_group_rank = dict(enumerate(rank.stage_ranks))
        stage._returned = set()
        return stage

    def clear_runtime_states(self) -> None:
        """Forget the last step."""
        super().clear_runtime_states()
        self._returned.clear()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run torch's backward; continue with zero gradients if it fails."""
        module = self.submod
        assert isinstance(module, StageModule)
        values = bwd_kwargs.get("input_values", ())
        inputs = [t if isinstance(t, torch.Tensor) and t.requires_grad else None for t in values]
        alone = backward_type == "weight"
        bare = [parameter for parameter in module.parameters() if parameter.grad is None] if alone else []
        try:
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            if self.is_last and backward_type != "input":
                # torch keeps the losses until the step's end, and what led to them would keep the inputs.
                for loss in bwd_kwargs["stage_output"] if alone else (bwd_kwargs["stage_output"],):
                    loss.detach_()
            if alone:
                _own_memory(bare, {*self._returned})
                return result
            gradients = tuple(each.contiguous() if each is not None else None for each in result[0])  # to be sent
            self._returned.update(_address(each) for each in gradients if each is not None)
            return gradients, result[1]
        except Exception as error:
            if module.exchanges:
                raise
            module.error = module.error or error
            zeros = functools.partial(torch.zeros_like, memory_format=torch.contiguous_format)  # ready to be sent
            return tuple(zeros(t) if t is not None else None for t in inputs), []
        finally:
            # They are returned. torch would keep those of every micro-batch until the step's end.
            for tensor in inputs:
                if tensor is not None:
                    tensor.grad = None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the engine reduces once for all stages of a rank."""
