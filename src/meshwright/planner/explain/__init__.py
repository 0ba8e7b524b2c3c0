"""Why a plan: what binds it, what would change it, how two plans differ; as text, JSON, a page and a trace."""

from meshwright.planner.explain.difference import Difference, Effect, diff
from meshwright.planner.explain.document import found_document
from meshwright.planner.explain.figures import mfu, per_gpu, price_per_billion_tokens, short
from meshwright.planner.explain.links import LinkTime, links
from meshwright.planner.explain.page import page
from meshwright.planner.explain.ranking import difference_table, ranked_table, reasons
from meshwright.planner.explain.trace import trace
from meshwright.planner.explain.what_if import WhatIf, what_if
from meshwright.planner.explain.why import Why, why

__all__ = [
    "Difference",
    "Effect",
    "LinkTime",
    "WhatIf",
    "Why",
    "diff",
    "difference_table",
    "found_document",
    "links",
    "mfu",
    "page",
    "per_gpu",
    "price_per_billion_tokens",
    "ranked_table",
    "reasons",
    "short",
    "trace",
    "what_if",
    "why",
]
