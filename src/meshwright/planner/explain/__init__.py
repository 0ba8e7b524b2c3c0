"""Explanations of plans: what limits them, what would change them, how they differ; as text, JSON, HTML or trace."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.planner.explain.plan_difference import (
        Difference as Difference,
        Effect as Effect,
        diff as diff,
        entries_diff as entries_diff,
    )
    from meshwright.planner.explain.plan_export import (
        comparison_document as comparison_document,
        found_document as found_document,
        page as page,
        read_document as read_document,
        trace as trace,
    )
    from meshwright.planner.explain.plan_figures import (
        LinkTime as LinkTime,
        RunLength as RunLength,
        WholeRun as WholeRun,
        links as links,
        mfu as mfu,
        per_gpu as per_gpu,
        plan_entry as plan_entry,
        price_per_billion_tokens as price_per_billion_tokens,
        short as short,
        whole_run as whole_run,
    )
    from meshwright.planner.explain.plan_reasons import (
        SubjectOf as SubjectOf,
        WhatIf as WhatIf,
        Why as Why,
        what_if as what_if,
        why as why,
    )
    from meshwright.planner.explain.ranking import (
        changed_circumstances as changed_circumstances,
        difference_table as difference_table,
        entries_table as entries_table,
        ranked_table as ranked_table,
        reasons as reasons,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
