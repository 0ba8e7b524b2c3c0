"""How many bytes of host tensors a piece of code holds at most, as torch's allocator counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Runs ``function`` and returns (its result, most bytes held at any moment beyond those held before)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = function(*args)
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, peak
