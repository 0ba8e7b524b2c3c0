"""Python's garbage collector, held back where much is made and little thrown away.

It looks at every object of torch's again and again while modules are imported and a model is traced, which takes up
to a tenth of the time from the start of a program to the end of its first step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Nothing is collected for a while; what is not in cycles is freed as ever. A caller's own setting stays."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
