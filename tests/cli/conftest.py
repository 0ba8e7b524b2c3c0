"""What a training file imports must not be found by the next test."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _own_imports():
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("tiny", None)
