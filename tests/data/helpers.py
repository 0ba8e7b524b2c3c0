"""Small things that several tests of the data room need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from meshwright.errors import MeshwrightError


@contextlib.contextmanager
def refused(kind: type[MeshwrightError], *words: str) -> Iterator[None]:
    """The block raises ``kind``, whose text has what, expected, got and fix, and all ``words``."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    assert type(error) is kind
    assert error.what
    assert error.expected
    assert error.got
    assert error.fix
    for word in words:
        assert word in str(error)
