"""Why a model cannot run without data: the operation, the module it is in, and what would help."""

from __future__ import annotations

from types import TracebackType

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from meshwright.errors import NOTE, MeshwrightError

_READS = "it reads the values of a tensor; keep such a branch, .item() or print out of forward, or use torch.where"
_SHAPES = "the size of its result depends on values; use a form of fixed size, such as torch.where or a mask"
_LENGTH = 160


def reason_of(error: BaseException, model: nn.Module) -> str:
    """One line for a person: what failed while a model was traced, where, and how to help.

    Args:
        error: With the traceback it was caught with.
        model: The model that was running.
    """
    place = _place(error.__traceback__, model)
    if isinstance(error, DataDependentOutputException):
        return f"DataDependentOutputException while tracing: {error.func} in {place}: {_READS}"
    if isinstance(error, DynamicOutputShapeException):
        return f"DynamicOutputShapeException while tracing: {error.func} in {place}: {_SHAPES}"
    if isinstance(error, MeshwrightError):
        return "; ".join(filter(None, (error.what, f"got {error.got}" if error.got else "", error.fix)))
    said = (str(error).splitlines() or [""])[0][:_LENGTH]
    told = " ".join(note.removeprefix(NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(NOTE))
    return f"{type(error).__name__} while tracing ({said}) in {place}" + (f". {told.removesuffix('.')}" if told else "")


def _place(trace: TracebackType | None, model: nn.Module) -> str:
    """The innermost module of the model whose code was running, and the line of it."""
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
