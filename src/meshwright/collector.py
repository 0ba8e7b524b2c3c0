"""Python's garbage collector, held back where much is made and little thrown away.

It looks at every object of torch's again and again while modules are imported, a model is traced and plans are
sought, up to a tenth of the time that takes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection(to_stay: bool = False) -> Iterator[None]:
    """Nothing is collected for a while; what is not in cycles is freed as ever. A caller's own setting stays.

    Args:
        to_stay: What is made meanwhile is there to stay, as modules are: it counts as old at once. Else all of it would
            be looked at as soon as collection goes on.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if to_stay and not gc.get_freeze_count():  # what a caller has frozen would thaw
            gc.freeze()
            gc.unfreeze()
        if collects:
            gc.enable()
