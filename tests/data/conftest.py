"""Property tests: fewer examples than usual, and no deadline, which a busy machine would miss."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("data", max_examples=50, deadline=None)
settings.load_profile("data")
