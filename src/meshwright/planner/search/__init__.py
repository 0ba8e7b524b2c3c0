"""WHICH strategy: candidates, bounded, predicted where they may be best, and ranked."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.planner.search.find import search
    from meshwright.planner.search.found import Found
    from meshwright.planner.search.in_stages import search_in_stages
    from meshwright.planner.search.objective import Objective
    from meshwright.planner.search.space import Space, choices, default_space
    from meshwright.planner.search.wishes import read_wishes
else:
    on_demand(
        __name__,
        """
        find: search
        found: Found
        in_stages: search_in_stages
        objective: Objective
        space: Space choices default_space
        wishes: read_wishes
        """,
    )

__all__ = ["Found", "Objective", "Space", "choices", "default_space", "read_wishes", "search", "search_in_stages"]
