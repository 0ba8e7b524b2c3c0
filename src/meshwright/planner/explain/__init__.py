"""Why a plan: what binds it, what would change it, how two plans differ; as text, JSON, a page and a trace."""

from meshwright.planner.explain.difference import Difference, Effect, diff, entries_diff
from meshwright.planner.explain.document import comparison_document, found_document
from meshwright.planner.explain.entry import plan_entry
from meshwright.planner.explain.figures import mfu, per_gpu, price_per_billion_tokens, short
from meshwright.planner.explain.links import LinkTime, links
from meshwright.planner.explain.page import page
from meshwright.planner.explain.ranking import difference_table, entries_table, ranked_table, reasons
from meshwright.planner.explain.reading import read_document
from meshwright.planner.explain.trace import trace
from meshwright.planner.explain.what_if import WhatIf, what_if
from meshwright.planner.explain.why import Why, why

__all__ = [
    "Difference",
    "Effect",
    "LinkTime",
    "WhatIf",
    "Why",
    "comparison_document",
    "diff",
    "difference_table",
    "entries_diff",
    "entries_table",
    "found_document",
    "links",
    "mfu",
    "page",
    "per_gpu",
    "plan_entry",
    "price_per_billion_tokens",
    "ranked_table",
    "read_document",
    "reasons",
    "short",
    "trace",
    "what_if",
    "why",
]
