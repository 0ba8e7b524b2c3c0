"""Puts the examples where a test can import them, as they are for a user who runs them in their folder."""

from __future__ import annotations

import sys
from pathlib import Path

_EXAMPLES = Path(__file__).parents[2] / "examples"

sys.path.insert(0, str(_EXAMPLES / "gpt2"))
