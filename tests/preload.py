"""Imported once by the fork server: every worker starts with these modules already loaded."""

import contextlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")


with contextlib.suppress(ImportError):
    pass
