"""Where a thread is: which operation it waits in, and who called that. Read from outside, by another thread."""

from __future__ import annotations

import sys
import traceback
from pathlib import PurePath
from types import FrameType
from typing import NamedTuple

_COLLECTIVES = ("/torch/distributed/", "/meshwright/runtime/together.py")
_LIBRARIES = ("/torch/", "/meshwright/runtime/", "/meshwright/distributed/")
_WRAPPERS = frozenset({"wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context"})


class Place(NamedTuple):
    """What a thread does at one moment."""

    operation: str
    """The collective it waits in; empty when it does something else."""
    caller: str
    """File, line and function outside of torch: the user's, as a rule."""


def place_of(thread_id: int) -> Place:
    """Where a thread of this process is; costs some microseconds.

    A thread counts as waiting when its innermost Python frame belongs to torch.distributed. With NCCL the host runs
    ahead of the device and waits where it next needs a number: only the caller tells then.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return Place("", "no such thread")
    return Place(_operation(frame), _caller(frame))


def stack_of(thread_id: int) -> str:
    """The whole stack of a thread of this process, as a traceback shows it."""
    frame = sys._current_frames().get(thread_id)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "no such thread"


def _operation(frame: FrameType | None) -> str:
    """The outermost of the collective functions at the inner end of a stack: what the caller has called."""
    found = ""
    while frame is not None and _is_of(frame, _COLLECTIVES):
        name = frame.f_code.co_name
        found = name if name not in _WRAPPERS else found or name
        frame = frame.f_back
    return found


def _caller(frame: FrameType | None) -> str:
    innermost = frame
    while frame is not None and _is_of(frame, _LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    assert frame is not None
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_of(frame: FrameType, folders: tuple[str, ...]) -> bool:
    name = frame.f_code.co_filename.replace("\\", "/")
    return any(folder in name for folder in folders)
