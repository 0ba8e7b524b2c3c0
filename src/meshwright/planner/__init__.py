"""WHICH strategy: profile the model, predict strategies, choose one, show it."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.planner.choose import choose, fitting, only_configs
    from meshwright.planner.family_shape import Shape
    from meshwright.planner.family_workload import FamilyWorkload
    from meshwright.planner.forecast import Forecast, forecast
    from meshwright.planner.known_models import known_models, parse_family
    from meshwright.planner.parameters import describe_blocks, measured_state
    from meshwright.planner.plan import Plan, Subject
    from meshwright.planner.real_world import cluster_at_hand, described_cluster
    from meshwright.planner.saved import record_saved
    from meshwright.planner.search import Found, Space, choices, default_space, search
    from meshwright.planner.sizes import readable_bytes
    from meshwright.planner.states import OptimizerProbe
    from meshwright.planner.table import plan_table
    from meshwright.planner.workload import Workload
else:
    on_demand(
        __name__,
        """
        choose: choose fitting only_configs
        family_shape: Shape
        family_workload: FamilyWorkload
        forecast: Forecast forecast
        known_models: known_models parse_family
        parameters: describe_blocks measured_state
        plan: Plan Subject
        real_world: cluster_at_hand described_cluster
        saved: record_saved
        search: Found Space choices default_space search
        sizes: readable_bytes
        states: OptimizerProbe
        table: plan_table
        workload: Workload
        """,
    )

__all__ = [
    "FamilyWorkload",
    "Forecast",
    "Found",
    "OptimizerProbe",
    "Plan",
    "Shape",
    "Space",
    "Subject",
    "Workload",
    "choices",
    "choose",
    "cluster_at_hand",
    "default_space",
    "describe_blocks",
    "described_cluster",
    "fitting",
    "forecast",
    "known_models",
    "measured_state",
    "only_configs",
    "parse_family",
    "plan_table",
    "readable_bytes",
    "record_saved",
    "search",
]
