"""Trace a model once per set of conditions, and scale what is recorded to other micro-batch sizes.

[Note: trace conditions] A strategy changes a forward pass only through its :class:`Conditions`, which the planner asks
the methods for: dtypes, the division of layers, tokens and experts, the blocks of a pipeline, layers in 8 bits.
Strategies with equal conditions share one trace; the methods' ``cost`` twins do the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from meshwright.cost import FP8
from meshwright.errors import NOTE, MeshwrightError, ModelError
from meshwright.loss.lazy_logits import LazyLogits
from meshwright.methods.base import torch_dtype
from meshwright.nn import widened
from meshwright.planner.trace.aten_kernels import device_of_pass
from meshwright.planner.trace.continued_blocks import NotRepeatedError
from meshwright.planner.trace.fake_pass import Pass, Predicted, Trace, places_of
from meshwright.planner.trace.repeated_blocks import FEWEST, Repeated, find_repeated
from meshwright.runtime.torch_internals.fake_tensors import DataDependentOutputException, DynamicOutputShapeException

if TYPE_CHECKING:
    from meshwright.cost import Activations, Boundary
    from meshwright.methods import ExpertTrace
    from meshwright.methods.fp8_torchao import Fp8Trace
    from meshwright.methods.tensor.tensor_parallel import SplitTrace
    from meshwright.planner.trace.op_recording import ModelOps


T = TypeVar("T")

_LINE = 2  # values that make one


class NotLinearError(Exception):
    """Two values differ in more than whole numbers, or a value between them is not whole."""


def on_the_line(first: T, second: T, at: tuple[int, int], wanted: int) -> T:
    """Return the value on the line through two values of plain data, part by part.

    The values are tuples and dataclasses of numbers, names and others.

    Args:
        first: Value at ``at[0]``.
        second: Value at ``at[1]``, of the same form.
        at: Two different positions.
        wanted: Position of the value to return.

    Raises:
        NotLinearError: When the two differ in form or in what is no whole number, or the value wanted is not whole.
    """
    return _Line(at, wanted).value(first, second)  # type: ignore[no-any-return]


class _Line:
    def __init__(self, at: tuple[int, int], wanted: int) -> None:
        self._step, self._distance = at[1] - at[0], wanted - at[0]
        self._found: dict[tuple[int, int], Any] = {}  # what is one tuple several times stays one

    def value(self, first: Any, second: Any) -> Any:
        if first is second:
            return first
        if not isinstance(first, tuple):
            return self._new(first, second)
        key = id(first), id(second)
        if key not in self._found:
            self._found[key] = self._new(first, second)
        return self._found[key]

    def _new(self, first: Any, second: Any) -> Any:
        if type(first) is not type(second):
            raise NotLinearError(f"{type(first).__name__} and {type(second).__name__}")
        if type(first) is int:
            return self._number(first, second)
        if isinstance(first, tuple):
            if len(first) != len(second):
                raise NotLinearError(f"{len(first)} and {len(second)} parts")
            parts = [self.value(a, b) for a, b in zip(first, second, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            names = [field.name for field in dataclasses.fields(first)]
            return type(first)(**{name: self.value(getattr(first, name), getattr(second, name)) for name in names})
        if first != second:
            raise NotLinearError(f"{first!r} and {second!r}")
        return first

    def _number(self, first: int, second: int) -> int:
        rise, rest = divmod((second - first) * self._distance, self._step)
        if rest:
            raise NotLinearError(f"{first} and {second} over {self._step}")
        return first + rise


class Samples:
    """Results by the number of samples of a micro-batch, continued linearly.

    Two sizes make a line. Whether a third lies on it is checked when it is run; only then are further ones continued.
    Where one kind of run lies on its line, other kinds of the same model are trusted after two sizes. A single sample
    lies on no line: dims of one element are broadcast.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, Any]] = {}
        self._straight: set[Hashable] = set()
        self._bent: set[Hashable] = set()

    def add(self, kind: Hashable, samples: int, value: Any) -> None:
        """Note the result of a run."""
        known = self._known.setdefault(kind, {})
        if len(known) == _LINE and kind not in self._straight:
            (self._straight if self._on_line(kind, samples) == value else self._bent).add(kind)
        if samples > 1:
            known[samples] = value

    def continued(self, kind: Hashable, samples: int) -> Any | None:
        """Extrapolate the result of a run with a number of samples; None if it cannot be told from those at hand."""
        trusted = kind in self._straight or (bool(self._straight) and not self._bent)
        if not trusted or samples == 1 or len(self._known.get(kind, {})) < _LINE:
            return None
        return self._on_line(kind, samples)

    def _on_line(self, kind: Hashable, samples: int) -> Any | None:
        (at, first), (then, second), *_ = self._known[kind].items()
        try:
            return on_the_line(first, second, (at, then), samples)
        except NotLinearError:
            self._bent.add(kind)
            return None


