"""What one micro-batch saves, computes and sends inside the layers: the model runs once for each set of conditions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.methods.dtypes import torch_dtype
from meshwright.nn import find_blocks, widened
from meshwright.planner.prediction import Pass, Predicted
from meshwright.planner.profile.device import stands_in
from meshwright.planner.profile.failure import reason_of
from meshwright.planner.profile.linear import Samples
from meshwright.planner.profile.repeated import Repeated, find_repeated
from meshwright.planner.traces import Trace

if TYPE_CHECKING:
    from meshwright.cost import Activations, Boundary
    from meshwright.methods import ExpertTrace
    from meshwright.methods.float8.trace import Fp8Trace
    from meshwright.planner.profile.model_ops import ModelOps


@dataclass(frozen=True)
class Conditions:
    """All that a strategy changes of one rank's forward."""

    param_dtype: str | None  # of the parameters as they compute; None keeps their own
    autocast_dtype: str | None
    samples: int  # of a micro-batch
    split: Trace | None  # how axes divide layers, tokens or experts
    blocks: tuple[nn.Module, ...] = ()  # those that a pipeline cuts; none: those that the model repeats
    fp8: Fp8Trace | None = None  # the layers that multiply in 8 bits
    widened: bool = False  # whether bf16 products are made in fp32 where the device is slow in bf16


class Traced(NamedTuple):
    """Of a micro-batch."""

    activations: Activations | None  # None: not predicted
    flops: int | None
    boundaries: tuple[Boundary, ...]  # collectives inside the layers
    gaps: tuple[str, ...]  # what could not be predicted, and why
    ops: ModelOps | None = None  # None: not known
    idle: tuple[str, ...] = ()  # parameters that should train and get no gradient, as far as they were seen

    @property
    def notices(self) -> tuple[str, ...]:
        """What its user may not expect. Another micro-batch may use what this one does not: it is counted."""
        if not self.idle:
            return ()
        named = ", ".join(self.idle[:3]) + (" and others" if len(self.idle) > 3 else "")
        return (f"no gradient comes to {named}; theirs, and their optimizer state, are counted all the same",)

    @property
    def fp8_flops(self) -> int:
        """Those of ``flops`` that are in 8 bits."""
        return self.ops.flops_in("fp8") if self.ops is not None else 0


class Tracer:
    """Runs a model on fake tensors, once for each set of conditions.

    Of many equal blocks only a few run, and numbers of samples that lie on a line with others are not run at all: both
    are found out by comparing first.

    Args:
        model: Plain module.
        inputs_of: ``inputs_of(samples)`` returns the model input, or None when there is no sample to be had.
        forward: ``forward(model, inputs)`` computes the loss.
        device: What it will train on; None: where its parameters are.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs_of: Callable[[int], Any],
        forward: Callable[[nn.Module, Any], Any],
        device: torch.device | None = None,
    ) -> None:
        self._model, self._inputs_of, self._forward, self._device = model, inputs_of, forward, device
        self._known: dict[Conditions, Traced] = {}
        self._samples = Samples()
        self._repeats: dict[tuple[object, ...], bool] = {}  # whether blocks do, by what divides them

    def of(self, conditions: Conditions) -> Traced:
        """What a micro-batch takes under these conditions.

        Raises:
            ModelError: When the model cannot be divided as they say.
        """
        conditions = dataclasses.replace(conditions, blocks=conditions.blocks or self._blocks)
        if conditions not in self._known:
            self._known[conditions] = self._trace(conditions)
        return self._known[conditions]

    def _trace(self, now: Conditions) -> Traced:
        kind = dataclasses.replace(now, samples=0)
        found = self._samples.continued(kind, now.samples)
        if found is None:
            found = self._attempt(now)
            if found.activations is not None:
                self._samples.add(kind, now.samples, found)
        return found

    def _attempt(self, now: Conditions) -> Traced:
        try:
            return self._run(now)
        # A user's model may do anything; training does not depend on this prediction.
        except (Exception, SystemExit) as error:
            reason = reason_of(error, self._model)
            if now.split is not None and now.split.divides_batch:
                if isinstance(error, ModelError):
                    raise  # training would fail in the same way
                return _untraced(reason)._replace(boundaries=self._sent_to_experts(now))
            whole = dataclasses.replace(now, split=None)
            if now.split is not None and self._trace(whole).activations is not None:
                raise _does_not_fit(reason) from error
            return _untraced(reason)

    def _run(self, now: Conditions) -> Traced:
        inputs = self._inputs_of(now.samples)
        if inputs is None:
            return _untraced("there is no sample to trace the model with")
        one = Pass(
            self._model,
            inputs,
            self._forward,
            param_dtype=torch_dtype(now.param_dtype) if now.param_dtype else None,
            autocast_dtype=torch_dtype(now.autocast_dtype) if now.autocast_dtype else None,
            split=now.split,
            blocks=now.blocks,
            fp8=now.fp8,
            device=self._device,
        )
        assumed = stands_in(self._model, self._device)
        with now.fp8.running() if now.fp8 is not None else self._widened(now):
            found = self._predict(one, now)
        idle = found.idle if now.split is None and now.fp8 is None else ()  # what is divided may run on other ranks
        gaps = (assumed,) if assumed else ()
        return Traced(found.activations, found.flops, found.boundaries, gaps, found.ops, idle)

    def _widened(self, now: Conditions) -> contextlib.AbstractContextManager[None]:
        if not now.widened or self._device is None:
            return contextlib.nullcontext()
        return widened(self._model, self._device)

    def _predict(self, one: Pass, now: Conditions) -> Predicted:
        """A pass of a few blocks where all are equal, else of the whole model."""
        repeated = self._repeated
        if repeated is None:
            return one.predict()
        # Blocks that are divided alike repeat as they do undivided.
        kind = repeated.divided_alike(now.split.dims if now.split else {}) or now.split, now.fp8
        if self._repeats.get(kind) is False:
            return one.predict()
        try:
            found = one.predict_repeated(repeated, check=kind not in self._repeats)
        except Exception:  # blocks differ, or the model counts on their number; what else is wrong shows again
            self._repeats[kind] = False
        else:
            self._repeats[kind] = True
            return found
        return one.predict()

    @functools.cached_property
    def _blocks(self) -> tuple[nn.Module, ...]:
        return tuple(block for _, block in find_blocks(self._model))

    @functools.cached_property
    def _repeated(self) -> Repeated | None:
        return find_repeated(self._model)

    def _sent_to_experts(self, now: Conditions) -> tuple[Boundary, ...]:
        """What travels, where experts that cannot run without data are passed over; nothing where more cannot."""
        if getattr(now.split, "stands_in", True):
            return ()
        experts = cast("ExpertTrace", now.split)
        experts.stands_in = True
        try:
            return self._trace(now).boundaries
        finally:
            experts.stands_in = False


def _untraced(reason: str) -> Traced:
    return Traced(None, None, (), (f"activations are not predicted: {reason}",))


def _does_not_fit(got: str) -> ModelError:
    """The model runs whole, and not as one rank of a tensor axis: training would fail in the same way."""
    return ModelError(
        "tensor_parallel: the model cannot run with its layers split by this plan",
        expected="layers split by columns that feed layers split by rows, in modules that name no number of features",
        got=got,
        fix="correct the plan: give both layers of a pair, or colwise_gather_output where whole features are needed",
    )
