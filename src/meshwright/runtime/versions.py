"""Which code this process runs: ranks that run different code must not train together."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch

from meshwright.version import __version__

_SOURCES = Path(__file__).parents[1]


def code_versions(sources: Path = _SOURCES) -> str:
    """Versions of Meshwright, torch and Python, and a digest of Meshwright's own source files.

    The digest tells two states of a source tree apart that carry one version number.

    Args:
        sources: The folder of the package.
    """
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
    python = platform.python_version()
    return f"meshwright {__version__} ({digest.hexdigest()[:12]}), torch {torch.__version__}, Python {python}"