# --- Why a model cannot run without data.

_READS = "it reads the values of a tensor; keep such a branch, .item() or print out of forward, or use torch.where"
_SHAPES = "the size of its result depends on values; use a form of fixed size, such as torch.where or a mask"
_LENGTH = 160


def reason_of(error: BaseException, model: nn.Module) -> str:
    """Explain in one line what failed while a model was traced, where, and what would help.

    Args:
        error: The error, with its traceback.
        model: The model that was running.
    """
    place = _place(error.__traceback__, model)
    if isinstance(error, DataDependentOutputException):
        return f"DataDependentOutputException while tracing: {error.func} in {place}: {_READS}"
    if isinstance(error, DynamicOutputShapeException):
        return f"DynamicOutputShapeException while tracing: {error.func} in {place}: {_SHAPES}"
    if isinstance(error, MeshwrightError):
        return "; ".join(filter(None, (error.what, f"got {error.got}" if error.got else "", error.fix)))
    text = (str(error).splitlines() or [""])[0][:_LENGTH]
    hints = " ".join(note.removeprefix(NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(NOTE))
    return f"{type(error).__name__} while tracing ({text}) in {place}" + (
        f". {hints.removesuffix('.')}" if hints else ""
    )


def _place(trace: TracebackType | None, model: nn.Module) -> str:
    """Return the innermost module of the model whose code was running, and its line."""
    names = {id(module): path for path, module in model.named_modules()}
    found = "the loss, or what calls the model"
    while trace is not None:
        code = trace.tb_frame.f_code
        # A method's first argument is its object, whatever it is called.
        owner = trace.tb_frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        # Calls of every module go through torch's own file; the model's code has one of its own.
        if isinstance(owner, nn.Module) and id(owner) in names and "torch/nn/modules/module.py" not in code.co_filename:
            path = names[id(owner)]
            named = f"{path} ({type(owner).__name__})" if path else type(owner).__name__
            found = f"{named}, line {trace.tb_lineno} of {code.co_filename.rpartition('/')[2]}"
        trace = trace.tb_next
    return found


# --- The tracer.


@dataclass(frozen=True)
class Conditions:
    """Everything of a strategy that changes one rank's forward pass."""

    param_dtype: str | None  # precision of the parameters as they compute; None keeps their own
    autocast_dtype: str | None
    output_dtype: str | None  # to which the loss casts what the model returns; None leaves it
    samples: int  # per micro-batch
    split: Trace | None  # how axes divide layers, tokens or experts
    blocks: tuple[nn.Module, ...] = ()  # those that a pipeline cuts; empty: see ``places_of``
    fp8: Fp8Trace | None = None  # the layers that multiply in 8 bits
    splits_backward: bool = False  # whether a schedule computes gradients of inputs first, and of weights later
    widened: bool = False  # whether products in bf16 are made in fp32 where the device is slow in bf16
    copies_output: bool = False  # whether the wrapper of the model copies what it returns


class Traced(NamedTuple):
    """The trace of a micro-batch, as far as it could be made."""

    activations: Activations | None  # None: not predicted
    flops: int | None
    boundaries: tuple[Boundary, ...]  # collectives inside the layers
    gaps: tuple[str, ...]  # what could not be predicted, and why
    ops: ModelOps | None = None  # None: not known
    idle: tuple[str, ...] = ()  # parameters that should train and get no gradient, as far as they were seen
    logits_for: tuple[str, ...] = ()  # functions that take logits with which the loss could have done without

    @property
    def notices(self) -> tuple[str, ...]:
        """Return notices for the user.

        A parameter without a gradient may get one in another micro-batch, so it is counted.
        """
        found = []
        if self.idle:
            named = ", ".join(self.idle[:3]) + (" and others" if len(self.idle) > 3 else "")
            found.append(f"no gradient comes to {named}; theirs, and their optimizer state, are counted all the same")
        return tuple(found + [self.in_vain] * bool(self.in_vain))

    @property
    def in_vain(self) -> str:
        """Return why a loss that could do without logits does not; empty where it does, or needs them anyway."""
        named = ", ".join(self.logits_for[:3])
        return f"the loss does not do without logits: they are computed for {named}, and counted" if named else ""

    @property
    def fp8_flops(self) -> int:
        """Return the FLOPs of products in 8 bits."""
        return self.ops.flops_in(FP8) if self.ops is not None else 0


class Tracer:
    """Run a model on fake tensors, once for each set of conditions.

    Of many blocks only a few run (see [Note: repeated blocks]), and numbers of samples that lie on a line with
    others are not run at all.

    Args:
        model: A plain module.
        inputs_of: ``inputs_of(samples)`` returns the model input, or None when there is no sample.
        forward: ``forward(model, inputs)`` computes the loss.
        device: Device that it will train on; None: that of its parameters.
        views_batch: Whether the model input is views of a batch in the same memory.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs_of: Callable[[int], Any],
        forward: Callable[[nn.Module, Any], Any],
        device: torch.device | None = None,
        *,
        views_batch: bool = False,
    ) -> None:
        self._model, self._inputs_of, self._forward, self._device = model, inputs_of, forward, device
        self._views_batch = views_batch
        self._known: dict[Conditions, Traced] = {}
        self._samples = Samples()
        self._repeats: dict[tuple[object, ...], bool] = {}  # whether blocks do, by what divides them
        self.never_runs: str | None = None
        """Why not even the model as it is can be traced, whatever data it gets; empty: it can; None: not known."""

    def of(self, conditions: Conditions) -> Traced:
        """Return the trace of a micro-batch under some conditions.

        Raises:
            ModelError: When the model cannot be divided as the conditions say.
        """
        conditions = dataclasses.replace(conditions, blocks=conditions.blocks or self._blocks)
        if conditions not in self._known:
            self._known[conditions] = self._trace(conditions)
        return self._known[conditions]

    def _trace(self, now: Conditions) -> Traced:
        kind = dataclasses.replace(now, samples=0)
        found = self._samples.continued(kind, now.samples)
        if found is None and self.never_runs and not _replaces_layers(now):
            found = _untraced(self.never_runs)
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
            self._look_whether_it_ever_runs(now, reason)
            if now.split is not None and now.split.divides_batch:
                if isinstance(error, ModelError):
                    raise  # training would fail in the same way
                return _untraced(reason)._replace(boundaries=self._sent_beside_experts(now))
            whole = dataclasses.replace(now, split=None)
            if now.split is not None and self.of(whole).activations is not None:
                raise _does_not_fit(reason) from error
            return _untraced(reason)._replace(boundaries=self._sent_beside_experts(now))

    def _look_whether_it_ever_runs(self, now: Conditions, reason: str) -> None:
        """Once, after a failure, run the model as it is: where that fails, most other conditions need not be tried.

        What has been traced under any conditions runs.
        """
        plain = Conditions(None, None, None, now.samples, None, blocks=self._blocks)
        if now == plain:
            self.never_runs = reason
        elif self.never_runs is None:
            self.never_runs = ""
            if all(traced.activations is None for traced in self._known.values()):
                self.of(plain)

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
            output_dtype=torch_dtype(now.output_dtype) if now.output_dtype else None,
            split=now.split,
            blocks=now.blocks,
            fp8=now.fp8,
            device=self._device,
            views_batch=self._views_batch,
            splits_backward=now.splits_backward,
            copies_output=now.copies_output,
        )
        assumed = stands_in(self._model, self._device)
        with _logits_computed() as computed, now.fp8.running() if now.fp8 is not None else self._widened(now):
            found = self._predict(one, now)
        idle = found.idle if now.split is None and now.fp8 is None else ()  # what is divided may run on other ranks
        gaps = (assumed,) if assumed else ()
        logits_for = () if now.split is not None and now.split.dims else tuple(dict.fromkeys(computed))
        return Traced(found.activations, found.flops, found.boundaries, gaps, found.ops, idle, logits_for)

    def _widened(self, now: Conditions) -> contextlib.AbstractContextManager[None]:
        if not now.widened or self._device is None:
            return contextlib.nullcontext()
        return widened(self._model, self._device)

    def _predict(self, one: Pass, now: Conditions) -> Predicted:
        """Run a few blocks where all are equal, else the whole model."""
        repeated = self._repeated
        if repeated is None:
            return one.predict()
        # Blocks that are divided alike repeat as they do undivided.
        kind = repeated.divided_alike(now.split.dims if now.split else {}) or now.split, now.fp8
        if self._repeats.get(kind) is False:
            return one.predict()
        try:
            found = one.predict_repeated(repeated, check=kind not in self._repeats)
        except Exception as error:  # blocks differ, or the model counts on their number
            if now.split is not None and self._repeats.get((True, None)) and not isinstance(error, NotRepeatedError):
                raise  # undivided, they repeat: it is how they are divided
            self._repeats[kind] = False  # what else is wrong shows again
        else:
            self._repeats[kind] = True
            return found
        return one.predict()

    @functools.cached_property
    def _blocks(self) -> tuple[nn.Module, ...]:
        return places_of(self._model)

    @functools.cached_property
    def _repeated(self) -> Repeated | None:
        return find_repeated(self._model) if len(self._blocks) >= FEWEST else None

    def _sent_beside_experts(self, now: Conditions) -> tuple[Boundary, ...]:
        """Return the collectives of a pass that skips experts which cannot run without data.

        Nothing where the rest cannot run, either.
        """
        if getattr(now.split, "stands_in", True):
            return ()
        experts = cast("ExpertTrace | SplitTrace", now.split)
        experts.stands_in = True
        try:
            return self._trace(now).boundaries
        finally:
            experts.stands_in = False


def stands_in(model: nn.Module, wanted: torch.device | None) -> str | None:
    """Return a notice on what is assumed if a pass cannot run on the device that the model will train on; else None."""
    if wanted is None or wanted.type == (device := device_of_pass(model, wanted)).type:
        return None
    return (
        f"traced as on {device.type}, for there is no {wanted.type} device here: attention is taken to be fused as on "
        f"{wanted.type}, its rows' sums take as much, and other operators are taken to save the same"
    )


def _replaces_layers(now: Conditions) -> bool:
    """Return whether something stands in for layers that cannot run without data: the experts of an axis."""
    return hasattr(now.split, "stands_in")


@contextlib.contextmanager
def _logits_computed() -> Iterator[list[str]]:
    """Collect the names of functions for which logits are computed that a loss could do without."""
    found = list[str]()
    before, LazyLogits.computed_for = LazyLogits.computed_for, found
    try:
        yield found
    finally:
        LazyLogits.computed_for = before


def _untraced(reason: str) -> Traced:
    return Traced(None, None, (), (f"activations are not predicted: {reason}",))


def _does_not_fit(got: str) -> ModelError:
    """Return the error for a model that runs whole, but not as one rank of a tensor axis: training would fail, too."""
    return ModelError(
        "tensor_parallel: the model cannot run with its layers split by this plan",
        expected="layers split by columns that feed layers split by rows, in modules that name no number of features",
        got=got,
        fix="correct the plan: give both layers of a pair, or colwise_gather_output where whole features are needed",
    )
