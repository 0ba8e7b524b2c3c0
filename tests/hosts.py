"""Ranks as on one host, or as on several."""

import contextlib
from unittest import mock

from meshwright.nn import host_exchange


@contextlib.contextmanager
def host_memory(shared):
    """Around what makes ranks exchange for the first time: without memory that they share unless ``shared``."""
    without = mock.patch.object(host_exchange, "shared_memory", return_value=None)
    with contextlib.nullcontext() if shared else without:
        yield
