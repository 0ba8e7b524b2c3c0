"""The public test suites of BMTrain, ColossalAI, ATorch and fairseq, and projects on them, run on Meshwright.

``python -m benchmarks.upstream bmtrain --source DIR`` copies the checkout at ``DIR``, renames its imports, runs every
file of :data:`SUITE` in ``benchmarks/upstream/bmtrain.py`` on the ranks told there, and writes
``benchmarks/upstream/results/bmtrain.json`` and the page ``docs/upstream_bmtrain.md``. Nothing of the suites is kept.
"""

from __future__ import annotations

from .suite import Case, Change, Outcome, Suite

__all__ = ["Case", "Change", "Outcome", "Suite"]
