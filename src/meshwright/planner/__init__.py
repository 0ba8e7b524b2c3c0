"""WHICH strategy: profile the model, predict strategies, choose one, show it."""

from meshwright.planner.choose import choose
from meshwright.planner.parameters import describe_blocks, measured_state
from meshwright.planner.plan import Plan, Workload
from meshwright.planner.saved import record_saved
from meshwright.planner.sizes import readable_bytes
from meshwright.planner.states import probe_optimizer
from meshwright.planner.table import plan_table

__all__ = [
    "Plan",
    "Workload",
    "choose",
    "describe_blocks",
    "measured_state",
    "plan_table",
    "probe_optimizer",
    "readable_bytes",
    "record_saved",
]
