"""WHICH strategy: candidates, bounded, predicted where they may be best, and ranked."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.planner.search.constraints import read_constraints as read_constraints
    from meshwright.planner.search.find import (
        search as search,
        search_in_stages as search_in_stages,
    )
    from meshwright.planner.search.search_space import (
        Space as Space,
        choices as choices,
        default_space as default_space,
    )
    from meshwright.planner.search.search_state import (
        FollowUp as FollowUp,
        Found as Found,
        Objective as Objective,
        experts_first as experts_first,
    )
    from meshwright.planner.search.within_time import (
        USUAL_LIMIT_S as USUAL_LIMIT_S,
        search_and_trace as search_and_trace,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
