"""WHICH strategy: profile the model, predict strategies, choose one, show it."""

from meshwright.planner.choose import choose, fitting
from meshwright.planner.forecast import Forecast, forecast
from meshwright.planner.parameters import describe_blocks, measured_state
from meshwright.planner.plan import Plan, Subject
from meshwright.planner.saved import record_saved
from meshwright.planner.sizes import readable_bytes
from meshwright.planner.states import probe_optimizer
from meshwright.planner.table import plan_table
from meshwright.planner.workload import Workload

__all__ = [
    "Forecast",
    "Plan",
    "Subject",
    "Workload",
    "choose",
    "describe_blocks",
    "fitting",
    "forecast",
    "measured_state",
    "plan_table",
    "probe_optimizer",
    "readable_bytes",
    "record_saved",
]
